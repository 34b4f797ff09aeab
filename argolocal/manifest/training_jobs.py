"""The kinds of job of Kubeflow's training operator: what its webhook asks of them, and what it adds.

Source: Kubeflow training operator 1.9: KIND_types.go, KIND_webhook.go and KIND_controller.go of each.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class JobKind:
    """One kind; its roles are what the operator calls replica types."""

    replicas: str  # the key of its roles in `spec`
    container: str  # the name of its container
    roles: tuple[str, ...]
    port: tuple[str, int]  # name and default, by which its pods find each other
    leaders: tuple[str, ...] = ()  # the job ends as the first of these that it has; without one, as its workers
    single: tuple[str, ...] = ()  # roles of exactly one pod, which the webhook requires to be explicit
    needed: tuple[str, ...] = ()
    restart: str = "Never"  # default restartPolicy
    named: bool = True  # the operator refuses a container of another name


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
GONE = {"MXJob": "the training operator dropped it in 1.9, as Apache MXNet is retired: train with a PyTorchJob"}
