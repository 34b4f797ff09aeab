"""Writes the files with which an MPIJob's Launcher finds its Workers and starts processes in them.

Kubeflow training operator 1.9 creates the same files (newConfigMap and newLauncher in
mpi/mpijob_controller.go).
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.files import write_atomically
from argolocal.common.json_text import to_json
from argolocal.common.processes import make_python_command
from argolocal.controllers.pod_process import Pod
from argolocal.manifest.types import Object
from argolocal.pods import filesystem
from rekindle.local.jobs import kubexec
from rekindle.local.jobs.frameworks import (
    MPI_MOUNT_PATH,
    count_replicas,
    get_replica_specs,
    make_pod_name,
)

MPI_VOLUME_NAME = "mpi-job-config"


def list_worker_names(mpi_job: Object) -> list[str]:
    if "Worker" in get_replica_specs(mpi_job):
        return [
            make_pod_name(mpi_job, "Worker", i) for i in range(count_replicas(mpi_job, "Worker"))
        ]
    return []


def are_all_workers_running(mpi_job: Object, pods_by_name: Mapping[str, Pod]) -> bool:
    """Return True if all Workers run. The Launcher must wait for all Workers, as the operator's
    init container does."""
    return all(
        name in pods_by_name and pods_by_name[name].running for name in list_worker_names(mpi_job)
    )


def write_launcher_files(mpi_job: Object, job_folder: Path) -> None:
    """Write the hostfile, the agent that `mpirun` starts for each Worker, and the script with which
    Horovod's elastic mode finds the Workers."""
    job_folder.mkdir(parents=True, exist_ok=True)
    slots_per_worker = mpi_job["spec"].get("slotsPerWorker", 1)
    all_worker_names = list_worker_names(mpi_job)
    agent_command = shlex.join(make_python_command(kubexec.__file__))
    (job_folder / "hostfile").write_text(
        "".join(f"{name} slots={slots_per_worker}\n" for name in all_worker_names)
    )

    script_texts = {
        "kubexec.sh": f'exec {agent_command} "$(dirname "$0")" "$@"',
        "discover_hosts.sh": "\n".join(
            f"echo {name}:{slots_per_worker}" for name in all_worker_names
        ),
    }
    for name, text in script_texts.items():
        (job_folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (job_folder / name).chmod(0o755)


def write_worker_processes(job_folder: Path, pods_by_name: Mapping[str, Pod]) -> None:
    """Write the pids and environments of the Workers for kubexec.py."""
    worker_processes = {name: pod.process for name, pod in pods_by_name.items() if pod.process}
    worker_records = {
        name: {"pid": worker_process.pid, "environment": dict(worker_process.environment)}
        for name, worker_process in worker_processes.items()
    }
    workers_path = job_folder / kubexec.WORKERS_FILE
    records_json = to_json(worker_records)
    if not workers_path.exists() or workers_path.read_text() != records_json:
        job_folder.mkdir(parents=True, exist_ok=True)
        # readable only for this user, because the environments of the Workers may contain secret
        # keys
        write_atomically(workers_path, records_json, 0o600)


def mount_launcher_files(
    pod_spec: Mapping[str, Any], environment: dict[str, str], job_folder: Path
) -> tuple[dict[str, Any], dict[str, str], dict[str, Path]]:
    """Return the Launcher's PodSpec, environment and volumes, with `job_folder` mounted at
    /etc/mpi.

    If this machine does not support mount namespaces, the environment contains the path of
    `job_folder` instead of /etc/mpi.
    """
    if not filesystem.supports_namespaces():
        return (
            dict(pod_spec),
            {
                variable_name: variable_value.replace(MPI_MOUNT_PATH, str(job_folder))
                for variable_name, variable_value in environment.items()
            },
            {},
        )

    (container,) = pod_spec["containers"]
    volume_mounts = [
        *(container.get("volumeMounts") or []),
        {"name": MPI_VOLUME_NAME, "mountPath": MPI_MOUNT_PATH},
    ]
    return (
        {**pod_spec, "containers": [container | {"volumeMounts": volume_mounts}]},
        environment,
        {MPI_VOLUME_NAME: job_folder},
    )
