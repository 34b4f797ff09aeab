"""The worker that the launchers of this folder start: a member of the coordinator's group that
makes steps without torch.

`install` puts this module in the place of `rekindle.training.loop`, the only module of a launcher
that imports torch. All other code of the launcher, its forkserver and the membership is the real
one.
"""

import mmap
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import rekindle.training
from rekindle.training.membership.client import CoordinatorClient
from rekindle.training.membership.protocol import read_coordinator_address
from rekindle.training.spec import TrainingSpec

STEP_S = 1.0  # duration of a step
ENTRY = struct.Struct("=qd")


class Board:
    """Memory that all processes of the benchmark share: for each pod, the newest generation that
    its worker is a member of, and the time when the worker received the list of members."""

    def __init__(self, pod_count: int) -> None:
        self.memory = mmap.mmap(-1, pod_count * ENTRY.size)

    def write(self, pod_number: int, generation: int) -> None:
        ENTRY.pack_into(self.memory, pod_number * ENTRY.size, generation, time.monotonic())

    def clear(self, pod_number: int) -> None:
        ENTRY.pack_into(self.memory, pod_number * ENTRY.size, 0, 0.0)

    def read(self) -> list[tuple[int, float]]:
        """Return (generation, time) of each pod."""
        return list(ENTRY.iter_unpack(self.memory[:]))


@dataclass
class PodPlace:
    """The pod of this process."""

    board: Board
    pod_number: int


pod_place: PodPlace | None = None  # set before the launcher forks its worker


def install(board: Board, pod_number: int) -> None:
    """Make this process, which becomes a launcher, start workers without torch."""
    global pod_place
    pod_place = PodPlace(board, pod_number)
    this_module = sys.modules[__name__]
    sys.modules["rekindle.training.loop"] = this_module
    rekindle.training.loop = this_module  # type: ignore[attr-defined]


def train(
    training_spec: TrainingSpec,
    leaving_event: threading.Event,
    find_uncovered_code: Callable[[], str],
) -> None:
    """Be a member of the group until SIGTERM."""
    coordinator_endpoint = read_coordinator_address()
    assert coordinator_endpoint
    assert pod_place
    client = CoordinatorClient(*coordinator_endpoint, {"torch": "none"}, lambda: False)
    threading.Thread(target=_announce_leaving, args=(client, leaving_event), daemon=True).start()

    generation = 0
    step = 0
    while group := client.wait_for_group(generation, step, leaving_event.is_set):
        generation, _ = group
        pod_place.board.write(pod_place.pod_number, generation)

        while client.open_generation <= generation and not leaving_event.is_set():
            client.wait_until_complete(generation, STEP_S)
            step += 1
            client.step = step

    client.leave()


def _announce_leaving(client: CoordinatorClient, leaving_event: threading.Event) -> None:
    leaving_event.wait()
    client.notify_waiters()
