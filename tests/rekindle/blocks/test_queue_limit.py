"""The time in a queue ends no workflow, and no failed run loses its checkpoints because of the time
in a queue."""

from rekindle.blocks.settings import ClusterConfig
from rekindle.release.retention.cluster_retention import compute_resumable_seconds


def test_a_workflow_with_a_queue_may_wait_in_the_queue_in_addition_to_its_limit() -> None:
    limits = {"deadline_hours": 48, "queue_hours": 100}
    queued = ClusterConfig.model_validate({"gang": "kueue", "queue": "train"} | limits)
    unqueued = ClusterConfig.model_validate(limits)
    assert (queued.workflow_hours, unqueued.workflow_hours) == (148, 48)

    hour = 3600
    kept = queued.keep_days * 24
    assert compute_resumable_seconds(queued.model_dump()) == (kept + 148) * hour
    assert compute_resumable_seconds(unqueued.model_dump()) == (kept + 48) * hour
    recorded = {"keep_days": 1, "deadline_hours": 48, "queue": "train"}
    assert compute_resumable_seconds(recorded) == (24 + 48) * hour
