"""A schedule on a cluster starts runs, but never two runs at the same time."""

from tests.cluster.kube import seconds
from tests.cluster.run import DEMO, SMALL_SETTINGS, Namespace, Run, rekindle
from tests.waiting import until

WEEKLY = [*SMALL_SETTINGS, "name=weekly", "schedule.cron=* * * * *"]


def test_runs_of_a_schedule_do_not_overlap(namespace: Namespace):
    flags = [str(DEMO), "--namespace", namespace.kube.namespace, *namespace.sets(WEEKLY)]
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
    first_run, second_run = sorted(
        workflows, key=lambda workflow: workflow["metadata"]["creationTimestamp"]
    )[:2]
    runs = [Run(namespace, workflow["metadata"]["name"]) for workflow in (first_run, second_run)]
    assert [run.wait_for_end() for run in runs] == ["Succeeded", "Succeeded"]
    end = runs[0].workflow()["status"]["finishedAt"]
    assert seconds(end) <= seconds(second_run["metadata"]["creationTimestamp"])
    assert [run.outputs()["verdict"] for run in runs] == ["release", "same"]
    assert runs[0].sha256() == runs[1].sha256()
    assert [bool(run.pods("train-master")) for run in runs] == [
        True,
        False,
    ]  # the second run compares its model with the released model
