"""Train gradient-boosted stumps on the digits as XGBoost does: each replica has a part of the rows,
and the replicas' histograms of gradients are summed.

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
from rekindle.documents import encode_model_description
from rekindle.kubernetes_names import POD_IP
from rekindle.step import SHA256_OR_EMPTY
from rekindle.training.spec import TrainingSpec

PIXEL_VALUES = 17
DIGITS = 10
SHRINKAGE = 0.5
L2_PENALTY = 1.0
DEFAULT_PORT = 9999
# maximum number of replicas, since a rank is sent as one byte
MAX_REPLICAS = 256
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
    """The step has no outputs, because it stores the model in the object store."""


def run(inputs: Inputs) -> Outputs:
    """Train and save the model. If a replica is lost, exit with 143, so that the operator restarts
    this replica."""
    import torch

    from rekindle.training.computation import open_samples
    from rekindle.workload import load

    object_store = Store.from_env()
    dataset_folder = inputs.workdir / "dataset"
    object_store.download(f"{inputs.dataset}/", dataset_folder)
    verify_dataset(dataset_folder, inputs.digest, object_store.uri(inputs.dataset))
    training_spec = TrainingSpec.for_local_training(
        inputs.workload, inputs.model, inputs.train, "stumps", inputs.digest
    )
    samples, _ = open_samples(training_spec, load(inputs.workload), dataset_folder)

    with connect_replicas() as replica_connections:
        own_indices = torch.arange(replica_connections.rank, len(samples), replica_connections.size)
        images, labels = samples.batch(own_indices)
        stumps = boost(images, labels, inputs.model["rounds"], replica_connections)
        share_description = {
            "replicas": replica_connections.size,
            "rows": int(replica_connections.all_reduce(np.array([len(own_indices)]))[0]),
        }

    if replica_connections.rank == 0:
        save(object_store, inputs, stumps, training_spec.identity() | share_description)

    return Outputs()


def boost(
    images: Any, labels: Any, round_count: int, replica_connections: "Peers"
) -> dict[str, Any]:
    """Train on the images [n, 1, 8, 8] and labels [n] of all replicas; return the stumps as NumPy
    arrays by name."""
    pixel_rows = (images.numpy().reshape(len(images), -1) * (PIXEL_VALUES - 1)).round()
    one_hot_targets = np.eye(DIGITS)[labels]
    class_scores = np.zeros((len(pixel_rows), DIGITS))
    # one column for each pixel and pixel value, shape [n, 64 * PIXEL_VALUES]
    one_hot = (
        (pixel_rows[:, :, None] == np.arange(PIXEL_VALUES))
        .reshape(len(pixel_rows), -1)
        .astype(float)
    )
    stumps = {
        array_name: np.zeros((round_count, DIGITS), "float32")
        for array_name in ("pixel", "threshold", "below", "above")
    }

    for round_number in range(round_count):
        probabilities = np.exp(class_scores - class_scores.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)

        local_sums = np.stack(
            [
                one_hot.T @ (probabilities - one_hot_targets),
                one_hot.T @ (probabilities * (1 - probabilities)),
            ]
        )

        # for each pixel and value: sums over the rows whose pixel is at most this value
        cumulative_sums = (
            replica_connections.all_reduce(local_sums)
            .reshape(2, -1, PIXEL_VALUES, DIGITS)
            .cumsum(2)
        )
        total_sums = cumulative_sums[:, :, -1:]
        gain_below, gain_above = (
            gradient_sum**2 / (weight_sum + L2_PENALTY)
            for gradient_sum, weight_sum in (cumulative_sums, total_sums - cumulative_sums)
        )
        split_gain = gain_below + gain_above
        best_split = split_gain[:, :-1].reshape(-1, DIGITS).argmax(0)
        best_pixel = best_split // (PIXEL_VALUES - 1)
        threshold_value = best_split % (PIXEL_VALUES - 1)
        digit_indices = np.arange(DIGITS)
        sums_below = cumulative_sums[:, best_pixel, threshold_value, digit_indices]
        sums_total = total_sums[:, best_pixel, 0, digit_indices]
        score_below, score_above = (
            -SHRINKAGE * gradient_sum / (weight_sum + L2_PENALTY)
            for gradient_sum, weight_sum in (sums_below, sums_total - sums_below)
        )
        class_scores += np.where(
            pixel_rows[:, best_pixel] <= threshold_value, score_below, score_above
        )

        for array_name, stump_column in zip(
            stumps,
            (best_pixel, (threshold_value + 0.5) / (PIXEL_VALUES - 1), score_below, score_above),
            strict=True,
        ):
            stumps[array_name][round_number] = stump_column

    return stumps


def save(
    object_store: Store, inputs: Inputs, stumps: dict[str, Any], model_description: dict[str, Any]
) -> None:
    """Upload the model in the layout of steps.train, with model.json last."""
    import torch
    from safetensors.torch import save as serialize

    stump_tensors = {
        array_name: torch.from_numpy(array_values) for array_name, array_values in stumps.items()
    }
    object_store.put(f"{inputs.out}/model.safetensors", serialize(stump_tensors))
    object_store.put(
        f"{inputs.out}/model.json",
        encode_model_description(model_description | {"sha256": weights_sha256(stump_tensors)}),
    )


class Peers:
    """The connections of a replica: rank 0 is connected to all other replicas, in rank order, and
    each other replica only to rank 0."""

    def __init__(self, rank: int, replica_count: int, sockets: list[socket.socket]) -> None:
        self.rank = rank
        self.size = replica_count
        self.sockets = sockets

    def all_reduce(self, local_values: Any) -> Any:
        """Return the sum of `local_values` over all replicas. Rank 0 adds the values in rank
        order, so that the sum is reproducible bit for bit."""
        if self.rank != 0:
            self.sockets[0].sendall(local_values.tobytes())
            return _receive_array(self.sockets[0], local_values)

        global_sum = local_values + sum(
            _receive_array(connection, local_values) for connection in self.sockets
        )
        for connection in self.sockets:
            connection.sendall(global_sum.tobytes())
        return global_sum


@contextlib.contextmanager
def connect_replicas() -> Iterator[Peers]:
    """Connect all replicas; in an MPIJob, the Launcher first starts the other replicas."""
    remote_shell_agent, hostfile_path = (
        os.environ.get(f"OMPI_MCA_{variable_name}", "")
        for variable_name in ("plm_rsh_agent", "orte_default_hostfile")
    )
    launched_processes: list[subprocess.Popen[bytes]] = []

    environment = {
        variable_name: os.environ.get(variable_name, "")
        for variable_name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    if hostfile_path and not environment["RANK"]:
        host_slots = [
            line.split(" slots=") for line in Path(hostfile_path).read_text().splitlines()
        ]
        host_per_process = [host for host, slot_count in host_slots for _ in range(int(slot_count))]

        environment = {
            "RANK": "0",
            "WORLD_SIZE": str(len(host_per_process) + 1),
            "MASTER_PORT": str(DEFAULT_PORT),
            "MASTER_ADDR": os.environ[POD_IP],
        }

        for rank, host in enumerate(host_per_process, 1):
            variable_assignments = [
                f"{variable_name}={value}"
                for variable_name, value in (environment | {"RANK": str(rank)}).items()
            ]
            remote_command = shlex.join(["env", *variable_assignments, *sys.orig_argv])
            launched_processes.append(subprocess.Popen([remote_shell_agent, host, remote_command]))

    os.environ.update(environment)
    replica_count = read_integer("WORLD_SIZE", 1, 1, MAX_REPLICAS)
    rank = read_integer("RANK", 0, 0, replica_count - 1)
    master_port = read_integer("MASTER_PORT", DEFAULT_PORT, 1, MAX_PORT)

    try:
        if rank == 0:
            replica_sockets = _accept_replicas(master_port, replica_count)
        else:
            replica_sockets = [_connect_to_master(environment["MASTER_ADDR"], master_port, rank)]

        yield Peers(rank, replica_count, replica_sockets)
    except OSError as error:
        print(f"a replica is lost: {error}", file=sys.stderr)
        # the training operator restarts a replica that ends with this exit code
        sys.exit(exit_codes.TERMINATED)

    for launched_process in launched_processes:
        launched_process.wait()


def _accept_replicas(port: int, replica_count: int) -> list[socket.socket]:
    """Accept the connections of the other replicas; return them in rank order."""
    if replica_count == 1:
        return []
    with socket.create_server((os.environ.get(POD_IP, ""), port)) as listening_socket:
        listening_socket.settimeout(TIMEOUT_S)
        sockets = [listening_socket.accept()[0] for _ in range(replica_count - 1)]
    sockets_by_rank = [(peer_socket.recv(1), peer_socket) for peer_socket in sockets]
    return [
        peer_socket
        for _, peer_socket in sorted(
            sockets_by_rank, key=lambda rank_and_socket: rank_and_socket[0]
        )
    ]


def _connect_to_master(host: str, port: int, rank: int) -> socket.socket:
    deadline_seconds = time.monotonic() + TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=TIMEOUT_S)
            connection.sendall(bytes([rank]))
            return connection
        except OSError:
            if time.monotonic() > deadline_seconds:
                raise
            time.sleep(0.1)


def _receive_array(connection: socket.socket, expected_array: Any) -> Any:
    received_bytes = bytearray()
    while len(received_bytes) < expected_array.nbytes:
        received_chunk = connection.recv(expected_array.nbytes - len(received_bytes))
        if not received_chunk:
            raise ConnectionError("the peer closed the connection")
        received_bytes += received_chunk
    return np.frombuffer(received_bytes, expected_array.dtype).reshape(expected_array.shape)
