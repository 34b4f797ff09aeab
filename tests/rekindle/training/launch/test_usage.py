"""The use of a pod is sampled together with the use of its child processes."""

import multiprocessing
import os
from multiprocessing.synchronize import Event

import pytest

from rekindle.training.launch import usage
from rekindle.training.launch.usage import UsageSampler
from rekindle.training.ledger.accounting import summarize_events
from rekindle.training.ledger.event_types import check_event

MEBIBYTES = 64


def work(ready: Event) -> None:
    """Use a CPU and memory until the parent ends this process."""
    memory = bytearray(os.urandom(1 << 20) * MEBIBYTES)
    ready.set()
    while memory:
        pass


def test_the_use_contains_the_children_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "SAMPLE_INTERVAL_S", 0.2)
    monkeypatch.setattr(usage, "FIRST_REPORT_AFTER_S", 0.5)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=work, args=(ready,), daemon=True)
    process.start()
    try:
        ready.wait(30)
        sampler = UsageSampler()
        fields = None
        while not fields:
            fields = sampler.sample()
    finally:
        process.kill()
        process.join()

    assert fields["cpu_cores_max"] > 0.05
    assert fields["memory_bytes_max"] > MEBIBYTES << 20
    event = {"t": 1.0, "event": "usage", "name": "worker-0", **fields}
    check_event(event)
    summary = summarize_events([event, {**event, "t": 2.0, "cpu_cores_mean": 0.0}])
    recorded = summary.as_json()["usage"]["worker-0"]
    assert recorded["seconds"] == pytest.approx(2 * fields["seconds"], abs=0.01)
    assert recorded["cpu_cores_mean"] == pytest.approx(fields["cpu_cores_mean"] / 2, abs=0.01)
    assert recorded["memory_bytes_max"] == fields["memory_bytes_max"]
