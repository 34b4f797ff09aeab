"""An elastic PyTorchJob: the Master is the coordinator, Workers may join and leave.

Source: the fields and the status are defined by Kubeflow training operator 1.9 (PyTorchJobSpec).
"""

from argolocal.manifest.training_jobs import JOB_API_VERSION
from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.kubeflow import build_replica_spec, build_run_policy
from rekindle.blocks.jobs.members import (
    MemberCommands,
    build_coordinator_spec,
    build_worker_spec,
    count_pods,
)
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

SUCCESS = "status.replicaStatuses.Master.succeeded > 0"
# host name of the coordinator, with {0} for the job's name
COORDINATOR_HOST = "{0}-master-0"


def build_pytorch_job(
    job_name: str, train_config: TrainConfig, cluster: ClusterConfig, commands: MemberCommands
) -> Manifest:
    """Return the job `job_name`. The name has at most 53 characters, because the names of the pods
    are longer. All pods run `commands` and share the Secret `job_name`.

    The exit code of the Master decides: with 0, the job completes; with 1 to 127, the job fails;
    from 128 on (a signal, a drain), the Master is restarted. The training operator always restarts
    workers, because the coordinator decides when the run fails. A pod with several GPUs runs one
    worker per GPU. Raises ConfigError if the numbers of workers are not multiples of the number of
    GPUs per pod.
    """
    pod_counts = count_pods(train_config, cluster)
    master_pod = build_coordinator_spec(job_name, cluster, commands, "pytorch")
    worker_pod = build_worker_spec(job_name, train_config, cluster, commands, "pytorch")

    # add one pod for the coordinator
    run_policy = build_run_policy(cluster, cluster.pod("train"), pod_counts.min_pods + 1)
    # The job gets the deadline of the whole workflow. The coordinator enforces the time limit of
    # one attempt, which excludes the time that pods wait for nodes.
    run_policy["activeDeadlineSeconds"] = 3600 * cluster.deadline_hours

    processes_per_pod = {}
    if pod_counts.workers_per_pod > 1:
        processes_per_pod["nprocPerNode"] = str(pod_counts.workers_per_pod)

    return {
        "apiVersion": JOB_API_VERSION,
        "kind": "PyTorchJob",
        "metadata": gang.job_metadata(job_name, cluster),
        "spec": {
            "runPolicy": run_policy,
            **processes_per_pod,
            "elasticPolicy": {
                "minReplicas": pod_counts.min_pods,
                "maxReplicas": pod_counts.max_pods,
            },
            "pytorchReplicaSpecs": {
                "Master": build_replica_spec(1, "ExitCode", cluster.pod("coordinator"), master_pod),
                "Worker": build_replica_spec(
                    pod_counts.pods, "OnFailure", cluster.pod("train"), worker_pod
                ),
            },
        },
    }
