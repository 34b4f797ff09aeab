"""`kubectl exec` into a worker of an MPIJob on this machine: kubexec.py FOLDER POD COMMAND...

The command has the environment of the pod, and ends with it. It sees the files of the Launcher. It is a script, and
imports nothing of ours: `mpirun` starts it once for each worker.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

WORKERS = "workers.json"  # pod → {"pid": ..., "environment": {...}}


def main(folder: str, pod: str, *command: str) -> int:
    """The exit code of the command."""
    worker = json.loads((Path(folder) / WORKERS).read_text()).get(pod)
    try:
        pod_end = os.pidfd_open(worker["pid"]) if worker else -1
    except ProcessLookupError:
        pod_end = -1
    if pod_end < 0:
        print(f'Error from server (NotFound): pods "{pod}" not found', file=sys.stderr)
        return 1
    child = subprocess.Popen(["/bin/sh", "-c", " ".join(command)], env=worker["environment"])
    ends = select.poll()
    for end in (pod_end, os.pidfd_open(child.pid)):
        ends.register(end, select.POLLIN)
    ended = [end for end, _ in ends.poll()]
    if ended == [pod_end]:
        child.kill()
        print(f"{pod} has ended", file=sys.stderr)
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
