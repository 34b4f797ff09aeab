"""A PyTorchJob whose Master is the coordinator and whose Workers come and go.

Source: Kubeflow training operator 1.9, PyTorchJobSpec and its status.
"""

from pipelines.blocks.cluster import ClusterConfig
from pipelines.blocks.pod import Manifest, container, pod_spec
from steps.training.config import TrainConfig

# Conditions are appended, Running and Restarting replace each other, Created is the first: Failed is one of 1..4.
SUCCESS = "status.replicaStatuses.Master.succeeded > 0"
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(1, 5))

NODE_LOST = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
]


def pytorch_job(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """The job `name` (at most 53 characters: its pods' names are longer); every process is given `flags`.

    The Master's exit code is the job's: 0 done, 1-127 failed for good, 128 and above (a signal, a drain) starts it
    again. Workers are started again whatever they end with, for the coordinator decides what cannot go on.
    """
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
            "elasticPolicy": {"minReplicas": train.min_workers, "maxReplicas": train.max_workers},
            "pytorchReplicaSpecs": {
                "Master": _replicas(1, "ExitCode", _coordinator(cluster, flags)),
                "Worker": _replicas(train.workers, "OnFailure", _worker(train, cluster, flags)),
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
    pod = pod.model_copy(update={"cpu": pod.cpu or str(train.threads)})
    worker = container("pytorch", pod, ["-m", "steps", "train", *flags])
    # 60 s to leave in order; 30 s until a lost node's worker is replaced (the cluster's default is 300)
    return pod_spec(pod, cluster.pod_account, [worker], terminationGracePeriodSeconds=60, tolerations=NODE_LOST)
