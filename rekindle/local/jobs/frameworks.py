"""Differences between the training operator's kinds of jobs: when a job ends, and the environment
of its pods.

The rules are from Kubeflow training operator 1.9, in KIND_types.go, pytorch/envvar.go, elastic.go,
tensorflow/tensorflow.go, xgboost/xgboost.go, paddlepaddle/envvar.go, jax/envvar.go and
mpi/mpijob_controller.go.
"""

import re
from collections.abc import Callable

from argolocal.common.environment import WHOLE_NUMBER
from argolocal.common.json_text import to_json
from argolocal.manifest import training_jobs
from argolocal.manifest.training_jobs import JOBS
from argolocal.manifest.types import Object

Address = Callable[[str], str]  # function that returns the address of a pod, given its name
MPI_DIRECTORY = "/etc/mpi"  # directory of an MPIJob's files in the pod of its Launcher


def replicas_of(obj: Object) -> Object:
    return obj["spec"].get(JOBS[obj["kind"]].replicas_field) or {}


def replica_count(obj: Object, role: str) -> int:
    return replicas_of(obj)[role].get(
        "replicas", 0 if (obj["kind"], role) == ("MPIJob", "Worker") else 1
    )


def pod_name(obj: Object, role: str, index: int = 0) -> str:
    return training_jobs.pod_name(obj["metadata"]["name"], role, index)


def pods_of(obj: Object) -> dict[str, tuple[str, int]]:
    """Return the role and index of each pod, by pod name."""
    replicas = [
        (role, index) for role in replicas_of(obj) for index in range(replica_count(obj, role))
    ]
    return {pod_name(obj, role, index): (role, index) for role, index in replicas}


def leading_role(obj: Object) -> str:
    """Return the role that decides when a job ends."""
    return next(
        (role for role in JOBS[obj["kind"]].leader_roles if role in replicas_of(obj)), "Worker"
    )


def is_complete(obj: Object, succeeded_pods: set[str]) -> bool:
    """Return True if the job has succeeded, given the names of the succeeded pods."""
    role = leading_role(obj)
    spec = obj["spec"]
    pods = [pod for pod, (pod_role, _) in pods_of(obj).items() if pod_role == role]
    succeeded_of_role = [pod for pod in pods if pod in succeeded_pods]
    if role == "Worker" and obj["kind"] == "TFJob" and spec.get("successPolicy") != "AllWorkers":
        return pods[:1] == succeeded_of_role[:1] and bool(pods)
    if role == "Worker" and obj["kind"] == "PyTorchJob" and spec.get("elasticPolicy") is not None:
        return bool(succeeded_of_role)
    return len(succeeded_of_role) == len(pods) > 0


def tolerates_failure(obj: Object, role: str, restart_policy: str) -> bool:
    """Return True if a job continues although a pod with this role has failed permanently."""
    is_dynamic = (
        obj["kind"] == "TFJob"
        and bool(obj["spec"].get("enableDynamicWorker"))
        and restart_policy == "Never"
    )
    return role == "Worker" and (
        is_dynamic or (obj["kind"] == "MPIJob" and restart_policy == "ExitCode")
    )


def operator_environment(obj: Object, role: str, index: int, address: Address) -> dict[str, str]:
    return ENVIRONMENTS[obj["kind"]](obj, role, index, address)


def port_of(obj: Object, role: str) -> int:
    """Return the container port with the operator's port name, or the operator's default port."""
    return find_port(obj, role) or JOBS[obj["kind"]].port[1]


def find_port(obj: Object, role: str) -> int | None:
    """Return the container port that has the operator's port name; None if there is none."""
    name = JOBS[obj["kind"]].port[0]
    ports = replicas_of(obj)[role]["template"]["spec"]["containers"][0].get("ports") or []
    return next((port["containerPort"] for port in ports if port.get("name") == name), None)


def _total_replicas(obj: Object) -> int:
    return sum(replica_count(obj, role) for role in replicas_of(obj))


def _rank_after_master(role: str, index: int) -> int:
    if role == "Master":
        return 0
    return index + 1


def _pytorch(obj: Object, role: str, index: int, address: Address) -> dict[str, str]:
    name = obj["metadata"]["name"]
    spec = obj["spec"]
    replicas = replicas_of(obj)
    elastic = spec.get("elasticPolicy")
    nproc = str(spec.get("nprocPerNode", "auto"))
    env = {"PYTHONUNBUFFERED": "1"}

    if "Master" in replicas:
        host = address(pod_name(obj, "Master"))
        port = str(port_of(obj, "Master"))
        rank = str(_rank_after_master(role, index))
        env["MASTER_PORT"] = port
        env["PET_MASTER_PORT"] = port
        env["MASTER_ADDR"] = host
        env["PET_MASTER_ADDR"] = host
        size = _total_replicas(obj) * (int(nproc) if WHOLE_NUMBER.fullmatch(nproc) else 1)
        env["WORLD_SIZE"] = str(size)
        env["RANK"] = rank
        env["PET_NODE_RANK"] = rank

    if elastic is None:
        return env | {"PET_NPROC_PER_NODE": nproc, "PET_NNODES": str(_total_replicas(obj))}

    workers = replica_count(obj, "Worker")
    minimum = elastic.get("minReplicas")
    maximum = elastic.get("maxReplicas")
    minimum, maximum = minimum or maximum or workers, maximum or minimum or workers

    host = elastic.get("rdzvHost", pod_name(obj, "Worker"))
    if re.fullmatch(rf"{name}-(master|worker)-\d+", host):
        host = address(host)
    else:
        host = host

    env["PET_RDZV_ENDPOINT"] = f"{host}:{elastic.get('rdzvPort', port_of(obj, 'Worker'))}"
    env["PET_RDZV_BACKEND"] = elastic.get("rdzvBackend", "c10d")
    env["PET_NNODES"] = f"{minimum}:{maximum}"
    env["PET_NPROC_PER_NODE"] = str(elastic.get("nProcPerNode", nproc))

    if "maxRestarts" in elastic:
        env["PET_MAX_RESTARTS"] = str(elastic["maxRestarts"])
    if "rdzvId" in elastic:
        env["PET_RDZV_ID"] = elastic["rdzvId"]

    if "rdzvConf" in elastic:
        env["PET_RDZV_CONF"] = ",".join(
            f"{entry['key']}={entry['value']}" for entry in elastic["rdzvConf"]
        )

    return env


def _tensorflow(obj: Object, role: str, index: int, address: Address) -> dict[str, str]:
    if _total_replicas(obj) == 1:
        return {}

    hosts = {
        kind.lower(): [
            f"{address(pod_name(obj, kind, i))}:{port_of(obj, kind)}"
            for i in range(replica_count(obj, kind))
        ]
        for kind in sorted(replicas_of(obj))
    }

    task_type = role.lower()
    task = {"type": role.lower(), "index": index}

    # with dynamic workers, TF_CONFIG lists only the worker itself and the parameter servers
    if obj["spec"].get("enableDynamicWorker"):
        servers = hosts.get("ps", [])
        if task_type != "worker":
            servers = servers[index : index + 1] if task_type == "ps" else []

        cluster = {
            "worker": {str(index): hosts[task_type][index]} if task_type == "worker" else {},
            "ps": servers,
        }
        return {"TF_CONFIG": to_json({"cluster": cluster, "task": task})}

    return {"TF_CONFIG": to_json({"cluster": hosts, "task": task, "environment": "cloud"})}


def _xgboost(obj: Object, role: str, index: int, address: Address) -> dict[str, str]:
    env = {
        "MASTER_PORT": str(port_of(obj, "Master")),
        "MASTER_ADDR": address(pod_name(obj, "Master")),
        "WORLD_SIZE": str(_total_replicas(obj)),
        "RANK": str(_rank_after_master(role, index)),
        "PYTHONUNBUFFERED": "1",
    }
    if _total_replicas(obj) > 1:
        workers = [address(pod_name(obj, "Worker", i)) for i in range(replica_count(obj, "Worker"))]
        env["WORKER_PORT"] = str(port_of(obj, "Worker"))
        env["WORKER_ADDRS"] = ",".join(workers)
    return env


def _paddle(obj: Object, role: str, index: int, address: Address) -> dict[str, str]:
    has_servers = "Master" in replicas_of(obj)
    first_role = "Master" if has_servers else "Worker"
    host = address(pod_name(obj, first_role))

    env = {
        "PYTHONUNBUFFERED": "1",
        "PADDLE_JOB_ID": obj["metadata"]["name"],
        "PADDLE_NNODES": str(_total_replicas(obj)),
        "PADDLE_MASTER": f"{host}:{port_of(obj, first_role)}",
    }

    if (role, index) == (first_role, 0):
        env["POD_IP_DUMMY"] = host
    if has_servers:
        env["PADDLE_SERVER_NUM" if role == "Master" else "PADDLE_TRAINER_NUM"] = "1"

    return env


def _jax(obj: Object, role: str, index: int, address: Address) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        "COORDINATOR_PORT": str(port_of(obj, "Worker")),
        "COORDINATOR_ADDRESS": address(pod_name(obj, "Worker")),
        "NUM_PROCESSES": str(_total_replicas(obj)),
        "PROCESS_ID": str(index),
    }


def _mpi(obj: Object, role: str, index: int, address: Address) -> dict[str, str]:
    if role == "Worker":
        return {}

    agent = f"{MPI_DIRECTORY}/kubexec.sh"
    container = replicas_of(obj)[role]["template"]["spec"]["containers"][0]
    limits = (container.get("resources") or {}).get("limits") or {}
    env = {
        "OMPI_MCA_plm_rsh_agent": agent,
        "OMPI_MCA_orte_default_hostfile": f"{MPI_DIRECTORY}/hostfile",
    }

    if not any(name.endswith("/gpu") for name in limits):
        env["NVIDIA_VISIBLE_DEVICES"] = ""
        env["NVIDIA_DRIVER_CAPABILITIES"] = ""

    container_names = {variable["name"] for variable in container.get("env") or []}
    intel_variables = {"I_MPI_HYDRA_BOOTSTRAP": "rsh", "I_MPI_HYDRA_BOOTSTRAP_EXEC": agent}
    return env | {
        name: value for name, value in intel_variables.items() if name not in container_names
    }


# kind of job → function that returns a pod's environment variables, given the job, the pod's role,
# its index, and the addresses of pods
ENVIRONMENTS: dict[str, Callable[[Object, str, int, Address], dict[str, str]]] = {
    "PyTorchJob": _pytorch,
    "TFJob": _tensorflow,
    "XGBoostJob": _xgboost,
    "PaddleJob": _paddle,
    "JAXJob": _jax,
    "MPIJob": _mpi,
}
