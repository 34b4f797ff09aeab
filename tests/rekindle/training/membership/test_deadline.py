"""Tests of the deadline of a training: time spent waiting for nodes or in a queue does not count; a
training that takes too long ends."""

import asyncio
import uuid
from typing import Any

import pytest

from argolocal.common import exit_codes
from rekindle.errors import ConfigError
from rekindle.kubernetes_names import REKINDLE_CREATED, REKINDLE_DEADLINE
from rekindle.storage import Store
from rekindle.training.ledger.events import Ledger
from rekindle.training.membership.job_time import read_creation_time, read_trained_seconds
from rekindle.training.membership.server import TICK_INTERVAL_S
from tests.rekindle.training.membership.members import make_join_message, serve_coordinator
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("secret")
LIMIT = 0.5  # seconds


@pytest.mark.slow
def test_the_deadline_of_a_training_counts_only_while_workers_train(
    s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REKINDLE_DEADLINE, str(LIMIT))

    async def scene() -> None:
        async with serve_coordinator() as (coordinator, _), asyncio.timeout(60):
            membership = coordinator.membership
            ticks = asyncio.Queue[float]()
            tick = membership.tick
            monkeypatch.setattr(membership, "tick", lambda now: (tick(now), ticks.put_nowait(now)))
            *_, now = [await ticks.get() for _ in range(2 * int(LIMIT / TICK_INTERVAL_S))]
            assert coordinator.trained_seconds == 0
            assert not membership.verdict, "it waits for its first worker"

            while not membership.verdict:
                if "a" in membership.alive_workers:
                    membership.acknowledge(now, "a", membership.generation, 0)
                else:
                    membership.join(now, make_join_message("a"))

                now = await ticks.get()

            verdict: Any = membership.verdict
            assert verdict
            code, text = verdict
            assert code == 1
            assert coordinator.trained_seconds > LIMIT
            assert "cluster.pods.train.deadline_minutes" in text
            assert "Raise it" in text

    asyncio.run(scene())


def test_an_invalid_deadline_is_one_error(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REKINDLE_DEADLINE, "soon")

    async def scene() -> None:
        async with serve_coordinator():
            raise AssertionError("the coordinator has started")

    with pytest.raises(ConfigError, match=f"{REKINDLE_DEADLINE} is"):
        asyncio.run(scene())


def write_events(s3: Store, prefix: str, *events: tuple[str, dict[str, Any]]) -> None:
    """Write a ledger in the state in which the previous coordinator of a run has left the
    ledger."""
    ledger = Ledger(lambda: s3, f"{prefix}/ledger")
    for event, fields in events:
        ledger.note(event, **fields)
    ledger.close()


def test_a_replaced_coordinator_continues_to_count_the_trained_time(
    s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REKINDLE_DEADLINE, "1000")
    prefix = f"w-{uuid.uuid4().hex[:6]}/train"
    write_events(
        s3,
        prefix,
        ("trained", {"seconds": 400.0}),
        ("trained", {"seconds": 900.0}),
        ("step", {"step": 3}),
    )

    async def replace_coordinator() -> float:
        async with serve_coordinator(prefix) as (coordinator, _), asyncio.timeout(60):
            await asyncio.to_thread(
                until, "the earlier time to be known", lambda: coordinator.has_restored_time
            )
            coordinator.trained_seconds += 50
            coordinator.set_exit_code(exit_codes.TERMINATED)
            return coordinator.trained_seconds

    assert asyncio.run(replace_coordinator()) == 950
    assert read_trained_seconds(s3, f"{prefix}/ledger") == 950, "it has left its time"


def test_a_resumed_training_has_the_full_limit_after_a_failure(s3: Store) -> None:
    prefix = f"w-{uuid.uuid4().hex[:6]}/train"
    assert read_trained_seconds(s3, f"{prefix}/ledger") == 0
    write_events(s3, prefix, ("trained", {"seconds": 900.0}), ("verdict", {"code": 1}))
    assert read_trained_seconds(s3, f"{prefix}/ledger") == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:01:40Z,1970-01-01T00:00:10Z", 100.0),
        ("1970-01-01T00:01:40Z", 100.0),
        ("", None),
        ("{{tasks.prepare.finishedAt}}", None),
        ("yesterday,1970-01-01T00:01:40Z", None),
    ],
)
def test_the_queue_begins_when_the_last_step_before_the_job_has_ended(
    text: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REKINDLE_CREATED, text)
    assert read_creation_time() == seconds
