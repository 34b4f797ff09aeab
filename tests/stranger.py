"""Another user of the machine, who tries what the kernel lets him: python stranger.py < TASK, as root, prints JSON.

The task: `places` (files and folders), `processes` (pids) and `ports` (address, port). The answer: `reached`, what of
these could be read, written or ended, and `said`, what each port answered. All that it needs is loaded before it stops
being root, for the interpreter may lie in root's home.
"""

import contextlib
import json
import os
import socket
import sys

NOBODY = 65534
SEEN = ("environ", "maps", "mem", "auxv", "fd", "cwd", "root", "exe", "io", "task/{pid}/environ")  # of /proc/PID
HEAD = "HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
SENT = (
    f"GET / {HEAD}\r\n",
    f"GET /metrics {HEAD}\r\n",
    f"GET /api/2.0/mlflow/experiments/search?max_results=9 {HEAD}Authorization: Bearer x\r\n\r\n",
    f"GET /rekindle?list-type=2 {HEAD}\r\n",
    f"PUT /rekindle/theirs {HEAD}Content-Length: 6\r\n\r\ntheirs",
    f"PUT /api/2.0/mlflow-artifacts/artifacts/theirs {HEAD}Content-Length: 6\r\n\r\ntheirs",
    '{{"type": "hello", "name": "worker-0"}}\n',
    "\0\0\0\1" * 4000,
)


def files(place: str) -> list[str]:
    """What of a file, or of a folder and all that is in it, can be read, changed or locked."""
    reached = []
    for mode, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY | os.O_APPEND)):
        if not os.path.isdir(place):
            with contextlib.suppress(OSError):
                os.close(os.open(place, flags | os.O_NOFOLLOW | os.O_NONBLOCK))
                reached.append(f"{mode} {place}")
    with contextlib.suppress(OSError):
        inside = os.listdir(place)
        reached.append(f"list {place}")
        reached += [hit for name in inside for hit in files(f"{place}/{name}")]
    with contextlib.suppress(OSError):
        os.mkdir(f"{place}/theirs")
        reached.append(f"write in {place}")
    return reached


def read(path: str) -> bytes:
    """The first byte of a file."""
    with open(path, "rb") as file:
        return file.read(1)


def process(pid: int) -> list[str]:
    """What of a process can be read, and whether it can be signalled."""
    reached = []
    for name in SEEN:
        path = f"/proc/{pid}/{name.format(pid=pid)}"
        with contextlib.suppress(OSError):
            look = {"fd": os.listdir, "cwd": os.readlink, "root": os.readlink, "exe": os.readlink}.get(name, read)
            reached += [f"read {path}"] if look(path) else []
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        reached.append(f"signal {pid}")
    return reached


def port(address: str, number: int) -> list[str]:
    """The answers to all that is sent."""
    said = []
    for text in SENT:
        with contextlib.suppress(OSError), socket.create_connection((address, number), timeout=2) as connection:
            connection.settimeout(0.2)
            answer = b""
            with contextlib.suppress(OSError):
                connection.sendall(text.replace("{port}", str(number)).replace("{{", "{").replace("}}", "}").encode())
                while part := connection.recv(1 << 16):
                    answer += part
            said.append(answer.decode(errors="replace"))
    return said


def main() -> None:
    task = json.load(sys.stdin)
    "".encode("idna")  # loads the codec of addresses
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    reached = [hit for place in task["places"] for hit in files(place)]
    reached += [hit for pid in task["processes"] for hit in process(pid)]
    said = {f"{address}:{number}": port(address, number) for address, number in task["ports"]}
    print(json.dumps({"reached": reached, "said": said}))


if __name__ == "__main__":
    main()
