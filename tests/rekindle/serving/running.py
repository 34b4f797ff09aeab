"""Make releases of the workload `echo` and start servers, for tests of the steps `serve` and
`verify`."""

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from rekindle.content.verified_release import compute_content_hash
from rekindle.storage import Store
from tests.waiting import until


def release_files(workload: str) -> dict[str, bytes]:
    """Return the files of a release of `echo`."""
    card = {"workload": workload, "sha256": sha256(b"weights").hexdigest()}
    facts = {"facts": {"data_until": "2024-03-01T00:00:00+00:00"}}

    return {
        "model.safetensors": b"weights",
        "model.json": json.dumps(card).encode(),
        "state/words.txt": b"hello",
        "dataset.json": json.dumps(facts).encode(),
    }


def prefix_of(name: str, workload: str = "echo") -> str:
    """Return the key prefix of a release, with the hash of its files."""
    hashes = {key: sha256(data).hexdigest() for key, data in release_files(workload).items()}
    return f"releases/{name}/{compute_content_hash(hashes)}/"


SERVER_PREFIX = prefix_of("server")


def write_release(store: Store, prefix: str, workload: str = "echo", version: str = "7") -> str:
    """Write a release into the store, and return the sha256 of the release's weights."""
    digest = sha256(b"weights").hexdigest()
    files = release_files(workload)
    for key, data in files.items():
        store.put(prefix + key, data)

    about = {"name": "echo", "version": version, "workload": workload, "model_sha256": digest}
    hashes = {key: sha256(data).hexdigest() for key, data in files.items()}
    store.put(f"{prefix}release.json", json.dumps(about | {"files": hashes}).encode())

    return digest


MODEL = "/v1/models/echo"
PREDICT = f"{MODEL}:predict"


class RunningServer:
    """A process of `rekindle step steps.serve` on a free port, which runs until the `with` block
    ends."""

    def __init__(
        self, *flags: str, descriptors: int = 0, listens: bool = True, **environment: str
    ) -> None:
        workloads = str(Path(__file__).parent)
        command = [
            sys.executable,
            "-m",
            "rekindle",
            "step",
            "steps.serve",
            "--port=0",
            "--drain-seconds=0.3",
            *flags,
        ]
        if descriptors:
            command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]

        env = {**os.environ, "PYTHONPATH": workloads, **environment}
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        self.client = httpx.Client(timeout=20)

        if not listens:
            return

        first_line = self.process.stderr.readline()
        match = re.fullmatch(r"listening on (http://\S+)\n", first_line)
        assert match, first_line
        self.url = match[1]
        self.client.base_url = self.url

    def __enter__(self) -> "RunningServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def until_ready(self, status: str = "ready") -> dict[str, Any]:
        """Wait up to a minute until /health/ready answers with the given status, and return the
        answer."""
        answers: list[dict[str, Any]] = []

        def check() -> dict[str, Any] | None:
            answers.append(self.client.get("/health/ready").json())
            if answers[-1]["status"] == status:
                return answers[-1]
            return None

        return until(f"{self.url} to be {status}", check, evidence=lambda: answers[-1])

    def predict(self, *instances: dict[str, Any]) -> httpx.Response:
        return self.client.post(PREDICT, json={"instances": list(instances)})

    def until_waiting(self, count: int) -> None:
        """Wait until `count` requests are queued or in progress."""
        line = f"rekindle_requests_waiting {count:.1f}\n"
        until(f"{count} requests to wait", lambda: line in self.client.get("/metrics").text)

    def end(self, seconds: float = 15) -> tuple[int, str]:
        """Wait until the process of the server has ended, and return its exit code and the rest of
        its log."""
        _, log = self.process.communicate(timeout=seconds)
        return self.process.returncode, log


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def refuses_connections(server: RunningServer) -> bool:
    try:
        connect(server).close()
    except ConnectionRefusedError:
        return True
    return False


class Gate:
    """A file that predictions of `echo` wait for, until the `with` block ends or `open` is
    called."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"gate-{len(list(folder.iterdir()))}"
        self.file = self.path.open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def open(self) -> None:
        self.file.close()

    def until_reached(self, processes: int = 1) -> None:
        """Wait until the given number of processes waits at this gate."""
        until(
            "the model to work",
            lambda: len(list(self.path.parent.glob(f"{self.path.name}.*"))) == processes,
        )

    def hold(
        self, server: RunningServer, pool: ThreadPoolExecutor, **instance: Any
    ) -> Future[httpx.Response]:
        """Send a request that the model works on until this gate opens."""
        answer = pool.submit(server.predict, {"id": "a", "gate": str(self.path), **instance})
        self.until_reached()
        return answer
