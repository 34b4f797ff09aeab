"""JAX: equal processes, of which worker 0 coordinates.

Source: Kubeflow training operator 1.9, JAXJobSpec, jax/jaxjob_controller.go and envvar.go.
"""

from rekindle.blocks.jobs.replicas import FAILED, Framework, Replica, Role, training_job
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig

SUCCESS = "status.completionTime"  # when every worker has succeeded
FAILURE = FAILED

JAX_JOB = Framework(kind="JAXJob", replicas="jaxReplicaSpecs", container="jax", roles={"Worker": Role(least=1)})


def jax_job(name: str, workers: Replica, cluster: ClusterConfig) -> Manifest:
    """Each calls jax.distributed.initialize(f"{COORDINATOR_ADDRESS}:{COORDINATOR_PORT}", NUM_PROCESSES, PROCESS_ID)."""
    return training_job(JAX_JOB, name, {"Worker": workers}, cluster)
