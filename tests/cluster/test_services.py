"""The object store and MLflow go away for a minute, connections and all: training goes on, and nothing is lost."""

from itertools import pairwise

import pytest

from tests.cluster.away import away
from tests.cluster.run import Place
from tests.cluster.story import STEPS, Story

AWAY = 60  # seconds


@pytest.fixture(scope="module")
def services(place: Place) -> Story:
    story = Story(place)
    story.hit("object store", lambda: away(place.kube, "s3", AWAY))
    story.hit("MLflow", lambda: away(place.kube, "mlflow", AWAY))
    return story


@pytest.fixture(scope="module")
def judged(place: Place) -> Story:
    """MLflow, and then the object store, is away when the training is over and the next steps need them."""
    story = Story(place)
    story.run.trains(STEPS, 600)
    story.run.pod_of("evaluate")
    away(place.kube, "mlflow", AWAY)
    story.run.pod_of("release")
    away(place.kube, "s3", AWAY)
    return story


@pytest.mark.parametrize("name", ["object store", "MLflow"])
def test_a_training_does_not_wait_for_what_is_away(services: Story, name: str, undisturbed: str):
    hit = services.hits[name]
    assert hit.over - hit.began > AWAY
    assert hit.repeated == 0 and not hit.struck
    points = [t for t, _ in services.run.summary().points if hit.began < t < hit.over]
    assert max(b - a for a, b in pairwise(points)) < 10, "steps went on being made"
    assert services.ended_well(undisturbed)


def test_steps_wait_for_mlflow_and_the_object_store_to_come_back(judged: Story, undisturbed: str):
    assert judged.ended_well(undisturbed)
