"""Differences between the training operator's kinds of jobs: when a job ends, and the environment
of its pods.

The rules for the jobs are from Kubeflow training operator 1.9, in KIND_types.go, pytorch/envvar.go,
elastic.go, tensorflow/tensorflow.go, xgboost/xgboost.go, paddlepaddle/envvar.go, jax/envvar.go and
mpi/mpijob_controller.go.
"""

import re
from collections.abc import Callable

from argolocal.common.environment import WHOLE_NUMBER
from argolocal.common.json_text import to_json
from argolocal.manifest import training_jobs
from argolocal.manifest.training_jobs import JOB_KINDS
from argolocal.manifest.types import Object

# function that returns the address of a pod, given its name
GetAddress = Callable[[str], str]
# directory of an MPIJob's files in the pod of the job's Launcher
MPI_MOUNT_PATH = "/etc/mpi"


def get_replica_specs(training_job: Object) -> Object:
    return training_job["spec"].get(JOB_KINDS[training_job["kind"]].replicas_field) or {}


def count_replicas(training_job: Object, role: str) -> int:
    return get_replica_specs(training_job)[role].get(
        "replicas", 0 if (training_job["kind"], role) == ("MPIJob", "Worker") else 1
    )


def make_pod_name(training_job: Object, role: str, index: int = 0) -> str:
    return training_jobs.make_pod_name(training_job["metadata"]["name"], role, index)


def map_pods_to_roles(training_job: Object) -> dict[str, tuple[str, int]]:
    """Return the role and index of each pod, by pod name."""
    role_indices = [
        (role, index)
        for role in get_replica_specs(training_job)
        for index in range(count_replicas(training_job, role))
    ]
    return {make_pod_name(training_job, role, index): (role, index) for role, index in role_indices}


def get_leading_role(training_job: Object) -> str:
    """Return the role that decides when a job ends."""
    return next(
        (
            role
            for role in JOB_KINDS[training_job["kind"]].leader_roles
            if role in get_replica_specs(training_job)
        ),
        "Worker",
    )


def is_complete(training_job: Object, succeeded_pods: set[str]) -> bool:
    """Return True if the job has succeeded, given the names of the succeeded pods."""
    deciding_role = get_leading_role(training_job)
    job_spec = training_job["spec"]
    role_pods = [
        pod
        for pod, (pod_role, _) in map_pods_to_roles(training_job).items()
        if pod_role == deciding_role
    ]
    succeeded_role_pods = [pod for pod in role_pods if pod in succeeded_pods]
    if (
        deciding_role == "Worker"
        and training_job["kind"] == "TFJob"
        and job_spec.get("successPolicy") != "AllWorkers"
    ):
        return role_pods[:1] == succeeded_role_pods[:1] and bool(role_pods)
    if (
        deciding_role == "Worker"
        and training_job["kind"] == "PyTorchJob"
        and job_spec.get("elasticPolicy") is not None
    ):
        return bool(succeeded_role_pods)
    return len(succeeded_role_pods) == len(role_pods) > 0


def tolerates_failure(training_job: Object, role: str, restart_policy: str) -> bool:
    """Return True if a job continues although a pod with this role has failed permanently."""
    has_dynamic_workers = (
        training_job["kind"] == "TFJob"
        and bool(training_job["spec"].get("enableDynamicWorker"))
        and restart_policy == "Never"
    )
    return role == "Worker" and (
        has_dynamic_workers or (training_job["kind"] == "MPIJob" and restart_policy == "ExitCode")
    )


def make_operator_environment(
    training_job: Object, role: str, index: int, get_address: GetAddress
) -> dict[str, str]:
    return ENVIRONMENT_FUNCTIONS[training_job["kind"]](training_job, role, index, get_address)


def get_port(training_job: Object, role: str) -> int:
    """Return the container port with the operator's port name, or the operator's default port."""
    return find_port(training_job, role) or JOB_KINDS[training_job["kind"]].port[1]


def find_port(training_job: Object, role: str) -> int | None:
    """Return the container port that has the operator's port name; None if no container port has
    this name."""
    port_name = JOB_KINDS[training_job["kind"]].port[0]
    container_ports = (
        get_replica_specs(training_job)[role]["template"]["spec"]["containers"][0].get("ports")
        or []
    )
    return next(
        (port["containerPort"] for port in container_ports if port.get("name") == port_name), None
    )


def _count_all_replicas(training_job: Object) -> int:
    return sum(count_replicas(training_job, role) for role in get_replica_specs(training_job))


def _compute_rank(role: str, index: int) -> int:
    if role == "Master":
        return 0
    return index + 1


def _make_pytorch_environment(
    training_job: Object, role: str, index: int, get_address: GetAddress
) -> dict[str, str]:
    job_name = training_job["metadata"]["name"]
    job_spec = training_job["spec"]
    replica_specs = get_replica_specs(training_job)
    elastic_policy = job_spec.get("elasticPolicy")
    processes_per_node = str(job_spec.get("nprocPerNode", "auto"))
    environment = {"PYTHONUNBUFFERED": "1"}

    if "Master" in replica_specs:
        master_host = get_address(make_pod_name(training_job, "Master"))
        master_port = str(get_port(training_job, "Master"))
        rank = str(_compute_rank(role, index))
        environment["MASTER_PORT"] = master_port
        environment["PET_MASTER_PORT"] = master_port
        environment["MASTER_ADDR"] = master_host
        environment["PET_MASTER_ADDR"] = master_host
        world_size = _count_all_replicas(training_job) * (
            int(processes_per_node) if WHOLE_NUMBER.fullmatch(processes_per_node) else 1
        )
        environment["WORLD_SIZE"] = str(world_size)
        environment["RANK"] = rank
        environment["PET_NODE_RANK"] = rank

    if elastic_policy is None:
        return environment | {
            "PET_NPROC_PER_NODE": processes_per_node,
            "PET_NNODES": str(_count_all_replicas(training_job)),
        }

    worker_count = count_replicas(training_job, "Worker")
    given_minimum = elastic_policy.get("minReplicas")
    given_maximum = elastic_policy.get("maxReplicas")
    min_workers = given_minimum or given_maximum or worker_count
    max_workers = given_maximum or given_minimum or worker_count

    rendezvous_host = elastic_policy.get("rdzvHost", make_pod_name(training_job, "Worker"))
    if re.fullmatch(rf"{job_name}-(master|worker)-\d+", rendezvous_host):
        rendezvous_host = get_address(rendezvous_host)

    environment["PET_RDZV_ENDPOINT"] = (
        f"{rendezvous_host}:{elastic_policy.get('rdzvPort', get_port(training_job, 'Worker'))}"
    )
    environment["PET_RDZV_BACKEND"] = elastic_policy.get("rdzvBackend", "c10d")
    environment["PET_NNODES"] = f"{min_workers}:{max_workers}"
    environment["PET_NPROC_PER_NODE"] = str(elastic_policy.get("nProcPerNode", processes_per_node))

    if "maxRestarts" in elastic_policy:
        environment["PET_MAX_RESTARTS"] = str(elastic_policy["maxRestarts"])
    if "rdzvId" in elastic_policy:
        environment["PET_RDZV_ID"] = elastic_policy["rdzvId"]

    if "rdzvConf" in elastic_policy:
        environment["PET_RDZV_CONF"] = ",".join(
            f"{rendezvous_setting['key']}={rendezvous_setting['value']}"
            for rendezvous_setting in elastic_policy["rdzvConf"]
        )

    return environment


def _make_tensorflow_environment(
    training_job: Object, role: str, index: int, get_address: GetAddress
) -> dict[str, str]:
    if _count_all_replicas(training_job) == 1:
        return {}

    addresses_by_role = {
        cluster_role.lower(): [
            f"{get_address(make_pod_name(training_job, cluster_role, i))}"
            f":{get_port(training_job, cluster_role)}"
            for i in range(count_replicas(training_job, cluster_role))
        ]
        for cluster_role in sorted(get_replica_specs(training_job))
    }

    task_type = role.lower()
    task_spec = {"type": role.lower(), "index": index}

    # with dynamic workers, TF_CONFIG lists only the worker itself and the parameter servers
    if training_job["spec"].get("enableDynamicWorker"):
        parameter_servers = addresses_by_role.get("ps", [])
        if task_type != "worker":
            parameter_servers = parameter_servers[index : index + 1] if task_type == "ps" else []

        cluster_spec = {
            "worker": {str(index): addresses_by_role[task_type][index]}
            if task_type == "worker"
            else {},
            "ps": parameter_servers,
        }
        return {"TF_CONFIG": to_json({"cluster": cluster_spec, "task": task_spec})}

    return {
        "TF_CONFIG": to_json(
            {"cluster": addresses_by_role, "task": task_spec, "environment": "cloud"}
        )
    }


def _make_xgboost_environment(
    training_job: Object, role: str, index: int, get_address: GetAddress
) -> dict[str, str]:
    environment = {
        "MASTER_PORT": str(get_port(training_job, "Master")),
        "MASTER_ADDR": get_address(make_pod_name(training_job, "Master")),
        "WORLD_SIZE": str(_count_all_replicas(training_job)),
        "RANK": str(_compute_rank(role, index)),
        "PYTHONUNBUFFERED": "1",
    }
    if _count_all_replicas(training_job) > 1:
        worker_addresses = [
            get_address(make_pod_name(training_job, "Worker", i))
            for i in range(count_replicas(training_job, "Worker"))
        ]
        environment["WORKER_PORT"] = str(get_port(training_job, "Worker"))
        environment["WORKER_ADDRS"] = ",".join(worker_addresses)
    return environment


def _make_paddle_environment(
    training_job: Object, role: str, index: int, get_address: GetAddress
) -> dict[str, str]:
    has_parameter_servers = "Master" in get_replica_specs(training_job)
    first_role = "Master" if has_parameter_servers else "Worker"
    first_host = get_address(make_pod_name(training_job, first_role))

    environment = {
        "PYTHONUNBUFFERED": "1",
        "PADDLE_JOB_ID": training_job["metadata"]["name"],
        "PADDLE_NNODES": str(_count_all_replicas(training_job)),
        "PADDLE_MASTER": f"{first_host}:{get_port(training_job, first_role)}",
    }

    if (role, index) == (first_role, 0):
        environment["POD_IP_DUMMY"] = first_host
    if has_parameter_servers:
        environment["PADDLE_SERVER_NUM" if role == "Master" else "PADDLE_TRAINER_NUM"] = "1"

    return environment


def _make_jax_environment(
    training_job: Object, role: str, index: int, get_address: GetAddress
) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        "COORDINATOR_PORT": str(get_port(training_job, "Worker")),
        "COORDINATOR_ADDRESS": get_address(make_pod_name(training_job, "Worker")),
        "NUM_PROCESSES": str(_count_all_replicas(training_job)),
        "PROCESS_ID": str(index),
    }


def _make_mpi_environment(
    training_job: Object, role: str, index: int, get_address: GetAddress
) -> dict[str, str]:
    if role == "Worker":
        return {}

    agent_path = f"{MPI_MOUNT_PATH}/kubexec.sh"
    container = get_replica_specs(training_job)[role]["template"]["spec"]["containers"][0]
    resource_limits = (container.get("resources") or {}).get("limits") or {}
    environment = {
        "OMPI_MCA_plm_rsh_agent": agent_path,
        "OMPI_MCA_orte_default_hostfile": f"{MPI_MOUNT_PATH}/hostfile",
    }

    if not any(resource_name.endswith("/gpu") for resource_name in resource_limits):
        environment["NVIDIA_VISIBLE_DEVICES"] = ""
        environment["NVIDIA_DRIVER_CAPABILITIES"] = ""

    container_variables = {variable["name"] for variable in container.get("env") or []}
    intel_variables = {"I_MPI_HYDRA_BOOTSTRAP": "rsh", "I_MPI_HYDRA_BOOTSTRAP_EXEC": agent_path}
    return environment | {
        variable_name: variable_value
        for variable_name, variable_value in intel_variables.items()
        if variable_name not in container_variables
    }


# kind of job → function that returns a pod's environment variables, given the job, the pod's role,
# its index, and the addresses of pods
ENVIRONMENT_FUNCTIONS: dict[str, Callable[[Object, str, int, GetAddress], dict[str, str]]] = {
    "PyTorchJob": _make_pytorch_environment,
    "TFJob": _make_tensorflow_environment,
    "XGBoostJob": _make_xgboost_environment,
    "PaddleJob": _make_paddle_environment,
    "JAXJob": _make_jax_environment,
    "MPIJob": _make_mpi_environment,
}
