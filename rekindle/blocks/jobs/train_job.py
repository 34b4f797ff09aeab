"""An elastic TrainJob of Kubeflow Trainer v2, with a TrainingRuntime that adds the coordinator.

A TrainJob sets only the command of its nodes, so each training has its own runtime, applied before
the job. A lost node is replaced after 10 s or more (the Job controller's back-off, which all nodes
share); a crash restarts the container.

Source: Kubeflow Trainer 2.3, trainer.kubeflow.org/v1alpha1.
"""

from argolocal.manifest.object_labels import TRAINER_STEP
from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.job_set import HOST, LEAD, lead_job, lead_policies, worker_job
from rekindle.blocks.jobs.members import count_pods, worker
from rekindle.blocks.pod_settings import OF_WORKFLOW, Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

__all__ = ["FAILURE", "HOST", "runtime", "success", "train_job"]

TRAINER_VERSION = "trainer.kubeflow.org/v1alpha1"
# name of the Job and the container for which Trainer sets PET_NNODES, PET_NODE_RANK,
# PET_MASTER_ADDR, ...
NODE = "node"
# Suspended may be the first condition
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(3))


def success(cluster: ClusterConfig) -> str:
    """Return the condition of success: Complete is the first condition or, in a queue of Kueue,
    follows Suspended."""
    return f"status.conditions.{int(bool(gang.fields('labels', cluster)))}.type == Complete"


def runtime(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """Return the TrainingRuntime of the job `name`: a JobSet of the coordinator and a Job for the
    nodes."""
    pod = worker(name, train, cluster, flags, NODE, HOST.format(name))
    nodes = worker_job(name, pod, cluster, restarts=True)
    jobs = [
        {"name": LEAD, "replicas": 1, "template": {"spec": lead_job(name, cluster, flags)}},
        {
            "name": NODE,
            "replicas": 1,
            "template": {
                "metadata": {"labels": {TRAINER_STEP: "trainer"}},
                "spec": nodes,
            },
        },
    ]

    group_policy = gang.fields("runtime", cluster)
    metadata = gang.queue_metadata(cluster)

    return {
        "apiVersion": TRAINER_VERSION,
        "kind": "TrainingRuntime",
        "metadata": {
            "name": name,
            "labels": OF_WORKFLOW | {"trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            **({"podGroupPolicy": group_policy} if group_policy else {}),
            "template": {
                **({"metadata": metadata} if metadata else {}),
                "spec": {**lead_policies([]), "replicatedJobs": jobs},
            },
        },
    }


def train_job(name: str, train: TrainConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """Return the TrainJob `name` (at most 45 characters, as its pods' names are longer), which uses
    its runtime."""
    counts = count_pods(train, cluster)
    return {
        "apiVersion": TRAINER_VERSION,
        "kind": "TrainJob",
        "metadata": gang.metadata(name, cluster),
        "spec": {
            "runtimeRef": {"name": name, "kind": "TrainingRuntime"},
            "trainer": {"numNodes": counts.pods, "numProcPerNode": counts.workers_per_pod},
        },
    }
