"""Train gradient-boosted stumps on the digits like XGBoost: each replica has a share of the rows, and the histograms of
gradients are summed over all replicas.

    rekindle step steps.boosting.boost --dataset=runs/a/dataset --out=runs/a/model --model='{"rounds": 40}'

Rank 0 writes `<out>/model.safetensors` and `<out>/model.json`. In an XGBoostJob, the variables RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT define the replicas. In an MPIJob, the Launcher starts one per slot of the hostfile. Without
either, this process is the only replica.
"""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from rekindle import StepInputs, StepOutputs, Store
from rekindle.training.state import weights_sha256

BINS, DIGITS, RATE, L2 = 17, 10, 0.5, 1.0  # values of a pixel, classes, shrinkage, regularization of a score
PORT, TIMEOUT_S = 9999, 60.0
RESTART = 143  # exit code that makes the operator restart a replica


class Inputs(StepInputs):
    dataset: str = Field(description="key prefix of the dataset")
    out: str = Field(description="key prefix of the model")
    model: dict[str, Any] = Field(description="section `model` of the config; `rounds`: stumps per digit")
    workload: str = Field("steps.boosting", description="module that scores the model")
    digest: str = Field("", description="sha256 that identifies the dataset")


class Outputs(StepOutputs):
    """Empty: the model is in the object store."""


def run(inputs: Inputs) -> Outputs:
    """Train and save the model. Exits with 143, to be restarted, if a replica is lost."""
    store = Store.from_env()
    store.download(f"{inputs.dataset}/", inputs.workdir / "dataset")
    with replicas() as peers:
        images, labels = (
            np.load(inputs.workdir / f"dataset/train-{name}.npy")[peers.rank :: peers.size]
            for name in ("images", "labels")
        )
        stumps = boost(images.reshape(len(images), -1), labels, inputs.model["rounds"], peers)
        shares = {"replicas": peers.size, "rows": int(peers.all_reduce(np.array([len(images)]))[0])}
    if peers.rank == 0:
        save(store, inputs, stumps, shares)
    return Outputs()


def boost(rows: Any, labels: Any, rounds: int, peers: "Peers") -> dict[str, Any]:
    """Train on the `rows` [n, 64] of all replicas; return the stumps as the tensors of steps/boosting."""
    truth, scores = np.eye(DIGITS)[labels], np.zeros((len(rows), DIGITS))
    one_hot = (rows[:, :, None] == np.arange(BINS)).reshape(len(rows), -1).astype(float)  # [n, 64 * BINS]
    stumps = {name: np.zeros((rounds, DIGITS), "float32") for name in ("pixel", "threshold", "below", "above")}
    for number in range(rounds):
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        local_sums = np.stack([one_hot.T @ (chances - truth), one_hot.T @ (chances * (1 - chances))])
        sums = peers.all_reduce(local_sums).reshape(2, -1, BINS, DIGITS).cumsum(2)  # over rows up to each value
        total = sums[:, :, -1:]
        low, high = (gradient**2 / (weight + L2) for gradient, weight in (sums, total - sums))
        gain = low + high
        best = gain[:, :-1].reshape(-1, DIGITS).argmax(0)
        pixel, value = best // (BINS - 1), best % (BINS - 1)
        digit = np.arange(DIGITS)
        below, whole = sums[:, pixel, value, digit], total[:, pixel, 0, digit]
        under, over = (-RATE * gradient / (weight + L2) for gradient, weight in (below, whole - below))
        scores += np.where(rows[:, pixel] <= value, under, over)
        for name, column in zip(stumps, (pixel, (value + 0.5) / (BINS - 1), under, over), strict=True):
            stumps[name][number] = column
    return stumps


def save(store: Store, inputs: Inputs, stumps: dict[str, Any], shares: dict[str, int]) -> None:
    """Upload the model in the layout of steps.train; model.json last."""
    import torch
    from safetensors.torch import save as packed

    tensors = {name: torch.from_numpy(values) for name, values in stumps.items()}
    description = {"workload": inputs.workload, "model": inputs.model, "digest": inputs.digest} | shares
    store.put(f"{inputs.out}/model.safetensors", packed(tensors))
    store.put(f"{inputs.out}/model.json", json.dumps(description | {"sha256": weights_sha256(tensors)}).encode())


class Peers:
    """The replicas. `sockets` of rank 0 lead to all others in rank order; the others have one, to rank 0."""

    def __init__(self, rank: int, size: int, sockets: list[socket.socket]) -> None:
        self.rank, self.size, self.sockets = rank, size, sockets

    def all_reduce(self, values: Any) -> Any:
        """Sum over all replicas in rank order, so the result is reproducible bit for bit."""
        if self.rank == 0:
            total = values + sum(_receive(connection, values) for connection in self.sockets)
        else:
            self.sockets[0].sendall(values.tobytes())
            return _receive(self.sockets[0], values)
        for connection in self.sockets:
            connection.sendall(total.tobytes())
        return total


@contextlib.contextmanager
def replicas() -> Iterator[Peers]:
    """Start the other replicas if needed, and connect all of them."""
    agent, hostfile = (os.environ.get(f"OMPI_MCA_{name}", "") for name in ("plm_rsh_agent", "orte_default_hostfile"))
    started: list[subprocess.Popen[bytes]] = []
    environment = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if hostfile and not environment["RANK"]:
        slots = [line.split(" slots=") for line in Path(hostfile).read_text().splitlines()]
        hosts = [host for host, count in slots for _ in range(int(count))]
        environment = {"RANK": "0", "WORLD_SIZE": str(len(hosts) + 1), "MASTER_PORT": str(PORT)}
        environment["MASTER_ADDR"] = os.environ["POD_IP"]
        for rank, host in enumerate(hosts, 1):
            variables = [f"{name}={value}" for name, value in (environment | {"RANK": str(rank)}).items()]
            program = shlex.join(["env", *variables, *sys.orig_argv])
            started.append(subprocess.Popen([agent, host, program]))
    rank, size = int(environment["RANK"] or 0), int(environment["WORLD_SIZE"] or 1)
    try:
        port = int(environment["MASTER_PORT"] or PORT)
        sockets = _accept(port, size) if rank == 0 else [_connect(environment["MASTER_ADDR"], port, rank)]
        yield Peers(rank, size, sockets)
    except OSError as error:
        print(f"a replica is lost: {error}", file=sys.stderr)
        sys.exit(RESTART)
    for process in started:
        process.wait()


def _accept(port: int, size: int) -> list[socket.socket]:
    """Accept the connections of the other replicas; return them in rank order."""
    if size == 1:
        return []
    with socket.create_server((os.environ.get("POD_IP", ""), port)) as server:
        server.settimeout(TIMEOUT_S)
        sockets = [server.accept()[0] for _ in range(size - 1)]
    ranked = [(peer.recv(1), peer) for peer in sockets]
    return [peer for _, peer in sorted(ranked, key=lambda pair: pair[0])]


def _connect(host: str, port: int, rank: int) -> socket.socket:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=TIMEOUT_S)
            connection.sendall(bytes([rank]))
            return connection
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _receive(connection: socket.socket, like: Any) -> Any:
    data = bytearray()
    while len(data) < like.nbytes:
        chunk = connection.recv(like.nbytes - len(data))
        if not chunk:
            raise ConnectionError("it closed the connection")
        data += chunk
    return np.frombuffer(data, like.dtype).reshape(like.shape)
