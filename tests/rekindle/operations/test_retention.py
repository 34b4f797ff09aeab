"""Retention removes old runs from the store, MLflow, the home (directory of runs) and the cache,
but nothing that is still needed."""

import json
import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from argolocal.common import homes
from argolocal.manifest.types import Object
from argolocal.state.journal import RunFiles
from rekindle import tracking
from rekindle.cache import claims, entries
from rekindle.cluster.cluster_objects import ClusterObjects
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import RekindleError, TrackingError
from rekindle.local.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects
from rekindle.local.services.services import ADDRESS_VARIABLES
from rekindle.mlflow_api import (
    Answer,
    RunAnswer,
    RunInfo,
    VersionAnswer,
    VersionsPage,
    send_request,
)
from rekindle.names import RunName
from rekindle.operations import retention
from rekindle.release.retention import listing, ownership, removal
from rekindle.release.retention.decision import Release, Removal, Run, RunRemoval
from rekindle.release.serve_config import VERSION_ANNOTATION
from rekindle.storage import Store
from steps import champion, report
from tests.proxy import Proxy, Write
from tests.rekindle.cli.processes import make_shell_workflow, run_rekindle
from tests.rekindle.cluster.server import ApiServer
from tests.rekindle.duplicate_version import leave_duplicate

pytestmark = pytest.mark.usefixtures("mlflow_server")


@pytest.fixture
def name() -> str:
    return f"cards-{uuid.uuid4().hex[:6]}"


TASKS = [{"name": "prepare"}, {"name": "train"}]


class Runs:
    """Creates runs of pipelines, each with a folder, artifacts, a record in MLflow and a cache
    entry."""

    def __init__(self, home: Path, store: Store, pipeline: str) -> None:
        self.home = home
        self.store = store
        self.pipeline = pipeline
        self.number = 0
        self.reader_ids: list[str] = []

    def make(
        self,
        phase: str = "Succeeded",
        pipeline: str = "",
        uses: str = "",
        backfill: str = "",
        **limits: float,
    ) -> str:
        pipeline = pipeline or self.pipeline
        self.number = self.number + 1
        name = f"{self.pipeline}-{self.number:03}"
        files = RunFiles(self.home, name)
        cached_parameter = {"prepare": {"task": "prepare", "at": uses}} if uses else {}

        values = {
            "cached": json.dumps(cached_parameter),
            "config": json.dumps({"retention": limits}),
            "backfill": backfill,
        }

        workflow = {
            "kind": "Workflow",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": pipeline}},
            "spec": {
                "entrypoint": "main",
                "templates": [{"name": "main", "dag": {"tasks": TASKS}}],
                "arguments": {"parameters": [{"name": n, "value": v} for n, v in values.items()]},
            },
        }

        files.create(workflow)
        ownership.begin_run(self.store, workflow, pipeline, is_counted=not backfill)

        if phase == "Running":
            ended = {}
        else:
            ended = {"finishedAt": f"2026-01-01T00:{self.number // 60:02}:{self.number % 60:02}Z"}

        files.snapshot({"phase": phase, "nodes": {}, "startedAt": "2026-01-01T00:00:00Z", **ended})
        run_id = tracking.start_run(pipeline, name)
        tracking.log_artifact(run_id, "config.yaml", b"name: cards")

        if ended:
            tracking.finish(run_id, "FINISHED" if phase == "Succeeded" else "FAILED")
            ownership.end_run(self.store, workflow, pipeline, phase == "Succeeded")

        for task in ("prepare", "train"):
            self.store.put(f"{name}/{task}/out/part", b"123")
            artifacts = {"out": {"sha256": "a" * 64, "files": 1, "bytes": 3}}
            entry = entries.Entry(
                f"{name}-{task}", f"{name}/{task}", {}, artifacts, {"step": "steps.x"}, 1.0
            )
            entries.record_entry(self.store, entry)

        files.close()
        return name

    def record_reader(self, data_source: str) -> None:
        """Record a run of another pipeline that reads `data_source`."""
        reader = f"{self.pipeline}-reader"
        run_id = tracking.start_run(reader, f"{reader}-1")
        tracking.log_to_run(run_id, run_params={"data.source": data_source})
        self.reader_ids.append(run_id)

    def workflow(self, name: str) -> dict[str, Any]:
        return RunFiles(self.home, name).workflow()

    def remaining_parts(self, name: str, pipeline: str = "") -> set[str]:
        """Return the parts of a run that still exist, as in ALL_PARTS."""
        run_id = tracking.find_run(pipeline or self.pipeline, name)
        cached_tasks = [entry.at for entry in entries.read_entries(self.store)]
        existence_by_part = {
            "folder": RunFiles(self.home, name).root.exists(),
            "mlflow": bool(run_id),
            "prepare": bool(list(self.store.list(f"{name}/prepare/"))),
            "train": bool(list(self.store.list(f"{name}/train/"))),
            "cache": f"{name}/train" in cached_tasks,
        }
        return {part for part, exists in existence_by_part.items() if exists}


ALL_PARTS = {"folder", "mlflow", "prepare", "train", "cache"}


@pytest.fixture
def runs(tmp_path: Path, s3: Store, name: str) -> Iterator[Runs]:
    entries.remove_entries(s3, entries.read_entries(s3))
    record_services(tmp_path, "s3", "mlflow")
    runs = Runs(tmp_path, s3, name)
    yield runs

    # a reader of the whole bucket would protect the runs of all later tests
    for run_id in runs.reader_ids:
        removal.delete_record(run_id)


def record_services(home: Path, *services: str) -> None:
    """Record `services` as embedded services of the home, at the addresses in the environment. All
    other services are shared by several homes."""
    (home / "services").mkdir(exist_ok=True)
    for service in ADDRESS_VARIABLES:
        port = urlsplit(os.environ[ADDRESS_VARIABLES[service]]).port or 0
        record = {"name": service, "port": port if service in services else 1, "pid": 0, "since": 0}
        (home / f"services/{service}.json").write_text(json.dumps(record))


def test_the_end_of_a_run_removes_the_oldest_runs_of_its_pipeline_everywhere(runs: Runs) -> None:
    names = [runs.make() for _ in range(4)]
    other = runs.make(pipeline=f"{runs.pipeline}-other")
    running = runs.make("Running")
    files = RunFiles(runs.home, running)
    files.lock()
    record = tracking.find_run(runs.pipeline, names[0])
    last_run = runs.make(keep_runs=3)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert [runs.remaining_parts(name) for name in names] == [set(), set(), ALL_PARTS, ALL_PARTS]
    assert runs.remaining_parts(running) == runs.remaining_parts(last_run) == ALL_PARTS
    assert runs.remaining_parts(other, f"{runs.pipeline}-other") == ALL_PARTS

    # the embedded MLflow removes deleted runs from its database
    with pytest.raises(Exception, match="not found"):
        tracking.read_tags(str(record))

    files.close()


def test_run_and_resume_remove_old_runs_when_the_run_has_ended(runs: Runs) -> None:
    homes.trust_home(runs.home)
    flag = runs.home / "flag"
    manifest = make_shell_workflow(("once", f"test -e {flag}"))
    manifest["metadata"]["labels"] = {
        "app.kubernetes.io/name": runs.pipeline,
        "app.kubernetes.io/part-of": "rekindle",
    }
    config = {"name": "config", "value": json.dumps({"retention": {"keep_runs": 1}})}
    manifest["spec"]["arguments"] = {"parameters": [config]}
    file = runs.home / "workflow.json"
    file.write_text(json.dumps(manifest))

    for command in (["run", "--manifest", file], ["resume", "four"]):
        old = [runs.make(), runs.make()]
        result = run_rekindle(*command, "--yes", cwd=runs.home, REKINDLE_HOME=str(runs.home))
        assert "(config section retention)" in result.stderr
        assert set() in [runs.remaining_parts(name) for name in old]
        flag.touch()


def test_the_end_of_one_run_removes_a_limited_number_of_runs(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "MAX_REMOVALS_AT_END", 3)
    names = [runs.make() for _ in range(removal.MAX_REMOVALS_AT_END + 2)]
    last_run = runs.make(keep_runs=1)
    for left in (2, 0):
        retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
        assert len([name for name in names if runs.remaining_parts(name)]) == left


def test_without_limits_the_end_of_a_run_removes_nothing(runs: Runs) -> None:
    names = [runs.make() for _ in range(3)]
    retention.apply_limits_after_run(runs.home, runs.workflow(names[-1]))
    assert [runs.remaining_parts(name) for name in names] == [ALL_PARTS] * 3


@pytest.mark.slow
def test_prune_lists_first_and_uses_the_limits_of_the_newest_config_unless_an_option_replaces_them(
    runs: Runs,
) -> None:
    names = [runs.make(), runs.make("Failed"), runs.make(keep_runs=1), runs.make(keep_runs=2)]
    prune_report = retention.prune_runs(runs.home, None, {"keep_runs": None}, should_delete=False)
    assert {row["run"] for row in prune_report["runs"]} == {*names[:2]}
    assert all(row["bytes"] > 0 for row in prune_report["runs"])
    assert [runs.remaining_parts(name) for name in names] == [ALL_PARTS] * 4
    assert (
        len(retention.prune_runs(runs.home, None, {"keep_runs": 3}, should_delete=False)["runs"])
        == 1
    )
    assert {
        row["run"]
        for row in retention.prune_runs(runs.home, None, {"keep_runs": 0}, should_delete=False)[
            "runs"
        ]
    } == {*names}
    assert (
        retention.prune_runs(runs.home, None, {}, should_delete=True)["runs"]
        == prune_report["runs"]
    )
    assert [runs.remaining_parts(name) for name in names] == [set(), set(), ALL_PARTS, ALL_PARTS]
    assert retention.prune_runs(runs.home, None, {}, should_delete=True) == {
        "runs": [],
        "releases": [],
    }


@pytest.mark.slow
def test_the_runs_of_a_backfill_are_not_counted_but_prune_can_remove_them(runs: Runs) -> None:
    week = runs.make(backfill="true")
    other = runs.make()
    last_run = runs.make(keep_runs=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert runs.remaining_parts(week) == ALL_PARTS
    assert runs.remaining_parts(other) == set()
    assert {
        row["run"]
        for row in retention.prune_runs(runs.home, None, {"keep_runs": 1}, should_delete=True)[
            "runs"
        ]
    } == {week}


@pytest.mark.slow
def test_prune_keeps_five_runs_if_no_config_has_a_limit(runs: Runs) -> None:
    names = [runs.make() for _ in range(6)]
    assert [
        row["run"] for row in retention.prune_runs(runs.home, None, {}, should_delete=False)["runs"]
    ] == names[:1]


def test_artifacts_stay_while_a_kept_run_reuses_them(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    source = runs.make()
    reader = runs.make(uses=f"{source}/prepare", keep_runs=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(reader))
    assert "removed 1 run (1 in part) and 0 releases" in capsys.readouterr().err
    assert runs.remaining_parts(source) == {"folder", "mlflow", "prepare"}
    assert retention.prune_runs(runs.home, None, {}, should_delete=True)["runs"] == [], (
        "nothing else can be removed"
    )
    last_run = runs.make(keep_runs=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert runs.remaining_parts(source) == set()
    assert runs.remaining_parts(reader) == set()


@pytest.mark.slow
def test_a_failed_run_whose_outputs_are_reused_can_still_be_resumed(runs: Runs) -> None:
    failed = runs.make("Failed")
    reader = runs.make(uses=f"{failed}/prepare", keep_runs=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(reader))
    assert runs.remaining_parts(failed) == ALL_PARTS


@pytest.mark.slow
def test_a_run_that_is_being_resumed_is_not_removed(runs: Runs) -> None:
    failed = runs.make("Failed")
    last_run = runs.make(keep_runs=1)
    scope = retention._make_local_scope(runs.home)
    scope.limits = {runs.pipeline: retention._read_limits(runs.workflow(last_run))}
    plan, source = scope.plan([runs.pipeline])
    files = RunFiles(runs.home, failed)
    files.lock()  # another process locks the failed run after the decision
    assert removal.apply_removal(runs.store, plan, scope.host, source) == []
    assert runs.remaining_parts(failed) == ALL_PARTS
    files.close()
    assert removal.apply_removal(runs.store, plan, scope.host, source) == [failed]
    assert runs.remaining_parts(failed) == set()


def test_artifacts_that_a_new_run_has_found_in_the_cache_stay(runs: Runs) -> None:
    old = runs.make()
    last_run = runs.make(keep_runs=1)
    lookup = entries.Lookup(runs.store, 1)
    cache_entry = lookup.find(f"{old}-train")
    assert cache_entry
    assert lookup.close(), "a look-up before a run, which is not created yet"
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert runs.remaining_parts(old) == {"folder", "mlflow", "train", "cache"}
    assert entries.find_valid_entry(runs.store, f"{old}-train") == cache_entry
    assert entries.find_valid_entry(runs.store, f"{old}-prepare") is None


def test_of_a_look_up_and_a_removal_at_the_same_time_one_notices_the_other(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = runs.make()
    last_run = runs.make(keep_runs=1)
    scope = retention._make_local_scope(runs.home)
    scope.limits = {runs.pipeline: retention._read_limits(runs.workflow(last_run))}
    plan, source = scope.plan([runs.pipeline])
    first_lookup = entries.Lookup(runs.store, 1)
    second_lookup = entries.Lookup(runs.store, 1)
    assert first_lookup.find(f"{old}-train")
    assert second_lookup.find(f"{old}-prepare")
    assert first_lookup.close(), "claimed after the decision, before the removal"
    assert removal.apply_removal(runs.store, plan, scope.host, source) == [old]
    assert runs.remaining_parts(old) == {"folder", "mlflow", "train"}, (
        "the removal has noticed the claim"
    )
    assert removal.apply_removal(runs.store, plan, scope.host, source) == [], (
        "only the artifacts of the claim are left"
    )
    assert not second_lookup.close(), "the look-up has noticed the removal"
    assert entries.find_and_claim(runs.store, f"{old}-train") is None
    monkeypatch.setattr(retention, "CLAIM_SECONDS", 0.0)
    plan, source = scope.plan([runs.pipeline])
    assert removal.apply_removal(runs.store, plan, scope.host, source) == [old]
    assert runs.remaining_parts(old) == set()
    assert [item.key for item in runs.store.list(f"{claims.CLAIMS_FOLDER}{old}")] == []


def test_a_removal_that_is_interrupted_is_completed_by_the_next(runs: Runs) -> None:
    class Killed(retention.MachineHost):
        def remove(self, run_name: str) -> None:
            raise KeyboardInterrupt

    names = [runs.make(), runs.make(), runs.make(keep_runs=1)]
    scope = retention._make_local_scope(runs.home)
    plan, source = scope.plan([runs.pipeline])

    with pytest.raises(KeyboardInterrupt):
        removal.apply_removal(runs.store, plan, Killed(runs.home), source)

    assert any(runs.remaining_parts(name) == {"folder"} for name in names[:2])
    remains = runs.home / "removed/earlier/logs"
    remains.mkdir(parents=True)
    retention.apply_limits_after_run(runs.home, runs.workflow(names[-1]))

    assert [runs.remaining_parts(name) for name in names] == [
        set(),
        set(),
        ALL_PARTS,
    ]
    assert not remains.exists()


def release_model(
    runs: Runs, run: str, pipeline: str = "", start: str = "", champion: str = "", sha256: str = ""
) -> str:
    """Release a model in a run, and return the version of the release."""
    prefix = f"releases/{runs.pipeline}/{uuid.uuid4().hex[:12]}/"
    runs.store.put(f"{prefix}model.json", json.dumps({"start": start}).encode())
    runs.store.put(f"{prefix}origin.json", json.dumps({"champion": champion}).encode())
    run_id = tracking.find_run(pipeline or runs.pipeline, run) or ""
    source = runs.store.uri(prefix)
    model_sha256 = sha256 or uuid.uuid4().hex * 2
    registered = tracking.register_version(runs.pipeline, prefix, source, model_sha256, run_id, {})
    record = {"name": runs.pipeline, "version": registered.version, "model_sha256": model_sha256}
    hashes = {"files": {"model.json": "0" * 64}}
    runs.store.put(f"{prefix}release.json", json.dumps(record | hashes).encode())
    return registered.version


def run_info(run_id: str) -> RunInfo:
    return send_request("GET", "mlflow/runs/get", RunAnswer, params={"run_id": run_id}).run.info


def find_versions(runs: Runs) -> dict[str, bool]:
    """Return {version of the model: True if the files of the version exist}."""
    search = {"filter": f"name = '{runs.pipeline}'"}
    page = send_request("GET", "mlflow/model-versions/search", VersionsPage, params=search)
    rows = {item.version: item.source.split("/", 3)[3] for item in page.model_versions}
    return {
        version: bool(list(runs.store.list(prefix))) for version, prefix in sorted(rows.items())
    }


def record_served_model(home: Path, model: str, version: str) -> None:
    """Create the Deployment of a release, to which `rekindle rollback` can go back."""
    labels = {"app.kubernetes.io/name": model}
    container = {"name": "main", "image": "a"}

    obj: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": f"{model}-{version}",
            "labels": labels,
            "annotations": {VERSION_ANNOTATION: version},
        },
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }

    LocalObjects(LocalCluster(home)).controllers["Deployment"].apply(obj)


def test_the_champion_the_rollback_targets_and_their_mlflow_runs_stay(runs: Runs) -> None:
    names = [runs.make() for _ in range(5)]
    numbers = [release_model(runs, name) for name in names]
    tracking.record_champion(runs.pipeline, numbers[0], "d-1")
    record_served_model(runs.home, runs.pipeline, numbers[1])
    last_run = runs.make(keep_runs=1, keep_releases=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert find_versions(runs) == {numbers[0]: True, numbers[1]: True, numbers[4]: True}

    assert [runs.remaining_parts(name) for name in names] == [
        {"mlflow"},
        {"mlflow"},
        set(),
        set(),
        {"mlflow"},
    ]

    emptied = tracking.read_tags(tracking.find_run(runs.pipeline, names[0]) or "")
    assert emptied[tracking.ARTIFACTS_EMPTIED] == "removed"
    assert retention.prune_runs(runs.home, None, {}, should_delete=False) == {
        "runs": [],
        "releases": [],
    }
    tracking.record_champion(runs.pipeline, numbers[4], "d-5")
    prune_report = retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert [row["release"] for row in prune_report["releases"]] == [f"{runs.pipeline}@{numbers[0]}"]
    assert runs.remaining_parts(names[0]) == set(), (
        "the record of the run was kept only for its release"
    )


@pytest.mark.slow
def test_the_releases_that_a_reproduction_reads_stay(runs: Runs) -> None:
    base = release_model(runs, runs.make())
    unused = release_model(runs, runs.make())
    champion = release_model(runs, runs.make(), sha256="5a" * 32)
    version = tracking.find_version(runs.pipeline, base)
    tuned = release_model(runs, runs.make(), start=version.uri if version else "")
    refreshed = release_model(runs, runs.make(keep_releases=2), champion=champion, sha256="5a" * 32)
    retention.prune_runs(runs.home, None, {}, should_delete=True)

    assert find_versions(runs) == {
        base: True,
        champion: True,
        tuned: True,
        refreshed: True,
    }
    assert unused not in find_versions(runs)


def register_copy(runs: Runs, model: str, version: str, tags: bool) -> None:
    """Copy a version into another model, as MLflow does, with or without its tags."""
    search = {"name": runs.pipeline, "version": version}
    version_answer = send_request("GET", "mlflow/model-versions/get", VersionAnswer, params=search)
    original = version_answer.model_version
    pairs = [{"key": name, "value": value} for name, value in original.tags.items()]
    copy = {"name": model, "source": original.source, "run_id": original.run_id}
    send_request("POST", "mlflow/registered-models/create", Answer, json={"name": model})
    send_request(
        "POST",
        "mlflow/model-versions/create",
        Answer,
        json=copy | ({"tags": pairs} if tags else {}),
    )


@pytest.mark.slow
def test_the_files_of_a_release_stay_while_a_copy_in_another_model_has_them(runs: Runs) -> None:
    numbers = [release_model(runs, runs.make()) for _ in range(4)]
    prefixes = [
        found.uri for number in numbers if (found := tracking.find_version(runs.pipeline, number))
    ]
    register_copy(runs, f"{runs.pipeline}-live", numbers[0], tags=True)
    register_copy(runs, f"{runs.pipeline}-other", numbers[1], tags=False)
    alias = {"name": f"{runs.pipeline}-live", "alias": "live", "version": "1"}
    send_request("POST", "mlflow/registered-models/alias", Answer, json=alias)
    runs.make(keep_releases=1)
    retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert [*find_versions(runs)] == [numbers[3]]
    assert [bool(list(runs.store.list(prefix))) for prefix in prefixes] == [True, True, False, True]


@pytest.mark.slow
def test_the_releases_of_a_renamed_model_stay_when_its_former_name_is_used_again(
    runs: Runs,
) -> None:
    first_release = release_model(runs, runs.make())
    version = tracking.find_version(runs.pipeline, first_release)
    assert version
    tracking.record_champion(runs.pipeline, first_release, "d-1")
    renamed = {"name": runs.pipeline, "new_name": f"{runs.pipeline}-renamed"}
    send_request("POST", "mlflow/registered-models/rename", Answer, json=renamed)
    run_id = tracking.find_run(runs.pipeline, runs.make()) or ""
    tracking.register_version(
        runs.pipeline, version.uri, runs.store.uri(version.uri), version.sha256, run_id, {}
    )
    last_release = release_model(runs, runs.make(keep_releases=1))
    retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert [*find_versions(runs)] == [last_release]
    assert list(runs.store.list(version.uri))


@pytest.mark.slow
def test_the_release_of_a_run_that_can_be_resumed_stays(runs: Runs) -> None:
    failed, running, succeeded = (runs.make(phase) for phase in ("Failed", "Running", "Succeeded"))
    numbers = [release_model(runs, name) for name in (failed, running, succeeded)]
    files = RunFiles(runs.home, running)
    files.lock()
    newest = release_model(runs, runs.make(keep_releases=1, keep_runs=3))
    retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert [*find_versions(runs)] == [*numbers[:2], newest]
    retention.prune_runs(runs.home, None, {"keep_runs": 1}, should_delete=True)
    assert [*find_versions(runs)] == [numbers[1], newest], "the failed run was removed"
    files.close()


@pytest.mark.slow
def test_the_limits_of_a_pipeline_do_not_apply_to_the_releases_of_others(runs: Runs) -> None:
    other = f"{runs.pipeline}-other"
    numbers = [
        release_model(runs, runs.make()),
        *(release_model(runs, runs.make(pipeline=other), other) for _ in range(2)),
    ]
    last_run = runs.make(keep_releases=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert [*find_versions(runs)] == numbers
    numbers.append(release_model(runs, runs.make(keep_releases=1)))
    retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert [*find_versions(runs)] == numbers[1:]
    assert (
        len(
            retention.prune_runs(runs.home, None, {"keep_releases": 1}, should_delete=False)[
                "releases"
            ]
        )
        == 1
    )


@pytest.mark.slow
def test_the_release_that_a_run_of_another_pipeline_reads_stays(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = []
    for _ in range(3):
        numbers.append(release_model(runs, runs.make(keep_releases=1)))
        tracking.record_champion(runs.pipeline, numbers[-1], f"d-{numbers[-1]}")
        if len(numbers) == 2:
            champion.run(champion.Inputs(name=runs.pipeline))
    retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert [*find_versions(runs)] == numbers[1:]
    monkeypatch.setattr(retention, "RESUMABLE_SECONDS", 0.0)
    retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert [*find_versions(runs)] == numbers[2:]


@pytest.mark.slow
def test_the_artifacts_that_another_pipeline_has_as_its_data_stay(runs: Runs) -> None:
    source = runs.make()
    other = runs.make()
    reader = f"{runs.pipeline}-reader"
    run_id = tracking.start_run(reader, f"{reader}-1")
    tracking.log_to_run(run_id, run_params={"data.source": runs.store.uri(f"{source}/prepare/out")})
    last_run = runs.make(keep_runs=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert runs.remaining_parts(source) == {"folder", "mlflow", "prepare"}
    assert runs.remaining_parts(other) == set()
    tracking.finish(run_id, "FINISHED")
    removal.delete_record(run_id)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert runs.remaining_parts(source) == set()


@pytest.mark.slow
def test_the_outputs_that_a_run_of_another_machine_reads_stay(runs: Runs) -> None:
    source = runs.make()
    copied = runs.make()
    for reader, task, tags in (("a", source, {tracking.REFERS_TO_RUNS: "yes"}), ("b", copied, {})):
        run_id = tracking.start_run(runs.pipeline, f"{runs.pipeline}-{reader}")
        tags[f"{tracking.CACHED}train"] = f"{task}/train"
        tags[listing.STORE_TAG] = listing.read_or_create_store_id(runs.store)
        tracking.log_to_run(run_id, run_tags=tags)
        tracking.finish(run_id, "FINISHED")

        ownership.end_run(
            runs.store,
            {"metadata": {"name": f"{runs.pipeline}-{reader}"}},
            runs.pipeline,
            has_succeeded=True,
        )

    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=3)))
    assert runs.remaining_parts(source) == {"folder", "mlflow", "train", "cache"}
    assert runs.remaining_parts(copied) == set()


@pytest.mark.slow
def test_with_shared_services_the_rollback_targets_of_other_machines_stay(runs: Runs) -> None:
    names = [runs.make() for _ in range(5)]
    numbers = [release_model(runs, name) for name in names]
    for number in numbers[:4]:
        tracking.record_champion(runs.pipeline, number, f"d-{number}")

    tracking.tag_version(runs.pipeline, numbers[3], tracking.KEEP_RELEASES, "1")
    runs.make(keep_releases=1)
    record_services(runs.home, "s3")
    retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert [*find_versions(runs)] == numbers[2:], (
        "the champion, the release before it, and the newest release"
    )

    for _ in range(6):
        runs.make(pipeline=f"{runs.pipeline}-other")

    assert retention.prune_runs(runs.home, None, {}, should_delete=False)["runs"] == [], (
        "no default limit"
    )
    record_services(runs.home, "s3", "mlflow")
    assert len(retention.prune_runs(runs.home, None, {}, should_delete=False)["runs"]) == 1


@pytest.mark.slow
def test_releases_stay_if_homes_share_an_object_store_but_not_mlflow(runs: Runs) -> None:
    numbers = [release_model(runs, runs.make()) for _ in range(3)]
    runs.make(keep_releases=1)
    record_services(runs.home, "mlflow")
    assert retention.prune_runs(runs.home, None, {}, should_delete=True)["releases"] == []
    assert [*find_versions(runs)] == numbers


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("folder", ["releases", "cache-claims", "data"])
def test_a_run_with_the_name_of_a_shared_folder_of_the_store_does_not_take_it_along(
    runs: Runs, folder: str
) -> None:
    key = f"{folder}/{runs.pipeline}/train/file"
    runs.store.put(key, b"1")
    run_removal = RunRemoval(Run(folder, runs.pipeline, 1.0), frozenset(), keep_mlflow=False)
    removal.apply_removal(
        runs.store,
        Removal(runs=[run_removal]),
        removal.NoHost(),
        listing.ListingContext({}, 0, 0, None),
    )
    assert runs.store.get(key) == b"1"
    runs.store.delete([key])


@pytest.mark.slow
def test_a_release_that_is_being_removed_is_registered_as_a_new_version(runs: Runs) -> None:
    run = runs.make()
    number = release_model(runs, run)
    version = tracking.find_version(runs.pipeline, number)
    assert version
    tracking.tag_version(
        runs.pipeline, number, tracking.REMOVED, listing.read_or_create_store_id(runs.store)
    )
    new_version = tracking.register_version(
        runs.pipeline, version.uri, runs.store.uri(version.uri), version.sha256, version.run_id, {}
    )
    assert int(new_version.version) > int(number)
    record = {"name": runs.pipeline, "version": new_version.version}
    runs.store.put(f"{version.uri}release.json", json.dumps(record).encode())
    runs.make(keep_runs=9)
    assert [
        row["release"]
        for row in retention.prune_runs(runs.home, None, {}, should_delete=True)["releases"]
    ]
    assert find_versions(runs) == {new_version.version: True}, "the files belong to the new version"


@pytest.mark.slow
def test_a_version_that_was_registered_twice_does_not_keep_the_files_of_the_release(
    runs: Runs, mlflow_server: str
) -> None:
    prefix = f"releases/{runs.pipeline}/{uuid.uuid4().hex[:12]}/"
    leave_duplicate(mlflow_server, runs.pipeline, prefix, runs.store.uri(prefix))
    record = {"name": runs.pipeline, "version": "1", "model_sha256": "0" * 64}
    runs.store.put(f"{prefix}release.json", json.dumps(record).encode())

    tracking.tag_version(
        runs.pipeline, "1", tracking.REMOVED, listing.read_or_create_store_id(runs.store)
    )
    removed_release = Release(runs.pipeline, 1, prefix, runs.pipeline, marked=True)
    context = listing.ListingContext({}, 0, 0, None)
    removal.apply_removal(
        runs.store, Removal(releases=[removed_release]), removal.NoHost(), context
    )
    assert find_versions(runs) == {}
    assert not list(runs.store.list(prefix))


def test_the_record_of_a_version_that_is_released_at_this_moment_is_not_overwritten(
    runs: Runs,
) -> None:
    number = release_model(runs, runs.make())
    version = tracking.find_version(runs.pipeline, number)
    assert version
    record = json.dumps({"name": runs.pipeline, "version": "77", "files": {}}).encode()
    removed_release = Release(runs.pipeline, int(number), version.uri, runs.pipeline, marked=True)
    alias = {"name": runs.pipeline, "alias": tracking.CANDIDATE}
    send_request("DELETE", "mlflow/registered-models/alias", Answer, json=alias)

    with Proxy(runs.store.endpoint or "") as proxy:

        def release_again(write: Write) -> None:
            if write.method == "PUT" and write.path.endswith("release.json"):
                runs.store.put(f"{version.uri}release.json", record)

        proxy.before = release_again
        context = listing.ListingContext({}, 0, 0, None)
        store = Store(runs.store.bucket, proxy.url)
        removal.apply_removal(store, Removal(releases=[removed_release]), removal.NoHost(), context)

    assert runs.store.get(f"{version.uri}release.json") == record
    assert runs.store.head(f"{version.uri}model.json"), "the file belongs to the new version"


CLUSTER = {"keep_days": 14, "deadline_hours": 168}


def report_end(runs: Runs, name: str, backfill: str = "", **limits: float) -> None:
    config = {"name": runs.pipeline, "retention": limits, "cluster": CLUSTER}
    report.run(
        report.Inputs(
            workflow=name,
            status="Succeeded",
            experiment=runs.pipeline,
            config=config,
            backfill=backfill,
        )
    )


@pytest.mark.slow
def test_in_a_cluster_the_last_step_removes_only_runs_that_cannot_be_active(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        runs.make(phase)
        for phase in ("Succeeded", "Succeeded", "Failed", "Running", "Succeeded", "Succeeded")
    ]
    # the second run belongs to another store, or to an earlier Rekindle
    remove_tag(runs, names[1], listing.STORE_TAG)

    report_end(runs, names[-1], keep_runs=2)
    assert all("mlflow" in runs.remaining_parts(name) for name in names), (
        "on one machine, `rekindle run` removes runs"
    )
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    report_end(runs, names[-1])
    assert all("mlflow" in runs.remaining_parts(name) for name in names), "without limits"
    report_end(runs, names[-1], keep_runs=2)

    assert [runs.remaining_parts(name) - {"folder"} for name in names] == [
        set(),
        *[ALL_PARTS - {"folder"}] * 3,
        ALL_PARTS - {"folder"},
        ALL_PARTS - {"folder"},
    ]

    monkeypatch.setenv("S3_BUCKET", "missing")
    report_end(runs, names[-1], keep_runs=1)  # a run ends even if its object store does not work


@pytest.mark.slow
def test_in_a_cluster_releases_are_removed_after_a_promotion(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    names = [runs.make() for _ in range(3)]
    for name in names:
        run_id = tracking.find_run(runs.pipeline, name) or ""
        tracking.log_to_run(
            run_id, run_tags={listing.STORE_TAG: listing.read_or_create_store_id(runs.store)}
        )

    numbers = [release_model(runs, name) for name in names]
    for number in numbers:
        tracking.record_champion(runs.pipeline, number, f"d-{number}")
        tracking.tag_version(runs.pipeline, number, tracking.KEEP_RELEASES, "1")

    report_end(runs, names[-1], keep_releases=1)
    assert len(find_versions(runs)) == 3, (
        "the run has promoted nothing, so older Deployments may still exist"
    )
    run_id = tracking.find_run(runs.pipeline, names[-1]) or ""
    tracking.log_to_run(run_id, run_tags={"rekindle.promoted": f"{runs.pipeline} {numbers[-1]}"})
    state = {"version": numbers[-1], "deployment": f"d-{numbers[-1]}", "run_id": run_id}
    runs.store.put(f"releases/{runs.pipeline}/promotion.json", json.dumps(state).encode())
    report_end(runs, names[-1], keep_releases=1)
    assert find_versions(runs) == {
        numbers[1]: True,
        numbers[2]: True,
    }, "serve.keep_releases keeps one earlier Deployment"


@pytest.mark.slow
def test_prune_removes_runs_of_a_cluster_with_their_workflows(
    runs: Runs, server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    collection = "/apis/argoproj.io/v1alpha1/namespaces/models/workflows"
    phases = ["Succeeded", "Failed", "Running", "Succeeded", "Succeeded"]

    names = [runs.make(phase) for phase in phases]
    for number, (name, phase) in enumerate(zip(names, phases, strict=True)):
        workflow = runs.workflow(name)
        workflow["metadata"]["labels"]["app.kubernetes.io/part-of"] = "rekindle"
        workflow["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{number:02}Z"

        if phase != "Running":
            ended = {"finishedAt": f"2026-01-01T01:00:{number:02}Z"}
        else:
            ended = {}

        server.put(collection, workflow | {"status": {"phase": phase, **ended}})

    assert retention.prune_runs(tmp_path, cluster, {}, should_delete=True) == {
        "runs": [],
        "releases": [],
    }, "no config has a limit"
    config = {"name": "config", "value": json.dumps({"retention": {"keep_runs": 2}})}
    newest = server.objects[collection][names[-1]]
    newest["status"]["storedWorkflowTemplateSpec"] = {"arguments": {"parameters": [config]}}
    newest["spec"] = {"workflowTemplateRef": {"name": runs.pipeline}}
    prune_report = retention.prune_runs(tmp_path, cluster, {}, should_delete=False)
    assert {row["run"] for row in prune_report["runs"]} == {*names[:2]}
    assert set(server.objects[collection]) == {*names}
    assert (
        len(retention.prune_runs(tmp_path, cluster, {"keep_runs": 3}, should_delete=False)["runs"])
        == 1
    )
    retention.prune_runs(tmp_path, cluster, {}, should_delete=True)
    assert set(server.objects[collection]) == {*names[2:]}
    assert [runs.remaining_parts(name) - {"folder"} for name in names[:2]] == [set(), set()]
    assert all(runs.remaining_parts(name) == ALL_PARTS for name in names[2:])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("fault", [{"status": 5}, {"status": {"phase": "Failed", "nodes": []}}])
def test_prune_keeps_a_malformed_workflow_and_all_to_which_it_may_refer(
    runs: Runs, server: ApiServer, cluster: Cluster, tmp_path: Path, fault: dict[str, Any]
) -> None:
    collection = "/apis/argoproj.io/v1alpha1/namespaces/models/workflows"
    used = runs.make()
    removed_run = runs.make()
    malformed_run = runs.make(uses=f"{used}/prepare")
    names = [used, removed_run, malformed_run, runs.make()]

    for number, name in enumerate(names):
        workflow = runs.workflow(name)
        workflow["metadata"]["labels"]["app.kubernetes.io/part-of"] = "rekindle"
        workflow["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{number:02}Z"
        status = {"phase": "Succeeded", "finishedAt": f"2026-01-01T01:00:{number:02}Z"}
        server.put(collection, workflow | {"status": status})

    server.objects[collection][malformed_run].update(fault)

    retention.prune_runs(tmp_path, cluster, {"keep_runs": 1}, should_delete=True)

    assert set(server.objects[collection]) == {*names} - {removed_run}
    assert runs.remaining_parts(malformed_run) == ALL_PARTS
    assert "prepare" in runs.remaining_parts(used)
    assert runs.remaining_parts(removed_run) - {"folder"} == set()


@pytest.mark.slow
def test_the_trials_of_a_sweep_are_removed_with_it_and_are_not_counted(runs: Runs) -> None:
    sweep = runs.make()
    previous_run = runs.make()
    parent = tracking.find_run(runs.pipeline, sweep) or ""
    trials = [
        tracking.start_run(runs.pipeline, f"{sweep}.trial-{n}", {tracking.PARENT: parent})
        for n in range(3)
    ]
    for trial in trials:
        ownership.record_trial(runs.store, RunName(sweep), trial)
    last_run = runs.make(keep_runs=2)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert runs.remaining_parts(previous_run) == ALL_PARTS
    assert runs.remaining_parts(sweep) == set()
    assert len(trials) == 3
    assert all(tracking.find_run(runs.pipeline, f"{sweep}.trial-{n}") is None for n in range(3))


@pytest.mark.slow
def test_the_trial_that_a_foreign_version_refers_to_stays_with_its_sweep(runs: Runs) -> None:
    sweep = runs.make()
    other = runs.make()
    parent = tracking.find_run(runs.pipeline, sweep) or ""
    trial = tracking.start_run(runs.pipeline, f"{sweep}.trial-0", {tracking.PARENT: parent})
    ownership.record_trial(runs.store, RunName(sweep), trial)
    send_request(
        "POST", "mlflow/registered-models/create", Answer, json={"name": f"{runs.pipeline}-mine"}
    )
    version = {"name": f"{runs.pipeline}-mine", "source": f"runs:/{trial}/model", "run_id": trial}
    send_request("POST", "mlflow/model-versions/create", Answer, json=version)
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert runs.remaining_parts(sweep) == {"mlflow"}
    assert tracking.find_run(runs.pipeline, f"{sweep}.trial-0") == trial
    assert runs.remaining_parts(other) == set()


@pytest.mark.slow
def test_the_record_that_the_next_scheduled_run_is_compared_with_stays(runs: Runs) -> None:
    scheduled = runs.make()
    other = runs.make()
    last_run = runs.make(keep_runs=1)
    run_id = tracking.find_run(runs.pipeline, scheduled) or ""
    tracking.log_to_run(run_id, run_tags={"rekindle.code": "abc"})
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert runs.remaining_parts(scheduled) == {"mlflow"}
    assert runs.remaining_parts(other) == set()


def test_keep_days_removes_runs_by_the_time_of_their_end(runs: Runs) -> None:
    old = runs.make()
    recent = runs.make()
    files = RunFiles(runs.home, recent)
    status, _ = files.load()
    status["finishedAt"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    files.snapshot(status)
    files.close()
    last_run = runs.make(keep_days=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(recent))
    assert runs.remaining_parts(old) == ALL_PARTS, "the config of this run has no limits"
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert runs.remaining_parts(old) == set()
    assert runs.remaining_parts(recent) == ALL_PARTS
    assert {*os.listdir(runs.home / "runs")} == {recent, last_run}, "the newest run stays"


def record_in_mlflow(runs: Runs, name: str, **tags: str) -> None:
    """Record a run as a client that can only access MLflow, with the copied id of the store."""
    copied = {
        tracking.WORKFLOW: name,
        listing.STORE_TAG: listing.read_or_create_store_id(runs.store),
        **tags,
    }
    tracking.finish(tracking.start_run(runs.pipeline, name, copied), "FINISHED")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["path", "parent", "folder", "prefix", "name"])
def test_a_run_that_only_mlflow_knows_removes_nothing(
    runs: Runs, tmp_path: Path, kind: str
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "manifest.yaml").write_text("{}")

    customers = f"customers-{runs.pipeline}"
    for key in (f"{customers}/2024.csv", f"raw/{customers}/2024.csv"):
        runs.store.put(key, b"1")

    names = {
        "path": str(precious),
        "parent": "../../precious",
        "folder": f"{customers}/",
        "prefix": f"raw/{customers}",
    }

    name = names.get(kind, customers)
    record_in_mlflow(runs, name)
    last_run = runs.make(keep_runs=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    retention.prune_runs(runs.home, None, {"keep_runs": 1}, should_delete=True)
    assert (precious / "manifest.yaml").exists()

    assert (
        runs.store.get(f"{customers}/2024.csv")
        == runs.store.get(f"raw/{customers}/2024.csv")
        == b"1"
    )

    assert tracking.find_run(runs.pipeline, name), "the record in MLflow stays, too"


@pytest.mark.slow
def test_a_second_record_of_a_run_in_mlflow_does_not_end_its_protection(runs: Runs) -> None:
    scheduled = runs.make()
    other = runs.make()
    last_run = runs.make(keep_runs=1)
    run_id = tracking.find_run(runs.pipeline, scheduled) or ""
    tracking.log_to_run(run_id, run_tags={"rekindle.code": "abc"})

    experiment = run_info(run_id).experiment_id
    tags = [{"key": tracking.WORKFLOW, "value": scheduled}]

    forged = send_request(
        "POST",
        "mlflow/runs/create",
        RunAnswer,
        json={"experiment_id": experiment, "start_time": 1, "tags": tags},
    )

    forged_id = forged.run.info.run_id

    send_request(
        "POST",
        "mlflow/runs/update",
        Answer,
        json={"run_id": forged_id, "status": "FINISHED", "end_time": 2},
    )

    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))

    for each in (run_id, forged_id):
        assert run_info(each).lifecycle_stage == "active"

    assert runs.remaining_parts(other) == set()


@pytest.mark.slow
def test_runs_that_only_mlflow_knows_do_not_count(runs: Runs) -> None:
    names = [runs.make() for _ in range(2)]
    for number in range(9):
        record_in_mlflow(runs, f"{runs.pipeline}-x{number}")
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=3)))
    assert [runs.remaining_parts(name) for name in names] == [ALL_PARTS] * 2


def test_a_run_with_a_fixed_name_does_not_own_the_files_that_it_found_or_that_are_of_no_task(
    runs: Runs,
) -> None:
    name = f"{runs.pipeline}-001"
    for key in ("2024.csv", "2024/january.csv", "train/earlier.csv"):
        runs.store.put(f"{name}/{key}", b"mine")

    assert runs.make() == name
    runs.store.put(f"{name}/2025.csv", b"mine")
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    left = {item.key.removeprefix(f"{name}/") for item in runs.store.list(f"{name}/")}

    assert left == {
        "2024.csv",
        "2024/january.csv",
        "2025.csv",
        "train/earlier.csv",
        "train/out/part",
    }


def test_a_run_with_a_generated_name_owns_its_folder(runs: Runs) -> None:
    workflow = {
        "metadata": {"name": f"{runs.pipeline}-x7k2p", "generateName": f"{runs.pipeline}-"},
        "spec": {},
    }
    ownership.begin_run(runs.store, workflow, runs.pipeline)
    mark = ownership.read(runs.store, RunName(workflow["metadata"]["name"]))
    assert mark
    assert mark.whole
    assert mark.ended is None
    for given_name in ("payments", f"{runs.pipeline}-2024a", f"{runs.pipeline}-x7k2"):
        assert not ownership.has_generated_name(
            {"name": given_name, "generateName": f"{runs.pipeline}-"}
        )


def test_a_folder_that_is_a_link_or_has_another_name_is_not_removed(
    runs: Runs, tmp_path: Path
) -> None:
    linked = runs.make()
    renamed = runs.make()
    project = tmp_path / "project"
    (runs.home / "runs" / linked).rename(project)
    (runs.home / "runs" / linked).symlink_to(project)
    (runs.home / "runs" / renamed).rename(runs.home / "runs" / "project")
    retention.prune_runs(runs.home, None, {"keep_runs": 0}, should_delete=True)
    assert (project / "manifest.yaml").exists()
    assert (runs.home / "runs/project/manifest.yaml").exists()


@pytest.mark.slow
def test_a_clock_that_is_set_back_does_not_remove_the_run_that_has_just_ended(runs: Runs) -> None:
    names = [runs.make() for _ in range(3)]
    last_run = runs.make(keep_runs=2)
    files = RunFiles(runs.home, last_run)
    status, _ = files.load()
    files.snapshot(status | {"finishedAt": "2025-12-31T00:00:00Z"})
    files.close()
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert [runs.remaining_parts(name) for name in (*names, last_run)] == [
        set(),
        set(),
        ALL_PARTS,
        ALL_PARTS,
    ]


@pytest.mark.slow
def test_the_mark_of_another_store_removes_no_version_and_an_own_mark_needs_the_store(
    runs: Runs,
) -> None:
    numbers = [release_model(runs, runs.make()) for _ in range(3)]
    tracking.tag_version(runs.pipeline, numbers[0], tracking.REMOVED, "another store")
    tracking.tag_version(
        runs.pipeline, numbers[1], tracking.REMOVED, listing.read_or_create_store_id(runs.store)
    )
    runs.make(keep_runs=9)
    assert retention.prune_runs(runs.home, None, {}, should_delete=True)["releases"] == []
    assert find_versions(runs) == dict.fromkeys(numbers, True)


@pytest.mark.slow
def test_an_interrupted_removal_of_a_release_is_finished(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    first_release, second_release = (release_model(runs, runs.make()) for _ in range(2))
    last_run = runs.make(keep_releases=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "delete", kill)
        retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert find_versions(runs) == {first_release: True, second_release: True}
    retention.prune_runs(runs.home, None, {"keep_releases": 9}, should_delete=True)
    assert find_versions(runs) == {second_release: True}


@pytest.mark.slow
def test_a_version_whose_tag_names_other_files_removes_no_file(runs: Runs) -> None:
    runs.store.put(f"raw/{runs.pipeline}/0123456789ab/file", b"1")
    run_id = tracking.find_run(runs.pipeline, runs.make()) or ""

    for uri in (
        f"raw/{runs.pipeline}",
        f"raw/{runs.pipeline}/0123456789ab",
        "",
        "/",
        "releases/",
        "../x",
    ):
        version = {"name": runs.pipeline, "source": "s3://x/y", "run_id": run_id}
        tags = [
            {"key": tracking.URI, "value": uri},
            {"key": tracking.REMOVED, "value": listing.read_or_create_store_id(runs.store)},
        ]

        send_request(
            "POST",
            "mlflow/registered-models/create",
            Answer,
            json={"name": f"{runs.pipeline}-{uuid.uuid4().hex}"},
        )

        if uri == f"raw/{runs.pipeline}":
            send_request(
                "POST", "mlflow/registered-models/create", Answer, json={"name": runs.pipeline}
            )

        send_request("POST", "mlflow/model-versions/create", Answer, json=version | {"tags": tags})

    runs.make(keep_releases=1)
    assert retention.prune_runs(runs.home, None, {}, should_delete=True)["releases"] == []
    assert runs.store.get(f"raw/{runs.pipeline}/0123456789ab/file") == b"1"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["models:/{model}/{version}", "s3://{bucket}/releases/{model}"])
def test_files_that_a_source_refers_to_stay(runs: Runs, source: str) -> None:
    numbers = [release_model(runs, runs.make()) for _ in range(2)]
    version = tracking.find_version(runs.pipeline, numbers[0])
    assert version
    text = source.format(model=runs.pipeline, version=numbers[0], bucket=runs.store.bucket)
    send_request(
        "POST", "mlflow/registered-models/create", Answer, json={"name": f"{runs.pipeline}-ref"}
    )
    send_request(
        "POST",
        "mlflow/model-versions/create",
        Answer,
        json={"name": f"{runs.pipeline}-ref", "source": text},
    )
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_releases=1)))
    assert list(runs.store.list(version.uri))


@pytest.mark.slow
def test_the_mlflow_run_that_a_foreign_version_refers_to_stays(runs: Runs) -> None:
    name = runs.make()
    other = runs.make()
    run_id = tracking.find_run(runs.pipeline, name) or ""
    send_request(
        "POST", "mlflow/registered-models/create", Answer, json={"name": f"{runs.pipeline}-mine"}
    )
    version = {"name": f"{runs.pipeline}-mine", "source": f"runs:/{run_id}/model", "run_id": run_id}
    send_request("POST", "mlflow/model-versions/create", Answer, json=version)
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert runs.remaining_parts(name) == {"mlflow"}
    assert runs.remaining_parts(other) == set()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("text", ["o'brien", 'say "hi"', "50%_off", "a\\", "a'b\"c", "modèle"])
def test_the_name_of_a_registered_model_does_not_stop_retention(runs: Runs, text: str) -> None:
    model = f"{runs.pipeline} {text}"
    registered = tracking.register_version(
        model, "releases/x/0123456789ab/", "s3://x/y", "0", "", {}
    )
    assert (
        tracking.register_version(
            model, "releases/x/0123456789ab/", "s3://x/y", "0", "", {}
        ).version
        == registered.version
    )
    tracking.record_champion(model, registered.version, "d")
    assert [promoted_release.version for promoted_release in tracking.promoted_releases(model)] == [
        registered.version
    ]
    old = runs.make()
    retention.apply_limits_after_run(
        runs.home, runs.workflow(runs.make(keep_runs=1, keep_releases=1))
    )
    assert runs.remaining_parts(old) == set()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("folder", ["mlflow", "releases", "customers"])
def test_a_forged_mark_does_not_make_a_folder_the_folder_of_a_run(runs: Runs, folder: str) -> None:
    store_id = ownership.read_or_create_store_id(runs.store)
    key = f"{folder}/{runs.pipeline}/2024.csv"
    runs.store.put(key, b"1")

    mark = ownership.RunMark(
        store=store_id,
        pipeline=runs.pipeline,
        number=1,
        whole=True,
        tasks=["other"],
        ended=1.0,
        succeeded=True,
    )

    runs.store.put(f"{folder}/{ownership.MARK_FILE}", mark.model_dump_json().encode())
    record_in_mlflow(runs, folder)
    runs.make()
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert runs.store.get(key) == b"1"
    runs.store.delete([key, f"{folder}/{ownership.MARK_FILE}"])


@pytest.mark.slow
def test_a_name_that_only_looks_generated_does_not_own_the_files_that_it_found(runs: Runs) -> None:
    name = f"{runs.pipeline}-x7k2p"
    runs.store.put(f"{name}/prepare/earlier.csv", b"mine")
    dag = {"name": "main", "dag": {"tasks": TASKS}}
    workflow = {
        "metadata": {"name": name, "generateName": f"{runs.pipeline}-"},
        "spec": {"templates": [dag]},
    }
    ownership.begin_run(runs.store, workflow, runs.pipeline)
    mark = ownership.read(runs.store, RunName(name))
    assert mark
    assert not mark.whole
    assert mark.tasks == ["train", name]

    ownership.begin_run(runs.store, workflow, runs.pipeline, is_first=False)
    mark = ownership.read(runs.store, RunName(name))
    assert mark
    assert mark.whole, "in a cluster, other tasks of the run may have written first"


@pytest.mark.slow
def test_a_run_that_a_tag_makes_a_part_of_another_stays(runs: Runs) -> None:
    old = runs.make()
    kept_run = runs.make()
    parent, child = (tracking.find_run(runs.pipeline, name) or "" for name in (old, kept_run))
    tracking.log_to_run(child, run_tags={tracking.PARENT: parent})
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=2)))
    assert runs.remaining_parts(old) == set()
    assert runs.remaining_parts(kept_run) == ALL_PARTS


@pytest.mark.slow
def test_a_record_that_got_the_name_of_a_removed_run_stays(runs: Runs) -> None:
    reported = runs.make()
    unreported = runs.make()
    run_ids = {
        name: tracking.find_run(runs.pipeline, name) or "" for name in (reported, unreported)
    }
    workflow = {"metadata": {"name": reported}}
    ownership.end_run(runs.store, workflow, runs.pipeline, True, run_ids[reported])

    experiment = run_info(run_ids[reported]).experiment_id
    own_records = {}

    for name in (reported, unreported):
        tags = [{"key": tracking.WORKFLOW, "value": name}]
        created = send_request(
            "POST",
            "mlflow/runs/create",
            RunAnswer,
            json={"experiment_id": experiment, "start_time": 1, "tags": tags},
        )

        own_records[name] = created.run.info.run_id

        send_request(
            "POST",
            "mlflow/runs/update",
            Answer,
            json={"run_id": own_records[name], "status": "FINISHED", "end_time": 2},
        )

    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert tracking.find_run(runs.pipeline, reported) == own_records[reported]
    assert tracking.find_run(runs.pipeline, unreported) == own_records[unreported]
    assert tracking.read_tags(run_ids[unreported]), (
        "without a record in the store, none of the two is removed"
    )

    with pytest.raises(TrackingError, match="not found"):
        tracking.read_tags(run_ids[reported])


def belong_to_the_store(runs: Runs, *names: str, **tags: str) -> None:
    """Give the records of runs in MLflow the id of the store, as at the end of a run."""
    for name in names:
        run_id = tracking.find_run(runs.pipeline, name) or ""
        tracking.log_to_run(
            run_id,
            run_tags={listing.STORE_TAG: listing.read_or_create_store_id(runs.store), **tags},
        )


def remove_tag(runs: Runs, name: str, tag: str) -> None:
    """Remove a tag of a run, which every client of MLflow can do."""
    run_id = tracking.find_run(runs.pipeline, name)
    send_request("POST", "mlflow/runs/delete-tag", Answer, json={"run_id": run_id, "key": tag})


@pytest.mark.slow
def test_runs_of_two_stores_with_the_same_name_have_a_record_each(
    runs: Runs, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = runs.make()
    record = tracking.find_run(runs.pipeline, name)
    report_end(runs, name)

    bucket = f"other-{uuid.uuid4().hex[:8]}"
    s3.client.create_bucket(Bucket=bucket)
    monkeypatch.setenv("S3_BUCKET", bucket)
    other = tracking.start_run(runs.pipeline, name)
    report_end(runs, name)
    assert tracking.find_run(runs.pipeline, name) == other != record

    # the run that belongs to the other store is not removed
    monkeypatch.setenv("S3_BUCKET", s3.bucket)
    assert tracking.find_run(runs.pipeline, name) == record
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert runs.remaining_parts(name) == set()
    assert tracking.read_tags(other)[tracking.WORKFLOW] == name


@pytest.mark.slow
def test_a_tag_that_says_that_a_run_is_emptied_removes_nothing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    names = [runs.make() for _ in range(3)]
    belong_to_the_store(runs, *names)
    belong_to_the_store(runs, names[0], **{tracking.ARTIFACTS_EMPTIED: "removed"})
    report_end(runs, names[-1], keep_runs=3)
    assert [runs.remaining_parts(name) for name in names] == [ALL_PARTS] * 3


@pytest.mark.slow
def test_runs_of_a_backfill_are_not_counted_if_their_tags_in_mlflow_are_removed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    old = runs.make()
    weeks = [runs.make(backfill="true") for _ in range(3)]
    last_run = runs.make()
    belong_to_the_store(runs, old, last_run)
    belong_to_the_store(runs, *weeks, **{tracking.BACKFILL: "yes"})
    for week in weeks:
        remove_tag(runs, week, tracking.BACKFILL)
    report_end(runs, last_run, keep_runs=2)
    assert runs.remaining_parts(old) == ALL_PARTS


@pytest.mark.slow
def test_runs_of_a_backfill_that_no_step_has_marked_are_not_counted(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    old = runs.make()
    weeks = [runs.make() for _ in range(3)]
    belong_to_the_store(runs, old)
    # remove the marks, as if `prepare`, which writes the mark of a run, was cached before the run
    runs.store.delete([ownership.make_mark_key(RunName(week)) for week in weeks])
    for week in weeks:
        report_end(runs, week, backfill="true")

    report_end(runs, runs.make(), keep_runs=2)
    assert runs.remaining_parts(old) == ALL_PARTS


def test_the_sha256_of_a_release_is_that_of_the_store(runs: Runs) -> None:
    champion = release_model(runs, runs.make(), sha256="5a" * 32)
    refreshed = release_model(runs, runs.make(keep_releases=1), champion=champion, sha256="5a" * 32)
    tracking.tag_version(runs.pipeline, champion, tracking.SHA256, "0" * 64)
    retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert find_versions(runs) == {champion: True, refreshed: True}


@pytest.mark.slow
def test_a_promotion_that_only_mlflow_knows_removes_no_release(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    names = [runs.make() for _ in range(2)]
    promoted = {"rekindle.promoted": f"{runs.pipeline} 2"}
    belong_to_the_store(runs, *names, **promoted)
    numbers = [release_model(runs, name) for name in names]
    report_end(runs, names[-1], keep_releases=1)
    assert find_versions(runs) == dict.fromkeys(numbers, True)


@pytest.mark.slow
def test_a_run_with_the_name_of_the_releases_does_not_remove_their_claims(runs: Runs) -> None:
    key = f"releases/{runs.pipeline}/0123456789ab"
    claims.claim_tasks(runs.store, [key])
    run_removal = RunRemoval(Run("releases", runs.pipeline, 1.0), frozenset(), keep_mlflow=False)
    context = listing.ListingContext({}, 0, 0, None)
    removal.apply_removal(runs.store, Removal(runs=[run_removal]), removal.NoHost(), context)
    assert key in claims.claimed_tasks(runs.store, 60, claims.RELEASES_CLAIM)


@pytest.mark.slow
def test_objects_of_others_in_the_folder_of_a_release_stay(runs: Runs) -> None:
    version = tracking.find_version(runs.pipeline, release_model(runs, runs.make()))
    assert version
    runs.store.put(f"{version.uri}mine/notes.txt", b"1")
    release_model(runs, runs.make(keep_releases=1))
    retention.prune_runs(runs.home, None, {}, should_delete=True)
    assert [item.key for item in runs.store.list(version.uri)] == [f"{version.uri}mine/notes.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("counter", [b"9" * 5000, b"0", None])
def test_a_lost_number_does_not_make_the_next_run_the_oldest(
    runs: Runs, counter: bytes | None
) -> None:
    names = [runs.make() for _ in range(2)]
    if counter is None:
        runs.store.delete([ownership.NUMBER_KEY])
    else:
        runs.store.put(ownership.NUMBER_KEY, counter)
    last_run = runs.make(keep_runs=1)
    retention.apply_limits_after_run(runs.home, runs.workflow(last_run))
    assert [runs.remaining_parts(name) for name in (*names, last_run)] == [set(), set(), ALL_PARTS]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("path", ["", "/", "/*/out", "/prep*/out/*.csv", "/prepare/out/*", "/prep"])
def test_the_folder_of_a_run_that_is_the_data_of_another_pipeline_stays(
    runs: Runs, path: str
) -> None:
    source = runs.make()
    runs.record_reader(runs.store.uri(f"{source}{path}"))
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert "prepare" in runs.remaining_parts(source)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "pattern", ["/{}-*/prepare/out/*", "", "/{}-0*/*/out", "/{}-", "/{}-0", "/*/prepare/out", "/"]
)
def test_the_runs_that_the_data_of_another_pipeline_covers_stay(runs: Runs, pattern: str) -> None:
    source = runs.make()
    runs.record_reader(runs.store.uri("").rstrip("/") + pattern.format(runs.pipeline))
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert "prepare" in runs.remaining_parts(source)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("address", ["S3://{}/{}/prepare/out", "s3://{}//{}/prepare/out"])
def test_the_data_of_another_pipeline_stays_however_its_address_is_written(
    runs: Runs, address: str
) -> None:
    source = runs.make()
    runs.record_reader(address.format(runs.store.bucket, source))
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert "prepare" in runs.remaining_parts(source)


@pytest.mark.slow
def test_a_workflow_of_others_with_the_name_of_a_run_is_not_deleted(
    runs: Runs, server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    collection = "/apis/argoproj.io/v1alpha1/namespaces/models/workflows"
    names = [runs.make() for _ in range(2)]
    belong_to_the_store(runs, *names)
    for name, labels in ((names[0], {}), (names[1], {"app.kubernetes.io/part-of": "rekindle"})):
        workflow = runs.workflow(name)
        metadata = workflow["metadata"] | {"creationTimestamp": "2026-01-01T00:00:00Z"}
        metadata["labels"] = {"app.kubernetes.io/name": runs.pipeline} | labels
        status = {"phase": "Succeeded", "finishedAt": "2026-01-01T01:00:00Z"}
        server.put(collection, workflow | {"metadata": metadata, "status": status})
    retention.prune_runs(tmp_path, cluster, {"keep_runs": 1}, should_delete=True)
    assert "prepare" not in runs.remaining_parts(names[0]), "the run is of another namespace"
    assert set(server.objects[collection]) == {*names}


def test_the_folder_of_a_run_of_another_machine_with_the_same_name_stays(runs: Runs) -> None:
    name = runs.make()
    manifest = runs.home / "runs" / name / "manifest.yaml"
    for uid in ("machine-a", "machine-b"):
        workflow = runs.workflow(name)
        workflow["metadata"]["uid"] = uid
        ownership.begin_run(runs.store, workflow, runs.pipeline)
        if uid == "machine-a":
            manifest.write_text(json.dumps(workflow))
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert runs.remaining_parts(name) >= {"mlflow", "prepare", "train"}
    assert not manifest.exists()


def test_a_model_whose_name_no_label_can_have_has_no_deployments(cluster: Cluster) -> None:
    for name in ("my model", "demo,team notin (a)", "ä", "x" * 64, ""):
        assert ClusterObjects(cluster).deployments(name) == []


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("uri", ["customers/2024", "../x", "releases/x", ""])
def test_a_tag_with_another_key_than_that_of_a_release_is_not_claimed(runs: Runs, uri: str) -> None:
    number = release_model(runs, runs.make())
    tracking.record_champion(runs.pipeline, number, "d-1")
    tracking.tag_version(runs.pipeline, number, tracking.URI, uri)
    earlier_claims = {item.key for item in runs.store.list(claims.CLAIMS_FOLDER)}
    with pytest.raises(RekindleError, match=r"is not (a release|the key of an object)"):
        champion.run(champion.Inputs(name=runs.pipeline))
    assert {item.key for item in runs.store.list(claims.CLAIMS_FOLDER)} == earlier_claims


@pytest.mark.parametrize("record_name", ["{}-other", "no name of a run"])
def test_the_data_of_a_run_that_is_not_of_this_store_stays(runs: Runs, record_name: str) -> None:
    source = runs.make()
    run_id = tracking.start_run(runs.pipeline, record_name.format(runs.pipeline))
    tracking.log_to_run(
        run_id,
        run_params={"data.source": runs.store.uri(f"{source}/prepare/out")},
        run_tags={tracking.STORE_TAG: "another-store"},
    )
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert "prepare" in runs.remaining_parts(source)


def test_the_data_of_a_run_that_mlflow_does_not_know_yet_stays(runs: Runs) -> None:
    source = runs.make()
    files = RunFiles(runs.home, f"{runs.pipeline}-reader-1")
    config = {"data": {"source": runs.store.uri(f"{source}/prepare/out")}}
    files.create(
        {
            "kind": "Workflow",
            "metadata": {
                "name": files.name,
                "labels": {"app.kubernetes.io/name": f"{runs.pipeline}-reader"},
            },
            "spec": {
                "entrypoint": "main",
                "templates": [{"name": "main", "dag": {"tasks": TASKS}}],
                "arguments": {"parameters": [{"name": "config", "value": json.dumps(config)}]},
            },
        }
    )
    files.snapshot({"phase": "Running", "nodes": {}, "startedAt": "2026-01-01T00:00:00Z"})
    files.close()
    retention.apply_limits_after_run(runs.home, runs.workflow(runs.make(keep_runs=1)))
    assert "prepare" in runs.remaining_parts(source)
