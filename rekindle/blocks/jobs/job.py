"""A plain Job: one pod that is tried again when it fails, and not blamed for what its node does to it.

Source: Kubernetes batch/v1 JobSpec (1.31 or later) and pkg/controller/job.
"""

from typing import Any

from rekindle.blocks.jobs import gang
from rekindle.blocks.pod import Manifest, container, metadata, pod_spec
from rekindle.blocks.presets import merged
from rekindle.blocks.settings import ClusterConfig, PodConfig

SUCCESS = "status.completionTime"  # only a Job that succeeded has one
# Kueue's Suspended may come first; FailureTarget, which is no end yet, comes before Failed
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(3))

NAME = "job"  # of the container
FATAL_EXIT_CODES = {
    "containerName": NAME,
    "operator": "In",
    "values": [65, 70, 78],
}  # wrong data, code or configuration: rekindle/errors.py
DRAINED = {"containerName": NAME, "operator": "In", "values": [143]}
# in this order: the first rule that matches decides; what none matches counts towards the limit
POLICY = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": FATAL_EXIT_CODES},
    {"action": "Ignore", "onExitCodes": DRAINED},
]


def job(name: str, pod: PodConfig, args: list[str], cluster: ClusterConfig, **spec: Any) -> Manifest:
    """`python ARGS`, up to cluster.retries times more; evictions, preemptions and drains do not count.

    It goes by itself after cluster.keep_days, so that a retried workflow still finds it and starts nothing twice.
    Raises ConfigError where cluster.gang takes no plain Job.
    """
    gang.check_job(name, cluster)
    runs = container(NAME, pod, args)
    template = pod_spec(pod, cluster.pod_account, [runs], restartPolicy="Never", **gang.fields("pods", cluster))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": gang.metadata(name, cluster),
        "spec": {
            **({} if "backoffLimitPerIndex" in spec else {"backoffLimit": cluster.retries}),
            "activeDeadlineSeconds": 60 * pod.deadline_minutes,
            "ttlSecondsAfterFinished": 86400 * cluster.keep_days,
            "podFailurePolicy": {"rules": POLICY},
            "template": {"metadata": merged(metadata(pod), gang.queued(cluster)), "spec": template},
            **spec,
        },
    }
