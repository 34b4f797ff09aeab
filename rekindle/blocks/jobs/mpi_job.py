"""MPI and Horovod: a Launcher that runs `mpirun` on the Workers, which it reaches by `kubectl exec`.

Source: Kubeflow training operator 1.9, MPIJobSpec, mpi/mpijob_controller.go.
"""

from rekindle.blocks.jobs.kubeflow import Replica, training_job
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig, PodConfig

IDLE = "trap 'exit 143' TERM; sleep 365d & wait"  # as process 1, a bare `sleep` ignores SIGTERM


def mpi_job(
    name: str, launcher: Replica, workers: PodConfig, count: int, cluster: ClusterConfig, slots: int = 1
) -> Manifest:
    """`count` workers, which idle until `mpirun` starts a process in them.

    A deleted or drained worker is replaced; one that its node evicts for lack of memory fails the job.
    Not for a namespace that enforces the PodSecurity standard `restricted`: the operator's own init container, which
    brings kubectl, is not hardened. The Launcher runs as the ServiceAccount that the operator creates for it.
    """
    replicas = {"Launcher": launcher, "Worker": Replica(workers, [IDLE], count, ("sh", "-c"))}
    job = training_job("MPIJob", name, replicas, cluster, slotsPerWorker=slots)
    for key in ("serviceAccountName", "automountServiceAccountToken"):
        del job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"][key]
    return job
