"""Gradient-boosted stumps on the digits, as XGBoost finds them: each replica has its share of the rows, and all add up
their histograms of gradients.

    rekindle step steps.boosting.boost --dataset=runs/a/dataset --out=runs/a/model --model='{"rounds": 40}'

Rank 0 adds up, and leaves `<out>/model.safetensors` and `<out>/model.json`. Who takes part is in the variables of an
XGBoostJob (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or in the hostfile of an MPIJob, in whose slots the Launcher
starts the others; without either this process is alone.
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

BINS, DIGITS, RATE, SMOOTH = 17, 10, 0.5, 1.0  # values of a pixel, classes, shrinkage, L2 of a score
PORT, PATIENCE, AGAIN = 9999, 60.0, 143  # AGAIN: an exit code with which the operator starts a replica again


class Inputs(StepInputs):
    dataset: str = Field(description="key of the dataset")
    out: str = Field(description="key of the model")
    model: dict[str, Any] = Field(description="the model section; `rounds` is how many stumps a digit gets")
    workload: str = Field("steps.boosting", description="module that scores the model")
    digest: str = Field("", description="identity of the dataset")


class Outputs(StepOutputs):
    """Nothing: the model is in the object store."""


def run(inputs: Inputs) -> Outputs:
    """Boost. Ends with 143, to be started again, if a replica goes away."""
    store = Store.from_env()
    store.download(f"{inputs.dataset}/", inputs.workdir / "dataset")
    with replicas() as peers:
        images, labels = (
            np.load(inputs.workdir / f"dataset/train-{part}.npy")[peers.rank :: peers.size]
            for part in ("images", "labels")
        )
        stumps = boosted(images.reshape(len(images), -1), labels, inputs.model["rounds"], peers)
        shares = {"replicas": peers.size, "rows": int(peers.added_up(np.array([len(images)]))[0])}
    if peers.rank == 0:
        save(store, inputs, stumps, shares)
    return Outputs()


def boosted(rows: Any, labels: Any, rounds: int, peers: "Peers") -> dict[str, Any]:
    """The stumps, as tensors of steps/boosting, from the `rows` [n, 64] of all replicas."""
    truth, scores = np.eye(DIGITS)[labels], np.zeros((len(rows), DIGITS))
    marks = (rows[:, :, None] == np.arange(BINS)).reshape(len(rows), -1).astype(float)  # [n, 64 * BINS]
    stumps = {name: np.zeros((rounds, DIGITS), "float32") for name in ("pixel", "threshold", "below", "above")}
    for number in range(rounds):
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        ours = np.stack([marks.T @ (chances - truth), marks.T @ (chances * (1 - chances))])
        sums = peers.added_up(ours).reshape(2, -1, BINS, DIGITS).cumsum(2)  # of rows up to a value
        total = sums[:, :, -1:]
        low, high = (gradient**2 / (weight + SMOOTH) for gradient, weight in (sums, total - sums))
        gain = low + high
        best = gain[:, :-1].reshape(-1, DIGITS).argmax(0)
        pixel, value = best // (BINS - 1), best % (BINS - 1)
        digit = np.arange(DIGITS)
        below, whole = sums[:, pixel, value, digit], total[:, pixel, 0, digit]
        under, over = (-RATE * gradient / (weight + SMOOTH) for gradient, weight in (below, whole - below))
        scores += np.where(rows[:, pixel] <= value, under, over)
        for name, column in zip(stumps, (pixel, (value + 0.5) / (BINS - 1), under, over), strict=True):
            stumps[name][number] = column
    return stumps


def save(store: Store, inputs: Inputs, stumps: dict[str, Any], shares: dict[str, int]) -> None:
    """Leave the model as a training of ours does; model.json last."""
    import torch
    from safetensors.torch import save as packed

    tensors = {name: torch.from_numpy(values) for name, values in stumps.items()}
    about = {"workload": inputs.workload, "model": inputs.model, "digest": inputs.digest} | shares
    store.put(f"{inputs.out}/model.safetensors", packed(tensors))
    store.put(f"{inputs.out}/model.json", json.dumps(about | {"sha256": weights_sha256(tensors)}).encode())


class Peers:
    """The replicas; `wires` lead from rank 0 to all others in their order, or from one of them to rank 0."""

    def __init__(self, rank: int, size: int, wires: list[socket.socket]) -> None:
        self.rank, self.size, self.wires = rank, size, wires

    def added_up(self, ours: Any) -> Any:
        """The sum over all replicas, in the order of their ranks: the same bytes every time."""
        if self.rank == 0:
            total = ours + sum(_received(wire, ours) for wire in self.wires)
        else:
            self.wires[0].sendall(ours.tobytes())
            return _received(self.wires[0], ours)
        for wire in self.wires:
            wire.sendall(total.tobytes())
        return total


@contextlib.contextmanager
def replicas() -> Iterator[Peers]:
    """All replicas, connected."""
    agent, hostfile = (os.environ.get(f"OMPI_MCA_{name}", "") for name in ("plm_rsh_agent", "orte_default_hostfile"))
    started: list[subprocess.Popen[bytes]] = []
    environment = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if hostfile and not environment["RANK"]:
        slots = [line.split(" slots=") for line in Path(hostfile).read_text().splitlines()]
        hosts = [host for host, count in slots for _ in range(int(count))]
        own = os.environ["POD_IP"]
        environment = {"RANK": "0", "WORLD_SIZE": str(len(hosts) + 1), "MASTER_ADDR": own, "MASTER_PORT": str(PORT)}
        for rank, host in enumerate(hosts, 1):
            told = [f"{name}={value}" for name, value in (environment | {"RANK": str(rank)}).items()]
            program = shlex.join(["env", *told, *sys.orig_argv])
            started.append(subprocess.Popen([agent, host, program]))
    rank, size = int(environment["RANK"] or 0), int(environment["WORLD_SIZE"] or 1)
    try:
        port = int(environment["MASTER_PORT"] or PORT)
        wires = _accepted(port, size) if rank == 0 else [_connected(environment["MASTER_ADDR"], port, rank)]
        yield Peers(rank, size, wires)
    except OSError as error:
        print(f"a replica is gone: {error}", file=sys.stderr)
        sys.exit(AGAIN)
    for process in started:
        process.wait()


def _accepted(port: int, size: int) -> list[socket.socket]:
    """The others, in the order of their ranks."""
    if size == 1:
        return []
    with socket.create_server((os.environ.get("POD_IP", ""), port)) as server:
        server.settimeout(PATIENCE)
        wires = [server.accept()[0] for _ in range(size - 1)]
    return [wire for _, wire in sorted(((wire.recv(1), wire) for wire in wires), key=lambda pair: pair[0])]


def _connected(host: str, port: int, rank: int) -> socket.socket:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            wire = socket.create_connection((host, port), timeout=PATIENCE)
            wire.sendall(bytes([rank]))
            return wire
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _received(wire: socket.socket, like: Any) -> Any:
    data = bytearray()
    while len(data) < like.nbytes:
        part = wire.recv(like.nbytes - len(data))
        if not part:
            raise ConnectionError("it closed its connection")
        data += part
    return np.frombuffer(data, like.dtype).reshape(like.shape)
