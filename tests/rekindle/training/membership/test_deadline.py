"""A training that waits for nodes or in a queue does not use up its time; one that trains too long is ended."""

import asyncio
import time
from typing import Any

import pytest

from rekindle.storage import Store
from rekindle.training.membership.server import DEADLINE
from tests.rekindle.training.membership.test_handshake import secret, serving
from tests.rekindle.training.membership.test_server import hello

__all__ = ["secret"]  # a fixture of all tests here


def test_the_deadline_of_a_training_counts_only_while_workers_train(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEADLINE, "0.5")

    async def scene() -> None:
        async with serving() as (coordinator, _):
            await asyncio.sleep(1)
            membership = coordinator.membership
            assert coordinator.trained == 0 and not membership.verdict, "it waits for its first worker"
            membership.join(time.monotonic(), hello("a"))
            until = time.monotonic() + 60
            while not membership.verdict and time.monotonic() < until:
                if "a" in membership.alive:
                    membership.ack(time.monotonic(), "a", membership.generation, 0)
                else:
                    membership.join(time.monotonic(), hello("a"))
                await asyncio.sleep(0.02)
            verdict: Any = membership.verdict
            assert verdict
            code, text = verdict
            assert code == 1 and coordinator.trained > 0.5
            assert "cluster.pods.train.deadline_minutes" in text and "Raise it" in text

    asyncio.run(scene())
