"""A schedule runs by itself, and never twice at once."""

from tests.cluster.kube import seconds
from tests.cluster.run import DEMO, Place, Run, rekindle
from tests.waiting import until

SMALL = [
    "name=weekly",
    "data.source=simulate://7?cards=150&terminals=300&days=70",
    "train.steps=20",
    "gate.minimum={auc: 0.01}",
    "schedule.cron=* * * * *",
]


def test_a_schedule_fires_twice_without_overlap(place: Place):
    flags = [str(DEMO), "--namespace", place.kube.namespace, *place.sets(SMALL)]
    rekindle("schedule", *flags)
    try:
        label = "workflows.argoproj.io/cron-workflow=weekly"
        until("it has fired twice", lambda: len(place.kube.items("workflows", label)) >= 2, 600, pause=2)
    finally:
        rekindle("schedule", *flags, "--suspend")
    workflows = place.kube.items("workflows", label)
    first, second = sorted(workflows, key=lambda workflow: workflow["metadata"]["creationTimestamp"])[:2]
    runs = [Run(place, workflow["metadata"]["name"]) for workflow in (first, second)]
    assert [run.ended() for run in runs] == ["Succeeded", "Succeeded"]
    end = runs[0].workflow()["status"]["finishedAt"]
    assert seconds(end) <= seconds(second["metadata"]["creationTimestamp"])
    assert [run.outputs()["verdict"] for run in runs] == ["release", "same"]
