"""A schedule starts runs, and never two at the same time."""

from tests.cluster.kube import seconds
from tests.cluster.run import DEMO, Namespace, Run, rekindle
from tests.waiting import until

SMALL = [
    "name=weekly",
    "data.source=simulate://7?cards=150&terminals=300&days=70",
    "train.steps=20",
    "gate.minimum={auc: 0.01}",
    "schedule.cron=* * * * *",
]


def test_runs_of_a_schedule_do_not_overlap(namespace: Namespace):
    flags = [str(DEMO), "--namespace", namespace.kube.namespace, *namespace.sets(SMALL)]
    rekindle("schedule", *flags)
    try:
        label = "workflows.argoproj.io/cron-workflow=weekly"
        until(
            "the schedule has started two runs",
            lambda: len(namespace.kube.items("workflows", label)) >= 2,
            600,
            pause=2,
        )
    finally:
        rekindle("schedule", *flags, "--suspend")
    workflows = namespace.kube.items("workflows", label)
    first, second = sorted(workflows, key=lambda workflow: workflow["metadata"]["creationTimestamp"])[:2]
    runs = [Run(namespace, workflow["metadata"]["name"]) for workflow in (first, second)]
    assert [run.wait_for_end() for run in runs] == ["Succeeded", "Succeeded"]
    end = runs[0].workflow()["status"]["finishedAt"]
    assert seconds(end) <= seconds(second["metadata"]["creationTimestamp"])
    assert [run.outputs()["verdict"] for run in runs] == ["release", "same"]
