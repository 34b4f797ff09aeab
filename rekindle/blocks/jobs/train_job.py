"""A TrainJob of Kubeflow Trainer v2 whose workers come and go, on a TrainingRuntime that brings the coordinator.

A TrainJob tells only its nodes what to run, so each training has a runtime of its own, applied before it. A lost node
is replaced after 10 s and more (the Job controller's waits, which its nodes share); a crash restarts in its pod.

Source: Kubeflow Trainer 2.3, trainer.kubeflow.org/v1alpha1.
"""

from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.job_set import HOST, LEAD, OFTEN, ended_by_lead, lead_job, one_pod
from rekindle.blocks.jobs.members import labels, share, worker
from rekindle.blocks.pod import OF_WORKFLOW, Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

__all__ = ["FAILURE", "HOST", "runtime", "success", "train_job"]

API = "trainer.kubeflow.org/v1alpha1"
NODE = "node"  # the Job and the container into which Trainer puts PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(3))  # Suspended may come first


def success(cluster: ClusterConfig) -> str:
    """A job that Kueue held back has the condition Suspended before its last one; another one has only that."""
    return f"status.conditions.{int(bool(gang.fields('labels', cluster)))}.type == Complete"


def runtime(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """The TrainingRuntime of the job `name`: a JobSet of the coordinator and one Job whose pods are the nodes."""
    pod = worker(name, train, cluster, flags, NODE, HOST.format(name)) | {"restartPolicy": "OnFailure"}
    nodes = {"backoffLimit": OFTEN, **one_pod(pod, labels(name, "worker", cluster.pod("train")), cluster)}
    jobs = [
        {"name": LEAD, "replicas": 1, "template": {"spec": lead_job(name, cluster, flags)}},
        {
            "name": NODE,
            "replicas": 1,
            "template": {
                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                "spec": nodes,
            },
        },
    ]
    together, queued = gang.fields("runtime", cluster), gang.queued(cluster)
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": OF_WORKFLOW | {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            **({"podGroupPolicy": together} if together else {}),
            "template": {
                **({"metadata": queued} if queued else {}),
                "spec": {**ended_by_lead([]), "replicatedJobs": jobs},
            },
        },
    }


def train_job(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """The job `name` (at most 45 characters) on its runtime; as `pytorch_job.pytorch_job`."""
    gpus = share(train, cluster)
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": gang.metadata(name, cluster),
        "spec": {
            "runtimeRef": {"name": name, "kind": "TrainingRuntime"},
            "trainer": {"numNodes": train.workers // gpus, "numProcPerNode": gpus},
        },
    }
