"""An elastic PyTorchJob: the Master is the coordinator, Workers may join and leave.

Source: the fields and the status are defined by Kubeflow training operator 1.9 (PyTorchJobSpec).
"""

from argolocal.manifest.training_jobs import JOB_VERSION
from rekindle.blocks.jobs import gang
from rekindle.blocks.jobs.kubeflow import replica_spec, run_policy
from rekindle.blocks.jobs.members import MemberCommands, coordinator_spec, count_pods, worker_spec
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.training.spec import TrainConfig

SUCCESS = "status.replicaStatuses.Master.succeeded > 0"
HOST = "{0}-master-0"  # host name of the coordinator


def pytorch_job(
    name: str, train: TrainConfig, cluster: ClusterConfig, commands: MemberCommands
) -> Manifest:
    """Return the job `name`, which has at most 53 characters, because the names of its pods are
    longer. All pods run `commands` and share the Secret `name`.

    The exit code of the Master decides: with 0, the job completes; with 1 to 127, it fails; from
    128 on (a signal, a drain), the Master is restarted. The operator always restarts workers,
    because the coordinator decides when the run fails. A pod with several GPUs runs one worker per
    GPU. Raises ConfigError if the numbers of workers are not multiples of the number of GPUs per
    pod.
    """
    counts = count_pods(train, cluster)
    master_pod = coordinator_spec(name, cluster, commands, "pytorch")
    worker_pod = worker_spec(name, train, cluster, commands, "pytorch")

    # one more pod, for the coordinator
    policy = run_policy(cluster, cluster.pod("train"), counts.min_pods + 1)
    # The deadline of the workflow, not of an attempt. The coordinator enforces the time limit of an
    # attempt, which excludes the time that pods wait for nodes.
    policy["activeDeadlineSeconds"] = 3600 * cluster.deadline_hours

    processes = {}
    if counts.workers_per_pod > 1:
        processes["nprocPerNode"] = str(counts.workers_per_pod)

    return {
        "apiVersion": JOB_VERSION,
        "kind": "PyTorchJob",
        "metadata": gang.job_metadata(name, cluster),
        "spec": {
            "runPolicy": policy,
            **processes,
            "elasticPolicy": {"minReplicas": counts.min_pods, "maxReplicas": counts.max_pods},
            "pytorchReplicaSpecs": {
                "Master": replica_spec(1, "ExitCode", cluster.pod("coordinator"), master_pod),
                "Worker": replica_spec(counts.pods, "OnFailure", cluster.pod("train"), worker_pod),
            },
        },
    }
