"""A PyTorchJob whose Master is the coordinator and whose Workers come and go.

Source: Kubeflow training operator 1.9, PyTorchJobSpec and its status.
"""

from rekindle.blocks import volume
from rekindle.blocks.jobs.kubeflow import metadata, replica_spec, run_policy
from rekindle.blocks.pod import MOUNTS, OF_WORKFLOW, POD_IP, Manifest, container, image_digest, pod_spec
from rekindle.blocks.pod import volumes as own_volumes
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError
from rekindle.training.spec import TrainConfig

SUCCESS = "status.replicaStatuses.Master.succeeded > 0"

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


def pytorch_job(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """The job `name` (at most 53 characters: its pods' names are longer); every process is given `flags`, and the
    Secret of that name.

    The Master's exit code is the job's: 0 done, 1-127 failed for good, 128 and above (a signal, a drain) starts it
    again. Workers are started again whatever they end with, for the coordinator decides what cannot go on. A pod with
    several GPUs runs a worker on each. Raises ConfigError if the workers cannot be shared out so.
    """
    share = max(1, cluster.pod("train").gpus)
    for key in ("workers", "max_workers"):
        if (number := getattr(train, key)) % share:
            raise ConfigError(
                f"train.{key} is {number}: it must be a multiple of cluster.pods.train.gpus ({share}), as each pod "
                f"runs one worker a GPU. Set it to {number - number % share or share}, or change the GPUs of a pod; "
                "neither changes the result."
            )
    least = -(-train.min_workers // share)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(name, cluster),
        "spec": {
            "runPolicy": run_policy(cluster, cluster.pod("train"), least + 1)  # and the coordinator
            | {"activeDeadlineSeconds": 3600 * cluster.deadline_hours},  # its own counts only while workers train
            **({"nprocPerNode": str(share)} if share > 1 else {}),
            "elasticPolicy": {"minReplicas": least, "maxReplicas": train.max_workers // share},
            "pytorchReplicaSpecs": {
                "Master": replica_spec(1, "ExitCode", cluster.pod("coordinator"), _coordinator(name, cluster, flags)),
                "Worker": replica_spec(
                    train.workers // share, "OnFailure", cluster.pod("train"), _worker(name, train, cluster, flags)
                ),
            },
        },
    }


def _secret(name: str) -> Manifest:
    return {"name": "REKINDLE_SECRET", "valueFrom": {"secretKeyRef": {"name": name, "key": KEY}}}


def _coordinator(name: str, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    pod = cluster.pod("coordinator")
    args = ["-m", "rekindle.training.membership.server", *flags]
    own = {"REKINDLE_DEADLINE": 60 * cluster.pod("train").deadline_minutes, "REKINDLE_METRICS": METRICS}
    env = [*POD_IP, _secret(name), *image_digest(cluster.pod("train").image)]
    env += ({"name": key, "value": str(value)} for key, value in own.items())
    ports = [{"name": "metrics", "containerPort": METRICS}]
    coordinator = container("pytorch", pod, args, env=env, ports=ports)
    # the operator looks at the job's own deadline only when something happens to a pod: this is what happens then
    return pod_spec(pod, cluster.pod_account, [coordinator], activeDeadlineSeconds=3600 * cluster.deadline_hours)


def _worker(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    pod = cluster.pod("train")
    pod = pod.model_copy(update={"cpu": pod.cpu or str(train.threads * max(1, pod.gpus))})
    pod_name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    cache = volume.cache(cluster.cache)
    notice = [{"name": "REKINDLE_NOTICE", "value": pod.notice}] if pod.notice else []
    worker = container(
        "pytorch",
        pod,
        ["-m", "rekindle.training.launch.launcher", *flags],
        env=[
            *POD_IP,
            pod_name,
            _secret(name),
            {"name": "REKINDLE_GRACE", "value": str(pod.grace_seconds)},
            *notice,
            *cache.env,
        ],
        volumeMounts=[*MOUNTS, SHARED_MOUNT, *cache.mounts],
    )
    volumes = [*own_volumes(pod), SHARED, *cache.volumes]
    grace = pod.grace_seconds
    return pod_spec(pod, cluster.pod_account, [worker], volumes=volumes, terminationGracePeriodSeconds=grace)
