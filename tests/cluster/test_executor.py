"""Tests with faults of Argo's executor pods and of steps: no training is restarted, and no work is
lost."""

import pytest

from tests.cluster.faults import STEPS, FaultyTraining
from tests.cluster.kube import Object
from tests.cluster.run import Namespace
from tests.waiting import until

# less than the about 36Mi of memory that Argo's executor needs
TOO_LITTLE_MEMORY = "12Mi"


@pytest.fixture(scope="module")
def executor(namespace: Namespace) -> FaultyTraining:
    """A training whose executor is deleted and runs out of memory, and an evaluation that is
    evicted."""
    training = FaultyTraining(namespace)
    kube = namespace.kube
    run = training.run
    training.inject("deleted", lambda: kube.delete_pods(run.wait_for_pod("train"), force=True))
    training.inject("out of memory", lambda: _starve(training))
    run.wait_for_step(STEPS, 600)
    # stop the proxy of MLflow, so that the evaluation cannot end before it is evicted
    kube.scale("mlflow-proxy", 0)
    # evict the pod soon, because the executor waits longer and longer between its attempts
    kube.evict(run.wait_for_pod("evaluate", 600))
    kube.scale("mlflow-proxy", 1)

    return training


def _starve(training: FaultyTraining) -> None:
    """Let the next executor pod be OOM-killed; the following executor has enough memory again."""
    kube = training.run.namespace.kube
    run = training.run
    limits = kube.get("limitrange", "rekindle")
    # find the pod before the memory limit applies, because a later kubectl process would not start
    pod = run.wait_for_pod("train")
    kube.apply(_limit(TOO_LITTLE_MEMORY))

    try:
        kube.delete_pods(pod, force=True)
        until(
            "an executor was OOM-killed",
            lambda: any("OOMKilled" in message for message in _list_messages(training)),
            120,
        )
    finally:
        if limits:
            limits["metadata"] = {"name": "rekindle"}
            kube.apply(limits)
        else:
            kube("delete", "limitrange", "rekindle")


def _limit(memory: str) -> Object:
    limit = {
        "type": "Container",
        "default": {"memory": memory},
        "defaultRequest": {"memory": memory},
    }
    return {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "rekindle"},
        "spec": {"limits": [limit]},
    }


def _list_messages(training: FaultyTraining) -> list[str]:
    return [node.get("message", "") for node in training.run.nodes("train")]


def test_deleting_the_executor_pod_does_not_restart_the_training(
    executor: FaultyTraining, undisturbed: str
):
    """argo-workflows#15641"""
    fault = executor.faults["deleted"]
    assert not fault.lost_pods
    assert fault.incidents == []
    assert fault.end_step > fault.start_step
    assert executor.run.nodes("train")[0]["message"] == "pod deleted"
    assert executor.succeeded_with(undisturbed)


def test_an_executor_that_runs_out_of_memory_does_not_restart_the_training(
    executor: FaultyTraining, undisturbed: str
):
    # if Argo creates the pod again for the same node of the workflow, the status does not show the
    # first pod
    fault = executor.faults["out of memory"]
    assert fault.incidents == []
    assert fault.end_step > fault.start_step
    assert executor.succeeded_with(undisturbed)


def test_an_evicted_step_is_repeated(executor: FaultyTraining, undisturbed: str):
    assert executor.succeeded_with(undisturbed)
    evicted, *_, last_pod = executor.run.namespace.watch.find(f"{executor.run.name}-evaluate")
    # Argo may create a new pod for the same node of the workflow
    assert evicted.deleting
    assert evicted.uid != last_pod.uid
    assert executor.run.nodes("evaluate")[-1]["phase"] == "Succeeded"
