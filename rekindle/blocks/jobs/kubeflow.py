"""Jobs of Kubeflow's training operator: replicas by role. `FRAMEWORKS` lists the differences
between the kinds of jobs.

Source: the fields, roles and conditions are defined by Kubeflow training operator 1.9, in
common_types.go, common/job.go, common/pod.go, core/status.go, util/status.go, and for each kind in
KIND_types.go and KIND_controller.go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from argolocal.common import exit_codes
from argolocal.manifest.training_jobs import JOB_API_VERSION, JOB_KINDS, REMOVED_KINDS
from rekindle.blocks import pod_settings as pods
from rekindle.blocks.jobs import gang
from rekindle.blocks.pod_settings import Manifest, hardened_container, pod_spec
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.errors import ConfigError, suggest_similar

# The condition Failed has one of the indices 1 to 4 in `status.conditions`, because Created comes
# first, and other conditions, such as Running, may come before Failed.
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(1, 5))
# a shell with a trap, because `sleep` as process 1 would ignore SIGTERM
IDLE_COMMAND = f"trap 'exit {exit_codes.TERMINATED}' TERM; sleep 365d & wait"
# maximum average number of container restarts per pod
RESTARTS_PER_POD = 10


@dataclass(frozen=True)
class Replica:
    """A role of a job, with `count` pods that run `python ARGS` with the settings of `pod`."""

    pod: PodConfig
    args: list[str]
    count: int = 1


class Role(NamedTuple):
    """The allowed number of pods in a role, and their restart policy.

    With OnFailure, the kubelet restarts the container, and the operator replaces evicted pods.
    With ExitCode, an exit code from 1 to 127 fails the job; with a code from 128 on (a signal, a
    drain), the pod is replaced.
    """

    restart_policy: str = "OnFailure"
    min_pods: int = 0
    max_pods: int = 1000
    # True if the pods only wait until the leading pod starts processes in them
    is_idle: bool = False
    # False if the operator creates the ServiceAccount of the pods
    has_account: bool = True


@dataclass(frozen=True)
class Framework:
    """The roles of one kind of job, and its condition of success."""

    roles: Mapping[str, Role]
    success: str = "status.completionTime"
    # roles whose programs end by themselves; a job needs at least one of them; the first pod of the
    # first such role leads the other pods
    completing_roles: tuple[str, ...] = ("Worker",)


FRAMEWORKS = {
    # Containers of a TFJob find each other through TF_CONFIG. A TFJob completes when its Chief
    # completes. Without a Chief, a TFJob completes with worker 0 or, if successPolicy is
    # "AllWorkers", with all workers. A deleted worker (a drain, a preemption) fails the TFJob; with
    # enableDynamicWorker=True, workers may join and leave, and TF_CONFIG lists only the worker
    # itself and the parameter servers.
    "TFJob": Framework(
        {"Chief": Role(max_pods=1), "Worker": Role(), "PS": Role(), "Evaluator": Role(max_pods=1)},
        completing_roles=("Chief", "Worker"),
    ),
    # An XGBoostJob runs XGBoost or LightGBM. MASTER_ADDR and MASTER_PORT are the address of the
    # tracker, RANK and WORLD_SIZE describe the process. The Master of an XGBoostJob is rank 0 and
    # also trains. The restart policy is ExitCode, because with every other policy a lost pod fails
    # the job.
    "XGBoostJob": Framework(
        {"Master": Role("ExitCode", min_pods=1, max_pods=1), "Worker": Role("ExitCode")},
        success="status.replicaStatuses.Master.succeeded > 0",
        completing_roles=("Master", "Worker"),
    ),
    # Without a Master, the workers of a PaddleJob train collectively. The Master of a PaddleJob, if
    # there is one, acts as a parameter server. Containers run `-m paddle.distributed.launch`, which
    # reads PADDLE_MASTER, PADDLE_NNODES and PADDLE_JOB_ID.
    "PaddleJob": Framework({"Master": Role(max_pods=1), "Worker": Role(min_pods=1)}),
    # All processes of a JAXJob run the same program, and worker 0 coordinates them. Each process of
    # a JAXJob calls jax.distributed.initialize(f"{COORDINATOR_ADDRESS}:{COORDINATOR_PORT}",
    # NUM_PROCESSES, PROCESS_ID).
    "JAXJob": Framework({"Worker": Role(min_pods=1)}),
    # The Launcher runs `mpirun` on the Workers through `kubectl exec`. With the restart policy
    # ExitCode, a deleted or drained worker of an MPIJob is replaced (with OnFailure, the MPIJob
    # would fail). If a node evicts a worker for lack of memory, the MPIJob fails. An MPIJob cannot
    # run in a namespace that enforces the PodSecurity standard `restricted`: the operator's init
    # container violates it.
    "MPIJob": Framework(
        {
            "Launcher": Role(min_pods=1, max_pods=1, has_account=False),
            "Worker": Role("ExitCode", min_pods=1, is_idle=True),
        },
        success="status.replicaStatuses.Launcher.succeeded > 0",
        completing_roles=("Launcher",),
    ),
}


def build_training_job(
    job_kind: str,
    job_name: str,
    replicas: Mapping[str, Replica],
    cluster: ClusterConfig,
    **more_spec_fields: object,
) -> Manifest:
    """Return the training job `job_name`. The name has at most 50 characters, because the names of
    the pods are longer. `more_spec_fields`: additional fields of the job's spec.

    Raises ConfigError for a kind that the operator no longer supports, an unknown role, or a wrong
    number of pods.
    """
    check_replicas(job_kind, job_name, replicas)
    framework = FRAMEWORKS[job_kind]

    replica_specs = {
        role: build_replica_spec(
            replica.count,
            framework.roles[role].restart_policy,
            replica.pod,
            build_role_pod(job_kind, role, replica, cluster),
        )
        for role, replica in replicas.items()
    }

    worker_replica = replicas.get("Worker") or next(iter(replicas.values()))
    restart_limit = RESTARTS_PER_POD * sum(replica.count for replica in replicas.values())

    return {
        "apiVersion": JOB_API_VERSION,
        "kind": job_kind,
        "metadata": gang.job_metadata(job_name, cluster),
        "spec": {
            "runPolicy": build_run_policy(cluster, worker_replica.pod)
            | {"backoffLimit": restart_limit},
            JOB_KINDS[job_kind].replicas_field: replica_specs,
            **more_spec_fields,
        },
    }


def check_replicas(job_kind: str, job_name: str, replicas: Mapping[str, Replica]) -> None:
    """Raise ConfigError if the operator would reject the job, or if the job could never
    complete."""
    job_title = f"{job_kind} {job_name}"
    if job_kind in REMOVED_KINDS:
        raise ConfigError(f"{job_title}: {REMOVED_KINDS[job_kind]}.")

    framework = FRAMEWORKS[job_kind]
    for role in replicas.keys() - framework.roles.keys():
        hint = (
            suggest_similar(role, set(framework.roles))
            or f" Its roles: {', '.join(framework.roles)}."
        )
        raise ConfigError(f"{job_title} has no role {role}.{hint}")

    for role, role_limits in framework.roles.items():
        pod_count = replicas[role].count if role in replicas else 0
        if not role_limits.min_pods <= pod_count <= role_limits.max_pods:
            if role_limits.min_pods == role_limits.max_pods:
                allowed_counts = f"{role_limits.min_pods}"
            else:
                allowed_counts = (
                    f"at least {role_limits.min_pods} and at most {role_limits.max_pods}"
                )

            raise ConfigError(
                f"{job_title} has {pod_count} {role}: there must be {allowed_counts}."
            )

    if not replicas.keys() & set(framework.completing_roles):
        completing_roles = " nor a ".join(framework.completing_roles)
        raise ConfigError(
            f"{job_title} has neither a {completing_roles}: it would never complete. Add one."
        )


def build_role_pod(job_kind: str, role: str, replica: Replica, cluster: ClusterConfig) -> Manifest:
    """Return the PodSpec of a role's pods."""
    job_description = JOB_KINDS[job_kind]

    if role in job_description.leader_roles:
        pod_config = replica.pod.on_demand()
    else:
        pod_config = replica.pod

    main_container = hardened_container(job_description.container_name, pod_config, replica.args)
    if FRAMEWORKS[job_kind].roles[role].is_idle:
        main_container["command"] = ["sh", "-c"]
        main_container["args"] = [IDLE_COMMAND]

    pod_manifest = pod_spec(
        pod_config,
        cluster.pod_account,
        [main_container],
        terminationGracePeriodSeconds=pod_config.grace_seconds,
    )
    return omit_account(job_kind, role, pod_manifest)


def omit_account(job_kind: str, role: str, pod_manifest: Manifest) -> Manifest:
    """Return the PodSpec without its ServiceAccount if the operator creates one for this role."""
    if FRAMEWORKS[job_kind].roles[role].has_account:
        return pod_manifest

    omitted_fields = ("serviceAccountName", "automountServiceAccountToken")
    return {
        field_name: value
        for field_name, value in pod_manifest.items()
        if field_name not in omitted_fields
    }


def build_replica_spec(
    pod_count: int, restart_policy: str, pod_config: PodConfig, pod_manifest: Manifest
) -> Manifest:
    """Return the ReplicaSpec of one role."""
    return {
        "replicas": pod_count,
        "restartPolicy": restart_policy,
        "template": {"metadata": pods.pod_metadata(pod_config), "spec": pod_manifest},
    }


def build_run_policy(
    cluster: ClusterConfig, worker_config: PodConfig, min_pods: int | None = None
) -> Manifest:
    """Return the RunPolicy of a job. `min_pods`: number of pods that suffice for gang scheduling to
    start an elastic job.

    The deadline of the job is only a safeguard, because the workflow itself has a deadline.
    """
    gang_policy = gang.preset_fields("policy", cluster, worker_config.priority_class)
    if min_pods:
        gang_policy = {"minAvailable": min_pods, **gang_policy}

    return {
        "cleanPodPolicy": "Running",
        "activeDeadlineSeconds": 60 * worker_config.deadline_minutes,
        **({"schedulingPolicy": gang_policy} if gang_policy else {}),
    }
