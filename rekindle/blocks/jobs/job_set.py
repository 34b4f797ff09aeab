"""A JobSet whose Job `lead` is the coordinator, and whose workers are Jobs of one pod each.

Each worker is a Job of its own, for the Job controller waits 10, 20, 40 s ... before it replaces the pods of one. With
JobSet's feature gate RestartJob (`cluster.restart_job`) a lost worker's Job is made anew at once, 1-3 s instead of 10.

Source: JobSet 0.12, jobset.x-k8s.io/v1alpha2, and Kubernetes batch/v1.
"""

from typing import Any

from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.members import coordinator, labels, share, worker
from rekindle.blocks.pod import Manifest
from rekindle.blocks.presets import merged
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

SUCCESS = "status.terminalState == Completed"
FAILURE = ("status.terminalState == Failed",)

LEAD, WORKER = "lead", "worker"
HOST = f"{{0}}-{LEAD}-0-0.{{0}}"  # of the coordinator: JobSet's name for its pod, in the Service of the JobSet's name
OFTEN = 100_000  # times that a pod is tried again: what cannot go on is decided by the coordinator
SIGNALS = [129, 130, 131, 134, 135, 137, 139, 143]  # a coordinator that ends so is started again


def job_set(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """The job `name` (at most 45 characters: its pods' names are longer); as `pytorch_job.pytorch_job`.

    It succeeds and fails with the coordinator; its names are its own, and no pod of a former one is taken for its.
    Raises ConfigError if the workers cannot be shared out among pods.
    """
    pods = train.workers // share(train, cluster)
    others = worker(name, train, cluster, flags, "worker", HOST.format(name))
    again: dict[str, Any] = {"backoffLimit": OFTEN, "restart": "OnFailure"}
    rules: list[Manifest] = []
    if cluster.restart_job:
        again = {"backoffLimit": 0, "restart": "Never"}
        action = {"action": "RestartJobAndIgnoreMaxRestarts", "targetReplicatedJobs": [WORKER]}
        rules = [{"name": "worker", **action}]
    workers = {
        "backoffLimit": again["backoffLimit"],
        **one_pod(others | {"restartPolicy": again["restart"]}, labels(name, "worker", cluster.pod("train")), cluster),
    }
    jobs = [
        {"name": LEAD, "replicas": 1, "template": {"spec": lead_job(name, cluster, flags)}},
        {"name": WORKER, "replicas": pods, "template": {"spec": workers}},
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": gang.metadata(name, cluster),
        "spec": {**ended_by_lead(rules), "replicatedJobs": jobs},
    }


def lead_job(name: str, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """The JobSpec of the coordinator: its exit codes 1-127 fail the job for good, a signal or a lost node do not."""
    ends = {"containerName": LEAD, "operator": "NotIn", "values": SIGNALS}
    pod = coordinator(name, cluster, flags, LEAD) | {"restartPolicy": "Never"}
    return {
        "backoffLimit": OFTEN,
        "activeDeadlineSeconds": 3600 * cluster.deadline_hours,  # counts anew after a suspension
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": ends},
            ]
        },
        **one_pod(pod, labels(name, "master", cluster.pod("coordinator")), cluster),
    }


def one_pod(pod: Manifest, metadata: Manifest, cluster: ClusterConfig, pods: int = 1) -> Manifest:
    """The part of a JobSpec that makes `pods` pods, by index."""
    template = {"metadata": merged(metadata, gang.queued(cluster)), "spec": pod | gang.fields("pods", cluster)}
    return {"completionMode": "Indexed", "completions": pods, "parallelism": pods, "template": template}


def ended_by_lead(rules: list[Manifest]) -> Manifest:
    """What decides about the JobSet: the coordinator alone."""
    return {
        "network": {"enableDNSHostnames": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [LEAD]},
        "failurePolicy": {"maxRestarts": 0, **({"rules": rules} if rules else {})},
    }
