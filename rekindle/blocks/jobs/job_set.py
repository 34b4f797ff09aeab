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
    build_coordinator_spec,
    build_worker_spec,
    count_pods,
    member_metadata,
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
COORDINATOR_HOST = f"{{0}}-{LEAD}-0-0.{{0}}"
# practically unlimited retries of a pod, because the coordinator decides when the run fails
UNLIMITED_RETRIES = 100_000
# exit codes of the coordinator that cause a restart
SIGNAL_EXIT_CODES = [
    exit_codes.SIGNAL_OFFSET + number
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


def build_job_set(
    job_name: str, train_config: TrainConfig, cluster: ClusterConfig, commands: MemberCommands
) -> Manifest:
    """Return the JobSet `job_name`, whose pods run `commands`. The name has at most 45 characters,
    because the names of the pods are longer.

    The JobSet succeeds or fails with the coordinator. Raises ConfigError if train.workers is not
    divisible by the number of GPUs per pod.
    """
    pod_counts = count_pods(train_config, cluster)
    failure_rules = list[Manifest]()
    if cluster.restart_job:
        failure_action = {
            "action": "RestartJobAndIgnoreMaxRestarts",
            "targetReplicatedJobs": [WORKER],
        }
        failure_rules = [{"name": "worker", **failure_action}]

    worker_pod = build_worker_spec(
        job_name, train_config, cluster, commands, "worker", COORDINATOR_HOST.format(job_name)
    )
    worker_job_spec = build_worker_job(
        job_name, worker_pod, cluster, is_restarted=not cluster.restart_job
    )
    replicated_jobs = [
        {
            "name": LEAD,
            "replicas": 1,
            "template": {"spec": build_lead_job(job_name, cluster, commands)},
        },
        {"name": WORKER, "replicas": pod_counts.pods, "template": {"spec": worker_job_spec}},
    ]

    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": gang.job_metadata(job_name, cluster),
        "spec": {**build_lead_policies(failure_rules), "replicatedJobs": replicated_jobs},
    }


def build_worker_job(
    job_name: str, worker_pod: Manifest, cluster: ClusterConfig, *, is_restarted: bool
) -> Manifest:
    """Return the JobSpec of a worker. If `is_restarted` is True, the Job controller replaces the
    pod of a failed worker; otherwise the JobSet recreates the whole Job."""
    pod_metadata = member_metadata(job_name, "worker", cluster.pod("train"))
    if is_restarted:
        max_retries = UNLIMITED_RETRIES
        restart_policy = "OnFailure"
    else:
        max_retries = 0
        restart_policy = "Never"
    worker_pod = worker_pod | {"restartPolicy": restart_policy}
    return {"backoffLimit": max_retries, **indexed_pod_fields(worker_pod, pod_metadata, cluster)}


def build_lead_job(job_name: str, cluster: ClusterConfig, commands: MemberCommands) -> Manifest:
    """Return the JobSpec of the coordinator. An exit code of the coordinator from 1 to 127 fails
    the job; after a signal or the loss of its node, the coordinator is restarted."""
    fatal_exit_codes = {"containerName": LEAD, "operator": "NotIn", "values": SIGNAL_EXIT_CODES}
    coordinator_pod = build_coordinator_spec(job_name, cluster, commands, LEAD) | {
        "restartPolicy": "Never"
    }

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
                {"action": "FailJob", "onExitCodes": fatal_exit_codes},
            ]
        },
        **indexed_pod_fields(
            coordinator_pod,
            member_metadata(job_name, "master", cluster.pod("coordinator")),
            cluster,
        ),
    }


def indexed_pod_fields(
    pod_spec: Manifest, pod_metadata: Manifest, cluster: ClusterConfig
) -> Manifest:
    """Return the fields of a JobSpec for one indexed pod."""
    pod_template = {
        "metadata": merge_mappings(pod_metadata, gang.queue_metadata(cluster)),
        "spec": pod_spec | gang.preset_fields("pods", cluster),
    }
    return {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "template": pod_template,
    }


def build_lead_policies(failure_rules: list[Manifest]) -> Manifest:
    """Return the fields of a JobSetSpec that make the JobSet succeed or fail with its
    coordinator."""
    return {
        "network": {"enableDNSHostnames": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [LEAD]},
        "failurePolicy": {"maxRestarts": 0, **({"rules": failure_rules} if failure_rules else {})},
    }
