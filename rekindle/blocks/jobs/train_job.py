"""An elastic TrainJob of Kubeflow Trainer v2, with a TrainingRuntime that adds the coordinator.

A TrainJob can set only the command of its nodes, so each training has its own TrainingRuntime,
which is applied before the job. The Job controller replaces a lost node after 10 s or more (the
controller's back-off counts the failures of all nodes); the kubelet restarts a crashed container.

Source: the fields are defined by Kubeflow Trainer 2.3 (trainer.kubeflow.org/v1alpha1).
"""

from argolocal.manifest.object_labels import TRAINER_STEP_LABEL
from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.job_set import (
    COORDINATOR_HOST,
    LEAD,
    build_lead_job,
    build_lead_policies,
    build_worker_job,
)
from rekindle.blocks.jobs.members import MemberCommands, build_worker_spec, count_pods
from rekindle.blocks.pod_settings import WORKFLOW_LABEL, Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

__all__ = ["COORDINATOR_HOST", "FAILURE", "success_condition", "train_job", "training_runtime"]

TRAINER_VERSION = "trainer.kubeflow.org/v1alpha1"
# name of the Job for the nodes, and of the Job's container, in which Trainer sets PET_NNODES,
# PET_NODE_RANK, PET_MASTER_ADDR, ...
NODE_ROLE = "node"
# other conditions, such as Suspended, may precede the condition Failed
FAILURE = tuple(f"status.conditions.{i}.type == Failed" for i in range(3))


def success_condition(cluster: ClusterConfig) -> str:
    """Return the condition of success, which is Complete. Complete is the first condition of a
    TrainJob or, in a queue of Kueue, the second one, after Suspended."""
    return f"status.conditions.{int(bool(gang.preset_fields('labels', cluster)))}.type == Complete"


def training_runtime(
    job_name: str, train_config: TrainConfig, cluster: ClusterConfig, commands: MemberCommands
) -> Manifest:
    """Return the TrainingRuntime of the job `job_name`: a JobSet with a Job for the coordinator and
    a Job for the nodes."""
    worker_pod = build_worker_spec(
        job_name, train_config, cluster, commands, NODE_ROLE, COORDINATOR_HOST.format(job_name)
    )
    node_job_spec = build_worker_job(job_name, worker_pod, cluster, is_restarted=True)
    replicated_jobs = [
        {
            "name": LEAD,
            "replicas": 1,
            "template": {"spec": build_lead_job(job_name, cluster, commands)},
        },
        {
            "name": NODE_ROLE,
            "replicas": 1,
            "template": {
                "metadata": {"labels": {TRAINER_STEP_LABEL: "trainer"}},
                "spec": node_job_spec,
            },
        },
    ]

    group_policy = gang.preset_fields("runtime", cluster)
    metadata = gang.queue_metadata(cluster)

    return {
        "apiVersion": TRAINER_VERSION,
        "kind": "TrainingRuntime",
        "metadata": {
            "name": job_name,
            "labels": WORKFLOW_LABEL | {"trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            **({"podGroupPolicy": group_policy} if group_policy else {}),
            "template": {
                **({"metadata": metadata} if metadata else {}),
                "spec": {**build_lead_policies([]), "replicatedJobs": replicated_jobs},
            },
        },
    }


def train_job(
    job_name: str, train_config: TrainConfig, cluster: ClusterConfig, commands: MemberCommands
) -> Manifest:
    """Return the TrainJob `job_name`, which uses the TrainingRuntime of the same name. The name has
    at most 45 characters, because the names of the pods are longer."""
    pod_counts = count_pods(train_config, cluster)
    return {
        "apiVersion": TRAINER_VERSION,
        "kind": "TrainJob",
        "metadata": gang.job_metadata(job_name, cluster),
        "spec": {
            "runtimeRef": {"name": job_name, "kind": "TrainingRuntime"},
            "trainer": {"numNodes": pod_counts.pods, "numProcPerNode": pod_counts.workers_per_pod},
        },
    }
