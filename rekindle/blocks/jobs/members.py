"""PodSpecs of the members of an elastic training, for every kind of job: one coordinator, and
workers that may join and leave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from argolocal.manifest.object_labels import JOB_NAME_LABEL, REPLICA_TYPE_LABEL
from argolocal.manifest.training_jobs import JOB_API_VERSION
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
    PROGRAM_MODULES,
    REKINDLE_CREATED,
    REKINDLE_DEADLINE,
    REKINDLE_JOB,
    REKINDLE_METRICS,
    REKINDLE_ON_DEMAND,
    REKINDLE_ON_DEMAND_AFTER,
    REKINDLE_POD_WORKERS,
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
# port of the coordinator's metrics, for Prometheus
METRICS_PORT = 9464
# path of the objects of a job kind in the Kubernetes API, by cluster.backend
JOB_PATHS = {
    "pytorchjob": f"{JOB_API_VERSION}/pytorchjobs",
    "jobset": "jobset.x-k8s.io/v1alpha2/jobsets",
    "trainjob": "trainer.kubeflow.org/v1alpha1/trainjobs",
}
METRICS_PORTS = [{"name": "metrics", "containerPort": METRICS_PORT}]
# role of the workers on on-demand nodes, which replace workers on spot nodes
ON_DEMAND_ROLE = "on-demand"
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def build_run_secret(job_name: str) -> Manifest:
    """Return the Secret by which the processes of the job `job_name` authenticate each other. Argo
    generates the value of this Secret.

    The value of the Secret is visible to users who may read Secrets and, while the pod that applies
    the Secret exists, to users who may read pods.
    """
    secret_manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": job_name, "labels": WORKFLOW_LABEL},
    }

    return secret_manifest | {
        "type": "Opaque",
        "data": {SECRET_FIELD: "{{=sprig.b64enc(sprig.randAlphaNum(43))}}"},
    }


@dataclass(frozen=True)
class MemberCommands:
    """The arguments of `python` in the coordinator and in the workers of an elastic training.
    `secrets`: environment variables of a worker whose values come from Secrets; `created`: template
    tag with the times from which on the job could be created."""

    coordinator: tuple[str, ...]
    worker: tuple[str, ...]
    secrets: tuple[str, ...] = ()
    created: str = ""


def member_commands(
    member_modules: MemberModules,
    step_flags: list[str],
    secret_names: Sequence[str] = (),
    created: str = "",
) -> MemberCommands:
    """Return the commands of an elastic training; all processes of the training get the arguments
    `step_flags`."""
    return MemberCommands(
        coordinator=("-m", member_modules.coordinator, *step_flags),
        worker=("-m", member_modules.launcher, *step_flags),
        secrets=tuple(secret_names),
        created=created,
    )


@dataclass(frozen=True)
class PodCounts:
    """The initial, minimum and maximum number of worker pods of a training, and the number of
    workers per pod (one per GPU)."""

    workers_per_pod: int
    pods: int
    min_pods: int
    max_pods: int


def count_pods(train_config: TrainConfig, cluster: ClusterConfig) -> PodCounts:
    """Return the numbers of pods for `train.workers`, `train.min_workers` and `train.max_workers`.
    Raises ConfigError if a number of workers is not a multiple of the GPUs per pod."""
    gpus_per_pod = max(1, cluster.pod("train").gpus)

    for key in ("workers", "max_workers"):
        worker_count = getattr(train_config, key)
        if worker_count % gpus_per_pod:
            raise ConfigError(
                f"train.{key} is {worker_count}: it must be a multiple of cluster.pods.train.gpus"
                f" ({gpus_per_pod}), as each pod runs one worker per GPU. Set it to"
                f" {worker_count - worker_count % gpus_per_pod or gpus_per_pod}, or change the"
                " GPUs of a pod; neither changes the result."
            )

    return PodCounts(
        workers_per_pod=gpus_per_pod,
        pods=train_config.workers // gpus_per_pod,
        min_pods=ceil(train_config.min_workers / gpus_per_pod),
        max_pods=train_config.max_workers // gpus_per_pod,
    )


def member_metadata(job_name: str, role_name: str, pod_config: PodConfig) -> Manifest:
    """Return the metadata of a pod of an elastic training, with the labels that the training
    operator would set; network policies, metrics and logs select pods by these labels."""
    return pod_metadata(
        pod_config, WORKFLOW_LABEL | {JOB_NAME_LABEL: job_name, REPLICA_TYPE_LABEL: role_name}
    )


def coordinator_variables(member_config: PodConfig, commands: MemberCommands) -> dict[str, str]:
    """Return the environment variables of the coordinator. `member_config`: settings of the pods
    that train."""
    variables = {
        REKINDLE_DEADLINE: str(60 * member_config.deadline_minutes),
        REKINDLE_METRICS: str(METRICS_PORT),
    }
    if commands.created:
        variables[REKINDLE_CREATED] = commands.created
    return variables


def build_coordinator_spec(
    job_name: str, cluster: ClusterConfig, commands: MemberCommands, container_name: str
) -> Manifest:
    """Return the PodSpec of the coordinator. `container_name`: container name that the kind of job
    prescribes."""
    pod_config = cluster.pod("coordinator")
    python_arguments = list(commands.coordinator)
    variables = coordinator_variables(cluster.pod("train"), commands)
    environment_variables = [
        *POD_ADDRESS,
        _secret_variable(job_name),
        *image_variables(cluster.pod("train").image),
    ]
    environment_variables += (
        {"name": key, "value": variable_value} for key, variable_value in variables.items()
    )
    account_fields: Manifest = {}
    if cluster.signal_account:
        job_path = f"{JOB_PATHS[cluster.backend]}/{job_name}"
        environment_variables.append({"name": REKINDLE_JOB, "value": job_path})
        account_fields["automountServiceAccountToken"] = True
        environment_variables += (
            {"name": key, "value": variable_value}
            for key, variable_value in _on_demand_variables(job_name, cluster, commands).items()
        )

    main_container = hardened_container(
        container_name, pod_config, python_arguments, env=environment_variables, ports=METRICS_PORTS
    )

    # The training operator checks the deadline of a job only when one of its pods changes. The
    # coordinator gets the same deadline as the job, because the operator checks the job when the
    # coordinator ends.
    return pod_spec(
        pod_config,
        cluster.signal_account or cluster.pod_account,
        [main_container],
        activeDeadlineSeconds=3600 * cluster.deadline_hours,
        **account_fields,
    )


def name_on_demand_deployment(job_name: str) -> str:
    """Return the name of the Deployment of on-demand workers of the job `job_name`."""
    return f"{job_name}-{ON_DEMAND_ROLE}"


def _on_demand_variables(
    job_name: str, cluster: ClusterConfig, commands: MemberCommands
) -> dict[str, str]:
    """Return the environment variables of a coordinator that scales on-demand workers; {} for
    another coordinator."""
    worker_pod = cluster.pod("train")
    if worker_pod.on_demand_after_minutes is None:
        return {}

    # the pod of a program is one member of the group, whatever its number of GPUs
    is_program = PROGRAM_MODULES.coordinator in commands.coordinator
    workers_per_pod = 1 if is_program else max(1, worker_pod.gpus)
    return {
        REKINDLE_ON_DEMAND: name_on_demand_deployment(job_name),
        REKINDLE_ON_DEMAND_AFTER: str(60 * worker_pod.on_demand_after_minutes),
        REKINDLE_POD_WORKERS: str(workers_per_pod),
    }


def build_worker_spec(
    job_name: str,
    train_config: TrainConfig,
    cluster: ClusterConfig,
    commands: MemberCommands,
    container_name: str,
    coordinator_host: str = "",
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Manifest:
    """Return the PodSpec of a worker. `coordinator_host`: host name of the coordinator; empty if
    the operator of the job sets it in the workers. `variables`: environment variables of a worker
    outside of the job."""
    pod_config = cluster.pod("train")
    gpus_per_pod = count_pods(train_config, cluster).workers_per_pod
    pod_config = pod_config.model_copy(
        update={"cpu": pod_config.cpu or str(train_config.threads * gpus_per_pod)}
    )

    if coordinator_host:
        variables = {
            "MASTER_ADDR": coordinator_host,
            "PET_NPROC_PER_NODE": str(gpus_per_pod) if gpus_per_pod > 1 else "",
            **variables,
        }
    return build_member_spec(job_name, pod_config, cluster, commands, container_name, variables)


def build_member_spec(
    job_name: str,
    pod_config: PodConfig,
    cluster: ClusterConfig,
    commands: MemberCommands,
    container_name: str,
    variables: Mapping[str, str],
    **container_fields: object,
) -> Manifest:
    """Return the PodSpec of a coordinator or worker. `variables`: environment variables that only
    this member needs."""
    main_container = hardened_container(
        container_name,
        pod_config,
        list(commands.worker),
        env=[
            *POD_ADDRESS,
            {"name": POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            _secret_variable(job_name),
            *(
                {"name": key, "value": variable_value}
                for key, variable_value in variables.items()
                if variable_value
            ),
            *shutdown_variables(pod_config),
            *secret_variables(commands.secrets),
        ],
        volumeMounts=[*TMP_MOUNTS, SHARED_MOUNT],
        **container_fields,
    )

    pod_fields = {
        "volumes": [*pod_volumes(pod_config), SHARED_MEMORY],
        "terminationGracePeriodSeconds": pod_config.grace_seconds,
    }
    return volume.mount_cache(
        pod_spec(pod_config, cluster.pod_account, [main_container], **pod_fields), cluster.cache
    )


def _secret_variable(job_name: str) -> Manifest:
    return {
        "name": REKINDLE_SECRET,
        "valueFrom": {"secretKeyRef": {"name": job_name, "key": SECRET_FIELD}},
    }
