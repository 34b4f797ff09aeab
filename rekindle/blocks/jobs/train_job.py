"""Kubeflow Trainer v2: a TrainingRuntime says what a training pod is, a TrainJob runs one training on it.

    kubectl apply the runtime once:  training_runtime("torch", cluster.pod("train"), cluster)
    a resource template each run:    train_job("{{workflow.name}}-train", "torch", args, cluster, nodes=4)

The number of nodes is fixed: v2 has no elastic jobs (yet), and all of them must end well. Preemptions restart a node
and are not counted. For training that goes on while nodes are away, use pytorch_job.

Source: Kubeflow Trainer 2.3, trainer.kubeflow.org/v1alpha1, and JobSet's status.
"""

from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.job import POLICY
from rekindle.blocks.jobs.kubeflow import metadata
from rekindle.blocks.pod import Manifest, container, pod_spec
from rekindle.blocks.pod import metadata as pod_metadata
from rekindle.blocks.settings import ClusterConfig, PodConfig

SUCCESS = "status.jobsStatus.0.succeeded > 0"  # the one Job of our runtime
# Suspended may come first; only what holds is added, but Suspended stays when it no longer does
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(3))

API = "trainer.kubeflow.org/v1alpha1"
NODE = "node"  # the Job and the container into which Trainer puts PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...
RESTARTS = 100  # crashes of all nodes together; preemptions and drains do not count


def training_runtime(name: str, pod: PodConfig, cluster: ClusterConfig, cluster_wide: bool = False) -> Manifest:
    """What a training pod of PyTorch is: image, resources, nodes, security; for one namespace or for all."""
    runs = container(NODE, pod, [])
    template = pod_spec(
        pod,
        cluster.pod_account,
        [runs],
        labels={},
        restartPolicy="Never",
        terminationGracePeriodSeconds=pod.grace_seconds,
        **gang.pods(cluster),
    )
    rules = [
        rule | {"onExitCodes": rule["onExitCodes"] | {"containerName": NODE}} if "onExitCodes" in rule else rule
        for rule in POLICY
    ]
    nodes = {
        "backoffLimit": RESTARTS,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": pod_metadata(pod, {}), "spec": template},
    }
    step = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": nodes}
    together, queued = gang.runtime(cluster), gang.queued(cluster)
    return {
        "apiVersion": API,
        "kind": "ClusterTrainingRuntime" if cluster_wide else "TrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            **({"podGroupPolicy": together} if together else {}),
            "template": {
                **({"metadata": queued} if queued else {}),
                "spec": {"replicatedJobs": [{"name": NODE, "template": step}]},
            },
        },
    }


def train_job(
    name: str, runtime: str, args: list[str], cluster: ClusterConfig, nodes: int, cluster_wide: bool = False
) -> Manifest:
    """`python ARGS` on `nodes` nodes of `runtime`; elastic options go into ARGS, PET_* names are Trainer's own."""
    pod = cluster.pod("train")
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": metadata(name, cluster),
        "spec": {
            "runtimeRef": {"name": runtime, "kind": "ClusterTrainingRuntime" if cluster_wide else "TrainingRuntime"},
            "activeDeadlineSeconds": 60 * pod.deadline_minutes,
            "trainer": {
                "numNodes": nodes,
                "numProcPerNode": max(1, pod.gpus),
                "image": pod.image,
                "command": ["python"],
                "args": args,
            },
        },
    }
