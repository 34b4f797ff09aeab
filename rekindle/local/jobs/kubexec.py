"""`kubectl exec` into a worker of a local MPIJob: kubexec.py FOLDER POD COMMAND...

The command gets the pod's environment and ends with the pod. The command sees the files of the
Launcher. This script imports nothing of this package, because `mpirun` starts it once per worker.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

WORKERS_FILE = "workers.json"  # pod → {"pid": ..., "environment": {...}}


def main(folder: str, pod: str, *command: str) -> int:
    worker = json.loads((Path(folder) / WORKERS_FILE).read_text()).get(pod)
    try:
        pod_fd = os.pidfd_open(worker["pid"]) if worker else -1
    except ProcessLookupError:
        pod_fd = -1

    if pod_fd < 0:
        print(f'Error from server (NotFound): pods "{pod}" not found', file=sys.stderr)
        return 1

    child = subprocess.Popen(["/bin/sh", "-c", " ".join(command)], env=worker["environment"])
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
