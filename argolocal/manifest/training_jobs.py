"""The kinds of training jobs of Kubeflow's training operator, with the operator's defaults and the
rules of its webhook.

The rules follow KIND_types.go, KIND_webhook.go and KIND_controller.go of each kind in Kubeflow
training operator 1.9.
"""

from dataclasses import dataclass

# apiVersion of all kinds of training jobs
JOB_API_VERSION = "kubeflow.org/v1"


@dataclass(frozen=True)
class JobKind:
    """A kind of training job."""

    # field of `spec` that contains the job's roles
    replicas_field: str
    # name of the training container of each pod
    container_name: str
    # names of the kind's replica types
    roles: tuple[str, ...]
    # name and default number of the port that the pods use to connect to each other
    port: tuple[str, int]
    # The first of the `leader_roles` that the job contains decides whether the job succeeds. If the
    # tuple is empty, the workers decide.
    leader_roles: tuple[str, ...] = ()
    # roles of the training job that must have `replicas: 1`
    single_roles: tuple[str, ...] = ()
    required_roles: tuple[str, ...] = ()
    restart_policy: str = "Never"
    # True if the operator requires a container with the name `container_name`
    requires_container_name: bool = True


JOB_KINDS = {
    "PyTorchJob": JobKind(
        "pytorchReplicaSpecs",
        "pytorch",
        ("Master", "Worker"),
        ("pytorchjob-port", 23456),
        leader_roles=("Master",),
        single_roles=("Master",),
        restart_policy="OnFailure",
    ),
    "TFJob": JobKind(
        "tfReplicaSpecs",
        "tensorflow",
        ("Chief", "Master", "Worker", "PS", "Evaluator"),
        ("tfjob-port", 2222),
        leader_roles=("Chief", "Master"),
    ),
    "XGBoostJob": JobKind(
        "xgbReplicaSpecs",
        "xgboost",
        ("Master", "Worker"),
        ("xgboostjob-port", 9999),
        leader_roles=("Master",),
        single_roles=("Master",),
        required_roles=("Master",),
    ),
    "PaddleJob": JobKind(
        "paddleReplicaSpecs",
        "paddle",
        ("Master", "Worker"),
        ("master", 36543),
        leader_roles=("Master",),
        restart_policy="OnFailure",
    ),
    "JAXJob": JobKind(
        "jaxReplicaSpecs", "jax", ("Worker",), ("jaxjob-port", 6666), required_roles=("Worker",)
    ),
    "MPIJob": JobKind(
        "mpiReplicaSpecs",
        "mpi",
        ("Launcher", "Worker"),
        ("", 0),
        leader_roles=("Launcher",),
        single_roles=("Launcher",),
        required_roles=("Launcher",),
        requires_container_name=False,
    ),
}
REMOVED_KINDS = {
    "MXJob": (
        "the training operator dropped MXJob in 1.9, as Apache MXNet is retired: train with a"
        " PyTorchJob"
    )
}


def make_pod_name(job_name: str, role: str, replica_index: int = 0) -> str:
    """Return the name of a job's pod. The pod's Service has the same name as the pod, which is also
    its host name."""
    name = f"{job_name}-{role.lower()}"
    if role == "Launcher":
        return name
    return f"{name}-{replica_index}"
