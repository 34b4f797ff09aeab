"""JobSets and TrainJobs as real processes: policies, restarts, names, suspension; and one result in every backend."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.controllers.base import Controller
from rekindle import project
from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.job_set import JobSets
from rekindle.local.jobs.training_job import TrainingJobs, condition
from rekindle.storage import Store
from rekindle.training.spec import TrainConfig
from rekindle.view.demo.recording import DemoCluster
from tests import polling
from tests.rekindle.training.crew import ROOT, SECRET, flags, provide
from tests.waiting import until

SLEEP = "import time; time.sleep(60)"
Every = dict[str, Controller]


@pytest.fixture
def every(tmp_path: Path) -> Iterator[Every]:
    kinds = (cluster := LocalCluster(tmp_path)).kinds.controllers(cluster, tmp_path / "run")
    yield kinds
    for controller in set(kinds.values()):
        controller.stop(0)


def job(name: str, program: str, restart: str = "OnFailure", replicas: int = 1, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "any", "command": ["python", "-c", program]}
    container["env"] = [{"name": "LEAD", "value": "js-lead-0-0.js"}]
    pod = {"spec": {"restartPolicy": restart, "containers": [container]}}
    return {"name": name, "replicas": replicas, "template": {"spec": {"template": pod, **spec}}}


def job_set(*jobs: dict[str, Any], **spec: Any) -> dict[str, Any]:
    spec = {"successPolicy": {"operator": "All", "targetReplicatedJobs": ["lead"]}, **spec}
    return {"kind": "JobSet", "metadata": {"name": "js"}, "spec": {**spec, "replicatedJobs": list(jobs)}}


def wait(every: Every, holds: Callable[[dict[str, Any]], Any], kind: str = "JobSet") -> dict[str, Any]:
    return polling.wait(every[kind], holds, "js", others=set(every.values()))


def sets(every: Every) -> JobSets:
    controller = every["JobSet"]
    assert isinstance(controller, JobSets)
    return controller


def pid(every: Every, pod: str) -> int:
    pods = sets(every).jobs["js"].pods if "js" in sets(every).jobs else {}
    return pods[pod].process.pid if pod in pods and pods[pod].process else 0  # pyright: ignore[reportOptionalMemberAccess]


def said(every: Every, pod: str) -> str:
    log = sets(every).run / "logs" / f"{pod}.log"
    return log.read_text() if log.exists() else ""


def test_pods_know_their_index_and_the_coordinators_address_and_end_with_it(every: Every) -> None:
    lead = "import os, socket; s = socket.create_server((os.environ['LEAD'], 23456)); [s.accept() for _ in range(2)]"
    worker = (
        "import os, socket, time; print(os.environ['JOB_COMPLETION_INDEX'], os.environ['LEAD'], flush=True)\n"
        "while True:\n"
        "    try: s = socket.create_connection((os.environ['LEAD'], 23456)); break\n"
        "    except OSError: time.sleep(0.05)\n"
        "time.sleep(60)"
    )
    every["JobSet"].apply(job_set(job("lead", lead), job("worker", worker, completions=2, parallelism=2)))
    status = wait(every, lambda status: status.get("terminalState") == "Completed")
    address = sets(every).cluster.address("js-lead-0-0")
    assert [said(every, f"js-worker-0-{index}") for index in range(2)] == [f"{i} {address}\n" for i in range(2)]
    assert [entry["type"] for entry in status["conditions"]] == ["Completed"] and status["restarts"] == 0
    wait(every, lambda _: "js" not in sets(every).jobs)  # its workers have ended


@pytest.mark.parametrize("quick", [False, True])
def test_a_lost_worker_comes_back_and_nobody_else_restarts(every: Every, quick: bool) -> None:
    rules = [{"name": "one", "action": "RestartJobAndIgnoreMaxRestarts", "targetReplicatedJobs": ["worker"]}]
    kept = {"failurePolicy": {"maxRestarts": 0, "rules": rules}} if quick else {}
    worker = job("worker", SLEEP, "Never", replicas=2, backoffLimit=0 if quick else 100)
    every["JobSet"].apply(job_set(job("lead", SLEEP), worker, **kept))
    names = ["js-lead-0-0", "js-worker-0-0", "js-worker-1-0"]
    wait(every, lambda _: all(pid(every, name) for name in names))
    lead, first, second = (pid(every, name) for name in names)
    os.kill(first, signal.SIGKILL)
    wait(every, lambda _: pid(every, "js-worker-0-0") not in (0, first))
    assert (pid(every, "js-lead-0-0"), pid(every, "js-worker-1-0")) == (lead, second)


@pytest.mark.parametrize("code, ends", [(78, "Failed"), (143, "")])
def test_the_coordinators_exit_code_decides(every: Every, code: int, ends: str) -> None:
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [137, 143]}}]
    lead = job("lead", f"raise SystemExit({code})", "Never", podFailurePolicy={"rules": rules}, backoffLimit=9)
    every["JobSet"].apply(job_set(lead, job("worker", SLEEP)))
    if ends:
        status = wait(every, lambda status: status.get("terminalState") == ends)
        assert f"js-lead-0-0 ended with code {code}" in status["conditions"][0]["message"]
    else:
        wait(every, lambda _: "is restarted" in said(every, "js-lead-0-0"))


def test_restarts_of_the_whole_are_counted_until_there_are_too_many(every: Every) -> None:
    broken = job("worker", "raise SystemExit(1)", "Never", backoffLimit=0)
    every["JobSet"].apply(job_set(job("lead", SLEEP), broken, failurePolicy={"maxRestarts": 2}))
    status = wait(every, lambda status: status.get("terminalState") == "Failed")
    assert status["restarts"] == 2 and status["conditions"][0]["reason"] == "ReachedMaxRestarts"


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_a_suspended_job_has_no_pods_and_goes_on_when_it_is_resumed(every: Every, kind: str) -> None:
    whole = job_set(job("lead", SLEEP), job("worker", SLEEP))
    if kind == "TrainJob":
        spec = {"mlPolicy": {"numNodes": 1}, "template": {"spec": whole["spec"]}}
        every["TrainingRuntime"].apply({"kind": "TrainingRuntime", "metadata": {"name": "rt"}, "spec": spec})
        whole = {
            "kind": kind,
            "metadata": {"name": "js"},
            "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "rt"}},
        }
    every[kind].apply(whole)
    wait(every, lambda _: pid(every, "js-worker-0-0"))
    first = pid(every, "js-worker-0-0")
    suspended = {**whole, "spec": whole["spec"] | {"suspend": True}}
    every[kind].apply(suspended)
    wait(every, lambda status: (condition(status, "Suspended") or {}).get("status") == "True", kind)
    wait(every, lambda _: not Path(f"/proc/{first}").exists())
    every[kind].apply({**whole, "spec": whole["spec"] | {"suspend": False}})
    wait(every, lambda _: pid(every, "js-worker-0-0") not in (0, first))
    resumed = [("Suspended", "False")]  # a TrainJob's status follows its JobSet's
    wait(every, lambda status: [(entry["type"], entry["status"]) for entry in status["conditions"]] == resumed, kind)


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda js: js["metadata"].update(name="j" * 50), "would have 6\\d characters, and 63 are the most"),
        (lambda js: js["spec"].update(startupPolicy={"startupPolicyOrder": "InOrder"}), "startupPolicy is not supp"),
        (lambda js: js["spec"]["successPolicy"].update(targetReplicatedJobs=["main"]), "names main, which is none"),
        (lambda js: js["spec"]["replicatedJobs"].append(job("lead", SLEEP)), "each with a name of its own"),
        (lambda js: js["spec"]["replicatedJobs"].append(job("x", SLEEP, "Always")), "must be OnFailure or Never"),
        (
            lambda js: js["spec"]["replicatedJobs"].append(job("x", "", podFailurePolicy={"rules": []} | {"a": 1})),
            "needs",
        ),
    ],
)
def test_what_the_webhook_refuses_is_refused(every: Every, spoil: Callable[[Any], None], says: str) -> None:
    wrong = job_set(job("lead", SLEEP))
    spoil(wrong)
    with pytest.raises(ConfigError, match=says):
        every["JobSet"].apply(wrong)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_gives_the_same_weights_in_every_backend_though_a_worker_is_killed(
    tmp_path: Path, s3_environment: dict[str, str], s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(project.PATH, ROOT)
    provide(s3_environment, tmp_path)
    weights = {backend: trained(backend, tmp_path / backend, s3) for backend in BACKENDS}
    assert len(set(weights.values())) == 1, weights


def trained(backend: str, folder: Path, s3: Store) -> str:
    """The sha256 of the weights of a small training in which one of two workers is killed after its first steps."""
    made, config = BACKENDS[backend], ClusterConfig.model_validate({"backend": backend})
    train = TrainConfig.model_validate({"workers": 2, "virtual_workers": 7})
    argv = flags(backend, workers=2, max_workers=2, steps=400, hot_seconds=0.001)
    kinds = (cluster := DemoCluster(folder)).kinds.controllers(cluster, folder / "run")
    kinds["Secret"].apply({"metadata": {"name": "js"}, "stringData": {"secret": SECRET}})
    if made.runtime:
        kinds["TrainingRuntime"].apply(made.runtime("js", train, config, argv))
    kinds[made.kind].apply(made.job("js", train, config, argv))
    jobs = kinds["JobSet" if made.kind == "TrainJob" else made.kind]
    assert isinstance(jobs, TrainingJobs)
    killed: list[int] = []

    def over() -> bool:
        for controller in set(kinds.values()):
            controller.poll()
        pods = jobs.jobs["js"].pods if "js" in jobs.jobs else {}
        victims = [pod for name, pod in pods.items() if name.endswith(("worker-0", "node-0-0", "worker-0-0"))]
        if not killed and victims and victims[0].process and re.search(r"step[= ]\d+", said()):
            killed.append(victims[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)
        return "js" not in jobs.jobs

    def said() -> str:
        return "".join(log.read_text() for log in (folder / "run/logs").glob("*.log"))

    try:
        until("the end of the job", over, 120, evidence=said)
    finally:
        for controller in set(kinds.values()):
            controller.stop(0)
    assert killed
    return json.loads(s3.get(f"{backend}/model/model.json"))["sha256"]
