"""Argo's controller and the training operator are restarted in the middle of a training.

These disturb everybody on the cluster, so they ask for REKINDLE_TEST_RESTARTS=yes.
"""

import os

import pytest

from tests.cluster.kube import Kube
from tests.cluster.run import Place
from tests.cluster.story import Story
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    os.environ.get("REKINDLE_TEST_RESTARTS") != "yes", reason="restarts controllers: REKINDLE_TEST_RESTARTS=yes"
)
ARGO = ("argo", "app=workflow-controller")
OPERATOR = ("kubeflow", "control-plane=kubeflow-training-operator")


def restart(namespace: str, selector: str) -> None:
    """Delete the pods of a controller and wait for new ones."""
    kube = Kube(namespace)
    old = {pod["metadata"]["uid"] for pod in kube.items("pods", selector)}
    assert old, f"no pod {selector} in {namespace}"
    kube("delete", "pod", "--selector", selector)

    def back() -> bool:
        new = [pod for pod in kube.items("pods", selector) if pod["metadata"]["uid"] not in old]
        return any(c["type"] == "Ready" and c["status"] == "True" for p in new for c in p["status"]["conditions"])

    until(f"{selector} is back", back, 120)


@pytest.fixture(scope="module")
def controllers(place: Place) -> Story:
    story = Story(place)
    story.hit("Argo", lambda: restart(*ARGO))
    story.hit("operator", lambda: restart(*OPERATOR))

    def both() -> None:
        place.kube.delete_pods(story.run.training_pod("worker-1"))
        restart(*OPERATOR)

    story.hit("operator and a worker", both)
    return story


@pytest.mark.parametrize("name", ["Argo", "operator"])
def test_a_training_does_not_notice_that_a_controller_is_restarted(controllers: Story, name: str, undisturbed: str):
    hit = controllers.hits[name]
    assert hit.incidents == [] and hit.after > hit.before
    assert controllers.ended_well(undisturbed)


def test_a_worker_lost_while_the_operator_is_away_comes_back(controllers: Story, undisturbed: str):
    hit = controllers.hits["operator and a worker"]
    assert [i.kind for i in hit.incidents if i.kind != "join"] == ["drain"] and hit.repeated == 0
    assert controllers.ended_well(undisturbed)
