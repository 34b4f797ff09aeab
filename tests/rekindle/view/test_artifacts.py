"""Old runs make room, and nothing goes that somebody still needs."""

import json
import os
from pathlib import Path

import pytest

from argolocal.state.journal import Busy, RunFiles
from rekindle.keys import CHECKPOINTS, key
from rekindle.storage import Store
from rekindle.view.artifacts import find_old_runs, remove_run


def ran(home: Path, store: Store, name: str, pipeline: str, phase: str = "Succeeded") -> RunFiles:
    """A run of a pipeline that left a checkpoint and a log."""
    files = RunFiles(home, name)
    labels = {"app.kubernetes.io/name": pipeline}
    spec = {"entrypoint": "main", "templates": [{"name": "main"}]}
    files.create({"kind": "Workflow", "metadata": {"name": name, "labels": labels}, "spec": spec})
    files.snapshot({"phase": phase, "nodes": {}, "startedAt": "2026-01-01T00:00:00Z"})
    (files.logs / "train.log").write_text("step 1\n")
    store.put(f"{key('train', CHECKPOINTS, name)}/latest", b"1")
    return files


def left(home: Path, store: Store) -> set[str]:
    return {entry.key.partition("/")[0] for entry in store.list("")} & {path.name for path in (home / "runs").iterdir()}


def test_the_newest_runs_of_each_pipeline_stay_and_whatever_has_not_ended(tmp_path: Path, s3: Store) -> None:
    for number, phase in enumerate(["Succeeded", "Failed", "Running", "Succeeded", "Failed"]):
        ran(tmp_path, s3, f"power-{number}", "power", phase).close()
    ran(tmp_path, s3, "cards-1", "cards").close()
    s3.put("releases/power/abc/release.json", b"{}")
    every = {"cards-1", *(f"power-{number}" for number in range(5))}
    rows = find_old_runs(tmp_path, 2)
    assert {row["run"] for row in rows} == {"power-0", "power-1"}, "power-2 was interrupted, and can be resumed"
    assert all(row["bytes"] > 0 for row in rows) and left(tmp_path, s3) == every, "only listed"
    for row in rows:
        remove_run(tmp_path, row["run"])
    assert left(tmp_path, s3) == every - {"power-0", "power-1"}
    assert not list(s3.list("power-0/")) and list(s3.list("releases/power/")) and find_old_runs(tmp_path, 2) == []


def test_a_run_whose_dataset_another_took_stays_as_long_as_that(tmp_path: Path, s3: Store) -> None:
    for number in range(3):
        ran(tmp_path, s3, f"taken-{number}", "taken").close()
    manifest = tmp_path / "runs/taken-2/manifest.yaml"
    known = {"prepare": {"task": "prepare", "at": "taken-0/prepare"}, "reuse": "yes"}
    taken = json.loads(manifest.read_text())
    taken["spec"]["arguments"] = {"parameters": [{"name": "cached", "value": json.dumps(known)}]}
    before = manifest.stat()
    manifest.write_text(json.dumps(taken))
    os.utime(manifest, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [row["run"] for row in find_old_runs(tmp_path, 1)] == ["taken-1"]
    assert {row["run"] for row in find_old_runs(tmp_path, 0)} == {"taken-0", "taken-1", "taken-2"}


def test_a_run_that_somebody_resumes_meanwhile_stays(tmp_path: Path, s3: Store) -> None:
    files = ran(tmp_path, s3, "busy-1", "busy", "Failed")
    with pytest.raises(Busy, match="is being run by process"):
        remove_run(tmp_path, "busy-1")
    assert left(tmp_path, s3) == {"busy-1"}
    files.close()
    remove_run(tmp_path, "busy-1")
    assert left(tmp_path, s3) == set()
