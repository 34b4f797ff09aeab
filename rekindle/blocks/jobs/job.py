"""A plain Job: one pod that is retried when it fails; disruptions by its node do not count as failures.

Source: Kubernetes batch/v1 JobSpec (1.31 or later) and pkg/controller/job.
"""

from typing import Any

from rekindle.blocks.jobs import gang
from rekindle.blocks.pod import Manifest, container, metadata, pod_spec
from rekindle.blocks.presets import merged
from rekindle.blocks.settings import ClusterConfig, PodConfig

SUCCESS = "status.completionTime"  # set only for Jobs that succeeded
# Kueue's Suspended may be the first condition; FailureTarget, which is not final, precedes Failed
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(3))

CONTAINER_NAME = "job"
# invalid data, code or configuration: rekindle/errors.py
FATAL_EXIT_CODES = {"containerName": CONTAINER_NAME, "operator": "In", "values": [65, 70, 78]}
DRAIN_EXIT_CODES = {"containerName": CONTAINER_NAME, "operator": "In", "values": [143]}
# the order matters: the first matching rule applies; a failure without a matching rule counts towards the limit
FAILURE_RULES = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": FATAL_EXIT_CODES},
    {"action": "Ignore", "onExitCodes": DRAIN_EXIT_CODES},
]


def job(name: str, pod: PodConfig, args: list[str], cluster: ClusterConfig, **spec: Any) -> Manifest:
    """Return a Job that runs `python ARGS` with cluster.retries retries; evictions and drains do not count.

    The Job is deleted cluster.keep_days after its end: until then, a retried workflow finds it and starts nothing
    twice. Raises ConfigError if cluster.gang does not support plain Jobs.
    """
    gang.check_job(name, cluster)
    main = container(CONTAINER_NAME, pod, args)
    template = pod_spec(pod, cluster.pod_account, [main], restartPolicy="Never", **gang.fields("pods", cluster))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": gang.metadata(name, cluster),
        "spec": {
            **({} if "backoffLimitPerIndex" in spec else {"backoffLimit": cluster.retries}),
            "activeDeadlineSeconds": 60 * pod.deadline_minutes,
            "ttlSecondsAfterFinished": 86400 * cluster.keep_days,
            "podFailurePolicy": {"rules": FAILURE_RULES},
            "template": {"metadata": merged(metadata(pod), gang.queue_metadata(cluster)), "spec": template},
            **spec,
        },
    }
