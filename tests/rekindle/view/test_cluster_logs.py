"""`rekindle logs --cluster` prints every line once, despite broken connections, new pods and
deleted pods."""

import io
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from argolocal.common import causes
from argolocal.manifest.object_labels import NODE_NAME_ANNOTATION, WORKFLOW
from argolocal.view.display import find_cause
from argolocal.view.summary import Step
from rekindle.cli import commands
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import RekindleError
from rekindle.storage import Store
from rekindle.view.cluster_logs import Logs, TrainingProgress, read_archived_lines, read_last_lines
from tests.rekindle.cluster.server import ApiServer, BrokenKubelet, Kubelet, make_status
from tests.rekindle.cluster.workflows import WORKFLOWS_AT, make_workflow
from tests.waiting import until

PODS_AT = "/api/v1/namespaces/models/pods"
REPLICA = {
    "training.kubeflow.org/replica-type": "worker",
    "training.kubeflow.org/job-name": "demo-train",
}


def make_pod(
    name: str, node: str = "", state: str = "running", labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    facts = {"exitCode": 0} if state == "terminated" else {}
    container = {"name": "main", "restartCount": 0, "state": {state: facts}}
    metadata = {
        "name": name,
        "labels": {WORKFLOW: "demo", **(labels or {})},
        "annotations": {NODE_NAME_ANNOTATION: node} if node else {},
    }
    status = {"phase": "Running", "containerStatuses": [container, {**container, "name": "wait"}]}
    return {"metadata": metadata, "spec": {"containers": [{"name": "main"}]}, "status": status}


@pytest.fixture
def out(server: ApiServer, cluster: Cluster) -> Iterator[io.StringIO]:
    """The output of `rekindle logs -f` for the run `demo`; the run and its pods end with the
    test."""
    server.put(WORKFLOWS_AT, make_workflow("demo"))
    out = io.StringIO()
    follower = threading.Thread(target=Logs(cluster, "demo", out).follow)
    follower.start()
    yield out
    for name in list(server.objects.get(PODS_AT, {})):
        server.put(PODS_AT, make_pod(name, state="terminated"))
        server.end_log(name)
    server.put(WORKFLOWS_AT, make_workflow("demo", "Succeeded"))
    follower.join(20)
    assert not follower.is_alive()


def test_logs_contain_steps_replicas_and_new_pods(server: ApiServer, out: io.StringIO):
    server.put(PODS_AT, make_pod("demo-prepare-1", "demo.prepare(0)"))
    server.write_log("demo-prepare-1", "one")
    until("the line", lambda: "prepare(0) | one\n" in out.getvalue())
    server.write_log("demo-train-worker-0", "two")
    server.put(PODS_AT, make_pod("demo-train-worker-0"))
    until("the line", lambda: "train-worker-0 | two\n" in out.getvalue())
    assert out.getvalue().count("\n") == 2


def test_a_broken_connection_neither_loses_nor_repeats_lines(server: ApiServer, out: io.StringIO):
    server.put(PODS_AT, make_pod("demo-a-1", "demo.a"))
    second = "2026-11-21T20:00:00."
    for i in range(30):
        # several lines have the same time, and requests can only name the second
        server.write_log("demo-a-1", f"line {i}", timestamp=f"{second}{i // 3:09d}Z")
        if i % 7 == 0:
            until("the line", lambda i=i: f"line {i}\n" in out.getvalue())
            server.cut()
    until("the line", lambda: "line 29\n" in out.getvalue())
    assert out.getvalue().splitlines() == [f"a | line {i}" for i in range(30)]


NOT_STARTED = make_status(
    400, "BadRequest", 'container "main" is waiting to start: PodInitializing'
)


def test_a_container_that_has_not_started_yet_is_read_later(server: ApiServer, out: io.StringIO):
    # the log before the restart, and two attempts to read the log after it
    server.refuse("GET", "/pods/demo-a-1/log", 400, NOT_STARTED, times=3)
    pod = make_pod("demo-a-1", "demo.a", state="waiting")
    pod["status"]["containerStatuses"][0]["restartCount"] = 1
    server.put(PODS_AT, pod)
    server.write_log("demo-a-1", "at last")
    until("the line", lambda: "a | at last\n" in out.getvalue())


def test_a_log_that_does_not_exist_any_more_is_not_awaited(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, make_workflow("demo", "Succeeded"))
    server.refuse("GET", "/log", 400, make_status(400, "BadRequest", "not found"), times=9)
    server.put(PODS_AT, make_pod("demo-a-1", "demo.a", state="terminated"))
    out = io.StringIO()
    Logs(cluster, "demo", out).follow()
    assert out.getvalue() == ""
    log_requests = [path for _, path, _ in server.requests if "/log" in path]
    assert len(log_requests) == 1


def test_a_recreated_pod_is_read_again(server: ApiServer, out: io.StringIO):
    server.put(PODS_AT, make_pod("demo-train-worker-0"))
    server.write_log("demo-train-worker-0", "first life")
    until("the line", lambda: "first life" in out.getvalue())
    server.remove(PODS_AT, "demo-train-worker-0")
    server.logs.clear()
    server.cut()
    server.write_log("demo-train-worker-0", "second life")
    server.put(PODS_AT, make_pod("demo-train-worker-0"))
    until("the line", lambda: "second life" in out.getvalue())
    assert out.getvalue().splitlines() == [
        "train-worker-0 | first life",
        "train-worker-0 | second life",
    ]


def test_pods_missed_by_the_watch_are_read_at_the_end(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, make_workflow("demo", "Succeeded"))
    server.put(PODS_AT, make_pod("demo-a-1", "demo.a", state="terminated"))
    server.write_log("demo-a-1", "late")
    server.end_log("demo-a-1")
    out = io.StringIO()
    Logs(cluster, "demo", out).follow()
    assert out.getvalue() == "a | late\n"


def test_logs_of_a_step_are_selected_by_a_part_of_its_name(server: ApiServer, cluster: Cluster):
    for name in ("prepare", "train"):
        server.put(PODS_AT, make_pod(f"demo-{name}-1", f"demo.{name}"))
        server.write_log(f"demo-{name}-1", f"of {name}")
    out = io.StringIO()
    assert Logs(cluster, "demo", out, "rai").print(make_workflow("demo")) == 1
    assert out.getvalue() == "train | of train\n"


def test_json_output_has_an_object_per_line(server: ApiServer, cluster: Cluster):
    server.put(PODS_AT, make_pod("demo-train-1", "demo.train"))
    server.write_log("demo-train-1", 'a "line" | of é')
    out = io.StringIO()
    Logs(cluster, "demo", out, as_json=True).print(make_workflow("demo"))
    assert json.loads(out.getvalue()) == {"step": "train", "line": 'a "line" | of é'}


def make_ended_run(*labels: str, phase: str = "Succeeded") -> dict[str, Any]:
    """Return the run `demo` with a completed pod for each label."""
    run = make_workflow("demo", phase)
    nodes = {
        label: {"id": label, "name": f"demo.{label}", "type": "Pod", "phase": "Succeeded"}
        for label in labels
    }
    return run | {"status": {"phase": phase, "nodes": nodes}}


def test_a_step_whose_pod_and_log_are_gone_is_named(server: ApiServer, cluster: Cluster):
    server.put(PODS_AT, make_pod("demo-train-1", "demo.train(0)", state="terminated"))
    server.write_log("demo-train-1", "40 steps")
    server.end_log("demo-train-1")
    server.put(WORKFLOWS_AT, make_ended_run("prepare(0)", "train(0)"))
    result = CliRunner().invoke(commands, ["logs", "demo", "--cluster"], catch_exceptions=False)
    assert result.stdout == "train(0) | 40 steps\n"
    assert (
        result.stderr == "prepare(0): its pod is deleted, and its log is not in the object store.\n"
    )
    selected = Logs(cluster, "demo", io.StringIO(), "train")
    assert selected.print(make_ended_run("prepare(0)", "train(0)")) == 1
    assert selected.missing_lines_reasons == {}


def test_a_pod_that_is_deleted_before_its_log_was_followed_is_named(
    server: ApiServer, cluster: Cluster
):
    server.put(WORKFLOWS_AT, make_ended_run("prepare(0)"))
    logs = Logs(cluster, "demo", io.StringIO())
    logs.follow()
    assert "before its log was read" in logs.missing_lines_reasons["prepare(0)"]
    assert "rekindle logs demo" in logs.missing_lines_reasons["prepare(0)"]


def test_a_run_that_is_deleted_while_it_is_followed_is_reported(
    server: ApiServer, cluster: Cluster
):
    server.put(WORKFLOWS_AT, make_workflow("demo"))
    logs = Logs(cluster, "demo", io.StringIO())
    follower = threading.Thread(target=logs.follow)
    follower.start()
    until("the watch", lambda: hasattr(logs, "workflow"))
    server.remove(WORKFLOWS_AT, "demo")
    follower.join(20)
    assert logs.missing_lines_reasons == {"demo": "the run was deleted while its logs were read."}


class RotatingKubelet(Kubelet):
    """A kubelet that keeps only the newest line of a log, as a node keeps only the end of a long
    log."""

    def write_log(self, pod: str, text: str, timestamp: str = "", container: str = "main") -> None:
        self.logs.pop((pod, container), None)
        super().write_log(pod, text, timestamp, container)


def test_a_long_archived_log_without_its_first_lines_says_so(
    tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("demo/demo-own-1/main.log", b"one\ntwo\nthree\n")
    outputs = {"artifacts": [{"name": "main-logs", "s3": {"key": "demo/demo-own-1/main.log"}}]}

    container = {
        "image": "rekindle:0.1",
        "command": ["python"],
        "args": ["-m", "rekindle", "step", "steps.own"],
    }

    nodes = {"own": {"name": "demo.own", "type": "Pod", "outputs": outputs}}
    run = make_workflow("demo") | {"spec": {"templates": [{"name": "own", "container": container}]}}
    run["status"] = {"phase": "Succeeded", "nodes": nodes}

    with RotatingKubelet(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        (_, cut), end = read_archived_lines(Cluster.connect(), run, "own")

    assert cut.startswith("(2 earlier lines are missing")
    assert end == ("own", "three")


def test_a_missing_permission_to_read_logs_is_an_error(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, make_workflow("demo", "Succeeded"))
    server.put(PODS_AT, make_pod("demo-a-1", "demo.a"))
    server.refuse("GET", "/log", 403, make_status(403, "Forbidden", "no"))
    with pytest.raises(ApiError, match="no"):
        Logs(cluster, "demo", io.StringIO()).follow()


def test_a_closed_output_ends_logs_of_an_active_run(server: ApiServer, cluster: Cluster):
    class Head(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    server.put(WORKFLOWS_AT, make_workflow("demo"))
    server.put(PODS_AT, make_pod("demo-a-1", "demo.a"))
    server.write_log("demo-a-1", "one line too many")
    with pytest.raises(BrokenPipeError):
        Logs(cluster, "demo", Head()).follow()


def test_the_tail_of_a_failed_step_excludes_lines_of_argo(server: ApiServer, cluster: Cluster):
    server.put(PODS_AT, make_pod("demo-train-worker-0"))
    server.put(PODS_AT, make_pod("demo-train-worker-1"))
    server.write_log("demo-train-worker-0", "step 3")
    for line in (
        "error: the data are wrong",
        'level=info msg="sub-process exited" argo=true x',
        'level=info msg="no need to save parameter" argo=true',
        "Error: exit status 65",
    ):
        server.write_log("demo-train-worker-1", line)
    assert read_last_lines(cluster, "demo", ["train"]) == "error: the data are wrong\n"
    assert read_last_lines(cluster, "demo", ["evaluate"]) == ""


def test_training_progress_is_read_from_the_workers(server: ApiServer, cluster: Cluster):
    server.put(PODS_AT, make_pod("demo-train-worker-0", labels=REPLICA))
    server.write_log(
        "demo-train-worker-0", "progress step=120/600 loss=0.0213 samples_per_s=10234 eta_s=12"
    )
    progress = TrainingProgress(cluster, "demo")
    row = Step("train", "train", 0, "Pod", "Running")
    until("the line", lambda: progress.of(row))
    assert progress.of(row) == "step 120/600  loss 0.0213  10 234 samples/s  12 s left"


def test_a_malformed_pod_does_not_end_the_progress_of_the_others(
    server: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.view.cluster_logs.PROGRESS_INTERVAL_S", 0.01)
    server.put(PODS_AT, make_pod("demo-train-worker-0", labels=REPLICA))
    server.write_log("demo-train-worker-0", "progress step=1/2 loss=1 samples_per_s=n/a eta_s=x")
    progress = TrainingProgress(cluster, "demo")
    row = Step("train", "train", 0, "Pod", "Running")
    until("the line", lambda: progress.of(row))
    assert progress.of(row) == "step 1/2  loss 1"

    malformed = {"requested": 0}

    def fail(*_: object) -> str:
        malformed["requested"] += 1
        raise TypeError("a malformed pod")

    with monkeypatch.context() as patch:
        patch.setattr("rekindle.view.cluster_logs._read_last_lines", fail)
        until("two polls", lambda: progress.of(row) and malformed["requested"] > 1)
    server.write_log("demo-train-worker-0", "progress step=2/2 loss=1 samples_per_s=1 eta_s=0")
    until("the next line", lambda: progress.of(row).startswith("step 2/2"))


def test_the_cause_of_a_failed_job_is_read_from_its_pods(server: ApiServer, cluster: Cluster):
    server.put(PODS_AT, make_pod("demo-train-worker-0", labels=REPLICA, state="terminated"))
    server.write_log("demo-train-worker-0", "error: /app/own.py:7: KeyError: 3.")
    server.end_log("demo-train-worker-0")
    attempt = Step(
        "train(0)", "(0)", 1, "Pod", "Failed", message="failure condition 'x' evaluated true"
    )
    progress = TrainingProgress(cluster, "demo").of
    assert find_cause(attempt, progress) == "/app/own.py:7: KeyError: 3."
    server.refuse("GET", "/pods", 403, make_status(403, "Forbidden", "no"))
    assert find_cause(attempt, progress) == causes.UNREPORTED_CAUSE


def test_the_cause_of_a_failed_deployment_is_read_from_its_pods(
    server: ApiServer, cluster: Cluster
):
    server.put(
        PODS_AT,
        make_pod("m-0123-abc", labels={WORKFLOW: "none", "app.kubernetes.io/instance": "m-0123"}),
    )
    server.write_log("m-0123-abc", "error: the model cannot be loaded: /app/own.py:7: KeyError: 3.")
    server.end_log("m-0123-abc")
    node = {"inputs": {"parameters": [{"name": "server", "value": "m-0123"}]}}
    message = "failure condition 'x' evaluated true"
    attempt = Step("deployment(0)", "(0)", 1, "Pod", "Failed", message=message, node=node)
    cause = find_cause(attempt, TrainingProgress(cluster, "demo").of)
    assert cause == "the model cannot be loaded: /app/own.py:7: KeyError: 3."


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "text",
    ["{", "{}", '{"key": 1, "number": 0, "line": ""}', '{"key": ' + "[" * 5000, "{\x1b[2J"],
)
def test_a_malformed_answer_of_the_pod_that_reads_the_archive_is_one_error(
    text: str, tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("demo/demo-own-1/main.log", b"one\n")
    outputs = {"artifacts": [{"name": "main-logs", "s3": {"key": "demo/demo-own-1/main.log"}}]}
    command = {"command": ["python"], "args": ["-m", "rekindle", "step", "steps.own"]}
    template = {"name": "own", "container": {"image": "rekindle:0.1", **command}}
    nodes = {"own": {"name": "demo.own", "type": "Pod", "outputs": outputs}}
    run = make_workflow("demo") | {"spec": {"templates": [template]}, "status": {"nodes": nodes}}

    with BrokenKubelet(tmp_path) as server:
        server.text = text
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        with pytest.raises(RekindleError) as error:
            list(read_archived_lines(Cluster.connect(), run, "own"))
    assert len(error.value.lines) == 1
    assert "\x1b" not in str(error.value)


@pytest.mark.slow
def test_logs_of_deleted_pods_are_read_from_the_archive(
    tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("demo/demo-prepare-1/main.log", b"500 rows\ndone\n")
    nodes = {
        name: {
            "name": f"demo.{name}",
            "type": kind,
            "outputs": {"artifacts": [{"name": "main-logs", "s3": {"key": key}}]},
        }
        for name, kind, key in (
            ("prepare", "Pod", "demo/demo-prepare-1/main.log"),
            ("evaluate", "Pod", "demo/gone/main.log"),
            # the logs of the last attempt of the step
            ("train", "Retry", "demo/train/main.log"),
        )
    }

    command = {"command": ["python"], "args": ["-m", "rekindle", "step", "steps.prepare"]}
    template = {"name": "prepare", "container": {"image": "rekindle:0.1", **command}}
    # the command of this container cannot read logs
    other = {"name": "own", "container": {"image": "busybox:1.36", "command": ["true"]}}
    tasks = [{"name": name, "template": "prepare"} for name in ("prepare", "train", "evaluate")]
    spec = {"templates": [other, template, {"name": "main", "dag": {"tasks": tasks}}]}
    run = {"metadata": {"name": "demo"}, "spec": spec, "status": {"nodes": nodes}}

    with Kubelet(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        cluster = Cluster.connect()
        assert list(read_archived_lines(cluster, run, "prepare")) == [
            ("prepare", "500 rows"),
            ("prepare", "done"),
        ]
        ((label, line),) = read_archived_lines(cluster, run, "evaluate")
        assert label == "evaluate"
        assert line.endswith("demo/gone/main.log does not exist")

        pods = [
            body
            for method, path, body in server.requests
            if (method, path.partition("?")[0]) == ("POST", PODS_AT)
        ]

        assert [body["spec"]["containers"][0]["image"] for body in pods] == [
            "rekindle:0.1",
            "rekindle:0.1",
        ]
        count = len(server.requests)
        assert list(read_archived_lines(cluster, run, "train")) == []
        assert len(server.requests) == count, "no needless pod"
        server.put(WORKFLOWS_AT, run)
        result = CliRunner().invoke(
            commands, ["logs", "demo", "prepare", "--cluster"], catch_exceptions=False
        )
        assert result.stdout.splitlines() == ["prepare | 500 rows", "prepare | done"]
        server.put(PODS_AT, make_pod("demo-train-master-0", state="terminated", labels=REPLICA))
        server.write_log("demo-train-master-0", "trained 40 steps")
        server.end_log("demo-train-master-0")
        result = CliRunner().invoke(commands, ["logs", "demo", "--cluster"], catch_exceptions=False)
        lines = set(result.stdout.splitlines())
        assert {"prepare | 500 rows", "prepare | done", "train-master-0 | trained 40 steps"} < lines
        run["status"]["phase"] = "Succeeded"
        server.put(WORKFLOWS_AT, run)
        result = CliRunner().invoke(
            commands, ["logs", "demo", "prepare", "-f", "--cluster"], catch_exceptions=False
        )
        assert result.stdout.splitlines() == ["prepare | 500 rows", "prepare | done"]


@pytest.mark.parametrize(
    ("key", "is_read"),
    [
        ("demo/demo-own-1/main.log", True),
        ("argo-logs/2026/demo/demo-own-1/main.log", True),
        ("data/salaries.csv", False),
        ("demo/prepare/dataset/part-0.parquet", False),
        ("other/other-own-1/main.log", False),
        ("demo/../other/main.log", False),
    ],
)
def test_only_keys_of_logs_of_the_run_are_read(
    key: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = {"artifacts": [{"name": "main-logs", "s3": {"key": key}}]}
    node = {"name": "demo.own", "type": "Pod", "outputs": outputs}
    run = {"metadata": {"name": "demo"}, "status": {"nodes": {"own": node}}}

    requested = list[str]()

    def read(cluster: object, workflow: object, kind: object, module: str, *keys: str) -> list[Any]:
        requested.extend(keys)
        return []

    monkeypatch.setattr("rekindle.cluster.remote.run_module", read)
    cluster: Any = None
    lines = list(read_archived_lines(cluster, run, "own"))
    assert requested == ([key] if is_read else [])
    assert bool(lines) is not is_read
