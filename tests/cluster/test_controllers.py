"""Tests with restarts of Argo's controller and the training operator during a training.

The restarts affect all users of the cluster, so the tests need REKINDLE_TEST_RESTARTS=yes.
"""

import os

import pytest

from tests.cluster.faults import FaultyTraining
from tests.cluster.kube import Kube
from tests.cluster.run import Namespace
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    os.environ.get("REKINDLE_TEST_RESTARTS") != "yes",
    reason="restarts controllers: REKINDLE_TEST_RESTARTS=yes",
)
ARGO = ("argo", "app=workflow-controller")
OPERATOR = ("kubeflow", "control-plane=kubeflow-training-operator")


def restart(namespace: str, selector: str) -> None:
    """Delete the pods of a controller and wait for the new pods."""
    kube = Kube(namespace)
    old_uids = {pod["metadata"]["uid"] for pod in kube.items("pods", selector)}
    assert old_uids, f"no pod {selector} in {namespace}"
    kube("delete", "pod", "--selector", selector)

    def is_back() -> bool:
        new = [
            pod for pod in kube.items("pods", selector) if pod["metadata"]["uid"] not in old_uids
        ]
        return any(
            c["type"] == "Ready" and c["status"] == "True"
            for p in new
            for c in p["status"]["conditions"]
        )

    until(f"{selector} is back", is_back, 120)


@pytest.fixture(scope="module")
def controllers(namespace: Namespace) -> FaultyTraining:
    training = FaultyTraining(namespace)
    training.inject("Argo", lambda: restart(*ARGO))
    training.inject("operator", lambda: restart(*OPERATOR))

    def lose_both() -> None:
        namespace.kube.delete_pods(training.run.training_pod("worker-1"))
        restart(*OPERATOR)

    training.inject("operator and a worker", lose_both)
    return training


@pytest.mark.parametrize("name", ["Argo", "operator"])
def test_a_restart_of_a_controller_does_not_affect_a_training(
    controllers: FaultyTraining, name: str, undisturbed: str
):
    fault = controllers.faults[name]
    assert fault.incidents == []
    assert fault.end_step > fault.start_step
    assert controllers.succeeded_with(undisturbed)


def test_a_worker_lost_during_a_restart_of_the_operator_is_replaced(
    controllers: FaultyTraining, undisturbed: str
):
    fault = controllers.faults["operator and a worker"]
    assert [i.kind for i in fault.incidents if i.kind != "join"] == ["drain"]
    assert fault.repeated == 0
    assert controllers.succeeded_with(undisturbed)
