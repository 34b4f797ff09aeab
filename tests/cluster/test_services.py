"""Tests with outages of the object store and MLflow for a minute: training continues, and no work
is lost."""

from itertools import pairwise

import pytest

from tests.cluster.faults import STEPS, FaultyTraining
from tests.cluster.outage import interrupt_service
from tests.cluster.run import Namespace

OUTAGE_S = 60


@pytest.fixture(scope="module")
def evaluated(namespace: Namespace) -> FaultyTraining:
    """A run with an outage of MLflow, and then of the object store, at the times when the steps
    after the training need these services."""
    # use a new name without a champion, because equal weights are not released again
    training = FaultyTraining(namespace, "evaluated")
    training.run.wait_for_step(STEPS, 600)
    training.run.wait_for_pod("evaluate")
    interrupt_service(namespace.kube, "mlflow", OUTAGE_S)
    training.run.wait_for_pod("release")
    interrupt_service(namespace.kube, "s3", OUTAGE_S)
    return training


@pytest.mark.parametrize("service", ["s3", "mlflow"])
def test_a_training_does_not_wait_for_unavailable_services(
    namespace: Namespace, service: str, undisturbed: str
):
    # each service has its own training, because on a fast machine a training may end during the
    # first outage
    training = FaultyTraining(namespace)
    training.inject(service, lambda: interrupt_service(namespace.kube, service, OUTAGE_S))
    fault = training.faults[service]
    assert fault.end - fault.start > OUTAGE_S
    assert fault.repeated == 0
    assert not fault.lost_pods
    points = [t for t, _ in training.run.summary().points if fault.start < t < fault.end]
    assert max(b - a for a, b in pairwise(points)) < 10, "training continued"
    assert training.succeeded_with(undisturbed)


def test_steps_wait_until_mlflow_and_the_object_store_are_available(
    evaluated: FaultyTraining, undisturbed: str
):
    assert evaluated.succeeded_with(undisturbed)
