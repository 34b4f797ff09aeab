"""Train gradient-boosted stumps on the digits as XGBoost does: each replica has a part of the rows,
and their histograms of gradients are summed.

    rekindle step steps.boosting.boost --dataset=runs/a/dataset --out=runs/a/model \\
      --model='{"rounds": 40}'

Rank 0 writes `<out>/model.safetensors` and `<out>/model.json`. In an XGBoostJob, the variables
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT define the replicas. In an MPIJob, the Launcher starts
one replica per slot of the hostfile. Without any of these variables, this process is the only
replica.
"""

import contextlib
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

from argolocal.common import exit_codes
from argolocal.common.environment import MAX_PORT, read_integer
from rekindle import StepInputs, StepOutputs, Store
from rekindle.content.dataset import verify_dataset
from rekindle.content.weights import weights_sha256
from rekindle.documents import describe_model
from rekindle.kubernetes_names import POD_IP
from rekindle.step import SHA256_OR_EMPTY
from rekindle.training.spec import TrainingSpec

PIXEL_VALUES = 17
DIGITS = 10
SHRINKAGE = 0.5
L2_PENALTY = 1.0
DEFAULT_PORT = 9999
MAX_REPLICAS = 256  # since a rank is sent as one byte
TIMEOUT_S = 60.0


class Inputs(StepInputs):
    dataset: str = Field(description="key prefix of the dataset")
    out: str = Field(description="key prefix of the model")
    model: dict[str, Any] = Field(
        description="section `model` of the config; `rounds`: stumps per digit"
    )
    train: dict[str, Any] = Field(
        default_factory=dict, description="section `train` of the config, with `validation`"
    )
    workload: str = Field("steps.boosting", description="module that scores the model")
    digest: str = Field(
        "", pattern=SHA256_OR_EMPTY, description="sha256 that identifies the dataset"
    )


class Outputs(StepOutputs):
    """No outputs: the model is in the object store."""


def run(inputs: Inputs) -> Outputs:
    """Train and save the model. If a replica is lost, exit with 143, so that the operator restarts
    this replica."""
    import torch

    from rekindle.training.computation import open_samples
    from rekindle.workload import load

    store = Store.from_env()
    dataset = inputs.workdir / "dataset"
    store.download(f"{inputs.dataset}/", dataset)
    verify_dataset(dataset, inputs.digest, store.uri(inputs.dataset))
    spec = TrainingSpec.for_local_training(
        inputs.workload, inputs.model, inputs.train, "stumps", inputs.digest
    )
    samples, _ = open_samples(spec, load(inputs.workload), dataset)

    with connect_replicas() as peers:
        share = torch.arange(peers.rank, len(samples), peers.size)
        images, labels = samples.batch(share)
        stumps = boost(images, labels, inputs.model["rounds"], peers)
        shares = {"replicas": peers.size, "rows": int(peers.all_reduce(np.array([len(share)]))[0])}

    if peers.rank == 0:
        save(store, inputs, stumps, spec.identity() | shares)

    return Outputs()


def boost(images: Any, labels: Any, rounds: int, peers: "Peers") -> dict[str, Any]:
    """Train on the images [n, 1, 8, 8] and labels [n] of all replicas; return the stumps as NumPy
    arrays by name."""
    rows = (images.numpy().reshape(len(images), -1) * (PIXEL_VALUES - 1)).round()
    targets = np.eye(DIGITS)[labels]
    scores = np.zeros((len(rows), DIGITS))
    # shape [n, 64 * PIXEL_VALUES]
    one_hot = (rows[:, :, None] == np.arange(PIXEL_VALUES)).reshape(len(rows), -1).astype(float)
    stumps = {
        name: np.zeros((rounds, DIGITS), "float32")
        for name in ("pixel", "threshold", "below", "above")
    }

    for number in range(rounds):
        probabilities = np.exp(scores - scores.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)

        local_sums = np.stack(
            [
                one_hot.T @ (probabilities - targets),
                one_hot.T @ (probabilities * (1 - probabilities)),
            ]
        )

        # for each pixel and value: sums over the rows whose pixel is at most this value
        sums = peers.all_reduce(local_sums).reshape(2, -1, PIXEL_VALUES, DIGITS).cumsum(2)
        total = sums[:, :, -1:]
        gain_below, gain_above = (
            gradient**2 / (weight + L2_PENALTY) for gradient, weight in (sums, total - sums)
        )
        gain = gain_below + gain_above
        best = gain[:, :-1].reshape(-1, DIGITS).argmax(0)
        pixel = best // (PIXEL_VALUES - 1)
        value = best % (PIXEL_VALUES - 1)
        digit = np.arange(DIGITS)
        sums_below = sums[:, pixel, value, digit]
        sums_total = total[:, pixel, 0, digit]
        score_below, score_above = (
            -SHRINKAGE * gradient / (weight + L2_PENALTY)
            for gradient, weight in (sums_below, sums_total - sums_below)
        )
        scores += np.where(rows[:, pixel] <= value, score_below, score_above)

        for name, column in zip(
            stumps,
            (pixel, (value + 0.5) / (PIXEL_VALUES - 1), score_below, score_above),
            strict=True,
        ):
            stumps[name][number] = column

    return stumps


def save(store: Store, inputs: Inputs, stumps: dict[str, Any], description: dict[str, Any]) -> None:
    """Upload the model in the layout of steps.train, with model.json last."""
    import torch
    from safetensors.torch import save as serialize

    tensors = {name: torch.from_numpy(values) for name, values in stumps.items()}
    store.put(f"{inputs.out}/model.safetensors", serialize(tensors))
    store.put(
        f"{inputs.out}/model.json",
        describe_model(description | {"sha256": weights_sha256(tensors)}),
    )


class Peers:
    """The connections of a replica: rank 0 is connected to all other replicas, in rank order, and
    each of these only to rank 0."""

    def __init__(self, rank: int, size: int, sockets: list[socket.socket]) -> None:
        self.rank = rank
        self.size = size
        self.sockets = sockets

    def all_reduce(self, values: Any) -> Any:
        """Return the sum of `values` over all replicas. Rank 0 adds the values in rank order, so
        that the sum is reproducible bit for bit."""
        if self.rank != 0:
            self.sockets[0].sendall(values.tobytes())
            return _receive(self.sockets[0], values)

        total = values + sum(_receive(connection, values) for connection in self.sockets)
        for connection in self.sockets:
            connection.sendall(total.tobytes())
        return total


@contextlib.contextmanager
def connect_replicas() -> Iterator[Peers]:
    """Connect all replicas; in an MPIJob, the Launcher first starts the other replicas."""
    agent, hostfile = (
        os.environ.get(f"OMPI_MCA_{name}", "")
        for name in ("plm_rsh_agent", "orte_default_hostfile")
    )
    processes: list[subprocess.Popen[bytes]] = []

    environment = {
        name: os.environ.get(name, "")
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    if hostfile and not environment["RANK"]:
        slots = [line.split(" slots=") for line in Path(hostfile).read_text().splitlines()]
        hosts = [host for host, count in slots for _ in range(int(count))]

        environment = {
            "RANK": "0",
            "WORLD_SIZE": str(len(hosts) + 1),
            "MASTER_PORT": str(DEFAULT_PORT),
            "MASTER_ADDR": os.environ[POD_IP],
        }

        for rank, host in enumerate(hosts, 1):
            variables = [
                f"{name}={value}" for name, value in (environment | {"RANK": str(rank)}).items()
            ]
            program = shlex.join(["env", *variables, *sys.orig_argv])
            processes.append(subprocess.Popen([agent, host, program]))

    os.environ.update(environment)
    size = read_integer("WORLD_SIZE", 1, 1, MAX_REPLICAS)
    rank = read_integer("RANK", 0, 0, size - 1)
    port = read_integer("MASTER_PORT", DEFAULT_PORT, 1, MAX_PORT)

    try:
        if rank == 0:
            sockets = _accept(port, size)
        else:
            sockets = [_connect(environment["MASTER_ADDR"], port, rank)]

        yield Peers(rank, size, sockets)
    except OSError as error:
        print(f"a replica is lost: {error}", file=sys.stderr)
        # the training operator restarts a replica that ends with this exit code
        sys.exit(exit_codes.TERMINATED)

    for process in processes:
        process.wait()


def _accept(port: int, size: int) -> list[socket.socket]:
    """Accept the connections of the other replicas; return them in rank order."""
    if size == 1:
        return []
    with socket.create_server((os.environ.get(POD_IP, ""), port)) as server:
        server.settimeout(TIMEOUT_S)
        sockets = [server.accept()[0] for _ in range(size - 1)]
    sockets_by_rank = [(peer.recv(1), peer) for peer in sockets]
    return [peer for _, peer in sorted(sockets_by_rank, key=lambda pair: pair[0])]


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


def _receive(connection: socket.socket, expected_array: Any) -> Any:
    data = bytearray()
    while len(data) < expected_array.nbytes:
        chunk = connection.recv(expected_array.nbytes - len(data))
        if not chunk:
            raise ConnectionError("the peer closed the connection")
        data += chunk
    return np.frombuffer(data, expected_array.dtype).reshape(expected_array.shape)
