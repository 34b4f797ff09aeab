"""Tests of all kinds of jobs other than PyTorchJobs as real processes: their replicas find each
other by the operator's variables."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hera.workflows import DAG, Resource, Task, Workflow

from argolocal.controllers import kubectl_check
from argolocal.language.selector import evaluate_conditions
from argolocal.manifest.training_jobs import JOB_KINDS
from argolocal.validate import lint
from rekindle.blocks.container import retries
from rekindle.blocks.jobs.kubeflow import FAILURE
from rekindle.blocks.jobs.kubeflow import FRAMEWORKS as BLOCKS
from rekindle.blocks.resource import apply
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.frameworks import ENVIRONMENT_FUNCTIONS, make_operator_environment
from rekindle.local.jobs.training_job import TrainingJobs, is_finished
from tests.commands import open_shell
from tests.kinds import kinds
from tests.polling import wait
from tests.waiting import until

SLEEP = "import time; time.sleep(60)"
# rank 0 prints the sum of all replicas' numbers; {where} reads rank, size, host and port from the
# environment
SUM = """
import json, os, socket, time
e = os.environ
{where}
if rank == 0:
    server = socket.create_server((host, int(port)))
    total = 1
    for _ in range(int(size) - 1):
        peer = server.accept()[0]
        total += int(peer.recv(9))
        peer.send(b"k")
    print("sum", total, flush=True)
else:
    for _ in range(400):
        try:
            s = socket.create_connection((host, int(port)))
            break
        except OSError:
            time.sleep(0.05)
    s.send(str(rank + 1).encode())
    s.recv(1)
"""
WHERE = {
    "TFJob": (
        "c = json.loads(e['TF_CONFIG']); order = c['cluster'].get('chief', []) +"
        " c['cluster']['worker']\nown = c['cluster'][c['task']['type']][c['task']['index']]; rank,"
        " size = order.index(own), len(order)\nhost, port = order[0].split(':')"
    ),
    "XGBoostJob": (
        "rank, size, host, port = int(e['RANK']), e['WORLD_SIZE'], e['MASTER_ADDR'],"
        " e['MASTER_PORT']"
    ),
    "PaddleJob": (
        "size = e['PADDLE_NNODES']; host, port = e['PADDLE_MASTER'].split(':')\nrank = 0 if"
        " 'POD_IP_DUMMY' in e else 1"
    ),
    "JAXJob": (
        "rank, size = int(e['PROCESS_ID']), e['NUM_PROCESSES']\n"
        "host, port = e['COORDINATOR_ADDRESS'], e['COORDINATOR_PORT']"
    ),
}
# kind of job → (name of the pod of rank 0, sum that this pod prints)
FIRST = {
    "TFJob": ("chief-0", 6),
    "XGBoostJob": ("master-0", 6),
    # a PaddleJob does not number its workers
    "PaddleJob": ("master-0", 5),
    "JAXJob": ("worker-0", 6),
}
# a program that starts a process in every slot of the hostfile, like mpirun, and prints their
# outputs
LAUNCH = """
import os, subprocess
e = os.environ
hosts = [line.split() for line in open(e['OMPI_MCA_orte_default_hostfile'])]
slots = [host for host, slots in hosts for _ in range(int(slots[6:]))]
agent = e['OMPI_MCA_plm_rsh_agent']
commands = [[agent, host, f'RANK={{i}} sh -c', {program!r}] for i, host in enumerate(slots)]
started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
outputs = [process.communicate()[0].split() for process in started]
print(outputs, flush=True)
raise SystemExit(max(process.returncode for process in started))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., tuple[TrainingJobs, dict[str, Any]]]]:
    """Return a function that applies a job, waits for a status, and returns the job's controller
    and status."""
    cluster = LocalCluster(tmp_path)
    controllers = cluster.kinds.controllers(cluster, tmp_path / "run")

    def run(
        obj: dict[str, Any], holds: Callable[[dict], Any] = is_finished, seconds: float = 60
    ) -> Any:
        jobs = controllers[obj["kind"]]
        name = obj["metadata"]["name"]
        jobs.apply(obj)
        return jobs, wait(jobs, holds, name, seconds)

    yield run
    for jobs in controllers.values():
        jobs.stop(0)


def make_job(
    kind: str, lead: str, worker: str = "", workers: int = 2, policy: str = "", **spec: Any
) -> dict[str, Any]:
    """Return the job that the block creates, with the given programs (default of `worker`:
    `lead`)."""
    obj = kinds("job", lead, worker or lead)[kind].manifest
    obj["spec"].update(spec)
    replicas = next(value for key, value in obj["spec"].items() if key.endswith("ReplicaSpecs"))
    replicas["Worker"]["replicas"] = workers
    for replica in replicas.values():
        replica["restartPolicy"] = policy or replica["restartPolicy"]
        (container,) = replica["template"]["spec"]["containers"]
        container["envFrom"] = []
        container["image"] = "python:3.11-slim"
    return obj


def read_log(jobs: TrainingJobs, pod: str) -> str:
    return (jobs.run / "logs" / f"{pod}.log").read_text()


def evaluate_job(kind: str, status: dict[str, Any]) -> bool | None:
    if kind == "PyTorchJob":
        success = "status.replicaStatuses.Master.succeeded > 0"
    else:
        success = BLOCKS[kind].success
    return evaluate_conditions({"status": status}, success, ",".join(FAILURE))[0]


def list_conditions(status: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (condition["type"], condition["status"], condition["reason"])
        for condition in status["conditions"]
    ]


def test_jobs_of_every_kind_of_the_blocks_run_on_this_machine() -> None:
    assert set(ENVIRONMENT_FUNCTIONS) == {*JOB_KINDS} == {*BLOCKS, "PyTorchJob"}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", WHERE)
def test_replicas_find_each_other_by_the_operators_variables(run: Any, kind: str) -> None:
    first_pods, total_pods = FIRST[kind]
    program = SUM.format(where=WHERE[kind])
    jobs, status = run(make_job(kind, program, workers=3 if kind == "JAXJob" else 2))
    assert read_log(jobs, f"job-{first_pods}").split() == ["sum", str(total_pods)]
    assert evaluate_job(kind, status) is True
    reasons = [(kind_, f"{kind}{kind_}") for kind_ in ("Created", "Running", "Succeeded")]
    assert [(type_, reason) for type_, _, reason in list_conditions(status)] == reasons
    assert list_conditions(status)[1][1] == "False"
    assert status["completionTime"] >= status["startTime"]


def test_the_launcher_starts_a_process_in_every_slot_of_its_workers(run: Any) -> None:
    program = "'echo $RANK $POD_IP'"
    obj = make_job("MPIJob", LAUNCH.format(program=program), slotsPerWorker=2)
    replicas = obj["spec"]["mpiReplicaSpecs"]
    replicas["Worker"]["template"]["spec"]["containers"][0]["command"] = ["sh", "-c"]
    replicas["Worker"]["template"]["spec"]["containers"][0]["args"] = ["sleep 60"]
    jobs, status = run(obj)
    ips = [jobs.cluster.address(f"job-worker-{index}") for index in (0, 0, 1, 1)]
    assert read_log(jobs, "job-launcher").strip() == str(
        [[str(rank), ip] for rank, ip in enumerate(ips)]
    )
    assert evaluate_job("MPIJob", status) is True


def test_processes_of_mpirun_end_with_their_worker(run: Any) -> None:
    obj = make_job("MPIJob", LAUNCH.format(program="'sleep 60'"), workers=1)
    worker = obj["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    worker["command"] = ["sh", "-c"]
    worker["args"] = ["sleep 60"]
    jobs, _ = run(
        obj, lambda status: status.get("replicaStatuses", {}).get("Launcher", {}).get("active")
    )
    launcher = psutil.Process(jobs.jobs["job"].pods["job-launcher"].process.pid)
    until(
        "mpirun's process",
        lambda: any(each.name() == "sleep" for each in launcher.children(recursive=True)),
    )
    os.killpg(jobs.jobs["job"].pods["job-worker-0"].process.pid, signal.SIGKILL)
    _, status = run(obj, lambda status: "job-worker-0 has ended" in read_log(jobs, "job-launcher"))
    assert evaluate_job("MPIJob", status) is None, "the kubelet restarts the Launcher"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", sorted(set(JOB_KINDS) - {"PyTorchJob"}))
def test_a_failed_job_has_the_reason_in_its_status(run: Any, kind: str) -> None:
    failing = "import sys; sys.exit('no such column')"
    obj = make_job(kind, failing, policy="Never")
    if kind == "MPIJob":
        worker = obj["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
        worker["command"] = ["sh", "-c"]
        worker["args"] = ["sleep 60"]
    _, status = run(obj)
    assert evaluate_job(kind, status) is False
    assert status["completionTime"]
    assert list_conditions(status)[-1] == ("Failed", "True", f"{kind}Failed")
    assert status["conditions"][-1]["message"].endswith("no such column")


def test_a_tfjob_without_a_chief_ends_with_its_first_or_all_workers(run: Any) -> None:
    program = (
        "import os, json, time; time.sleep(json.loads(os.environ['TF_CONFIG'])['task']['index']"
        " * 60)"
    )
    obj = make_job("TFJob", program)
    del obj["spec"]["tfReplicaSpecs"]["Chief"]
    _, status = run(obj)
    assert evaluate_job("TFJob", status) is True
    all_workers_job = json.loads(json.dumps(obj))
    all_workers_job["metadata"]["name"] = "every"
    all_workers_job["spec"]["successPolicy"] = "AllWorkers"
    _, status = run(
        all_workers_job,
        lambda status: status.get("replicaStatuses", {}).get("Worker", {}).get("succeeded"),
    )
    assert not is_finished(status)


def test_dynamic_workers_of_a_tfjob_may_fail(run: Any) -> None:
    failing = (
        "import json, os\nif json.loads(os.environ['TF_CONFIG'])['task']['index']: raise"
        " SystemExit(3)\n"
    )
    obj = make_job("TFJob", SLEEP, failing + SLEEP, policy="Never", enableDynamicWorker=True)
    _, status = run(
        obj, lambda status: status.get("replicaStatuses", {}).get("Worker", {}).get("failed")
    )
    assert evaluate_job("TFJob", status) is None
    assert not is_finished(status)


@pytest.mark.slow
def test_a_workflow_with_a_job_of_every_other_kind_lints_and_runs(tmp_path: Path) -> None:
    def applied(kind: str) -> Resource:
        obj = make_job(
            kind,
            (
                SUM.format(where=WHERE[kind])
                if kind in WHERE
                else LAUNCH.format(program="'echo $RANK'")
            ),
        )

        obj["metadata"]["name"] = kind.lower()
        success = BLOCKS[kind].success

        return apply(
            kind.lower(), obj, success=success, failure=FAILURE, owned=True, retry=retries(1)
        )

    # other tests execute PyTorchJobs
    other_kinds = [kind for kind in JOB_KINDS if kind != "PyTorchJob"]

    with Workflow(name="kinds", entrypoint="main") as workflow:
        templates = [applied(kind) for kind in other_kinds]
        with DAG(name="main"):
            for template in templates:
                Task(name=f"run-{template.name}", template=template)

    manifest: Any = workflow.to_dict()
    assert [str(finding) for finding in lint(manifest) if finding.fatal] == []
    (tmp_path / "kinds.yaml").write_text(json.dumps(manifest))

    with open_shell(tmp_path) as typed:
        result = typed("rekindle run --manifest kinds.yaml -o json")

    assert result.returncode == 0, result.stderr
    phases = {step["name"]: step["phase"] for step in json.loads(result.stdout)["steps"]}
    assert {phases[f"run-{kind.lower()}"] for kind in other_kinds} == {"Succeeded"}


def test_the_environment_of_every_kind_matches_the_operator() -> None:
    def env(kind: str, role: str, index: int, **spec: Any) -> dict[str, str]:
        return make_operator_environment(
            make_job(kind, "", **spec), role, index, lambda pod: f"<{pod}>"
        )

    hosts = {
        "chief": ["<job-chief-0>:2222"],
        "worker": ["<job-worker-0>:2222", "<job-worker-1>:2222"],
    }
    config = json.loads(env("TFJob", "Worker", 1)["TF_CONFIG"])

    assert config == {
        "cluster": hosts,
        "task": {"type": "worker", "index": 1},
        "environment": "cloud",
    }

    sparse = json.loads(env("TFJob", "Worker", 1, enableDynamicWorker=True)["TF_CONFIG"])
    visible = {"worker": {"1": "<job-worker-1>:2222"}, "ps": []}
    assert sparse == {"cluster": visible, "task": {"type": "worker", "index": 1}}

    assert env("XGBoostJob", "Worker", 1) == {
        "MASTER_PORT": "9999",
        "MASTER_ADDR": "<job-master-0>",
        "WORLD_SIZE": "3",
        "RANK": "2",
        "PYTHONUNBUFFERED": "1",
        "WORKER_PORT": "9999",
        "WORKER_ADDRS": "<job-worker-0>,<job-worker-1>",
    }

    paddle = {
        "PYTHONUNBUFFERED": "1",
        "PADDLE_JOB_ID": "job",
        "PADDLE_NNODES": "3",
        "PADDLE_MASTER": "<job-master-0>:36543",
    }

    assert env("PaddleJob", "Worker", 0) == paddle | {"PADDLE_TRAINER_NUM": "1"}
    first = {"POD_IP_DUMMY": "<job-master-0>", "PADDLE_SERVER_NUM": "1"}
    assert env("PaddleJob", "Master", 0) == paddle | first

    assert env("JAXJob", "Worker", 1) == {
        "PYTHONUNBUFFERED": "1",
        "COORDINATOR_PORT": "6666",
        "COORDINATOR_ADDRESS": "<job-worker-0>",
        "NUM_PROCESSES": "2",
        "PROCESS_ID": "1",
    }

    assert env("MPIJob", "Worker", 1) == {}

    assert env("MPIJob", "Launcher", 0) == {
        "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "NVIDIA_VISIBLE_DEVICES": "",
        "NVIDIA_DRIVER_CAPABILITIES": "",
        "I_MPI_HYDRA_BOOTSTRAP": "rsh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": "/etc/mpi/kubexec.sh",
    }


def test_jobs_that_the_operator_rejects_are_rejected(run: Any) -> None:
    job_without_pods = make_job("XGBoostJob", "")
    other = make_job("JAXJob", "")
    v2 = make_job("MPIJob", "")
    del job_without_pods["spec"]["xgbReplicaSpecs"]["Master"]
    other["spec"]["jaxReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"] = "main"

    v2["apiVersion"] = "kubeflow.org/v2beta1"
    for obj, reason in (
        (job_without_pods, "needs a Master"),
        (other, 'must be called "jax"'),
        (v2, "use kubeflow.org/v1"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run(obj)


@pytest.mark.parametrize("text", [json.dumps, yaml.safe_dump], ids=["json", "yaml"])
def test_a_version_that_is_not_supported_is_refused_before_any_step(
    tmp_path: Path, text: Any
) -> None:
    obj = make_job("MPIJob", "") | {"apiVersion": "kubeflow.org/v2beta1"}
    resource = {"action": "apply", "manifest": text(obj)}
    with pytest.raises(
        ConfigError, match=r"apiVersion kubeflow.org/v2beta1.*use kubeflow.org/v1\."
    ):
        kubectl_check.check_resource_template(
            resource, "spec.templates[0].resource", LocalCluster(tmp_path)
        )

    kubectl_check.check_resource_template(
        {**resource, "manifest": text(obj | {"apiVersion": "kubeflow.org/v1"})},
        "",
        LocalCluster(tmp_path),
    )

    tagged = text(obj | {"apiVersion": "{{inputs.parameters.version}}"})
    kubectl_check.check_resource_template(
        {**resource, "manifest": tagged}, "", LocalCluster(tmp_path)
    )
    findings = [item for item in lint(obj) if item.path == "apiVersion"]
    assert [item.fatal for item in findings] == [False]


def test_the_default_restart_policies_match_the_operator() -> None:
    restarts = {kind: framework.restart_policy for kind, framework in JOB_KINDS.items()}
    assert [kind for kind, policy in restarts.items() if policy == "OnFailure"] == [
        "PyTorchJob",
        "PaddleJob",
    ]
