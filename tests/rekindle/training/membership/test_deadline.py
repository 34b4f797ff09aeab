"""The deadline of a training: time spent waiting for nodes or in a queue does not count; too long a
training ends."""

import asyncio
from typing import Any

import pytest

from rekindle.errors import ConfigError
from rekindle.kubernetes_names import REKINDLE_DEADLINE
from rekindle.storage import Store
from rekindle.training.membership.server import TICK_INTERVAL_S
from tests.rekindle.training.membership.members import make_join_message, serving

pytestmark = pytest.mark.usefixtures("secret")
LIMIT = 0.5  # seconds


@pytest.mark.slow
def test_the_deadline_of_a_training_counts_only_while_workers_train(
    s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REKINDLE_DEADLINE, str(LIMIT))

    async def scene() -> None:
        async with serving() as (coordinator, _), asyncio.timeout(60):
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
        async with serving():
            raise AssertionError("the coordinator has started")

    with pytest.raises(ConfigError, match=f"{REKINDLE_DEADLINE} is"):
        asyncio.run(scene())
