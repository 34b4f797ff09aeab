"""MPI and Horovod: a Launcher that runs `mpirun` on the Workers.

Two operators serve an MPIJob, and a cluster can have one of them: `mpi_job` is v1 of the training operator, which
reaches its workers by `kubectl exec`; `mpi_job_v2` is v2beta1 of the mpi-operator, which reaches them by ssh.

Source: Kubeflow training operator 1.9, MPIJobSpec, mpi/mpijob_controller.go; mpi-operator 0.8, v2beta1/types.go.
"""

from rekindle.blocks.jobs.kubeflow import (
    Replica,
    check_replicas,
    metadata,
    replica_spec,
    role_pod,
    run_policy,
    training_job,
)
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig, PodConfig

IDLE = "trap 'exit 143' TERM; sleep 365d & wait"  # as process 1, a bare `sleep` ignores SIGTERM
MPI_USER = 1000  # `mpiuser` of the mpi-operator's images, whose sshd runs without root
SSH = "/home/mpiuser"


def mpi_job(
    name: str, launcher: Replica, workers: PodConfig, count: int, cluster: ClusterConfig, slots: int = 1
) -> Manifest:
    """Version v1, with `count` workers, which idle until `mpirun` starts a process in them.

    A deleted or drained worker is replaced; one that its node evicts for lack of memory fails the job.
    Not for a namespace that enforces the PodSecurity standard `restricted`: the operator's own init container, which
    brings kubectl, is not hardened. The Launcher runs as the ServiceAccount that the operator creates for it.
    """
    replicas = {"Launcher": launcher, "Worker": Replica(workers, [IDLE], count, ("sh", "-c"))}
    job = training_job("MPIJob", name, replicas, cluster, slotsPerWorker=slots)
    for key in ("serviceAccountName", "automountServiceAccountToken"):
        del job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"][key]
    return job


def mpi_job_v2(
    name: str, launcher: Replica, workers: PodConfig, count: int, cluster: ClusterConfig, slots: int = 1
) -> Manifest:
    """Version v2beta1, of an image made like mpioperator/base: `mpiuser` with an sshd of its own."""
    sshd = Replica(workers, ["-De", "-f", f"{SSH}/.sshd_config"], count, ("/usr/sbin/sshd",))
    check_replicas("MPIJob", name, {"Launcher": launcher, "Worker": sshd})
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata(name, cluster),
        "spec": {
            "slotsPerWorker": slots,
            "sshAuthMountPath": f"{SSH}/.ssh",
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": run_policy(cluster, workers) | {"backoffLimit": 3},
            "mpiReplicaSpecs": {
                "Launcher": replica_spec(
                    1, "OnFailure", launcher.pod, _as_user(role_pod("MPIJob", "Launcher", launcher, cluster))
                ),
                "Worker": replica_spec(count, "Never", workers, _as_user(role_pod("MPIJob", "Worker", sshd, cluster))),
            },
        },
    }


def _as_user(spec: Manifest) -> Manifest:
    """The pod as the user to whom the ssh keys belong; sshd writes its process id beside them."""
    (container,) = spec["containers"]
    user = spec["securityContext"] | {"runAsUser": MPI_USER, "runAsGroup": MPI_USER, "fsGroup": MPI_USER}
    writable = container["securityContext"] | {"readOnlyRootFilesystem": False}
    return spec | {"securityContext": user, "containers": [container | {"securityContext": writable}]}
