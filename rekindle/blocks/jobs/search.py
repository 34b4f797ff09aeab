"""A hyperparameter search as an indexed Job: each trial is a pod with its own number and its own retries.

    args = ["-m", "shop.trial", "--number=$(JOB_COMPLETION_INDEX)"]
    search("{{workflow.name}}-search", cluster.pod("train"), args, cluster, trials=50, tolerated=5)

A trial stores its result in the object store under its number; the next step selects the best.
Source: Kubernetes batch/v1 JobSpec (1.31 or later): completionMode Indexed, backoffLimitPerIndex, maxFailedIndexes.
"""

from rekindle.blocks.jobs.job import FAILURE_RULES, job
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig, PodConfig

# FailureTarget or Failed, except with the reason FailedIndexes; Kueue's Suspended may be the first condition
FAILURE = tuple(f"status.conditions.{i}.reason in (DeadlineExceeded,MaxFailedIndexesExceeded)" for i in range(3))
# an error that retries cannot cure fails the trial, not the search
TRIAL_FAILURE_RULES = [
    rule | {"action": "FailIndex"} if rule["action"] == "FailJob" else rule for rule in FAILURE_RULES
]


def success(queued: bool = False) -> str:
    """Return the condition that all trials have ended, and few enough have failed: Complete, or Failed (FailedIndexes).

    Either is the second condition, after FailureTarget or SuccessCriteriaMet; with Kueue (`queued`), it is the third.
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
    """Return a Job with `trials` pods, `parallelism` at a time; it fails if more than `tolerated` trials fail."""
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
        podFailurePolicy={"rules": TRIAL_FAILURE_RULES},
    )
