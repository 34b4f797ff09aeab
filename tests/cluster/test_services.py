"""The object store and MLflow go away for a minute, connections and all: training goes on, and nothing is lost."""

from itertools import pairwise

import pytest

from tests.cluster.away import away
from tests.cluster.run import Place
from tests.cluster.story import STEPS, Story

AWAY = 60  # seconds


@pytest.fixture(scope="module")
def judged(place: Place) -> Story:
    """MLflow, and then the object store, is away when the training is over and the next steps need them."""
    story = Story(place, "judged")  # a name without a champion: the same weights would not be released again
    story.run.trains(STEPS, 600)
    story.run.pod_of("evaluate")
    away(place.kube, "mlflow", AWAY)
    story.run.pod_of("release")
    away(place.kube, "s3", AWAY)
    return story


@pytest.mark.parametrize("service", ["s3", "mlflow"])
def test_a_training_does_not_wait_for_what_is_away(place: Place, service: str, undisturbed: str):
    story = Story(place)  # one each: a fast machine has trained before two were away
    story.hit(service, lambda: away(place.kube, service, AWAY))
    hit = story.hits[service]
    assert hit.over - hit.began > AWAY
    assert hit.repeated == 0 and not hit.struck
    points = [t for t, _ in story.run.summary().points if hit.began < t < hit.over]
    assert max(b - a for a, b in pairwise(points)) < 10, "steps went on being made"
    assert story.ended_well(undisturbed)


def test_steps_wait_for_mlflow_and_the_object_store_to_come_back(judged: Story, undisturbed: str):
    assert judged.ended_well(undisturbed)
