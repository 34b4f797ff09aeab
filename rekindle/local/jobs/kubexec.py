"""`kubectl exec` into a worker of a local MPIJob: kubexec.py FOLDER POD COMMAND...

The command gets the pod's environment and ends with the pod. The command sees the files of the
Launcher, because the Launcher starts the command. This script imports nothing of this package,
because `mpirun` starts it once per worker.
"""

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WORKERS_FILE = "workers.json"  # pod → {"pid": ..., "environment": {...}}


@dataclass(frozen=True)
class Worker:
    """A worker's process, in which commands can be run."""

    pid: int
    environment: dict[str, str]


def read_worker(path: Path, pod: str) -> Worker | None:
    """Return the process of a pod; None if the pod does not exist. Raises OSError, ValueError."""
    workers = json.loads(path.read_text())
    if not isinstance(workers, dict):
        raise ValueError("it must be an object")
    if pod not in workers:
        return None

    fields = workers[pod]
    if not isinstance(fields, dict):
        raise ValueError(f"{pod!r} must be an object")

    pid = fields.get("pid")
    environment = fields.get("environment")
    if type(pid) is not int or pid < 1:
        raise ValueError(f"the pid of {pod!r} must be a positive number")
    if not isinstance(environment, dict) or not all(
        isinstance(value, str) for value in environment.values()
    ):
        raise ValueError(f"the environment of {pod!r} must map names to texts")

    return Worker(pid, environment)


def main(folder: str, pod: str, *command: str) -> int:
    path = Path(folder) / WORKERS_FILE
    try:
        worker = read_worker(path, pod)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        print(f"error: {path} is malformed: {reason}. Run the workflow again.", file=sys.stderr)
        return 1

    try:
        pod_fd = os.pidfd_open(worker.pid) if worker else -1
    except ProcessLookupError:
        pod_fd = -1

    if not worker or pod_fd < 0:
        print(f'Error from server (NotFound): pods "{pod}" not found', file=sys.stderr)
        return 1

    child = subprocess.Popen(["/bin/sh", "-c", " ".join(command)], env=worker.environment)
    poll = select.poll()
    for fd in (pod_fd, os.pidfd_open(child.pid)):
        poll.register(fd, select.POLLIN)

    ended_fds = [fd for fd, _ in poll.poll()]
    if ended_fds == [pod_fd]:
        child.kill()
        print(f"{pod} has ended", file=sys.stderr)

    code = child.wait()
    if code >= 0:
        return code

    return 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
