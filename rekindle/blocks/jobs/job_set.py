"""A JobSet whose Job `lead` is the coordinator, and whose workers are Jobs of one pod each.

Each worker has its own Job because the Job controller's back-off (10, 20, 40 s ...) applies to all
pods of a Job. With JobSet's feature gate RestartJob (`cluster.restart_job`), the Job of a lost
worker is recreated within 1-3 s instead of 10 s.

Source: the fields are defined by JobSet 0.12 (jobset.x-k8s.io/v1alpha2) and Kubernetes (batch/v1).
"""

import signal

from argolocal.common import exit_codes
from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.members import (
    MemberCommands,
    coordinator_spec,
    count_pods,
    member_metadata,
    worker_spec,
)
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.presets import merge_mappings
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

SUCCESS = "status.terminalState == Completed"
FAILURE = ("status.terminalState == Failed",)

LEAD = "lead"
WORKER = "worker"
# host name of the coordinator's pod, in the Service that has the JobSet's name
HOST = f"{{0}}-{LEAD}-0-0.{{0}}"
# practically unlimited retries of a pod, because the coordinator decides when the run fails
UNLIMITED_RETRIES = 100_000
# exit codes of the coordinator that cause a restart
SIGNAL_EXIT_CODES = [
    exit_codes.SIGNALLED + number
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGKILL,
        signal.SIGSEGV,
        signal.SIGTERM,
    )
]


def job_set(
    name: str, train: TrainConfig, cluster: ClusterConfig, commands: MemberCommands
) -> Manifest:
    """Return the JobSet `name`, whose pods run `commands`. `name` has at most 45 characters,
    because the names of the pods are longer.

    The job succeeds or fails with the coordinator. Raises ConfigError if train.workers is not
    divisible by the number of GPUs per pod.
    """
    counts = count_pods(train, cluster)
    rules = list[Manifest]()
    if cluster.restart_job:
        action = {"action": "RestartJobAndIgnoreMaxRestarts", "targetReplicatedJobs": [WORKER]}
        rules = [{"name": "worker", **action}]

    pod = worker_spec(name, train, cluster, commands, "worker", HOST.format(name))
    workers = worker_job(name, pod, cluster, restarts=not cluster.restart_job)
    jobs = [
        {"name": LEAD, "replicas": 1, "template": {"spec": lead_job(name, cluster, commands)}},
        {"name": WORKER, "replicas": counts.pods, "template": {"spec": workers}},
    ]

    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": gang.job_metadata(name, cluster),
        "spec": {**lead_policies(rules), "replicatedJobs": jobs},
    }


def worker_job(name: str, pod: Manifest, cluster: ClusterConfig, *, restarts: bool) -> Manifest:
    """Return the JobSpec of a worker. If `restarts` is True, the Job controller replaces the pod of
    a failed worker; otherwise the JobSet recreates the whole Job."""
    metadata = member_metadata(name, "worker", cluster.pod("train"))
    if restarts:
        limit = UNLIMITED_RETRIES
        policy = "OnFailure"
    else:
        limit = 0
        policy = "Never"
    pod = pod | {"restartPolicy": policy}
    return {"backoffLimit": limit, **indexed_pod(pod, metadata, cluster)}


def lead_job(name: str, cluster: ClusterConfig, commands: MemberCommands) -> Manifest:
    """Return the JobSpec of the coordinator. An exit code of the coordinator from 1 to 127 fails
    the job; after a signal or the loss of its node, the coordinator is restarted."""
    fatal = {"containerName": LEAD, "operator": "NotIn", "values": SIGNAL_EXIT_CODES}
    pod = coordinator_spec(name, cluster, commands, LEAD) | {"restartPolicy": "Never"}

    return {
        "backoffLimit": UNLIMITED_RETRIES,
        # Kubernetes counts this deadline from the start of the Job or, if it was suspended, from
        # its resumption
        "activeDeadlineSeconds": 3600 * cluster.deadline_hours,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {"action": "FailJob", "onExitCodes": fatal},
            ]
        },
        **indexed_pod(pod, member_metadata(name, "master", cluster.pod("coordinator")), cluster),
    }


def indexed_pod(pod: Manifest, metadata: Manifest, cluster: ClusterConfig) -> Manifest:
    """Return the fields of a JobSpec for one indexed pod."""
    template = {
        "metadata": merge_mappings(metadata, gang.queue_metadata(cluster)),
        "spec": pod | gang.preset_fields("pods", cluster),
    }
    return {"completionMode": "Indexed", "completions": 1, "parallelism": 1, "template": template}


def lead_policies(rules: list[Manifest]) -> Manifest:
    """Return the fields of a JobSetSpec that make the JobSet succeed or fail with its
    coordinator."""
    return {
        "network": {"enableDNSHostnames": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [LEAD]},
        "failurePolicy": {"maxRestarts": 0, **({"rules": rules} if rules else {})},
    }
