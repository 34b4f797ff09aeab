"""`kubectl exec` into a worker of a local MPIJob: kubexec.py FOLDER POD COMMAND...

The command COMMAND gets the pod's environment, and is killed when the pod ends. COMMAND sees the
files of the Launcher, because the Launcher starts COMMAND. This script imports no other module of
this package, so that it starts fast, since `mpirun` starts the script once for each worker.
"""

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# file that maps the name of a pod to {"pid": ..., "environment": {...}}
WORKERS_FILE = "workers.json"


@dataclass(frozen=True)
class WorkerProcess:
    """A worker's process, in which commands can be run."""

    pid: int
    environment: dict[str, str]


def read_worker(workers_path: Path, pod_name: str) -> WorkerProcess | None:
    """Return the first process of a pod; None if the pod does not exist. Raises OSError,
    ValueError."""
    worker_records = json.loads(workers_path.read_text())
    if not isinstance(worker_records, dict):
        raise ValueError("it must be an object")
    if pod_name not in worker_records:
        return None

    worker_fields = worker_records[pod_name]
    if not isinstance(worker_fields, dict):
        raise ValueError(f"{pod_name!r} must be an object")

    pid = worker_fields.get("pid")
    environment = worker_fields.get("environment")
    if type(pid) is not int or pid < 1:
        raise ValueError(f"the pid of {pod_name!r} must be a positive number")
    if not isinstance(environment, dict) or not all(
        isinstance(variable_value, str) for variable_value in environment.values()
    ):
        raise ValueError(f"the environment of {pod_name!r} must map names to texts")

    return WorkerProcess(pid, environment)


def main(job_folder: str, pod_name: str, *command_words: str) -> int:
    workers_path = Path(job_folder) / WORKERS_FILE
    try:
        worker_process = read_worker(workers_path, pod_name)
    except (OSError, ValueError) as error:
        error_text = " ".join(str(error).split())
        print(
            f"error: {workers_path} is malformed: {error_text}. Run the workflow again.",
            file=sys.stderr,
        )
        return 1

    try:
        pod_descriptor = os.pidfd_open(worker_process.pid) if worker_process else -1
    except ProcessLookupError:
        pod_descriptor = -1

    if not worker_process or pod_descriptor < 0:
        print(f'Error from server (NotFound): pods "{pod_name}" not found', file=sys.stderr)
        return 1

    shell_process = subprocess.Popen(
        ["/bin/sh", "-c", " ".join(command_words)], env=worker_process.environment
    )
    poller = select.poll()
    for process_descriptor in (pod_descriptor, os.pidfd_open(shell_process.pid)):
        poller.register(process_descriptor, select.POLLIN)

    ended_descriptors = [process_descriptor for process_descriptor, _ in poller.poll()]
    if ended_descriptors == [pod_descriptor]:
        shell_process.kill()
        print(f"{pod_name} has ended", file=sys.stderr)

    exit_code = shell_process.wait()
    if exit_code >= 0:
        return exit_code

    return 128 - exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
