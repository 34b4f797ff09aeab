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
from argolocal.common.processes import python_command
from argolocal.controllers.pod_process import Pod
from argolocal.manifest.types import Object
from argolocal.pods import filesystem
from rekindle.local.jobs import kubexec
from rekindle.local.jobs.frameworks import MPI_DIRECTORY, pod_name, replica_count, replicas_of

VOLUME = "mpi-job-config"


def worker_names(obj: Object) -> list[str]:
    if "Worker" in replicas_of(obj):
        return [pod_name(obj, "Worker", i) for i in range(replica_count(obj, "Worker"))]
    return []


def all_workers_run(obj: Object, pods: Mapping[str, Pod]) -> bool:
    """Return True if all Workers run. The Launcher must wait for them, as with the operator's init
    container."""
    return all(name in pods and pods[name].running for name in worker_names(obj))


def write_files(obj: Object, folder: Path) -> None:
    """Write the hostfile, the agent that `mpirun` starts for a Worker, and the script of Horovod's
    elastic mode."""
    folder.mkdir(parents=True, exist_ok=True)
    slots = obj["spec"].get("slotsPerWorker", 1)
    names = worker_names(obj)
    agent = shlex.join(python_command(kubexec.__file__))
    (folder / "hostfile").write_text("".join(f"{name} slots={slots}\n" for name in names))

    scripts = {
        "kubexec.sh": f'exec {agent} "$(dirname "$0")" "$@"',
        "discover_hosts.sh": "\n".join(f"echo {name}:{slots}" for name in names),
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def write_processes(folder: Path, pods: Mapping[str, Pod]) -> None:
    """Write the pids and environments of the Workers for kubexec.py."""
    processes = {name: pod.process for name, pod in pods.items() if pod.process}
    records = {
        name: {"pid": process.pid, "environment": dict(process.environment)}
        for name, process in processes.items()
    }
    path = folder / kubexec.WORKERS_FILE
    text = to_json(records)
    if not path.exists() or path.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        # 0o600: 0o600: the environments may contain secret keys
        write_atomically(path, text, 0o600)


def mount_files(
    spec: Mapping[str, Any], env: dict[str, str], folder: Path
) -> tuple[dict[str, Any], dict[str, str], dict[str, Path]]:
    """Return the Launcher's PodSpec, environment and volumes, with `folder` mounted at /etc/mpi.

    Without mount namespaces, the environment has the path of `folder` instead of /etc/mpi.
    """
    if not filesystem.available():
        return (
            dict(spec),
            {name: value.replace(MPI_DIRECTORY, str(folder)) for name, value in env.items()},
            {},
        )

    (container,) = spec["containers"]
    mounts = [*(container.get("volumeMounts") or []), {"name": VOLUME, "mountPath": MPI_DIRECTORY}]
    return {**spec, "containers": [container | {"volumeMounts": mounts}]}, env, {VOLUME: folder}
