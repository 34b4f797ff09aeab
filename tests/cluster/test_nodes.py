"""Containers end as on a node that loses its power, because root kills their processes on the node
with SIGKILL.

A pod in another namespace kills the processes; the namespace must allow access to all processes of
a node (REKINDLE_TEST_RESTARTS=yes).
"""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.faults import WORKERS, FaultyTraining
from tests.cluster.kube import Kube
from tests.cluster.run import Namespace

pytestmark = pytest.mark.skipif(
    os.environ.get("REKINDLE_TEST_RESTARTS") != "yes",
    reason="needs root on the nodes: REKINDLE_TEST_RESTARTS=yes",
)
SIGKILLED = 137
KILL = """
import os, pathlib, signal, sys
for pid in (int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()):
    try:
        if any(id in pathlib.Path(f"/proc/{pid}/cgroup").read_text() for id in sys.argv[1:]):
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended
"""


@pytest.fixture(scope="module")
def privileged(namespace: Namespace) -> Iterator[Kube]:
    """A namespace where pods may be root and access the node."""
    kube = Kube(f"{namespace.kube.namespace}-node")
    kube("create", "namespace", kube.namespace)
    yield kube
    kube("delete", "namespace", kube.namespace, "--timeout=60s", timeout=90)


def kill_outright(namespace: Namespace, privileged: Kube, *pods: str) -> None:
    """Kill all processes of the given pods at once; the pods must be on one node."""
    members = [pod for pod in namespace.kube.items("pods") if pod["metadata"]["name"] in pods]
    ids = [
        pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2] for pod in members
    ]
    assert len(ids) == len(pods)

    killer = {
        "name": "kill",
        "image": namespace.image,
        "command": ["python", "-c", KILL, *ids],
        "securityContext": {"runAsUser": 0},
    }

    spec = {"hostPID": True, "restartPolicy": "Never", "containers": [killer]}
    spec.update({"nodeName": members[0]["spec"]["nodeName"]})
    privileged.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kill"}, "spec": spec}
    )

    privileged(
        "wait",
        "pod/kill",
        "--for=jsonpath={.status.phase}=Succeeded",
        "--timeout=240s",
        timeout=250,
    )

    privileged("delete", "pod/kill", "--grace-period=0", "--force")


@pytest.fixture(scope="module")
def nodes(namespace: Namespace, privileged: Kube) -> FaultyTraining:
    """A training whose containers are killed."""
    training = FaultyTraining(namespace)
    name = training.run.training_pod
    workers = [name(f"worker-{n}") for n in range(WORKERS)]
    training.inject("one", lambda: kill_outright(namespace, privileged, workers[1]))
    training.inject(
        "the coordinator", lambda: kill_outright(namespace, privileged, name("master-0"))
    )
    training.inject("all", lambda: kill_outright(namespace, privileged, *workers, name("master-0")))
    return training


def test_a_worker_killed_without_a_grace_period_costs_no_finished_step(
    nodes: FaultyTraining, undisturbed: str
):
    fault = nodes.faults["one"]
    assert [i.kind for i in fault.incidents if i.kind != "join"] == ["lost"]
    assert fault.repeated == 0
    assert any(SIGKILLED in record.codes.values() for record in nodes.run.pod_records("worker-1"))
    assert nodes.succeeded_with(undisturbed)


def test_workers_continue_after_their_coordinator_is_killed(
    nodes: FaultyTraining, undisturbed: str
):
    fault = nodes.faults["the coordinator"]
    assert [i.kind for i in fault.incidents] == ["coordinator"]
    assert fault.repeated == 0
    assert nodes.succeeded_with(undisturbed)


def test_after_all_containers_are_killed_training_resumes_from_the_object_store(
    nodes: FaultyTraining, undisturbed: str
):
    fault = nodes.faults["all"]
    assert fault.end_step > fault.start_step
    assert nodes.succeeded_with(undisturbed)
