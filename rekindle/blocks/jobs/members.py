"""The processes of an elastic training, whatever job they run in: one coordinator, and workers that come and go.

host = "demo-train-master-0"                     where the coordinator is found; "" if the operator says it
coordinator(name, cluster, flags, "pytorch")     a PodSpec
worker(name, train, cluster, flags, "pytorch", host)
"""

from argolocal.manifest.names import JOB_NAME, REPLICA_TYPE
from rekindle.blocks import volume
from rekindle.blocks.pod import MOUNTS, OF_WORKFLOW, POD_IP, Manifest, container, image_digest, pod_spec
from rekindle.blocks.pod import metadata as pod_metadata
from rekindle.blocks.pod import volumes as own_volumes
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.errors import ConfigError
from rekindle.training.spec import TrainConfig

# The newest states, which survive the processes of the pod: they count as the pod's memory, as all it has in a tmpfs.
# Without a limit of its own the volume may take what the pod may; the default of /dev/shm would be 64 MB.
SHARED = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
SHARED_MOUNT = {"name": "shared-memory", "mountPath": "/dev/shm"}
KEY = "secret"
METRICS = 9464  # port of the coordinator: what Prometheus may know


def run_secret(name: str) -> Manifest:
    """The Secret of the job `name`, by which its processes know each other; Argo makes its value up.

    Only who may read pods while the pod that applies it exists, and who may read Secrets, can see it.
    """
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "labels": OF_WORKFLOW}}
    return secret | {"type": "Opaque", "data": {KEY: "{{=sprig.b64enc(sprig.randAlphaNum(43))}}"}}


def share(train: TrainConfig, cluster: ClusterConfig) -> int:
    """Workers of a pod: one a GPU. Raises ConfigError if the workers cannot be shared out so."""
    gpus = max(1, cluster.pod("train").gpus)
    for key in ("workers", "max_workers"):
        if (number := getattr(train, key)) % gpus:
            raise ConfigError(
                f"train.{key} is {number}: it must be a multiple of cluster.pods.train.gpus ({gpus}), as each pod "
                f"runs one worker a GPU. Set it to {number - number % gpus or gpus}, or change the GPUs of a pod; "
                "neither changes the result."
            )
    return gpus


def labels(name: str, role: str, pod: PodConfig) -> Manifest:
    """Metadata of a pod that no training operator labels: network rules, metrics and logs find it by these labels."""
    return pod_metadata(pod, OF_WORKFLOW | {JOB_NAME: name, REPLICA_TYPE: role})


def coordinator(name: str, cluster: ClusterConfig, flags: list[str], called: str) -> Manifest:
    """The PodSpec of the coordinator; its container is `called` as the job wants it."""
    pod = cluster.pod("coordinator")
    args = ["-m", "rekindle.training.membership.server", *flags]
    own = {"REKINDLE_DEADLINE": 60 * cluster.pod("train").deadline_minutes, "REKINDLE_METRICS": METRICS}
    env = [*POD_IP, _secret(name), *image_digest(cluster.pod("train").image)]
    env += ({"name": key, "value": str(value)} for key, value in own.items())
    ports = [{"name": "metrics", "containerPort": METRICS}]
    runs = container(called, pod, args, env=env, ports=ports)
    # the operator looks at the job's own deadline only when something happens to a pod: this is what happens then
    return pod_spec(pod, cluster.pod_account, [runs], activeDeadlineSeconds=3600 * cluster.deadline_hours)


def worker(
    name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str], called: str, host: str = ""
) -> Manifest:
    """The PodSpec of a worker pod; `host`: where its coordinator is, unless the job's operator tells the pod."""
    pod, gpus = cluster.pod("train"), share(train, cluster)
    pod = pod.model_copy(update={"cpu": pod.cpu or str(train.threads * gpus)})
    own = {"MASTER_ADDR": host, "PET_NPROC_PER_NODE": str(gpus) if gpus > 1 else ""} if host else {}
    own |= {"REKINDLE_GRACE": str(pod.grace_seconds), "REKINDLE_NOTICE": pod.notice}
    runs = container(
        called,
        pod,
        ["-m", "rekindle.training.launch.launcher", *flags],
        env=[
            *POD_IP,
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            _secret(name),
            *({"name": key, "value": value} for key, value in own.items() if value),
        ],
        volumeMounts=[*MOUNTS, SHARED_MOUNT],
    )
    more = {"volumes": [*own_volumes(pod), SHARED], "terminationGracePeriodSeconds": pod.grace_seconds}
    return volume.cached(pod_spec(pod, cluster.pod_account, [runs], **more), cluster.cache)


def _secret(name: str) -> Manifest:
    return {"name": "REKINDLE_SECRET", "valueFrom": {"secretKeyRef": {"name": name, "key": KEY}}}
