"""`rekindle prune` removes old runs, but no run that is still needed."""

import json
import os
from pathlib import Path

import pytest

from argolocal.state.journal import Busy, RunFiles
from rekindle.keys import CHECKPOINTS, key
from rekindle.storage import Store
from rekindle.view.artifacts import find_old_runs, remove_run


def make_run(home: Path, store: Store, name: str, pipeline: str, phase: str = "Succeeded") -> RunFiles:
    """Create a run of a pipeline with a checkpoint and a log."""
    files = RunFiles(home, name)
    labels = {"app.kubernetes.io/name": pipeline}
    spec = {"entrypoint": "main", "templates": [{"name": "main"}]}
    files.create({"kind": "Workflow", "metadata": {"name": name, "labels": labels}, "spec": spec})
    files.snapshot({"phase": phase, "nodes": {}, "startedAt": "2026-01-01T00:00:00Z"})
    (files.logs / "train.log").write_text("step 1\n")
    store.put(f"{key('train', CHECKPOINTS, name)}/latest", b"1")
    return files


def remaining_runs(home: Path, store: Store) -> set[str]:
    return {entry.key.partition("/")[0] for entry in store.list("")} & {path.name for path in (home / "runs").iterdir()}


def test_prune_keeps_the_newest_runs_of_each_pipeline_and_unfinished_runs(tmp_path: Path, s3: Store) -> None:
    for number, phase in enumerate(["Succeeded", "Failed", "Running", "Succeeded", "Failed"]):
        make_run(tmp_path, s3, f"power-{number}", "power", phase).close()
    make_run(tmp_path, s3, "cards-1", "cards").close()
    s3.put("releases/power/abc/release.json", b"{}")
    every = {"cards-1", *(f"power-{number}" for number in range(5))}
    rows = find_old_runs(tmp_path, 2)
    assert {row["run"] for row in rows} == {"power-0", "power-1"}, "power-2 was interrupted, and can be resumed"
    assert all(row["bytes"] > 0 for row in rows) and remaining_runs(tmp_path, s3) == every, "only listed"
    for row in rows:
        remove_run(tmp_path, row["run"])
    assert remaining_runs(tmp_path, s3) == every - {"power-0", "power-1"}
    assert not list(s3.list("power-0/")) and list(s3.list("releases/power/")) and find_old_runs(tmp_path, 2) == []


def test_prune_keeps_a_run_while_a_kept_run_reuses_its_outputs(tmp_path: Path, s3: Store) -> None:
    for number in range(3):
        make_run(tmp_path, s3, f"cached-{number}", "cached").close()
    manifest = tmp_path / "runs/cached-2/manifest.yaml"
    cached = {"prepare": {"task": "prepare", "at": "cached-0/prepare"}, "reuse": "yes"}
    workflow = json.loads(manifest.read_text())
    workflow["spec"]["arguments"] = {"parameters": [{"name": "cached", "value": json.dumps(cached)}]}
    stat = manifest.stat()
    manifest.write_text(json.dumps(workflow))
    os.utime(manifest, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert [row["run"] for row in find_old_runs(tmp_path, 1)] == ["cached-1"]
    assert {row["run"] for row in find_old_runs(tmp_path, 0)} == {"cached-0", "cached-1", "cached-2"}


def test_a_run_that_is_being_resumed_cannot_be_removed(tmp_path: Path, s3: Store) -> None:
    files = make_run(tmp_path, s3, "busy-1", "busy", "Failed")
    with pytest.raises(Busy, match="is being run by process"):
        remove_run(tmp_path, "busy-1")
    assert remaining_runs(tmp_path, s3) == {"busy-1"}
    files.close()
    remove_run(tmp_path, "busy-1")
    assert remaining_runs(tmp_path, s3) == set()
