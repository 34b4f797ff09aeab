"""Act as another user of the machine and try to access a run. As root: python stranger.py < TASK
prints JSON.

The JSON object TASK has `paths` (files and folders), `processes` (pids) and `ports` (address,
port). The printed result has `reached`, the accesses that succeeded, and `answers` of each port.
All modules are loaded before the user changes, because the interpreter may be in the home of root.
"""

import contextlib
import json
import os
import socket
import sys

NOBODY_UID = 65534
# names of files of /proc/PID
PROC_FILES = (
    "environ",
    "maps",
    "mem",
    "auxv",
    "fd",
    "cwd",
    "root",
    "exe",
    "io",
    "task/{pid}/environ",
)
REQUEST_HEAD = "HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
REQUESTS = (
    f"GET / {REQUEST_HEAD}\r\n",
    f"GET /metrics {REQUEST_HEAD}\r\n",
    f"GET /api/2.0/mlflow/experiments/search?max_results=9 {REQUEST_HEAD}Authorization: Bearer x\r\n\r\n",
    f"GET /rekindle?list-type=2 {REQUEST_HEAD}\r\n",
    f"PUT /rekindle/theirs {REQUEST_HEAD}Content-Length: 6\r\n\r\ntheirs",
    f"PUT /api/2.0/mlflow-artifacts/artifacts/theirs {REQUEST_HEAD}Content-Length: 6\r\n\r\ntheirs",
    '{{"type": "hello", "name": "worker-0"}}\n',
    "\0\0\0\1" * 4000,
)


def access_path(path: str) -> list[str]:
    """Return the accesses that succeed for a file, or for a folder and its contents."""
    reached = []
    for mode, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY | os.O_APPEND)):
        if not os.path.isdir(path):
            with contextlib.suppress(OSError):
                os.close(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK))
                reached.append(f"{mode} {path}")

    with contextlib.suppress(OSError):
        file_names = os.listdir(path)
        reached.append(f"list {path}")
        reached += [access for name in file_names for access in access_path(f"{path}/{name}")]

    with contextlib.suppress(OSError):
        os.mkdir(f"{path}/theirs")
        reached.append(f"write in {path}")

    return reached


def read(path: str) -> bytes:
    """Read the first byte of a file."""
    with open(path, "rb") as file:
        return file.read(1)


def access_process(pid: int) -> list[str]:
    """Return the files of a process that can be read, and whether the process can be signalled."""
    reached = []

    for name in PROC_FILES:
        path = f"/proc/{pid}/{name.format(pid=pid)}"
        with contextlib.suppress(OSError):
            access_file = {
                "fd": os.listdir,
                "cwd": os.readlink,
                "root": os.readlink,
                "exe": os.readlink,
            }.get(name, read)
            reached += [f"read {path}"] if access_file(path) else []

    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        reached.append(f"signal {pid}")

    return reached


def send_requests(address: str, port_number: int) -> list[str]:
    """Send requests to a port, and return all answers."""
    answers = []

    for request_text in REQUESTS:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port_number), timeout=2) as connection,
        ):
            connection.settimeout(0.2)
            answer = b""

            with contextlib.suppress(OSError):
                connection.sendall(
                    request_text.replace("{port}", str(port_number))
                    .replace("{{", "{")
                    .replace("}}", "}")
                    .encode()
                )
                while chunk := connection.recv(1 << 16):
                    answer += chunk

            answers.append(answer.decode(errors="replace"))

    return answers


def main() -> None:
    task = json.load(sys.stdin)
    # this call loads the codec for addresses
    "".encode("idna")
    os.setgroups([])
    os.setgid(NOBODY_UID)
    os.setuid(NOBODY_UID)
    reached = [access for path in task["paths"] for access in access_path(path)]
    reached += [access for pid in task["processes"] for access in access_process(pid)]
    answers = {
        f"{address}:{number}": send_requests(address, number) for address, number in task["ports"]
    }
    print(json.dumps({"reached": reached, "answers": answers}))


if __name__ == "__main__":
    main()
