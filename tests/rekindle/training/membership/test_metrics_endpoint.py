"""Tests of the Prometheus metrics of a training: its steps, the value of the loss function, its
workers, and how many workers were lost."""

import asyncio
from contextlib import suppress

from rekindle.training.membership.metrics_endpoint import (
    MAX_REQUESTS,
    MAX_STEP_TIMES,
    MetricsExporter,
)
from rekindle.training.membership.state_machine import MembershipStateMachine
from rekindle.training.spec import JOIN_TIMEOUT_S
from tests.rekindle.training.membership.members import make_join_message, make_spec


def parse_metrics(text: bytes) -> dict[str, float]:
    samples = [
        line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")
    ]
    return {name.removeprefix("rekindle_training_"): float(value) for name, value in samples}


def make_training_exporter() -> MetricsExporter:
    """Report the events of a training with two workers: one worker is lost, the other completes
    step 2."""
    membership = MembershipStateMachine(make_spec(workers=2, min_workers=1))
    exporter = MetricsExporter(membership)
    now = 100.0

    for name in "ab":
        membership.join(now, make_join_message(name))

    now += JOIN_TIMEOUT_S + 0.1
    for name in "ab":
        membership.acknowledge(now, name, membership.generation, 0)

    membership.heartbeat(now, "a", 1)
    membership.remove(now + 1, "b")
    membership.acknowledge(now + 1, "a", membership.generation, 1)
    membership.heartbeat(now + 2, "a", 2)
    exporter.note("run", steps=40)

    for event in membership.events:
        exporter.note(**event)

    return exporter


def test_a_scrape_has_steps_loss_members_and_lost_workers() -> None:
    exporter = make_training_exporter()
    assert "loss" not in parse_metrics(exporter.format_metrics()), "not reported yet"
    exporter.note("loss", loss=0.25)
    seen = parse_metrics(exporter.format_metrics())
    assert seen["step"] == 2
    assert seen["steps"] == 40
    assert seen["loss"] == 0.25
    assert seen["members"] == 1
    assert seen["workers"] == 1
    assert seen["generation"] == exporter.membership.published_generation
    assert seen['events_total{event="lost"}'] == 1
    assert seen['events_total{event="join"}'] == 2
    assert seen['worker_seconds{kind="trained"}'] > 0
    assert 'worker_seconds{kind="lost"}' in seen


def test_the_coordinators_memory_does_not_grow_with_the_steps() -> None:
    exporter = make_training_exporter()
    for step in range(3, 3 * MAX_STEP_TIMES):
        exporter.note("step", step=step)
    assert len(exporter.accounts.points) <= MAX_STEP_TIMES
    assert len(exporter.accounts.summary.points) <= MAX_STEP_TIMES


def test_the_exporter_answers_http_and_survives_silent_clients_and_large_requests() -> None:
    async def get(port: int, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def scrape() -> None:
        exporter = make_training_exporter()
        server = await exporter.serve("127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_REQUESTS - 2)]
        assert b"200" not in await get(port, b"x" * 100_000)
        head, _, body = (await get(port)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert f"Content-Length: {len(body)}".encode() in head
        assert parse_metrics(body)["step"] == 2

        for _, writer in silent:
            writer.close()

        server.close()

    asyncio.run(scrape())


def test_malformed_events_do_not_change_the_metrics() -> None:
    exporter = make_training_exporter()
    wrong_events: list[tuple[str, dict[str, object]]] = [
        ("step", {"step": "many"}),
        ("run", {"steps": "many"}),
        ("loss", {}),
        ("loss", {"loss": 10**400}),
        ("loss", {"loss": "nan"}),
    ]
    for event, fields in wrong_events:
        with suppress(ValueError):
            exporter.note(event, **fields)

    seen = parse_metrics(exporter.format_metrics())
    assert seen["step"] == 2
    assert seen["steps"] == 40
    assert "loss" not in seen
