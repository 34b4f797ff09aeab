"""Start a coordinator in this process, and make the messages of members that join it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from rekindle.training.membership.protocol import PROTOCOL_VERSION
from rekindle.training.membership.server import Coordinator
from rekindle.training.membership.state_machine import MembershipStateMachine
from rekindle.training.spec import JOIN_TIMEOUT_S, TrainingSpec
from tests.ports import free_port, is_listening
from tests.rekindle.training.crew import SECRET
from tests.waiting import until


def make_spec(**settings: Any) -> TrainingSpec:
    values: dict[str, Any] = {
        "max_workers": 4,
        "min_workers": 2,
        "workers": 3,
        "hung_seconds": 20,
    } | settings
    return TrainingSpec(
        workload="w", dataset="d", digest="d" * 64, out="o", checkpoints="c", **values
    )


def publish_group(*workers: str, **settings: Any) -> MembershipStateMachine:
    """Return the membership of a run whose first group is published."""
    membership = MembershipStateMachine(make_spec(**settings))
    for worker in workers:
        membership.join(0, make_join_message(worker))
    for worker in workers:
        membership.acknowledge(0, worker, 1, 0)
    membership.tick(JOIN_TIMEOUT_S)
    assert membership.members == list(workers)
    for output in (membership.outbox, membership.events, membership.log):
        output.clear()
    return membership


def make_join_message(worker: str, **settings: Any) -> dict[str, Any]:
    first = {
        "id": worker,
        "name": worker,
        "address": "x:1",
        "fingerprint": {"torch": "2"},
        "step": -1,
    }
    return (
        first | {"protocol": PROTOCOL_VERSION, "generation": 0, "group": 0, "peers": []} | settings
    )


numbers = count()


@asynccontextmanager
async def serve_coordinator(prefix: str = "") -> AsyncIterator[tuple[Coordinator, tuple[str, int]]]:
    """Yield a coordinator in this process, and its address. `prefix`: prefix of the run's objects;
    by default, the run is new."""
    prefix = prefix or f"handshake-{next(numbers)}"

    settings = {
        "workload": "w",
        "dataset": "d",
        "digest": "d" * 64,
        "out": f"{prefix}/model",
        "checkpoints": prefix,
    }

    port = free_port()
    coordinator = Coordinator(TrainingSpec.model_validate(settings), SECRET.encode())
    run = asyncio.create_task(coordinator.run("127.0.0.1", port))
    await asyncio.to_thread(
        until, "the coordinator to listen", lambda: run.done() or is_listening(port)
    )
    yield coordinator, ("127.0.0.1", port)
    coordinator.set_exit_code(0)
    await run
