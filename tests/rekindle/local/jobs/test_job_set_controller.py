"""Tests of JobSets and TrainJobs as real processes: policies, restarts, names, suspension, and
equal results with all values of `cluster.backend`."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.controllers.controller import Controller
from rekindle import project
from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.jobs.members import member_commands
from rekindle.blocks.settings import ClusterConfig
from rekindle.demo.watched_training import DemoCluster
from rekindle.errors import ConfigError
from rekindle.kubernetes_names import WORKLOAD_MODULES
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.job_set_controller import JobSets
from rekindle.local.jobs.training_job import TrainingJobs, find_condition
from rekindle.storage import Store
from rekindle.training.spec import TrainConfig
from tests import polling
from tests.rekindle.training.crew import ROOT, SECRET, make_flags, upload_dataset
from tests.waiting import until

SLEEP = "import time; time.sleep(60)"
Controllers = dict[str, Controller]


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[Controllers]:
    cluster = LocalCluster(tmp_path)
    kinds = cluster.kinds.controllers(cluster, tmp_path / "run")
    yield kinds
    for controller in set(kinds.values()):
        controller.stop(0)


def make_replicated_job(
    name: str, program: str, restart: str = "OnFailure", replicas: int = 1, **spec: Any
) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "any",
        "command": ["python", "-c", program],
        "env": [{"name": "LEAD", "value": "js-lead-0-0.js"}],
    }
    pod = {"spec": {"restartPolicy": restart, "containers": [container]}}
    return {"name": name, "replicas": replicas, "template": {"spec": {"template": pod, **spec}}}


def job_set(*jobs: dict[str, Any], **spec: Any) -> dict[str, Any]:
    spec = {"successPolicy": {"operator": "All", "targetReplicatedJobs": ["lead"]}, **spec}
    return {
        "kind": "JobSet",
        "metadata": {"name": "js"},
        "spec": {**spec, "replicatedJobs": list(jobs)},
    }


def wait(
    controllers: Controllers, holds: Callable[[dict[str, Any]], Any], kind: str = "JobSet"
) -> dict[str, Any]:
    return polling.wait(controllers[kind], holds, "js", other_controllers=set(controllers.values()))


def find_controller(controllers: Controllers) -> JobSets:
    controller = controllers["JobSet"]
    assert isinstance(controller, JobSets)
    return controller


def pid_of(controllers: Controllers, pod: str) -> int:
    if "js" in find_controller(controllers).jobs:
        pods = find_controller(controllers).jobs["js"].pods
    else:
        pods = {}
    return pods[pod].process.pid if pod in pods and pods[pod].process else 0  # pyright: ignore[reportOptionalMemberAccess]


def read_log(controllers: Controllers, pod: str) -> str:
    log = find_controller(controllers).run / "logs" / f"{pod}.log"
    if log.exists():
        return log.read_text()
    return ""


def test_pods_get_their_index_and_the_coordinators_address_and_end_with_it(
    controllers: Controllers,
) -> None:
    lead = (
        "import os, socket; s = socket.create_server((os.environ['LEAD'], 23456)); [s.accept() for"
        " _ in range(2)]"
    )
    worker = (
        "import os, socket, time; print(os.environ['JOB_COMPLETION_INDEX'], os.environ['LEAD'],"
        " flush=True)\nwhile True:\n    try: s = socket.create_connection((os.environ['LEAD'],"
        " 23456)); break\n    except OSError: time.sleep(0.05)\ntime.sleep(60)"
    )

    controllers["JobSet"].apply(
        job_set(
            make_replicated_job("lead", lead),
            make_replicated_job("worker", worker, completions=2, parallelism=2),
        )
    )
    status = wait(controllers, lambda status: status.get("terminalState") == "Completed")
    address = find_controller(controllers).cluster.address("js-lead-0-0")
    assert [read_log(controllers, f"js-worker-0-{index}") for index in range(2)] == [
        f"{i} {address}\n" for i in range(2)
    ]
    assert [condition["type"] for condition in status["conditions"]] == ["Completed"]
    assert status["restarts"] == 0
    # the workers of the JobSet have ended
    wait(controllers, lambda _: "js" not in find_controller(controllers).jobs)


@pytest.mark.parametrize("quick", [False, True])
def test_a_lost_worker_restarts_and_no_other_pod_does(
    controllers: Controllers, quick: bool
) -> None:
    rules = [
        {
            "name": "one",
            "action": "RestartJobAndIgnoreMaxRestarts",
            "targetReplicatedJobs": ["worker"],
        }
    ]
    if quick:
        policy = {"failurePolicy": {"maxRestarts": 0, "rules": rules}}
    else:
        policy = {}

    worker = make_replicated_job(
        "worker", SLEEP, "Never", replicas=2, backoffLimit=0 if quick else 100
    )
    controllers["JobSet"].apply(job_set(make_replicated_job("lead", SLEEP), worker, **policy))
    names = ["js-lead-0-0", "js-worker-0-0", "js-worker-1-0"]
    wait(controllers, lambda _: all(pid_of(controllers, name) for name in names))
    lead_pid, first_pid, second_pid = (pid_of(controllers, name) for name in names)
    os.kill(first_pid, signal.SIGKILL)
    wait(controllers, lambda _: pid_of(controllers, "js-worker-0-0") not in (0, first_pid))
    assert pid_of(controllers, "js-lead-0-0") == lead_pid
    assert pid_of(controllers, "js-worker-1-0") == second_pid


@pytest.mark.parametrize("code, ends", [(78, "Failed"), (143, "")])
def test_the_coordinators_exit_code_decides_about_a_restart(
    controllers: Controllers, code: int, ends: str
) -> None:
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [137, 143]}}]
    lead = make_replicated_job(
        "lead",
        f"raise SystemExit({code})",
        "Never",
        podFailurePolicy={"rules": rules},
        backoffLimit=9,
    )

    controllers["JobSet"].apply(job_set(lead, make_replicated_job("worker", SLEEP)))

    if ends:
        status = wait(controllers, lambda status: status.get("terminalState") == ends)
        assert f"js-lead-0-0 ended with code {code}" in status["conditions"][0]["message"]
    else:
        wait(controllers, lambda _: "is restarted" in read_log(controllers, "js-lead-0-0"))


def test_a_job_set_fails_after_max_restarts(controllers: Controllers) -> None:
    failing_job = make_replicated_job("worker", "raise SystemExit(1)", "Never", backoffLimit=0)
    controllers["JobSet"].apply(
        job_set(make_replicated_job("lead", SLEEP), failing_job, failurePolicy={"maxRestarts": 2})
    )
    status = wait(controllers, lambda status: status.get("terminalState") == "Failed")
    assert status["restarts"] == 2
    assert status["conditions"][0]["reason"] == "ReachedMaxRestarts"


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_a_suspended_job_runs_no_pods_and_continues_when_resumed(
    controllers: Controllers, kind: str
) -> None:
    resumed_set = job_set(make_replicated_job("lead", SLEEP), make_replicated_job("worker", SLEEP))
    if kind == "TrainJob":
        spec = {"mlPolicy": {"numNodes": 1}, "template": {"spec": resumed_set["spec"]}}
        controllers["TrainingRuntime"].apply(
            {"kind": "TrainingRuntime", "metadata": {"name": "rt"}, "spec": spec}
        )
        resumed_set = {
            "kind": kind,
            "metadata": {"name": "js"},
            "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "rt"}},
        }

    controllers[kind].apply(resumed_set)
    wait(controllers, lambda _: pid_of(controllers, "js-worker-0-0"))
    first_pid = pid_of(controllers, "js-worker-0-0")
    suspended = {**resumed_set, "spec": resumed_set["spec"] | {"suspend": True}}
    controllers[kind].apply(suspended)

    wait(
        controllers,
        lambda status: (find_condition(status, "Suspended") or {}).get("status") == "True",
        kind,
    )

    wait(controllers, lambda _: not Path(f"/proc/{first_pid}").exists())
    controllers[kind].apply({**resumed_set, "spec": resumed_set["spec"] | {"suspend": False}})
    wait(controllers, lambda _: pid_of(controllers, "js-worker-0-0") not in (0, first_pid))
    # the status of a TrainJob follows the status of its JobSet
    resumed = [("Suspended", "False")]

    wait(
        controllers,
        lambda status: (
            [(condition["type"], condition["status"]) for condition in status["conditions"]]
            == resumed
        ),
        kind,
    )


@pytest.mark.parametrize(
    "spoil, says",
    [
        (
            lambda js: js["metadata"].update(name="j" * 50),
            "has 6\\d characters: shorten metadata.name, so that",
        ),
        (
            lambda js: js["spec"].update(startupPolicy={"startupPolicyOrder": "InOrder"}),
            "startupPolicy is not supp",
        ),
        (
            lambda js: js["spec"]["successPolicy"].update(targetReplicatedJobs=["main"]),
            "names main: it must be one of",
        ),
        (
            lambda js: js["spec"]["replicatedJobs"].append(make_replicated_job("lead", SLEEP)),
            "jobs with different names",
        ),
        (
            lambda js: js["spec"]["replicatedJobs"].append(
                make_replicated_job("x", SLEEP, "Always")
            ),
            "must be OnFailure or Never",
        ),
        (
            lambda js: js["spec"]["replicatedJobs"].append(
                make_replicated_job("x", "", podFailurePolicy={"rules": []} | {"a": 1})
            ),
            "needs",
        ),
    ],
)
def test_job_sets_that_the_webhook_rejects_are_rejected(
    controllers: Controllers, spoil: Callable[[Any], None], says: str
) -> None:
    wrong = job_set(make_replicated_job("lead", SLEEP))
    spoil(wrong)
    with pytest.raises(ConfigError, match=says):
        controllers["JobSet"].apply(wrong)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_with_a_killed_worker_has_the_same_weights_in_every_backend(
    tmp_path: Path, s3_environment: dict[str, str], s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(project.PATH_VARIABLE, ROOT)
    upload_dataset(s3_environment, tmp_path)
    weights = {backend: train_and_kill(backend, tmp_path / backend, s3) for backend in BACKENDS}
    assert len(set(weights.values())) == 1, weights


def train_and_kill(name: str, folder: Path, s3: Store) -> str:
    """Run a small training, kill one of two workers after its first steps, and return the sha256 of
    the weights."""
    backend = BACKENDS[name]
    config = ClusterConfig.model_validate({"backend": name})
    train = TrainConfig.model_validate({"workers": 2, "virtual_workers": 7})
    argv = make_flags(name, workers=2, max_workers=2, steps=400, hot_seconds=0.001)
    commands = member_commands(WORKLOAD_MODULES, argv)
    cluster = DemoCluster(folder)
    kinds = cluster.kinds.controllers(cluster, folder / "run")
    kinds["Secret"].apply({"metadata": {"name": "js"}, "stringData": {"secret": SECRET}})

    if backend.runtime:
        kinds["TrainingRuntime"].apply(backend.runtime("js", train, config, commands))

    kinds[backend.kind].apply(backend.job("js", train, config, commands))
    jobs = kinds["JobSet" if backend.kind == "TrainJob" else backend.kind]
    assert isinstance(jobs, TrainingJobs)
    killed_pids: list[int] = []

    def is_over() -> bool:
        for controller in set(kinds.values()):
            controller.poll()
        pods = jobs.jobs["js"].pods if "js" in jobs.jobs else {}
        victims = [
            pod
            for name, pod in pods.items()
            if name.endswith(("worker-0", "node-0-0", "worker-0-0"))
        ]
        if (
            not killed_pids
            and victims
            and victims[0].process
            and re.search(r"step[= ]\d+", read_log())
        ):
            killed_pids.append(victims[0].process.pid)
            os.kill(killed_pids[0], signal.SIGKILL)
        return "js" not in jobs.jobs

    def read_log() -> str:
        return "".join(log.read_text() for log in (folder / "run/logs").glob("*.log"))

    try:
        until("the end of the job", is_over, 120, evidence=read_log)
    finally:
        for controller in set(kinds.values()):
            controller.stop(0)

    assert killed_pids
    return json.loads(s3.get(f"{name}/model/model.json"))["sha256"]
