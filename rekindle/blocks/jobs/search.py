"""A search over hyper-parameters: an indexed Job whose trials are pods, each with its own number and its own retries.

    args = ["-m", "shop.trial", "--number=$(JOB_COMPLETION_INDEX)"]
    search("{{workflow.name}}-search", cluster.pod("train"), args, cluster, trials=50, tolerated=5)

A trial leaves its result in the object store under its number; the step after this one picks the best.
Source: Kubernetes batch/v1 JobSpec (1.31 or later): completionMode Indexed, backoffLimitPerIndex, maxFailedIndexes.
"""

from rekindle.blocks.jobs.job import POLICY, job
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig, PodConfig

# FailureTarget or Failed, but not for FailedIndexes; Kueue's Suspended may come first
FAILURE = tuple(f"status.conditions.{i}.reason in (DeadlineExceeded,MaxFailedIndexesExceeded)" for i in range(3))
# what no retry can cure ends the trial, not the search
RULES = [rule | {"action": "FailIndex"} if rule["action"] == "FailJob" else rule for rule in POLICY]


def success(queued: bool = False) -> str:
    """Every trial has ended, and few enough failed: such a Job ends as Failed for FailedIndexes, or as Complete.

    Both come second, after FailureTarget or SuccessCriteriaMet; in Kueue's queue (`queued`) Suspended is before them.
    """
    return f"status.conditions.{2 if queued else 1}.type in (Complete,Failed)"


def search(
    name: str,
    pod: PodConfig,
    args: list[str],
    cluster: ClusterConfig,
    trials: int,
    parallelism: int = 10,
    tolerated: int = 0,
) -> Manifest:
    """`trials` pods, `parallelism` at a time; the search fails when more than `tolerated` trials have."""
    return job(
        name,
        pod,
        args,
        cluster,
        completionMode="Indexed",
        completions=trials,
        parallelism=min(parallelism, trials),
        backoffLimitPerIndex=cluster.retries,
        maxFailedIndexes=tolerated,
        podFailurePolicy={"rules": RULES},
    )
