"""The job kinds of Kubeflow's training operator, with the requirements of its webhook and its
defaults.

Source: Kubeflow training operator 1.9: KIND_types.go, KIND_webhook.go and KIND_controller.go of
each kind.
"""

from dataclasses import dataclass

JOB_VERSION = "kubeflow.org/v1"  # apiVersion of all kinds of training jobs


@dataclass(frozen=True)
class JobKind:
    """A kind of training job."""

    replicas_field: str  # key of the job's roles in `spec`
    container_name: str  # name of the training container of each pod
    roles: tuple[str, ...]  # names of the operator's replica types
    port: tuple[str, int]  # name and default number of the port that pods connect to
    # the first of these roles that exists in a job decides whether the job succeeds; default: the
    # workers
    leader_roles: tuple[str, ...] = ()
    single_roles: tuple[str, ...] = ()  # roles that must have `replicas: 1`
    required_roles: tuple[str, ...] = ()
    restart_policy: str = "Never"
    # True if the operator requires the training container to have `container_name`
    requires_container_name: bool = True


JOBS = {
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


def pod_name(job: str, role: str, index: int = 0) -> str:
    """Return the name of a pod, which is also the host name of its Service."""
    name = f"{job}-{role.lower()}"
    if role == "Launcher":
        return name
    return f"{name}-{index}"
