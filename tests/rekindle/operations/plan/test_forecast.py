"""Times and resources of a plan follow from earlier runs, their ledgers and the manifest."""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from argolocal.manifest import read
from argolocal.state.journal import RunFiles
from rekindle import project, tracking
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import StorageError
from rekindle.local.services.services import Services
from rekindle.local.services.stored_files import StoredFiles
from rekindle.operations.plan import releases
from rekindle.operations.plan.forecast import Forecast, ForecastSources, TaskForecast, forecast_run
from rekindle.operations.plan.tasks import RUNS_STATUS, TaskTree
from rekindle.storage import Store
from rekindle.view.plan import build_forecast_object, format_forecast
from tests.commands import ROOT
from tests.rekindle.cluster.server import ApiServer

START = datetime(2026, 1, 1, tzinfo=UTC)
PLAIN_WORKFLOW = """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: plain-}
spec:
  entrypoint: main
  arguments: {parameters: [{name: mode, value: fast}]}
  templates:
  - name: main
    steps:
    - - {name: fetch, template: work, arguments: {parameters: [{name: x, value: a}]}}
    - - {name: each, template: work, arguments: {parameters: [{name: x, value: "{{item}}"}]}, withItems: [1, 2, 3]}
      - {name: slow, template: work, arguments: {parameters: [{name: x, value: b}]},
         when: "{{workflow.parameters.mode}} == slow"}
      - name: late
        template: work
        arguments: {parameters: [{name: x, value: c}]}
        when: "{{steps.fetch.outputs.result}} == yes"
    - - {name: server, template: server}
  - name: work
    inputs: {parameters: [{name: x}]}
    container:
      image: python:3.11
      command: [python, -c, "print('{{inputs.parameters.x}}')"]
      resources: {requests: {cpu: 500m, memory: 1Gi}, limits: {nvidia.com/gpu: 2}}
  - name: server
    resource:
      action: create
      manifest: |
        apiVersion: jobset.x-k8s.io/v1alpha2
        kind: JobSet
        metadata: {generateName: set-, labels: {kueue.x-k8s.io/queue-name: research}}
        spec:
          replicatedJobs:
          - name: workers
            replicas: 2
            template: {spec: {parallelism: 3, template: {spec: {containers: [
              {name: main, resources: {requests: {cpu: 2, memory: 4Gi}}}]}}}}
"""
FLIP = """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: coin-}
spec:
  entrypoint: coin
  templates:
  - name: coin
    steps:
    - - {name: flip, template: flip}
    - - {name: tails, template: coin, when: "{{steps.flip.outputs.result}} == tails"}
  - name: flip
    container: {image: python:3.11, command: [python, -c, "print('tails')"]}
"""


def record_run(
    home: Path,
    manifest: Any,
    name: str,
    nodes: Mapping[str, tuple[float, float]],
    phase: str = "Succeeded",
    parameters: Mapping[str, str] | None = None,
) -> None:
    """Write the journal of a run whose successful nodes (by path) have a start and an end, in
    seconds."""
    workflow = read.build_workflow(manifest, parameters or {})
    workflow["metadata"]["name"] = name
    files = RunFiles(home, name)
    files.create(workflow)

    def time(seconds: float) -> str:
        return (START + timedelta(seconds=seconds)).isoformat()

    def node(path: str, start: float, end: float) -> dict[str, Any]:
        if path.startswith("["):
            full_name = f"{name}{path}"
        else:
            full_name = f"{name}.{path}"

        kind = {"each": "TaskGroup", "next": "DAG"}.get(path.rpartition(".")[2], "Pod")

        return {
            "id": full_name,
            "name": full_name,
            "displayName": path,
            "type": kind,
            "phase": "Succeeded",
            "startedAt": time(start),
            "finishedAt": time(end),
        }

    all_nodes = {n["id"]: n for n in (node(path, *times) for path, times in nodes.items())}
    end = max(times[1] for times in nodes.values())
    files.snapshot(
        {"phase": phase, "startedAt": time(0), "finishedAt": time(end), "nodes": all_nodes}
    )
    files.close()


def record_training(store: Store, run: str, seconds: float, steps: int, samples: int) -> None:
    """Write the ledger of a training that makes `steps` steps in `seconds` seconds, at a constant
    speed."""
    worker = f"{run}-train-worker-0"

    events = [
        {
            "t": 1,
            "event": "run",
            "device": "cpu",
            "workers": 1,
            "virtual_workers": 4,
            "steps": steps,
            "samples": samples,
        },
        {"t": 1, "event": "join", "worker": "w", "name": worker, "step": 0},
        {"t": 2, "event": "generation", "generation": 1, "members": ["w"], "step": 0},
        {"t": 2, "event": "step", "step": 0},
        {"t": 2 + seconds, "event": "step", "step": steps},
        {"t": 2 + seconds, "event": "complete", "sha256": "ab", "step": steps},
    ]

    lines = "".join(f"{json.dumps(event)}\n" for event in events)
    store.put(f"{run}/train/checkpoints/ledger/0000000000001-abcdef-00000.jsonl", lines.encode())


@cache
def render_digits(*sets: str) -> dict[str, Any]:
    settings = ["train.workers=1", "train.validation=0", *sets]
    return render_manifest(
        load_config(ROOT / "configs/digits.yaml", settings, environment={}).config
    )


def read_forecasts(plan: Forecast) -> dict[str, TaskForecast]:
    return {row.task: row for row in plan.rows}


def make_plain_config(change: str = "") -> dict[str, Any]:
    (manifest,) = read.parse_objects(
        PLAIN_WORKFLOW.replace("value: fast", f"value: {change or 'fast'}")
    )
    return manifest


def test_a_training_takes_its_fixed_seconds_and_the_seconds_of_its_steps(
    tmp_path: Path, s3: Store
) -> None:
    # there are 960 samples in steps of 64: 12 epochs are 180 steps, which take 90 of 100 seconds
    for number in range(3):
        name = f"digits-{number}"
        record_run(
            tmp_path,
            render_digits(),
            name,
            {"prepare": (0, 10 + number), "train": (10 + number, 110 + number)},
        )
        record_training(s3, name, seconds=90.0, steps=180, samples=960)

    # the environment names the object store
    sources = ForecastSources(tmp_path, None)

    def plan(*sets: str) -> dict[str, TaskForecast]:
        return read_forecasts(forecast_run(sources, render_digits(*sets), {}))

    unchanged_time = plan()["train"].time
    row = plan()["train"]
    # like the cost of a run, the cost of a training begins with its ledger, which has 91 of 100
    # seconds
    assert row.usage.cpu_seconds == pytest.approx(row.requests["cpu"] * 91)
    assert unchanged_time.seconds == pytest.approx(100)
    assert unchanged_time.runs == 3
    assert unchanged_time.note == ""
    assert plan("train.epochs=24")["train"].time.seconds == pytest.approx(10 + 180)
    assert plan("train.steps=90")["train"].time.seconds == pytest.approx(10 + 45)
    # the samples of an epoch are the same, in half as many steps that take twice as long
    assert plan("train.batch_size=32")["train"].time.seconds == pytest.approx(100)
    times = plan("train.seed=5")["prepare"].time
    assert times.seconds == 11
    assert times.low == 10
    assert times.high == 12
    total = forecast_run(sources, render_digits("train.epochs=24"), {}).unconditional_total
    assert total.critical_path[:2] == ["prepare", "train"]
    assert total.seconds == pytest.approx(11 + 190)
    assert forecast_run(sources, render_digits(), {}).unknown_tasks[0] != "prepare"


@pytest.mark.slow
def test_a_scheduled_run_of_a_moving_window_always_prepares_its_data(
    tmp_path: Path, s3: Store
) -> None:
    manifest = render_manifest(
        load_config(ROOT / "configs/demo.yaml", ["data.window=60d"], environment={}).config
    )
    by_hand, scheduled = (
        read_forecasts(forecast_run(ForecastSources(tmp_path, None), manifest, parameters))[
            "prepare"
        ].reason.text
        for parameters in ({}, {"scheduled-time": "2024-03-25T03:00:00Z"})
    )
    assert "compares its data" in scheduled
    assert "compares its data" not in by_hand


@pytest.mark.parametrize(
    "cached_text", ["[]", "{", '{"train": {"at": ["x"]}}', '{"train": "", "prepare": {}}']
)
def test_a_malformed_former_run_is_passed_over_with_a_note(
    tmp_path: Path, s3: Store, cached_text: str
) -> None:
    record_run(tmp_path, render_digits(), "digits-good", {"train": (0, 60)})
    parameters = {"cached": cached_text}
    record_run(tmp_path, render_digits(), "digits-bad", {"train": (0, 600)}, parameters=parameters)
    plan = forecast_run(ForecastSources(tmp_path, None), render_digits(), {})
    assert read_forecasts(plan)["train"].time.runs == 1
    assert plan.former_runs == ["digits-good"]
    (note,) = plan.notes
    assert note.startswith("the run digits-bad is not compared: ")
    assert "`cached`" in note


def test_a_row_of_the_user_s_own_parameter_is_not_a_cached_task(tmp_path: Path) -> None:
    tree = TaskTree(render_digits(), '{"prepare": "x", "train": 1}')
    assert {leaf.status for leaf in tree.leaves() if leaf.name in ("prepare", "train")} == {
        RUNS_STATUS
    }


@pytest.mark.slow
def test_a_former_training_without_a_ledger_is_scaled_as_a_whole(tmp_path: Path, s3: Store) -> None:
    record_run(tmp_path, render_digits(), "digits-none", {"train": (0, 60)})
    plan = forecast_run(ForecastSources(tmp_path, None), render_digits("train.epochs=24"), {})
    assert read_forecasts(plan)["train"].time.seconds == pytest.approx(120)
    assert read_forecasts(plan)["train"].time.note == "scaled without a ledger"


def test_a_plain_manifest_has_times_conditions_loops_and_resources(tmp_path: Path) -> None:
    times = {"[0].fetch": (0, 5), "[1].each": (5, 12), "[1].late": (5, 30), "[2].server": (30, 40)}
    record_run(tmp_path, make_plain_config(), "plain-a", times)
    plan = forecast_run(ForecastSources(tmp_path, None), make_plain_config(), {})
    by_name = read_forecasts(plan)

    assert {name: row.status for name, row in by_name.items()} == {
        "[0].fetch": "runs",
        "[1].each": "runs",
        "[1].slow": "skipped",
        "[1].late": "conditional",
        "[2].server": "runs",
    }

    assert by_name["[1].late"].reason.text == "depends on result of [0].fetch"
    assert by_name["[1].slow"].reason.text == "its condition is false: fast == slow"

    assert by_name["[1].each"].requests == {
        "pods": 3,
        "cpu": 1.5,
        "memory": 3 * 2**30,
        "nvidia.com/gpu": 6,
    }

    assert by_name["[2].server"].requests["cpu"] == 12
    assert by_name["[2].server"].pods[-1].queue == "research"
    assert by_name["[1].each"].usage.gpu_seconds == 6 * 7
    assert plan.unconditional_total.seconds == 5 + 7 + 10
    assert plan.total.seconds == 5 + 25 + 10
    assert plan.peak["nvidia.com/gpu"] == 8, (
        "the loop and the conditional step run at the same time"
    )
    assert (
        read_forecasts(
            forecast_run(ForecastSources(tmp_path, None), make_plain_config("slow"), {})
        )["[1].slow"].time.seconds
        is None
    )
    shown = format_forecast(plan)
    assert "2 min" not in shown
    assert "[1].slow" not in shown
    assert "if all conditional tasks run" in shown
    assert build_forecast_object(plan)["former_runs"] == ["plain-a"]


def test_templates_that_call_themselves_are_followed_once(tmp_path: Path) -> None:
    manifest = render_digits("serve.canary.steps=[50, 100]")
    promote = "decide.ship.promote"

    times = {
        f"{promote}.canary.watch": (0, 60),
        f"{promote}.canary.next": (60, 150),
        f"{promote}.evaluate-again": (0, 1),
    }

    record_run(tmp_path, manifest, "digits-a", times)
    plan = forecast_run(ForecastSources(tmp_path, None), manifest, {})
    by_name = read_forecasts(plan)
    assert [name for name in by_name if name.endswith("next")] == [
        f"{promote}.canary.next",
        f"{promote}.next",
    ]
    assert not any(".next." in name for name in by_name)
    assert by_name[f"{promote}.canary.next"].time.seconds == 90
    next_forecast = by_name[f"{promote}.next"]
    assert next_forecast.status == "conditional"
    assert next_forecast.time.seconds is None
    assert next_forecast.requests == {}
    assert (
        next_forecast.reason.text
        == f"depends on verdict of {promote}.evaluate-again; repeats {promote}"
    )
    (flip,) = read.parse_objects(FLIP)
    _, child = forecast_run(ForecastSources(tmp_path, None), flip, {}).rows
    assert child.task == "[1].tails"
    assert child.reason.text == "depends on result of [0].flip; repeats main"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("backend", ["pytorchjob", "jobset", "trainjob"])
def test_a_job_has_a_coordinator_and_its_workers_with_every_backend(
    tmp_path: Path, backend: str
) -> None:
    plan = forecast_run(
        ForecastSources(tmp_path, None),
        render_digits("train.workers=3", f"cluster.backend={backend}"),
        {},
    )
    counts = [pod.count for pod in read_forecasts(plan)["train"].pods if not pod.is_executor]
    assert sorted(counts) == [1, 3]
    assert sum(row.requests.get("cpu", 0) for row in plan.rows if row.task.startswith("train")) < 4


def test_a_run_of_another_pipeline_is_not_used_for_the_time(tmp_path: Path) -> None:
    record_run(tmp_path, make_plain_config(), "plainly-a", {"[0].fetch": (0, 5)})
    plan = forecast_run(ForecastSources(tmp_path, None), make_plain_config(), {})
    assert plan.former_runs == []
    assert "time       unknown" in format_forecast(plan)


@pytest.mark.parametrize(
    ("phase", "names"), [("Running", ["plain-a"]), ("Failed", ["plain-b", "plain-a"])]
)
def test_a_run_counts_as_a_former_run_after_its_end(
    tmp_path: Path, phase: str, names: list[str]
) -> None:
    record_run(tmp_path, make_plain_config(), "plain-a", {"[0].fetch": (0, 5)})
    record_run(tmp_path, make_plain_config(), "plain-b", {"[0].fetch": (0, 7)}, phase)
    os.utime(tmp_path / "runs/plain-a/manifest.yaml", (0, 0))
    plan = forecast_run(ForecastSources(tmp_path, None), make_plain_config(), {})
    assert plan.former_runs == names
    assert read_forecasts(plan)["[0].fetch"].time.seconds == (5 if phase == "Running" else 6)


def test_a_cluster_s_former_runs_nodes_and_quotas_are_compared(
    server: ApiServer, cluster: Cluster
) -> None:
    node = {
        "metadata": {"name": "small", "labels": {}},
        "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}},
    }
    server.fixed["/api/v1/nodes"] = {"items": [node], "metadata": {}}

    quota = {
        "metadata": {"name": "team"},
        "spec": {},
        "status": {"hard": {"requests.cpu": "10"}, "used": {}},
    }

    server.put("/api/v1/namespaces/models/resourcequotas", quota)
    kueue = "/apis/kueue.x-k8s.io/v1beta2"
    local = {"metadata": {"name": "research"}, "spec": {"clusterQueue": "shared"}}
    server.put(f"{kueue}/namespaces/models/localqueues", local)
    flavor = {"name": "any", "resources": [{"name": "cpu", "nominalQuota": "8"}]}
    groups = {"namespaceSelector": {}, "resourceGroups": [{"flavors": [flavor]}]}
    server.fixed[f"{kueue}/clusterqueues/shared"] = {"metadata": {"name": "shared"}, "spec": groups}

    end = {
        "phase": "Succeeded",
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:01:00Z",
    }

    fetch = end | {"id": "n", "name": "plain-x[0].fetch", "type": "Pod"}
    workflow = read.build_workflow(make_plain_config(), {}) | {
        "status": end | {"nodes": {"n": fetch}}
    }
    workflow["metadata"]["name"] = "plain-x"
    server.put("/apis/argoproj.io/v1alpha1/namespaces/models/workflows", workflow)
    running = workflow | {
        "metadata": {"name": "plain-y"},
        "status": workflow["status"] | {"phase": "Running"},
    }
    server.put("/apis/argoproj.io/v1alpha1/namespaces/models/workflows", running)

    plan = forecast_run(ForecastSources(Path("none"), cluster), make_plain_config(), {})
    assert read_forecasts(plan)["[0].fetch"].time.seconds == 60
    assert plan.former_runs == ["plain-x"]
    assert (
        "[0].fetch: the pod does not fit into any node (2 nvidia.com/gpu of 1 of small)"
        in plan.shortages
    )
    assert any(
        "[2].server exceeds the quota of the ClusterQueue shared, 12 cpu of 8: " in line
        for line in plan.shortages
    )
    assert any(
        "the unused part of the ResourceQuota team: 12 cpu of 10" in line for line in plan.shortages
    )
    assert any("exceeds all nodes together" in line for line in plan.shortages)
    assert not [request for request in server.requests if request[0] != "GET"]


@pytest.mark.parametrize("field", ["cohortName", "cohort"])  # v1beta2, v1beta1
def test_a_queue_without_a_borrowing_limit_may_use_the_quotas_of_its_cohort(
    server: ApiServer, cluster: Cluster, field: str
) -> None:
    kueue = "/apis/kueue.x-k8s.io/v1beta2"
    server.put(
        f"{kueue}/namespaces/models/localqueues",
        {"metadata": {"name": "research"}, "spec": {"clusterQueue": "a"}},
    )

    def queue(name: str, cpus: int, cohort: str = "lab", **limits: int) -> dict[str, Any]:
        flavor = {"name": "any", "resources": [{"name": "cpu", "nominalQuota": cpus, **limits}]}
        return {
            "metadata": {"name": name},
            "spec": {
                field: cohort,
                "namespaceSelector": {},
                "resourceGroups": [{"flavors": [flavor]}],
            },
        }

    def excess(*other_queues: dict[str, Any], **limits: int) -> list[str]:
        """Return what the plan says about the 12 CPUs of a task whose queue has a quota of 4."""
        own_queue = queue("a", 4, "lab", **limits)
        server.fixed[f"{kueue}/clusterqueues/a"] = own_queue
        server.fixed[f"{kueue}/clusterqueues"] = {"items": [own_queue, *other_queues]}
        return [
            line.partition(":")[0].removeprefix(
                "[2].server exceeds the quota of the ClusterQueue a"
            )
            for line in forecast_run(
                ForecastSources(Path("none"), cluster), make_plain_config(), {}
            ).shortages
            if "exceeds the quota of" in line
        ]

    quota_finding = " and all that it may borrow from lab, 12 cpu of"
    assert excess(queue("b", 4), queue("c", 90, "other")) == [f"{quota_finding} 8"]
    assert excess(queue("b", 8)) == []
    assert excess(queue("b", 90), borrowingLimit=6) == [f"{quota_finding} 10"]
    assert excess(queue("b", 90), borrowingLimit=0) == [f"{quota_finding} 4"]
    assert excess(queue("b", 4)) == [f"{quota_finding} 8"]
    server.fixed[f"{kueue}/cohorts"] = {
        "items": [{"metadata": {"name": "child"}, "spec": {"parentName": "lab"}}]
    }
    assert excess(queue("b", 4)) == []
    del server.fixed[f"{kueue}/cohorts"]
    server.refuse("GET", "/clusterqueues?", 403, {"message": "forbidden", "code": 403}, times=9)
    assert excess(queue("b", 4)) == []


def test_archived_runs_count_if_the_argo_server_is_known(
    server: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = {
        "phase": "Succeeded",
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:30Z",
    }

    archived = read.build_workflow(make_plain_config(), {})
    archived["metadata"]["name"] = "plain-old"
    nodes = {"n": end | {"id": "n", "name": "plain-old[0].fetch", "type": "Pod"}}
    server.fixed["/api/v1/workflows/models"] = {"items": [archived]}
    server.fixed["/api/v1/workflows/models/plain-old"] = archived | {
        "status": end | {"nodes": nodes}
    }
    assert (
        forecast_run(ForecastSources(Path("none"), cluster), make_plain_config(), {}).former_runs
        == []
    )
    monkeypatch.setenv("ARGO_SERVER", f"http://127.0.0.1:{server.port}")
    plan = forecast_run(ForecastSources(Path("none"), cluster), make_plain_config(), {})
    assert plan.former_runs == ["plain-old"]
    assert read_forecasts(plan)["[0].fetch"].time.seconds == 30


def test_a_plan_names_the_objects_of_a_cluster_that_it_may_not_read(
    server: ApiServer, cluster: Cluster
) -> None:
    server.refuse("GET", "/nodes", 403, {"message": "nodes is forbidden", "code": 403}, times=9)
    plan = forecast_run(ForecastSources(Path("none"), cluster), make_plain_config(), {})
    assert any(
        line.startswith("not compared with the nodes of the cluster") for line in plan.shortages
    )


def test_the_champion_is_read_from_the_database_of_the_embedded_mlflow(
    services: Services, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = tracking.start_run("list_planned_tasks", "list_planned_tasks-run")
    version = tracking.register_version(
        "list_planned_tasks", "releases/list_planned_tasks/1", "s3://bucket/1", "ab", run_id, {}
    ).version
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert releases.find_local_champion(services.home, "list_planned_tasks").version == ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    tracking.record_champion("list_planned_tasks", version, "list_planned_tasks-server")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert releases.find_local_champion(services.home, "list_planned_tasks") == releases.Champion(
        version, ""
    )
    assert releases.find_local_champion(Path("none"), "list_planned_tasks") == releases.Champion()


def test_files_and_server_of_the_embedded_store_list_the_same_objects(
    services: Services, s3: Store
) -> None:
    s3.put("plan/a/b", b"123")
    s3.put("plan/a/c", b"4")
    files = StoredFiles(services.home / "s3", s3.bucket)
    listed_objects = list(s3.list("plan/"))
    read_items = list(files.list("plan/"))
    assert [(e.key, e.size, e.etag) for e in read_items] == [
        (e.key, e.size, e.etag) for e in listed_objects
    ]
    assert files.get("plan/a/b") == b"123"
    assert files.head("plan/a/x") is None
    with pytest.raises(StorageError, match="plan/a/x does not exist"):
        files.get("plan/a/x")


def test_prices_of_the_project_give_the_cost_of_each_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = "on_demand: {cpu_hour: 3600, gib_hour: 0, gpu_hour: 7200}"
    (tmp_path / "prices.yaml").write_text(
        f"currency: EUR\ndefault: any\nclasses:\n  any: {{{rate}}}\n"
    )
    record_run(
        tmp_path / "home",
        make_plain_config(),
        "plain-a",
        {"[0].fetch": (0, 5), "[1].each": (5, 12)},
    )
    assert (
        read_forecasts(
            forecast_run(ForecastSources(tmp_path / "home", None), make_plain_config(), {})
        )["[0].fetch"].usage.cost
        is None
    )
    monkeypatch.setenv(project.PATH_VARIABLE, str(tmp_path))
    plan = forecast_run(ForecastSources(tmp_path / "home", None), make_plain_config(), {})
    assert read_forecasts(plan)["[0].fetch"].usage.cost == pytest.approx(5 * 0.5 + 5 * 2 * 2)
    assert plan.usage.cost == pytest.approx(5 * 4.5 + 3 * 7 * 4.5)
    assert plan.currency == "EUR"
    assert plan.unconditional_cost == pytest.approx(plan.usage.cost)
    assert "117.00 EUR" in format_forecast(plan)
    assert "COST" in format_forecast(plan)
    assert "22.50" in format_forecast(plan)
    unknown = format_forecast(
        forecast_run(ForecastSources(tmp_path / "empty", None), make_plain_config(), {})
    )
    assert "total      unknown" in unknown
    assert "EUR" not in unknown
    assert unknown.count("unknown") > 4


def test_a_run_of_a_program_has_a_forecast_of_its_pods(tmp_path: Path) -> None:
    values = {
        "name": "slopes",
        "workload": "tests.rekindle.program.slopes",
        "data": {"source": "simulate://7"},
        "program": {"command": ["tests/programs/ddp.py"]},
        "train": {"workers": 3},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(values))
    manifest = render_manifest(load_config(tmp_path / "c.yaml", environment={}).config)

    training = read_forecasts(forecast_run(ForecastSources(tmp_path, None), manifest, {}))["train"]
    assert training.status == RUNS_STATUS
    counts = [pod.count for pod in training.pods if not pod.is_executor]
    assert sorted(counts) == [1, 3], "one coordinator, three workers"
