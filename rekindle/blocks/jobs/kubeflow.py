"""Jobs of Kubeflow's training operator: replicas by role. `FRAMEWORKS` has what differs between the kinds.

    train = cluster.pod("train")
    workers = Replica(train, ["-m", "shop.train"], count=4)
    job = training_job("TFJob", "{{workflow.name}}-train", {"Worker": workers}, cluster)
    apply("train", job, success=FRAMEWORKS["TFJob"].success, failure=FAILURE, owned=True, retry=retries(5))

Source: Kubeflow training operator 1.9: common_types.go, common/job.go, common/pod.go, core/status.go, util/status.go,
and of each kind KIND_types.go and KIND_controller.go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from argolocal.manifest.training_jobs import JOBS, REMOVED
from rekindle.blocks import pod as pods
from rekindle.blocks.jobs import gang
from rekindle.blocks.pod import Manifest, container, pod_spec
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.errors import ConfigError, did_you_mean

# Conditions are appended, Running and Restarting replace each other, Created is the first: Failed is one of 1..4.
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(1, 5))
IDLE = "trap 'exit 143' TERM; sleep 365d & wait"  # as process 1, a bare `sleep` ignores SIGTERM
RESTARTS = 10  # restarts in place per pod, on average, until the job fails


@dataclass(frozen=True)
class Replica:
    """`count` pods that run `python ARGS`, with the image, resources and nodes of `pod`."""

    pod: PodConfig
    args: list[str]
    count: int = 1


class Role(NamedTuple):
    """How many pods a role may have, and the restart policy.

    OnFailure: the kubelet restarts the container, the operator replaces evicted pods. ExitCode: codes 1-127 fail the
    job, 128 and above (a signal, a drain) replace the pod.
    """

    restart: str = "OnFailure"
    least: int = 0
    most: int = 1000
    idles: bool = False  # until the leader starts processes in its pods
    account: bool = True  # False: the operator makes one for its pods


@dataclass(frozen=True)
class Framework:
    """How one kind of job is built. Its leading pod never runs on preemptible nodes."""

    roles: Mapping[str, Role]
    success: str = "status.completionTime"
    ended_by: tuple[str, ...] = ()  # roles of which a job needs one, or it never completes


FRAMEWORKS = {
    # Containers find each other in TF_CONFIG. Complete when the Chief is; without one, when worker 0 is, or with the
    # spec field successPolicy="AllWorkers" every worker. A deleted worker (a drain, a preemption with notice) fails the
    # job; with enableDynamicWorker=True workers come and go, and each knows only itself and the parameter servers.
    "TFJob": Framework(
        {"Chief": Role(most=1), "Worker": Role(), "PS": Role(), "Evaluator": Role(most=1)},
        ended_by=("Chief", "Worker"),
    ),
    # XGBoost and LightGBM: MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE name the tracker. The Master is rank 0 and
    # trains too. ExitCode, since under any other policy a lost pod fails the job.
    "XGBoostJob": Framework(
        {"Master": Role("ExitCode", least=1, most=1), "Worker": Role("ExitCode")},
        success="status.replicaStatuses.Master.succeeded > 0",
    ),
    # Workers alone train collectively, with a Master it is a parameter server. Containers run
    # `-m paddle.distributed.launch`, which reads PADDLE_MASTER, PADDLE_NNODES and PADDLE_JOB_ID.
    "PaddleJob": Framework({"Master": Role(most=1), "Worker": Role(least=1)}),
    # Equal processes, of which worker 0 coordinates. Each calls
    # jax.distributed.initialize(f"{COORDINATOR_ADDRESS}:{COORDINATOR_PORT}", NUM_PROCESSES, PROCESS_ID).
    "JAXJob": Framework({"Worker": Role(least=1)}),
    # The Launcher runs `mpirun` on the Workers, which it reaches by `kubectl exec`. A deleted or drained worker is
    # replaced (under OnFailure it would fail the job); one that its node evicts for lack of memory fails the job. Not
    # for a namespace that enforces the PodSecurity standard `restricted`: the operator's own init container, which
    # brings kubectl, is not hardened.
    "MPIJob": Framework(
        {"Launcher": Role(least=1, most=1, account=False), "Worker": Role("ExitCode", least=1, idles=True)},
        success="status.replicaStatuses.Launcher.succeeded > 0",
    ),
}


def training_job(
    kind: str, name: str, replicas: Mapping[str, Replica], cluster: ClusterConfig, **spec: Any
) -> Manifest:
    """The job `name` (at most 50 characters: its pods' names are longer); `spec`: further fields of the kind's spec.

    Raises ConfigError for a kind that no operator serves, an unknown role, or a wrong number of pods.
    """
    check_replicas(kind, name, replicas)
    framework = FRAMEWORKS[kind]
    specs = {
        role: replica_spec(
            replica.count, framework.roles[role].restart, replica.pod, role_pod(kind, role, replica, cluster)
        )
        for role, replica in replicas.items()
    }
    workers = replicas.get("Worker") or next(iter(replicas.values()))
    limit = RESTARTS * sum(replica.count for replica in replicas.values())
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": kind,
        "metadata": gang.metadata(name, cluster),
        "spec": {
            "runPolicy": run_policy(cluster, workers.pod) | {"backoffLimit": limit},
            JOBS[kind].replicas: specs,
            **spec,
        },
    }


def check_replicas(kind: str, name: str, replicas: Mapping[str, Replica]) -> None:
    """Raises ConfigError for what the operator would refuse, or never finish."""
    job = f"{kind} {name}"
    if kind in REMOVED:
        raise ConfigError(f"{job}: {REMOVED[kind]}.")
    framework = FRAMEWORKS[kind]
    for role in replicas.keys() - framework.roles.keys():
        known = f" It has {', '.join(framework.roles)}."
        raise ConfigError(f"{job} has no role {role}.{did_you_mean(role, set(framework.roles)) or known}")
    for role, rule in framework.roles.items():
        count = replicas[role].count if role in replicas else 0
        if not rule.least <= count <= rule.most:
            limits = f"{rule.least}" if rule.least == rule.most else f"at least {rule.least} and at most {rule.most}"
            raise ConfigError(f"{job} has {count} {role}: there must be {limits}.")
    if framework.ended_by and not replicas.keys() & set(framework.ended_by):
        neither = " nor a ".join(framework.ended_by)
        raise ConfigError(f"{job} has neither a {neither}: nothing would end it. Give it one.")


def role_pod(kind: str, role: str, replica: Replica, cluster: ClusterConfig) -> Manifest:
    """The PodSpec of a role's pods."""
    job, rule = JOBS[kind], FRAMEWORKS[kind].roles[role]
    config = replica.pod.steady() if role in job.leaders else replica.pod
    main = container(job.container, config, replica.args)
    main |= {"command": ["sh", "-c"], "args": [IDLE]} if rule.idles else {}
    pod = pod_spec(config, cluster.pod_account, [main], terminationGracePeriodSeconds=config.grace_seconds)
    own = () if rule.account else ("serviceAccountName", "automountServiceAccountToken")
    return {field: value for field, value in pod.items() if field not in own}


def replica_spec(count: int, restart: str, config: PodConfig, pod: Manifest) -> Manifest:
    """One entry of a job's replica specs."""
    return {"replicas": count, "restartPolicy": restart, "template": {"metadata": pods.metadata(config), "spec": pod}}


def run_policy(cluster: ClusterConfig, workers: PodConfig, least: int | None = None) -> Manifest:
    """What ends a job. Its deadline is only a backstop: the workflow has its own."""
    # with `least` pods an elastic job begins; without it the operator waits for all
    policy = {"minAvailable": least} if least else {}
    policy |= gang.fields("policy", cluster, workers.priority_class)
    return {
        "cleanPodPolicy": "Running",
        "activeDeadlineSeconds": 60 * workers.deadline_minutes,
        **({"schedulingPolicy": policy} if policy else {}),
    }
