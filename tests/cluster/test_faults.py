"""Tests with faults of the pods of a training: the run succeeds with the weights of an undisturbed
run.

All faults are injected into the same workflow, one after the other, because a workflow takes
minutes.
"""

import pytest

from tests.cluster.faults import WORKERS, FaultyTraining
from tests.cluster.run import Namespace


@pytest.fixture(scope="module")
def pods(namespace: Namespace) -> FaultyTraining:
    """A training whose pods are deleted."""
    training = FaultyTraining(namespace)
    kube = namespace.kube
    name = training.run.training_pod
    workers = [name(f"worker-{n}") for n in range(WORKERS)]
    training.inject("one, in order", lambda: kube.delete_pods(workers[1]))
    training.inject("one, by force", lambda: kube.delete_pods(workers[2], force=True))
    training.inject("two at once", lambda: kube.delete_pods(*workers[:2], force=True))
    training.inject("the coordinator", lambda: kube.delete_pods(name("master-0")))
    training.inject("all, in order", lambda: kube.delete_pods(*workers))
    training.inject("all, by force", lambda: kube.delete_pods(*workers, force=True))
    return training


def test_a_preempted_worker_leaves_its_group_and_costs_no_finished_step(
    pods: FaultyTraining, undisturbed: str
):
    fault = pods.faults["one, in order"]
    (pod,) = fault.lost_pods
    assert pod.codes == {"pytorch": 143}
    assert [i.kind for i in fault.incidents if i.kind != "join"] == ["drain"]
    assert fault.repeated == 0
    assert pods.succeeded_with(undisturbed)


def test_a_killed_worker_costs_no_finished_step(pods: FaultyTraining, undisturbed: str):
    fault = pods.faults["one, by force"]
    assert len(fault.lost_pods) == 1
    assert {i.kind for i in fault.incidents} & {"lost", "drain"}
    assert fault.repeated == 0
    assert pods.succeeded_with(undisturbed)


def test_two_workers_killed_at_once_cost_no_finished_step(pods: FaultyTraining, undisturbed: str):
    fault = pods.faults["two at once"]
    assert len(fault.lost_pods) == 2
    assert len([i for i in fault.incidents if i.kind in ("lost", "drain")]) == 2
    assert fault.repeated == 0
    assert pods.succeeded_with(undisturbed)


def test_workers_continue_while_their_coordinator_is_replaced(
    pods: FaultyTraining, undisturbed: str
):
    fault = pods.faults["the coordinator"]
    assert len(fault.lost_pods) == 1
    assert fault.repeated == 0
    assert [i.kind for i in fault.incidents] == ["coordinator"], "no worker was lost"
    assert fault.end_step > fault.start_step
    assert pods.succeeded_with(undisturbed)


def test_terminating_all_workers_at_once_loses_no_finished_step(
    pods: FaultyTraining, undisturbed: str
):
    fault = pods.faults["all, in order"]
    assert [pod.codes for pod in fault.lost_pods] == [{"pytorch": 143}] * WORKERS
    assert fault.repeated == 0
    assert pods.succeeded_with(undisturbed)


def test_after_all_workers_are_killed_training_resumes_from_the_object_store(
    pods: FaultyTraining, undisturbed: str
):
    fault = pods.faults["all, by force"]
    assert len(fault.lost_pods) == WORKERS
    assert fault.end_step > fault.start_step
    assert pods.succeeded_with(undisturbed)
