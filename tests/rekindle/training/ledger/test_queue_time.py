"""The ledger counts the time in a queue, but no time after the end of a run, and no time twice."""

from typing import Any

from rekindle.training.ledger.publish import compute_metrics
from rekindle.training.ledger.sentences import describe_summary, describe_unended_wait
from tests.rekindle.training.ledger.events import (
    make_generation,
    make_lost,
    make_start,
    make_step,
    summarize,
)

RUN = (2, "run", {"workers": 2})


def make_coordinator(t: float, created: float | None = None) -> tuple[Any, ...]:
    return (t, "coordinator", {"id": f"c{t}", "created": created})


def join(t: float, name: str) -> tuple[Any, ...]:
    return (t, "join", {"worker": f"{t}-{name}", "name": name, "step": -1})


def test_the_queue_before_the_first_start_and_after_a_preemption_counts() -> None:
    summary = summarize(
        make_coordinator(100, created=40),
        join(101, "a"),
        join(103, "b"),
        make_generation(104, 1, -1, "a", "b"),
        (104, "run", {"workers": 2}),
        make_step(110, 10),
        (120, "drain", {"worker": "101-a", "name": "a"}),
        (120, "drain", {"worker": "103-b", "name": "b"}),
        # all pods had been deleted, and the names of the new pods differ
        make_coordinator(300, created=40),
        join(301, "c"),
        join(302, "b"),
        make_generation(303, 2, 10, "c", "b"),
        make_step(310, 20),
        (320, "complete", {"step": 30}),
    )

    assert summary.queued_seconds == (101 - 40) + (301 - 120)
    assert summary.queued_by_worker == {
        "a": 101 - 40,
        "b": (103 - 40) + (302 - 120),
        "c": 301 - 120,
    }
    # while the job was queued, its coordinator was not running either
    assert summary.coordinator_idle_seconds == 1 + 1
    assert summary.as_json()["worker_seconds"]["queued"] == 61 + 245 + 181
    assert compute_metrics(summary, "workers")["workers/worker_seconds_queued"] == 487
    assert compute_metrics(summary, "workers")["workers/queued_seconds"] == 242
    assert "for 4 min 02 s, during which no worker was alive." in "\n".join(
        describe_summary(summary)
    )


def test_a_lost_worker_is_queued_until_it_is_replaced_or_the_run_ends() -> None:
    summary = summarize(
        *make_start("a", "b"),
        RUN,
        make_step(3, 10),
        make_lost(5, "b"),
        make_generation(5, 2, 20, "a"),
        join(9, "b"),
        make_generation(9, 3, 30, "a", "b"),
        make_lost(10, "a"),
        make_generation(10, 4, 35, "b"),
        (20, "complete", {"step": 60}),
    )
    assert summary.queued_by_worker == {"b": 4, "a": 10}
    assert summary.queued_seconds == 0, "a worker was alive at all times"


def test_time_after_the_end_of_a_run_is_not_queued() -> None:
    failed = [*make_start("a"), (2, "run", {"workers": 1}), make_step(3, 10)]
    summary = summarize(
        *failed,
        make_lost(5, "a"),
        (6, "verdict", {"code": 1, "message": "no data"}),
        # a user has resumed the run: the job was created before the failure, or is unknown
        make_coordinator(1000, created=0),
        join(1002, "a"),
        make_generation(1003, 2, 10, "a"),
        make_lost(1010, "a"),
        (1010, "verdict", {"code": 1, "message": "no data"}),
        # the new job was queued again
        make_coordinator(2000, created=1500),
        join(2001, "a"),
        (2002, "complete", {"step": 20}),
    )
    assert summary.queued_seconds == 1 + 2 + 501
    assert summary.coordinator_idle_seconds == 1 + 2 + 1


def test_a_training_without_a_coordinator_has_no_queue() -> None:
    summary = summarize(join(5, "a"), RUN, (10, "complete", {"step": 3}), join(100, "a"))
    assert (summary.queued_seconds, summary.queued_by_worker) == (0, {})


def test_a_workflow_that_ended_while_its_job_waited_says_so() -> None:
    never_started = summarize()
    assert describe_unended_wait(never_started, "train", 5000) == (
        "no worker has started: the job waited in the queue train or for nodes."
    )
    preempted = summarize(
        *make_start("a"), make_step(3, 10), (60, "drain", {"worker": "id-a", "name": "a"})
    )
    assert describe_unended_wait(preempted, "", 60 + 7200).startswith(
        "no worker was alive for the last 2 h 00 min: the job waited for nodes."
    )
    # the workers left when the workflow ended
    assert describe_unended_wait(preempted, "", 61) == ""
    complete = summarize(*make_start("a"), (9, "complete", {"step": 20}))
    assert describe_unended_wait(complete, "", 5000) == ""
