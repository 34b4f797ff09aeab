"""What clusters do to the pods of a training: it ends Succeeded, with the weights of an undisturbed run.

Faults share a workflow, one after the other, since a workflow takes minutes; each is judged by what was seen of it.
"""

import pytest

from tests.cluster.run import Place
from tests.cluster.story import WORKERS, Story


@pytest.fixture(scope="module")
def pods(place: Place) -> Story:
    """A training whose pods are deleted."""
    story = Story(place)
    kube, name = place.kube, story.run.training_pod
    workers = [name(f"worker-{n}") for n in range(WORKERS)]
    story.hit("one, in order", lambda: kube.delete_pods(workers[1]))
    story.hit("one, by force", lambda: kube.delete_pods(workers[2], force=True))
    story.hit("two at once", lambda: kube.delete_pods(*workers[:2], force=True))
    story.hit("the coordinator", lambda: kube.delete_pods(name("master-0")))
    story.hit("all, in order", lambda: kube.delete_pods(*workers))
    story.hit("all, by force", lambda: kube.delete_pods(*workers, force=True))
    return story


def test_a_preempted_worker_leaves_in_order_and_costs_no_finished_step(pods: Story, undisturbed: str):
    hit = pods.hits["one, in order"]
    (pod,) = hit.struck
    assert pod.codes == {"pytorch": 143}
    assert [i.kind for i in hit.incidents if i.kind != "join"] == ["drain"]
    assert hit.repeated == 0
    assert pods.ended_well(undisturbed)


def test_a_worker_that_vanishes_costs_no_finished_step(pods: Story, undisturbed: str):
    hit = pods.hits["one, by force"]
    assert len(hit.struck) == 1
    assert {i.kind for i in hit.incidents} & {"lost", "drain"} and hit.repeated == 0
    assert pods.ended_well(undisturbed)


def test_two_workers_that_vanish_at_once_cost_no_finished_step(pods: Story, undisturbed: str):
    hit = pods.hits["two at once"]
    assert len(hit.struck) == 2
    assert len([i for i in hit.incidents if i.kind in ("lost", "drain")]) == 2 and hit.repeated == 0
    assert pods.ended_well(undisturbed)


def test_workers_train_on_while_their_coordinator_is_replaced(pods: Story, undisturbed: str):
    hit = pods.hits["the coordinator"]
    assert len(hit.struck) == 1 and hit.repeated == 0
    assert [i.kind for i in hit.incidents] == ["coordinator"], "nobody was lost meanwhile"
    assert hit.after > hit.before
    assert pods.ended_well(undisturbed)


def test_all_workers_told_to_go_at_once_lose_no_finished_step(pods: Story, undisturbed: str):
    hit = pods.hits["all, in order"]
    assert [pod.codes for pod in hit.struck] == [{"pytorch": 143}] * WORKERS
    assert hit.repeated == 0
    assert pods.ended_well(undisturbed)


def test_all_workers_that_vanish_at_once_go_on_from_the_object_store(pods: Story, undisturbed: str):
    hit = pods.hits["all, by force"]
    assert len(hit.struck) == WORKERS
    assert hit.after > hit.before
    assert pods.ended_well(undisturbed)
