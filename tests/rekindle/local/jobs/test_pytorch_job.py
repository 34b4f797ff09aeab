"""Tests of training jobs as real processes: environment, restarts, conditions, clean-up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from argolocal.controllers.kubectl import Resources
from argolocal.controllers.memory_volumes import clean_up_shared_memory, shared_memory_path
from argolocal.language.selector import evaluate_conditions
from argolocal.state.journal import RunFiles
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.frameworks import make_operator_environment
from rekindle.local.jobs.training_job import (
    TrainingJobs,
    find_condition,
)
from tests.polling import wait
from tests.waiting import until

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[TrainingJobs]:
    cluster = LocalCluster(tmp_path)
    controller = cluster.kinds.controllers(cluster, tmp_path / "run")["PyTorchJob"]
    assert isinstance(controller, TrainingJobs)
    yield controller
    controller.stop(0)


def make_replica(program: str, count: int = 1, policy: str = "OnFailure", **spec: Any) -> dict:
    container = {"name": "pytorch", "image": "any", "command": ["python", "-c", program]}
    return {
        "replicas": count,
        "restartPolicy": policy,
        "template": {"spec": {"containers": [container], **spec}},
    }


def make_job(
    name: str = "job", *, master: dict | None = None, worker: dict | None = None, **spec: Any
) -> dict:
    replicas = {"Master": master, "Worker": worker}
    spec["pytorchReplicaSpecs"] = {key: value for key, value in replicas.items() if value}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": spec,
    }


def condition_types(status: dict) -> list[str]:
    return [condition["type"] for condition in status.get("conditions") or []]


def has_condition(kind: str) -> Callable[[dict], Any]:
    return lambda status: find_condition(status, kind)


def read_log(jobs: TrainingJobs, pod: str) -> str:
    return (jobs.run / "logs" / f"{pod}.log").read_text()


def pid_of(jobs: TrainingJobs, pod: str, name: str = "job") -> int:
    process = jobs.jobs[name].pods[pod].process
    assert process
    return process.pid


def has_exited(pid: int) -> bool:
    return (
        not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    )


def test_replicas_connect_at_the_address_of_the_master(jobs: TrainingJobs) -> None:
    master = (
        "import os, socket; s = socket.create_server((os.environ['MASTER_ADDR'],"
        " int(os.environ['MASTER_PORT'])));print(sorted(s.accept()[0].recv(9) for _ in range(2)),"
        " flush=True)"
    )

    worker = (
        "import os, socket, time\nfor _ in range(100):\n    try: s ="
        " socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])));"
        " break\n    except OSError: time.sleep(0.05)\ns.send((os.environ['RANK'] + '/' +"
        " os.environ['WORLD_SIZE']).encode()); time.sleep(60)"
    )

    policy = {"cleanPodPolicy": "Running"}
    jobs.apply(
        make_job(
            master=make_replica(master, policy="ExitCode"),
            worker=make_replica(worker, 2),
            runPolicy=policy,
        )
    )
    wait(
        jobs, lambda status: status.get("replicaStatuses", {}).get("Worker", {}).get("active") == 2
    )
    workers = [pid_of(jobs, f"job-worker-{index}") for index in range(2)]
    status = wait(jobs, has_condition("Succeeded"))
    assert read_log(jobs, "job-master-0").strip() == "[b'1/3', b'2/3']"
    assert condition_types(status) == ["Created", "Running", "Succeeded"]
    assert status["conditions"][1]["status"] == "False"
    assert status["replicaStatuses"]["Master"]["succeeded"] == 1
    assert status["completionTime"] >= status["startTime"]
    assert evaluate_conditions(
        {"status": status}, "status.replicaStatuses.Master.succeeded > 0", ""
    )[0]
    wait(jobs, lambda _: all(map(has_exited, workers)), seconds=5)


def test_the_environment_matches_the_operator() -> None:
    conf = [{"key": "is_host", "value": "0"}, {"key": "x", "value": "1"}]
    elastic = {
        "minReplicas": 1,
        "maxReplicas": 4,
        "rdzvBackend": "rekindle",
        "rdzvId": "a",
        "maxRestarts": 100,
        "rdzvHost": "job-master-0",
        "rdzvConf": conf,
    }

    obj = make_job(
        master=make_replica(""), worker=make_replica("", 3), elasticPolicy=elastic, nprocPerNode="2"
    )
    port = {"name": "pytorchjob-port", "containerPort": 4000}
    obj["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["ports"] = [
        port
    ]

    assert make_operator_environment(obj, "Worker", 1, lambda pod: f"<{pod}>") == {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": "4000",
        "PET_MASTER_PORT": "4000",
        "MASTER_ADDR": "<job-master-0>",
        "PET_MASTER_ADDR": "<job-master-0>",
        "WORLD_SIZE": "8",
        "RANK": "2",
        "PET_NODE_RANK": "2",
        "PET_RDZV_ENDPOINT": "<job-master-0>:23456",
        "PET_RDZV_BACKEND": "rekindle",
        "PET_NNODES": "1:4",
        "PET_NPROC_PER_NODE": "2",
        "PET_MAX_RESTARTS": "100",
        "PET_RDZV_ID": "a",
        "PET_RDZV_CONF": "is_host=0,x=1",
    }

    obj["spec"]["nprocPerNode"] = "\u00b2"
    assert make_operator_environment(obj, "Worker", 1, str)["WORLD_SIZE"] == "4"

    plain = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": "auto", "PET_NNODES": "2"}
    assert (
        make_operator_environment(make_job(worker=make_replica("", 2)), "Worker", 0, str) == plain
    )


def test_a_killed_worker_restarts_in_place(jobs: TrainingJobs) -> None:
    jobs.apply(
        make_job(
            master=make_replica(SLEEP), worker=make_replica("print('up', flush=True); " + SLEEP, 2)
        )
    )
    wait(jobs, lambda _: all("up" in read_log(jobs, f"job-worker-{index}") for index in range(2)))
    victim = pid_of(jobs, "job-worker-0")
    other = pid_of(jobs, "job-worker-1")
    os.kill(victim, signal.SIGKILL)
    status = wait(jobs, lambda _: read_log(jobs, "job-worker-0").count("up") == 2, seconds=5)
    assert "ended with code 137 and is restarted\n" in read_log(jobs, "job-worker-0")
    assert pid_of(jobs, "job-worker-0") != victim
    assert pid_of(jobs, "job-worker-1") == other
    assert condition_types(status) == ["Created", "Running"]


def test_exit_codes_below_128_fail_the_job_with_the_reason(jobs: TrainingJobs) -> None:
    failing = "import sys; print('train.workers is 0', file=sys.stderr); sys.exit(78)"
    policy = {"cleanPodPolicy": "Running"}
    jobs.apply(
        make_job(
            master=make_replica(failing, policy="ExitCode"),
            worker=make_replica(SLEEP),
            runPolicy=policy,
        )
    )
    status = wait(jobs, has_condition("Failed"))
    assert "job-master-0 ended with code 78" in status["conditions"][-1]["message"]
    assert status["conditions"][-1]["message"].endswith("train.workers is 0")
    failure = ",".join(f"status.conditions.{index}.type == Failed" for index in range(1, 5))

    assert (
        evaluate_conditions(
            {"status": status}, "status.replicaStatuses.Master.succeeded > 0", failure
        )[0]
        is False
    )

    assert "completionTime" not in status, "the operator omits it, too"
    wait(jobs, lambda _: not jobs.jobs, seconds=5)


def test_exit_codes_from_128_recreate_the_pod(jobs: TrainingJobs) -> None:
    # the folder is shared by pods and the machine
    tried = Path(tempfile.mkdtemp(dir="/dev/shm"))
    program = (
        f"import pathlib, sys; p, own = pathlib.Path({str(tried)!r}), pathlib.Path('/tmp/own')\n"
        "assert not own.exists(); own.touch(); again = not p.exists(); again or p.rmdir()\n"
        "sys.exit(0 if again else 143)"
    )
    jobs.apply(make_job(master=make_replica(program, policy="ExitCode")))
    wait(jobs, has_condition("Restarting"))
    assert condition_types(wait(jobs, has_condition("Succeeded")))[-1] == "Succeeded"


def test_policy_never_fails_the_job_at_once_and_policy_always_restarts_the_pod(
    jobs: TrainingJobs,
) -> None:
    jobs.apply(make_job("never", worker=make_replica("raise SystemExit(3)", policy="Never")))
    status = wait(jobs, has_condition("Failed"), "never")
    assert status["replicaStatuses"]["Worker"]["failed"] == 1
    assert "completionTime" in status
    jobs.apply(
        make_job("always", worker=make_replica("print('again', flush=True)", policy="Always"))
    )
    wait(jobs, lambda _: read_log(jobs, "always-worker-0").count("again") == 2, "always")


def test_an_elastic_job_without_a_master_ends_with_the_first_success(jobs: TrainingJobs) -> None:
    quick = "import os, time; time.sleep(0 if os.environ['POD'] == 'job-worker-0' else 60)"
    worker = make_replica(quick, 2)
    env = [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    worker["template"]["spec"]["containers"][0]["env"] = env
    jobs.apply(make_job(worker=worker, elasticPolicy={"minReplicas": 1}))
    status = wait(jobs, has_condition("Succeeded"))
    assert status["replicaStatuses"]["Worker"]["succeeded"] == 2, (
        "the operator counts active pods, too"
    )


@pytest.mark.slow
def test_a_job_fails_at_its_backoff_limit_and_at_its_deadline(jobs: TrainingJobs) -> None:
    crash = "import time; time.sleep(0.1); raise SystemExit(1)"
    policy = {"backoffLimit": 2, "cleanPodPolicy": "All"}
    jobs.apply(make_job("backoff", worker=make_replica(crash), runPolicy=policy))

    jobs.apply(
        make_job(
            "deadline",
            worker=make_replica(SLEEP),
            runPolicy={"activeDeadlineSeconds": 1, "cleanPodPolicy": "All"},
        )
    )

    assert (
        "specified backoff limit"
        in wait(jobs, has_condition("Failed"), "backoff")["conditions"][-1]["message"]
    )
    assert (
        "longer than specified deadline"
        in wait(jobs, has_condition("Failed"), "deadline")["conditions"][-1]["message"]
    )
    wait(jobs, lambda _: not jobs.jobs, "deadline")


def test_a_suspended_job_runs_no_pods_and_continues_when_resumed(jobs: TrainingJobs) -> None:
    obj = make_job(worker=make_replica(SLEEP))
    jobs.apply(obj)
    wait(jobs, has_condition("Running"))
    first_pid = pid_of(jobs, "job-worker-0")
    obj["spec"]["runPolicy"] = {"suspend": True}
    jobs.apply(obj)
    status = wait(
        jobs, lambda status: find_condition(status, "Suspended") and has_exited(first_pid)
    )
    assert "startTime" not in status
    obj["spec"]["runPolicy"]["suspend"] = False
    jobs.apply(obj)
    wait(
        jobs, lambda status: status["conditions"][-1]["type"] == "Running" and "startTime" in status
    )


@pytest.mark.slow
def test_a_deleted_job_may_drain_and_leaves_no_processes(jobs: TrainingJobs) -> None:
    polite = (
        "import os, signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), os._exit(143)))\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )

    stubborn_command = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf',"
        " flush=True); time.sleep(60)"
    )
    jobs.apply(
        make_job(
            master=make_replica(polite),
            worker=make_replica(stubborn_command, terminationGracePeriodSeconds=1),
        )
    )
    wait(
        jobs,
        lambda _: (
            read_log(jobs, "job-master-0").strip() and "deaf" in read_log(jobs, "job-worker-0")
        ),
    )
    pids = [
        pid_of(jobs, "job-master-0"),
        pid_of(jobs, "job-worker-0"),
        int(read_log(jobs, "job-master-0")),
    ]
    assert jobs.delete("job")
    assert "drained" in read_log(jobs, "job-master-0")
    assert all(map(has_exited, pids))
    assert jobs.get("job") is None


def test_memory_volumes_survive_processes_but_not_the_job(jobs: TrainingJobs) -> None:
    program = (
        "import os, sys; kept = os.environ['REKINDLE_SHM'] + '/kept'; there = os.path.exists(kept);"
        " open(kept, 'w');sys.exit(0 if there else 1)"
    )
    volumes = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    jobs.apply(make_job(worker=make_replica(program, volumes=volumes)))
    wait(jobs, has_condition("Succeeded"))
    assert not shared_memory_path(jobs.run, "job").exists()

    jobs.apply(
        make_job(
            "other",
            worker=make_replica(
                f"open(__import__('os').environ['REKINDLE_SHM'] + '/x', 'w'); {SLEEP}",
                volumes=volumes,
            ),
        )
    )

    wait(jobs, has_condition("Running"), "other")
    assert shared_memory_path(jobs.run, "other").exists()
    jobs.delete("other")
    assert not shared_memory_path(jobs.run, "other").exists()


def test_a_job_continues_after_its_runner_was_killed(tmp_path: Path) -> None:
    obj = make_job(master=make_replica("print('up', flush=True); " + SLEEP))
    runner = (
        "import json, sys, time; from pathlib import Path\nfrom rekindle.local.cluster import"
        " LocalCluster; from rekindle.local.jobs.training_job import TrainingJobs\njobs ="
        " TrainingJobs(LocalCluster(Path(sys.argv[1])), 'PyTorchJob', Path(sys.argv[1]) /"
        " 'run')\njobs.apply(json.loads(sys.argv[2]))\nwhile True: jobs.poll(); time.sleep(0.02)"
    )

    first_process = subprocess.Popen([sys.executable, "-c", runner, tmp_path, json.dumps(obj)])
    jobs = TrainingJobs(LocalCluster(tmp_path), "PyTorchJob", tmp_path / "run")
    path = tmp_path / "run/logs/job-master-0.log"

    def up() -> bool:
        return (
            path.exists()
            and "up" in path.read_text()
            and has_condition("Running")((jobs.get("job") or {})["status"])
        )

    until("the job to run", up)
    assert not jobs.jobs, "another process runs it"
    first_process.kill()
    first_process.wait()
    status = wait(
        jobs, lambda status: condition_types(status)[-1:] == ["Restarting"] or len(jobs.jobs)
    )
    status = wait(jobs, lambda status: read_log(jobs, "job-master-0").count("up") == 2)
    assert condition_types(status) == ["Created", "Running"]
    assert jobs.apply(obj)["metadata"]["generation"] == 1, (
        "applying it again does not change the job"
    )
    jobs.stop(5)
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout


def test_leftovers_of_a_runner_that_died_with_its_job_are_removed(jobs: TrainingJobs) -> None:
    jobs.apply(make_job(master=make_replica("")))
    wait(jobs, lambda status: has_condition("Succeeded")(status) and not jobs.jobs)
    leftovers = [shared_memory_path(jobs.run, "job"), jobs.run / "pods/job-master-0"]
    jobs.apply(make_job("other", master=make_replica(SLEEP)))
    kept_path = shared_memory_path(jobs.run, "other")
    for folder in (*leftovers, kept_path):
        folder.mkdir(parents=True)
    Resources(jobs.cluster, {}, jobs.run).clean_up()
    assert [folder.exists() for folder in (*leftovers, kept_path)] == [False, False, True]
    kept_path.rmdir()


WRONG_JOBS: dict[str, Callable[[dict, dict], Any]] = {
    "needs a Worker": lambda spec, replicas: replicas.clear(),
    "replicas is missing: it must be 1": lambda spec, replicas: replicas["Master"].pop("replicas"),
    '"PS" is not a replica type': lambda spec, replicas: replicas.update(PS=make_replica("")),
    'must be called "pytorch"': (
        lambda spec, replicas: replicas["Worker"]["template"]["spec"]["containers"][0].update(
            name="main"
        )
    ),
    "must be one of Always, OnFailure": (
        lambda spec, replicas: replicas["Worker"].update(restartPolicy="Sometimes")
    ),
    "rdzvConf": lambda spec, replicas: spec.update(elasticPolicy={"rdzvConf": []}),
    "cleanPodPolicy": lambda spec, replicas: spec.update(
        runPolicy={"cleanPodPolicy": "Everything"}
    ),
}


@pytest.mark.parametrize("message", WRONG_JOBS)
def test_jobs_that_the_webhook_rejects_are_rejected(jobs: TrainingJobs, message: str) -> None:
    obj = make_job(master=make_replica(""), worker=make_replica(""))
    WRONG_JOBS[message](obj["spec"], obj["spec"]["pytorchReplicaSpecs"])
    with pytest.raises(ConfigError, match=message):
        jobs.apply(obj)
    assert jobs.get("job") is None


def test_shared_memory_of_interrupted_runs_is_removed_by_the_next_command(
    jobs: TrainingJobs, tmp_path: Path
) -> None:
    def interrupt_run(name: str, hours: float) -> Path:
        """Create the files that an interrupted run leaves in shared memory."""
        # without this folder, any command on this machine would remove the shared memory
        (tmp_path / "runs" / name).mkdir(parents=True)
        cluster = LocalCluster(tmp_path)
        controller = cluster.kinds.controllers(cluster, tmp_path / "runs" / name)["PyTorchJob"]
        volume = {"name": "memory", "emptyDir": {"medium": "Memory"}}
        controller.apply(make_job(name, worker=make_replica(SLEEP, volumes=[volume])))
        controller.poll()
        controller.stop(0)

        memory = shared_memory_path(tmp_path / "runs" / name, name)
        for file in memory.iterdir():
            os.utime(file, (then := datetime.now(UTC).timestamp() - hours * 3600, then))

        return memory

    ages = {"recent": 0.5, "old": 2, "removed": 0, "running": 2}
    recent, old, removed, running = (interrupt_run(name, hours) for name, hours in ages.items())
    shutil.rmtree(tmp_path / "runs/removed")
    runner = RunFiles(tmp_path, "running")
    runner.lock()

    try:
        clean_up_shared_memory()
        assert [path.exists() for path in (recent, old, removed, running)] == [
            True,
            False,
            False,
            True,
        ]
    finally:
        runner.close()
        for memory in (recent, running):
            shutil.rmtree(memory)
