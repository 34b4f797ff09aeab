"""What happens to Argo's own pods, and to those of steps: nothing is started twice, nothing is lost."""

import pytest

from tests.cluster.kube import Object
from tests.cluster.run import Place
from tests.cluster.story import STEPS, Story
from tests.waiting import until

TOO_LITTLE = "12Mi"  # memory; Argo's executor needs three times that


@pytest.fixture(scope="module")
def executor(place: Place) -> Story:
    """A training whose executor is deleted and runs out of memory, and an evaluation that is evicted."""
    story = Story(place)
    kube, run = place.kube, story.run
    story.hit("deleted", lambda: kube.delete_pods(run.pod_of("train"), force=True))
    story.hit("out of memory", lambda: _starve(story))
    run.trains(STEPS, 600)
    kube.scale("mlflow-proxy", 0)  # so that the evaluation cannot be over before it is evicted
    kube.evict(run.pod_of("evaluate", 600))  # the executor rests ever longer between its attempts
    kube.scale("mlflow-proxy", 1)
    return story


def _starve(story: Story) -> None:
    """The next executor gets too little memory and is killed for it; the one after gets enough again."""
    kube, run = story.run.place.kube, story.run
    limits = kube.get("limitrange", "rekindle")
    pod = run.pod_of("train")  # before there is too little: it would not come
    kube.apply(_limit(TOO_LITTLE))
    try:
        kube.delete_pods(pod, force=True)
        until("an executor was killed for its memory", lambda: any("OOMKilled" in m for m in _messages(story)), 120)
    finally:
        if limits:
            limits["metadata"] = {"name": "rekindle"}
            kube.apply(limits)
        else:
            kube("delete", "limitrange", "rekindle")


def _limit(memory: str) -> Object:
    limit = {"type": "Container", "default": {"memory": memory}, "defaultRequest": {"memory": memory}}
    return {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "rekindle"}, "spec": {"limits": [limit]}}


def _messages(story: Story) -> list[str]:
    return [node.get("message", "") for node in story.run.nodes("train")]


def test_deleting_the_executor_pod_does_not_restart_the_training(executor: Story, undisturbed: str):
    """argo-workflows#15641"""
    hit = executor.hits["deleted"]
    assert not hit.struck
    assert hit.incidents == [] and hit.after > hit.before
    assert executor.run.nodes("train")[0]["message"] == "pod deleted"
    assert executor.ended_well(undisturbed)


def test_an_executor_without_memory_does_not_restart_the_training(executor: Story, undisturbed: str):
    hit = executor.hits["out of memory"]  # Argo forgets it of a pod that it makes anew under the same node
    assert hit.incidents == [] and hit.after > hit.before
    assert executor.ended_well(undisturbed)


def test_a_step_that_is_evicted_is_done_again(executor: Story, undisturbed: str):
    assert executor.ended_well(undisturbed)
    evicted, *_, last = executor.run.place.watch.of(f"{executor.run.name}-evaluate")
    assert evicted.deleting and evicted.uid != last.uid  # Argo may give the new pod to the same node
    assert executor.run.nodes("evaluate")[-1]["phase"] == "Succeeded"
