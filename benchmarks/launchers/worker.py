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
from rekindle.training.membership.protocol import Members, read_coordinator_address
from rekindle.training.spec import TrainingSpec

# duration of a step
STEP_S = 1.0
EXCHANGE_TIMEOUT_S = 120.0
ENTRY = struct.Struct("=qd")
HEADER = struct.Struct("=q")


class Board:
    """Memory that all processes of the benchmark share: for each pod, the newest generation that
    its worker is a member of, and the time when the worker received the list of members.

    `must_exchange` is True if the workers of a new generation first send a value to each other."""

    def __init__(self, pod_count: int) -> None:
        self.memory = mmap.mmap(-1, HEADER.size + pod_count * ENTRY.size)

    def write(self, pod_number: int, generation: int, time_s: float) -> None:
        offset = HEADER.size + pod_number * ENTRY.size
        ENTRY.pack_into(self.memory, offset, generation, time_s)

    def read(self) -> list[tuple[int, float]]:
        """Return (generation, time) of each pod."""
        return list(ENTRY.iter_unpack(self.memory[HEADER.size :]))

    @property
    def must_exchange(self) -> bool:
        return HEADER.unpack_from(self.memory) != (0,)

    @must_exchange.setter
    def must_exchange(self, value: bool) -> None:
        HEADER.pack_into(self.memory, 0, value)


@dataclass
class PodPlace:
    """The pod of this process."""

    board: Board
    pod_number: int


# set before the launcher forks its worker
pod_place: PodPlace | None = None


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
        generation, members = group
        if pod_place.board.must_exchange:
            try:
                _exchange_values(client, generation, members)
            except RuntimeError:
                # the group has changed
                continue
        pod_place.board.write(pod_place.pod_number, generation, time.monotonic())

        while client.open_generation <= generation and not leaving_event.is_set():
            client.wait_until_complete(generation, STEP_S)
            step += 1
            client.step = step

    client.leave()


def compute_value_bytes(member_count: int) -> int:
    """Return the size of the value that each member of torch's gloo sends to all others, its
    addresses for each of them (measured with torch 2.15)."""
    return 154 + 8 * member_count


def _exchange_values(client: CoordinatorClient, generation: int, members: Members) -> None:
    """Send a value to each other member, and wait for the values of all. Raises RuntimeError."""
    value = bytes(compute_value_bytes(len(members)))
    client.send_value(generation, f"0/{client.id}", value)
    keys = [f"0/{member_id}" for member_id, _ in members]
    client.wait_for_values(generation, keys, EXCHANGE_TIMEOUT_S)


def _announce_leaving(client: CoordinatorClient, leaving_event: threading.Event) -> None:
    leaving_event.wait()
    client.notify_waiters()
