"""A Deployment of workers that join the workers of a job, with the labels of the job's pods.

Source: the fields are defined by Kubernetes (apps/v1, DeploymentSpec).
"""

from collections.abc import Mapping

from argolocal.manifest.object_labels import JOB_NAME_LABEL, REPLICA_TYPE_LABEL
from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.members import MemberCommands, build_worker_spec, member_metadata
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

DEPLOYMENT_KIND = "deployment"


def build_worker_deployment(
    job_name: str,
    deployment_name: str,
    role: str,
    replicas: int,
    train_config: TrainConfig,
    cluster: ClusterConfig,
    commands: MemberCommands,
    coordinator_host: str,
    variables: Mapping[str, str],
) -> Manifest:
    """Return the Deployment. `cluster`: settings in which `cluster.pods.train` and
    `cluster.queue_priority` are those of these workers; `coordinator_host`: host name of the
    coordinator, with {0} in place of the job's name."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": gang.job_metadata(deployment_name, cluster),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {JOB_NAME_LABEL: job_name, REPLICA_TYPE_LABEL: role}},
            "revisionHistoryLimit": 0,
            "template": {
                "metadata": member_metadata(job_name, role, cluster.pod("train")),
                "spec": build_worker_spec(
                    job_name,
                    train_config,
                    cluster,
                    commands,
                    "worker",
                    coordinator_host.format(job_name),
                    variables,
                ),
            },
        },
    }
