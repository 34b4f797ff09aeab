"""Job kinds of Kubeflow's training operator: the requirements of its webhook, and its defaults.

Source: Kubeflow training operator 1.9: KIND_types.go, KIND_webhook.go and KIND_controller.go of each.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class JobKind:
    """A job kind."""

    replicas: str  # key of its roles in `spec`
    container: str  # name of its container
    roles: tuple[str, ...]  # the operator's replica types
    port: tuple[str, int]  # name and default of the port that its pods connect to
    leaders: tuple[str, ...] = ()  # the first existing one decides how the job ends; if none exists, the workers do
    single: tuple[str, ...] = ()  # roles whose `replicas` must be given as 1
    needed: tuple[str, ...] = ()  # required roles
    restart: str = "Never"  # default restartPolicy
    named: bool = True  # the operator rejects a container with another name


JOBS = {
    "PyTorchJob": JobKind(
        "pytorchReplicaSpecs",
        "pytorch",
        ("Master", "Worker"),
        ("pytorchjob-port", 23456),
        leaders=("Master",),
        single=("Master",),
        restart="OnFailure",
    ),
    "TFJob": JobKind(
        "tfReplicaSpecs",
        "tensorflow",
        ("Chief", "Master", "Worker", "PS", "Evaluator"),
        ("tfjob-port", 2222),
        leaders=("Chief", "Master"),
    ),
    "XGBoostJob": JobKind(
        "xgbReplicaSpecs",
        "xgboost",
        ("Master", "Worker"),
        ("xgboostjob-port", 9999),
        leaders=("Master",),
        single=("Master",),
        needed=("Master",),
    ),
    "PaddleJob": JobKind(
        "paddleReplicaSpecs",
        "paddle",
        ("Master", "Worker"),
        ("master", 36543),
        leaders=("Master",),
        restart="OnFailure",
    ),
    "JAXJob": JobKind("jaxReplicaSpecs", "jax", ("Worker",), ("jaxjob-port", 6666), needed=("Worker",)),
    "MPIJob": JobKind(
        "mpiReplicaSpecs",
        "mpi",
        ("Launcher", "Worker"),
        ("", 0),
        leaders=("Launcher",),
        single=("Launcher",),
        needed=("Launcher",),
        named=False,
    ),
}
REMOVED = {"MXJob": "the training operator dropped it in 1.9, as Apache MXNet is retired: train with a PyTorchJob"}
