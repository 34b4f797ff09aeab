"""A PyTorchJob whose Master is the coordinator and whose Workers come and go.

Source: Kubeflow training operator 1.9, PyTorchJobSpec and its status.
"""

from pipelines.blocks.cluster import ClusterConfig
from pipelines.blocks.pod import MOUNTS, POD_IP, VOLUMES, Manifest, container, pod_spec
from steps.errors import ConfigError
from steps.training.config import TrainConfig

# Conditions are appended, Running and Restarting replace each other, Created is the first: Failed is one of 1..4.
SUCCESS = "status.replicaStatuses.Master.succeeded > 0"
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(1, 5))

GRACE = 60  # seconds in which a worker leaves in order; it is told how many
# 30 s until a lost node's worker is replaced; the cluster's default is 300
NODE_LOST = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
]
# The newest states, which survive the processes of the pod: they count as the pod's memory, as all it has in a tmpfs.
# Without a limit of its own the volume may take what the pod may; the default of /dev/shm would be 64 MB.
SHARED = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
SHARED_MOUNT = {"name": "shared-memory", "mountPath": "/dev/shm"}


def pytorch_job(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """The job `name` (at most 53 characters: its pods' names are longer); every process is given `flags`.

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
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": {"workflows.argoproj.io/workflow": "{{workflow.name}}"}},
        "spec": {
            # a backstop only: the workflow has a deadline of its own
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "activeDeadlineSeconds": 60 * cluster.pod("train").deadline_minutes,
            },
            **({"nprocPerNode": str(share)} if share > 1 else {}),
            "elasticPolicy": {"minReplicas": -(-train.min_workers // share), "maxReplicas": train.max_workers // share},
            "pytorchReplicaSpecs": {
                "Master": _replicas(1, "ExitCode", _coordinator(cluster, flags)),
                "Worker": _replicas(train.workers // share, "OnFailure", _worker(train, cluster, flags)),
            },
        },
    }


def _replicas(count: int, restart: str, pod: Manifest) -> Manifest:
    labels = {"workflows.argoproj.io/workflow": "{{workflow.name}}"}  # `argo logs` finds the pods by it
    return {"replicas": count, "restartPolicy": restart, "template": {"metadata": {"labels": labels}, "spec": pod}}


def _coordinator(cluster: ClusterConfig, flags: list[str]) -> Manifest:
    pod = cluster.pod("coordinator")
    return pod_spec(pod, cluster.pod_account, [container("pytorch", pod, ["-m", "steps.training.coordinator", *flags])])


def _worker(train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    pod = cluster.pod("train")
    pod = pod.model_copy(update={"cpu": pod.cpu or str(train.threads * max(1, pod.gpus))})
    name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    worker = container(
        "pytorch",
        pod,
        ["-m", "steps.training.launcher", *flags],
        env=[*POD_IP, name, {"name": "REKINDLE_GRACE", "value": str(GRACE)}],
        volumeMounts=[*MOUNTS, SHARED_MOUNT],
    )
    return pod_spec(
        pod,
        cluster.pod_account,
        [worker],
        volumes=[*VOLUMES, SHARED],
        terminationGracePeriodSeconds=GRACE,
        tolerations=NODE_LOST,
    )
