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
from argolocal.manifest.training_jobs import JOB_VERSION, JOBS, REMOVED_KINDS
from rekindle.blocks import pod_settings as pods
from rekindle.blocks.jobs import gang
from rekindle.blocks.pod_settings import Manifest, hardened_container, pod_spec
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.errors import ConfigError, did_you_mean

# The condition Failed has one of the indices 1 to 4 in `status.conditions`, because Created comes
# first, and Running and Restarting are never present at the same time.
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(1, 5))
# a shell with a trap, because `sleep` as process 1 would ignore SIGTERM
IDLE_COMMAND = f"trap 'exit {exit_codes.TERMINATED}' TERM; sleep 365d & wait"
RESTARTS_PER_POD = 10  # maximum average number of container restarts per pod


@dataclass(frozen=True)
class Replica:
    """`count` pods that run `python ARGS` with the settings of `pod`."""

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
    is_idle: bool = False  # True: the pods wait until the leader starts processes in them
    has_account: bool = True  # False: the operator creates the ServiceAccount of the pods


@dataclass(frozen=True)
class Framework:
    """The roles of one kind of job, and its condition of success."""

    roles: Mapping[str, Role]
    success: str = "status.completionTime"
    # Roles whose programs end by themselves; a job needs at least one of them. The first pod of the
    # first such role leads the other pods.
    completing_roles: tuple[str, ...] = ("Worker",)


FRAMEWORKS = {
    # Containers find each other through TF_CONFIG. The job completes when the Chief completes.
    # Without a Chief, it completes with worker 0 or, if successPolicy is "AllWorkers", with all
    # workers. A deleted worker (a drain, a preemption) fails the job; with
    # enableDynamicWorker=True, workers may join and leave, and TF_CONFIG lists only the worker
    # itself and the parameter servers.
    "TFJob": Framework(
        {"Chief": Role(max_pods=1), "Worker": Role(), "PS": Role(), "Evaluator": Role(max_pods=1)},
        completing_roles=("Chief", "Worker"),
    ),
    # XGBoost and LightGBM: MASTER_ADDR and MASTER_PORT are the address of the tracker, RANK and
    # WORLD_SIZE describe the process. The Master is rank 0 and also trains. The restart policy is
    # ExitCode, because with every other policy a lost pod fails the job.
    "XGBoostJob": Framework(
        {"Master": Role("ExitCode", min_pods=1, max_pods=1), "Worker": Role("ExitCode")},
        success="status.replicaStatuses.Master.succeeded > 0",
        completing_roles=("Master", "Worker"),
    ),
    # Without a Master, the workers train collectively. With a Master, it acts as a parameter
    # server. Containers run `-m paddle.distributed.launch`, which reads PADDLE_MASTER,
    # PADDLE_NNODES and PADDLE_JOB_ID.
    "PaddleJob": Framework({"Master": Role(max_pods=1), "Worker": Role(min_pods=1)}),
    # All processes are equal, and worker 0 coordinates them. Each process calls
    # jax.distributed.initialize(f"{COORDINATOR_ADDRESS}:{COORDINATOR_PORT}", NUM_PROCESSES,
    # PROCESS_ID).
    "JAXJob": Framework({"Worker": Role(min_pods=1)}),
    # The Launcher runs `mpirun` on the Workers through `kubectl exec`. With ExitCode, a deleted or
    # drained worker is replaced (with OnFailure, the job would fail). If a node evicts a worker for
    # lack of memory, the job fails. An MPIJob cannot run in a namespace that enforces the
    # PodSecurity standard `restricted`: the operator's init container violates it.
    "MPIJob": Framework(
        {
            "Launcher": Role(min_pods=1, max_pods=1, has_account=False),
            "Worker": Role("ExitCode", min_pods=1, is_idle=True),
        },
        success="status.replicaStatuses.Launcher.succeeded > 0",
        completing_roles=("Launcher",),
    ),
}


def training_job(
    kind: str, name: str, replicas: Mapping[str, Replica], cluster: ClusterConfig, **spec: object
) -> Manifest:
    """Return the job `name`, which has at most 50 characters, because the names of its pods are
    longer. `spec`: additional fields of the job's spec.

    Raises ConfigError for a kind that the operator no longer supports, an unknown role, or a wrong
    number of pods.
    """
    check_replicas(kind, name, replicas)
    framework = FRAMEWORKS[kind]

    specs = {
        role: replica_spec(
            replica.count,
            framework.roles[role].restart_policy,
            replica.pod,
            role_pod(kind, role, replica, cluster),
        )
        for role, replica in replicas.items()
    }

    workers = replicas.get("Worker") or next(iter(replicas.values()))
    restart_limit = RESTARTS_PER_POD * sum(replica.count for replica in replicas.values())

    return {
        "apiVersion": JOB_VERSION,
        "kind": kind,
        "metadata": gang.job_metadata(name, cluster),
        "spec": {
            "runPolicy": run_policy(cluster, workers.pod) | {"backoffLimit": restart_limit},
            JOBS[kind].replicas_field: specs,
            **spec,
        },
    }


def check_replicas(kind: str, name: str, replicas: Mapping[str, Replica]) -> None:
    """Raise ConfigError if the operator would reject the job, or if the job could never
    complete."""
    job = f"{kind} {name}"
    if kind in REMOVED_KINDS:
        raise ConfigError(f"{job}: {REMOVED_KINDS[kind]}.")

    framework = FRAMEWORKS[kind]
    for role in replicas.keys() - framework.roles.keys():
        hint = (
            did_you_mean(role, set(framework.roles)) or f" Its roles: {', '.join(framework.roles)}."
        )
        raise ConfigError(f"{job} has no role {role}.{hint}")

    for role, rule in framework.roles.items():
        count = replicas[role].count if role in replicas else 0
        if not rule.min_pods <= count <= rule.max_pods:
            if rule.min_pods == rule.max_pods:
                limits = f"{rule.min_pods}"
            else:
                limits = f"at least {rule.min_pods} and at most {rule.max_pods}"

            raise ConfigError(f"{job} has {count} {role}: there must be {limits}.")

    if not replicas.keys() & set(framework.completing_roles):
        roles = " nor a ".join(framework.completing_roles)
        raise ConfigError(f"{job} has neither a {roles}: it would never complete. Add one.")


def role_pod(kind: str, role: str, replica: Replica, cluster: ClusterConfig) -> Manifest:
    """Return the PodSpec of a role's pods."""
    job = JOBS[kind]

    if role in job.leader_roles:
        config = replica.pod.on_demand()
    else:
        config = replica.pod

    main = hardened_container(job.container_name, config, replica.args)
    if FRAMEWORKS[kind].roles[role].is_idle:
        main["command"] = ["sh", "-c"]
        main["args"] = [IDLE_COMMAND]

    pod = pod_spec(
        config, cluster.pod_account, [main], terminationGracePeriodSeconds=config.grace_seconds
    )
    return omit_account(kind, role, pod)


def omit_account(kind: str, role: str, pod: Manifest) -> Manifest:
    """Return a PodSpec; remove its ServiceAccount if the operator creates one for this role."""
    if FRAMEWORKS[kind].roles[role].has_account:
        return pod

    omitted_fields = ("serviceAccountName", "automountServiceAccountToken")
    return {field: value for field, value in pod.items() if field not in omitted_fields}


def replica_spec(count: int, restart_policy: str, config: PodConfig, pod: Manifest) -> Manifest:
    """Return the ReplicaSpec of one role."""
    return {
        "replicas": count,
        "restartPolicy": restart_policy,
        "template": {"metadata": pods.pod_metadata(config), "spec": pod},
    }


def run_policy(cluster: ClusterConfig, workers: PodConfig, min_pods: int | None = None) -> Manifest:
    """Return the RunPolicy of a job. `min_pods`: number of pods that suffice for gang scheduling to
    start an elastic job.

    The deadline of the job is only a safeguard, because the workflow itself has a deadline.
    """
    policy = gang.preset_fields("policy", cluster, workers.priority_class)
    if min_pods:
        policy = {"minAvailable": min_pods, **policy}

    return {
        "cleanPodPolicy": "Running",
        "activeDeadlineSeconds": 60 * workers.deadline_minutes,
        **({"schedulingPolicy": policy} if policy else {}),
    }
