"""MPI and Horovod: a Launcher that runs `mpirun` on the Workers.

Two operators serve an MPIJob, and a cluster can have one of them: `mpi_job` is v1 of the training operator, which
reaches its workers by `kubectl exec`; `mpi_job_v2` is v2beta1 of the mpi-operator, which reaches them by ssh.

Source: Kubeflow training operator 1.9, MPIJobSpec, mpi/mpijob_controller.go; mpi-operator 0.8, v2beta1/types.go.
"""

from rekindle.blocks.jobs.replicas import (
    FAILED,
    Framework,
    Replica,
    Role,
    check,
    pod,
    replica,
    run_policy,
    training_job,
)
from rekindle.blocks.jobs.replicas import metadata as named
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig, PodConfig

SUCCESS = "status.replicaStatuses.Launcher.succeeded > 0"
FAILURE = FAILED

MPI_JOB = Framework(
    kind="MPIJob",
    replicas="mpiReplicaSpecs",
    container="mpi",
    # under OnFailure a worker that is deleted fails the job; a Launcher is restarted in place, with its mpirun
    roles={"Launcher": Role(least=1, most=1), "Worker": Role("ExitCode", least=1)},
    lead="Launcher",
)
IDLE = "trap 'exit 143' TERM; sleep 365d & wait"  # a bare `sleep`, as process 1, would not hear of its end
MPI_USER = 1000  # `mpiuser` of the mpi-operator's images, whose sshd runs without root
SSH = "/home/mpiuser"


def mpi_job(
    name: str, launcher: Replica, workers: PodConfig, count: int, cluster: ClusterConfig, slots: int = 1
) -> Manifest:
    """Version v1, with `count` workers, which idle until `mpirun` starts something in them.

    A worker that is deleted or drained is made anew; if its node throws it out for want of memory, the job fails.
    Not for a namespace that enforces the PodSecurity standard `restricted`: the operator's own init container, which
    brings kubectl, is not hardened. The Launcher runs as the ServiceAccount that the operator makes for it.
    """
    replicas = {"Launcher": launcher, "Worker": Replica(workers, [IDLE], count, ("sh", "-c"))}
    job = training_job(MPI_JOB, name, replicas, cluster, slotsPerWorker=slots)
    for key in ("serviceAccountName", "automountServiceAccountToken"):
        del job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"][key]
    return job


def mpi_job_v2(
    name: str, launcher: Replica, workers: PodConfig, count: int, cluster: ClusterConfig, slots: int = 1
) -> Manifest:
    """Version v2beta1, of an image made like mpioperator/base: `mpiuser` with an sshd of its own."""
    sshd = Replica(workers, ["-De", "-f", f"{SSH}/.sshd_config"], count, ("/usr/sbin/sshd",))
    check(MPI_JOB, name, {"Launcher": launcher, "Worker": sshd})
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": named(name, cluster),
        "spec": {
            "slotsPerWorker": slots,
            "sshAuthMountPath": f"{SSH}/.ssh",
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": run_policy(cluster, workers) | {"backoffLimit": 3},
            "mpiReplicaSpecs": {
                "Launcher": replica(1, "OnFailure", _as_user(pod(MPI_JOB, "Launcher", launcher, cluster))),
                "Worker": replica(count, "Never", _as_user(pod(MPI_JOB, "Worker", sshd, cluster))),
            },
        },
    }


def _as_user(spec: Manifest) -> Manifest:
    """The pod as the user to whom the ssh keys belong; sshd writes its process id beside them."""
    (container,) = spec["containers"]
    user = spec["securityContext"] | {"runAsUser": MPI_USER, "runAsGroup": MPI_USER, "fsGroup": MPI_USER}
    writable = container["securityContext"] | {"readOnlyRootFilesystem": False}
    return spec | {"securityContext": user, "containers": [container | {"securityContext": writable}]}
