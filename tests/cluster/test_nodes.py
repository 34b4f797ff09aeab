"""Containers that end without a word, as with a node that loses its power: SIGKILL by root on the node, no grace.

A pod that sees the processes of its node does it, in a namespace beside that allows one (REKINDLE_TEST_RESTARTS=yes).
"""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.kube import Kube
from tests.cluster.run import Place
from tests.cluster.story import WORKERS, Story

pytestmark = pytest.mark.skipif(
    os.environ.get("REKINDLE_TEST_RESTARTS") != "yes", reason="needs root on the nodes: REKINDLE_TEST_RESTARTS=yes"
)
SIGKILLED = 137
KILL = """
import os, pathlib, signal, sys
for pid in (int(each.name) for each in pathlib.Path("/proc").iterdir() if each.name.isdigit()):
    try:
        if any(id in pathlib.Path(f"/proc/{pid}/cgroup").read_text() for id in sys.argv[1:]):
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended by itself
"""


@pytest.fixture(scope="module")
def beside(place: Place) -> Iterator[Kube]:
    """A namespace where pods may be root and see the node."""
    kube = Kube(f"{place.kube.namespace}-node")
    kube("create", "namespace", kube.namespace)
    yield kube
    kube("delete", "namespace", kube.namespace, "--timeout=60s", timeout=90)


def kill_outright(place: Place, beside: Kube, *pods: str) -> None:
    """SIGKILL to all in the containers of these pods, at once (they are on one node)."""
    members = [pod for pod in place.kube.items("pods") if pod["metadata"]["name"] in pods]
    ids = [pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2] for pod in members]
    assert len(ids) == len(pods)
    killer = {"name": "kill", "image": place.image, "command": ["python", "-c", KILL, *ids]}
    killer["securityContext"] = {"runAsUser": 0}
    spec = {"hostPID": True, "restartPolicy": "Never", "containers": [killer]}
    spec |= {"nodeName": members[0]["spec"]["nodeName"]}
    beside.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kill"}, "spec": spec})
    beside("wait", "pod/kill", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=240s", timeout=250)
    beside("delete", "pod/kill", "--grace-period=0", "--force")


@pytest.fixture(scope="module")
def nodes(place: Place, beside: Kube) -> Story:
    """A training whose containers are killed."""
    story = Story(place)
    name = story.run.training_pod
    workers = [name(f"worker-{n}") for n in range(WORKERS)]
    story.hit("one", lambda: kill_outright(place, beside, workers[1]))
    story.hit("the coordinator", lambda: kill_outright(place, beside, name("master-0")))
    story.hit("all", lambda: kill_outright(place, beside, *workers, name("master-0")))
    return story


def test_a_worker_that_is_gone_at_once_costs_no_finished_step(nodes: Story, undisturbed: str):
    hit = nodes.hits["one"]
    assert [i.kind for i in hit.incidents if i.kind != "join"] == ["lost"] and hit.repeated == 0
    assert any(SIGKILLED in sight.codes.values() for sight in nodes.run.sights("worker-1"))
    assert nodes.ended_well(undisturbed)


def test_workers_train_on_when_their_coordinator_is_gone_at_once(nodes: Story, undisturbed: str):
    hit = nodes.hits["the coordinator"]
    assert [i.kind for i in hit.incidents] == ["coordinator"] and hit.repeated == 0
    assert nodes.ended_well(undisturbed)


def test_all_gone_at_once_go_on_from_the_object_store(nodes: Story, undisturbed: str):
    hit = nodes.hits["all"]
    assert hit.after > hit.before
    assert nodes.ended_well(undisturbed)
