"""PodSpecs of the members of an elastic training, for every kind of job: one coordinator, and
workers that may join and leave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from argolocal.manifest.object_labels import JOB_NAME, REPLICA_TYPE
from rekindle.blocks import volume
from rekindle.blocks.pod_settings import (
    POD_ADDRESS,
    TMP_MOUNTS,
    WORKFLOW_LABEL,
    Manifest,
    hardened_container,
    image_variables,
    pod_spec,
    secret_variables,
    shutdown_variables,
)
from rekindle.blocks.pod_settings import pod_metadata as pod_metadata
from rekindle.blocks.pod_settings import tmp_volumes as pod_volumes
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.errors import ConfigError
from rekindle.kubernetes_names import (
    POD_NAME,
    REKINDLE_DEADLINE,
    REKINDLE_METRICS,
    REKINDLE_SECRET,
    MemberModules,
)
from rekindle.training.spec import TrainConfig

# The volume of the snapshots in memory, which survive restarts of the pod's processes. The volume
# is a tmpfs without a size limit, so it may use all memory of the pod. The default /dev/shm has
# only 64 MB.
SHARED_MEMORY = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
SHARED_MOUNT = {"name": "shared-memory", "mountPath": "/dev/shm"}
SECRET_FIELD = "secret"
METRICS_PORT = 9464  # port of the coordinator's metrics, for Prometheus
METRICS_PORTS = [{"name": "metrics", "containerPort": METRICS_PORT}]


def run_secret(name: str) -> Manifest:
    """Return the Secret by which the processes of the job `name` authenticate each other. Argo
    generates its value.

    The value is visible to users who may read Secrets and, while the pod that applies the Secret
    exists, to users who may read pods.
    """
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": WORKFLOW_LABEL},
    }

    return secret | {
        "type": "Opaque",
        "data": {SECRET_FIELD: "{{=sprig.b64enc(sprig.randAlphaNum(43))}}"},
    }


@dataclass(frozen=True)
class MemberCommands:
    """The arguments of `python` in the two kinds of pods. `secrets`: environment variables of a
    worker whose values come from Secrets."""

    coordinator: tuple[str, ...]
    worker: tuple[str, ...]
    secrets: tuple[str, ...] = ()


def member_commands(
    modules: MemberModules, flags: list[str], secrets: Sequence[str] = ()
) -> MemberCommands:
    """Return the commands of a training; all its processes get the arguments `flags`."""
    return MemberCommands(
        coordinator=("-m", modules.coordinator, *flags),
        worker=("-m", modules.launcher, *flags),
        secrets=tuple(secrets),
    )


@dataclass(frozen=True)
class PodCounts:
    """The initial, minimum and maximum number of worker pods of a training, and the number of
    workers per pod (one per GPU)."""

    workers_per_pod: int
    pods: int
    min_pods: int
    max_pods: int


def count_pods(train: TrainConfig, cluster: ClusterConfig) -> PodCounts:
    """Return the numbers of pods for `train.workers`, `train.min_workers` and `train.max_workers`.
    Raises ConfigError if a number of workers is not a multiple of the GPUs per pod."""
    gpus = max(1, cluster.pod("train").gpus)

    for key in ("workers", "max_workers"):
        number = getattr(train, key)
        if number % gpus:
            raise ConfigError(
                f"train.{key} is {number}: it must be a multiple of cluster.pods.train.gpus"
                f" ({gpus}), as each pod runs one worker per GPU. Set it to"
                f" {number - number % gpus or gpus}, or change the GPUs of a pod; neither changes"
                " the result."
            )

    return PodCounts(
        workers_per_pod=gpus,
        pods=train.workers // gpus,
        min_pods=ceil(train.min_workers / gpus),
        max_pods=train.max_workers // gpus,
    )


def member_metadata(name: str, role: str, pod: PodConfig) -> Manifest:
    """Return the metadata of a pod, with the labels that the training operator would set; network
    policies, metrics and logs select pods by these labels."""
    return pod_metadata(pod, WORKFLOW_LABEL | {JOB_NAME: name, REPLICA_TYPE: role})


def coordinator_variables(pod: PodConfig) -> dict[str, str]:
    """Return the environment variables of the coordinator; `pod`: pod of the members."""
    return {
        REKINDLE_DEADLINE: str(60 * pod.deadline_minutes),
        REKINDLE_METRICS: str(METRICS_PORT),
    }


def coordinator_spec(
    name: str, cluster: ClusterConfig, commands: MemberCommands, container_name: str
) -> Manifest:
    """Return the PodSpec of the coordinator. `container_name`: container name that the kind of job
    prescribes."""
    pod = cluster.pod("coordinator")
    args = list(commands.coordinator)
    variables = coordinator_variables(cluster.pod("train"))
    env = [*POD_ADDRESS, _secret_variable(name), *image_variables(cluster.pod("train").image)]
    env += ({"name": key, "value": value} for key, value in variables.items())
    main = hardened_container(container_name, pod, args, env=env, ports=METRICS_PORTS)

    # The operator checks the deadline of the job only when a pod changes. This pod gets the same
    # deadline, so that its end triggers the check.
    return pod_spec(
        pod, cluster.pod_account, [main], activeDeadlineSeconds=3600 * cluster.deadline_hours
    )


def worker_spec(
    name: str,
    train: TrainConfig,
    cluster: ClusterConfig,
    commands: MemberCommands,
    container_name: str,
    host: str = "",
) -> Manifest:
    """Return the PodSpec of a worker. `host`: host name of the coordinator; empty if the operator
    of the job sets it in the workers."""
    pod = cluster.pod("train")
    gpus = count_pods(train, cluster).workers_per_pod
    pod = pod.model_copy(update={"cpu": pod.cpu or str(train.threads * gpus)})

    if host:
        variables = {"MASTER_ADDR": host, "PET_NPROC_PER_NODE": str(gpus) if gpus > 1 else ""}
    else:
        variables = {}
    return member_spec(name, pod, cluster, commands, container_name, variables)


def member_spec(
    name: str,
    pod: PodConfig,
    cluster: ClusterConfig,
    commands: MemberCommands,
    container_name: str,
    variables: Mapping[str, str],
    **container_fields: object,
) -> Manifest:
    """Return the PodSpec of a member of the group. `variables`: environment variables that only
    this member needs."""
    main = hardened_container(
        container_name,
        pod,
        list(commands.worker),
        env=[
            *POD_ADDRESS,
            {"name": POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            _secret_variable(name),
            *({"name": key, "value": value} for key, value in variables.items() if value),
            *shutdown_variables(pod),
            *secret_variables(commands.secrets),
        ],
        volumeMounts=[*TMP_MOUNTS, SHARED_MOUNT],
        **container_fields,
    )

    pod_fields = {
        "volumes": [*pod_volumes(pod), SHARED_MEMORY],
        "terminationGracePeriodSeconds": pod.grace_seconds,
    }
    return volume.mount_cache(
        pod_spec(pod, cluster.pod_account, [main], **pod_fields), cluster.cache
    )


def _secret_variable(name: str) -> Manifest:
    return {
        "name": REKINDLE_SECRET,
        "valueFrom": {"secretKeyRef": {"name": name, "key": SECRET_FIELD}},
    }
