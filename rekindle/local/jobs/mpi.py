"""The files by which the Launcher of an MPIJob finds its Workers and starts processes in them.

Source: Kubeflow training operator 1.9, mpi/mpijob_controller.go (newConfigMap, newLauncher).
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.files import write_atomically
from argolocal.common.processes import python
from argolocal.controllers.pod import Pod
from argolocal.pods import filesystem
from rekindle.local.jobs import kubexec
from rekindle.local.jobs.frameworks import MPI, Object, count, pod_name, replicas_of

VOLUME = "mpi-job-config"


def workers(obj: Object) -> list[str]:
    """The names of the Workers' pods."""
    return [pod_name(obj, "Worker", i) for i in range(count(obj, "Worker"))] if "Worker" in replicas_of(obj) else []


def ready(obj: Object, pods: Mapping[str, Pod]) -> bool:
    """Whether all Workers run: until then, the operator's init container holds the Launcher back."""
    return all(name in pods and pods[name].running for name in workers(obj))


def write(obj: Object, folder: Path) -> None:
    """The hostfile, the agent by which `mpirun` reaches a Worker, and the script of Horovod's elastic mode."""
    folder.mkdir(parents=True, exist_ok=True)
    slots, names = obj["spec"].get("slotsPerWorker", 1), workers(obj)
    agent = shlex.join(python(kubexec.__file__))
    (folder / "hostfile").write_text("".join(f"{name} slots={slots}\n" for name in names))
    scripts = {
        "kubexec.sh": f'exec {agent} "$(dirname "$0")" "$@"',
        "discover_hosts.sh": "\n".join(f"echo {name}:{slots}" for name in names),
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def record(folder: Path, pods: Mapping[str, Pod]) -> None:
    """Tell kubexec.py which processes the Workers are."""
    processes = {name: pod.process for name, pod in pods.items() if pod.process}
    known = {name: {"pid": each.pid, "environment": dict(each.environment)} for name, each in processes.items()}
    path, text = folder / kubexec.WORKERS, json.dumps(known)
    if not path.exists() or path.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, 0o600)  # it may hold keys


def mounted(
    spec: Mapping[str, Any], env: dict[str, str], folder: Path
) -> tuple[dict[str, Any], dict[str, str], dict[str, Path]]:
    """The Launcher's PodSpec, environment and volumes with `folder` at /etc/mpi, or by its own path where pods have no
    directories of their own."""
    if not filesystem.available():
        return dict(spec), {name: value.replace(MPI, str(folder)) for name, value in env.items()}, {}
    (container,) = spec["containers"]
    mounts = [*(container.get("volumeMounts") or []), {"name": VOLUME, "mountPath": MPI}]
    return {**spec, "containers": [container | {"volumeMounts": mounts}]}, env, {VOLUME: folder}
