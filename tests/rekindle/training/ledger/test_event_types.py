"""A damaged or malicious line of a ledger is skipped, and no command fails because of it."""

import json
from typing import Any

import pytest

from rekindle.training.cost.bill import build_report
from rekindle.training.ledger.accounting import summarize_events
from rekindle.training.ledger.event_types import EVENT_TYPES
from rekindle.training.ledger.events import Event, read_events
from rekindle.training.ledger.sentences import describe_summary

RUN: list[Event] = [
    {"t": 1, "event": "run", "device": "cpu", "workers": 1, "virtual_workers": 8, "steps": 10},
    {"t": 1, "event": "run", "program": True, "unit": "steps", "samples": 80},
    {"t": 1, "event": "coordinator", "id": "a", "created": 0.5},
    {"t": 2, "event": "join", "worker": "w", "name": "w", "step": -1, "harvested": True},
    {"t": 2, "event": "join", "worker": "x", "name": "x", "step": -1, "capacity": "on-demand"},
    {"t": 2, "event": "on_demand", "workers": 2, "previous": 0, "seconds": 600.0},
    {"t": 3, "event": "generation", "generation": 1, "members": ["w"], "step": 0},
    {"t": 4, "event": "restored", "step": 1, "tier": "hot", "name": "w"},
    {"t": 5, "event": "step", "step": 5, "last": True},
    {"t": 6, "event": "checkpoint", "step": 5, "seconds": 1, "cost": 1, "bytes": 4, "uploaded": 3},
    {
        "t": 6.5,
        "event": "progress",
        "percentage": 4,
        "seconds_left": 5,
        "metrics": {"a": 1},
        "not_finite": ["x"],
    },
    {"t": 6.6, "event": "trained", "seconds": 10.0},
    {"t": 7, "event": "unsaved", "seconds": 4},
    {
        "t": 7,
        "event": "usage",
        "name": "a",
        "seconds": 60,
        "cpu_cores_mean": 1.5,
        "gpu_percent_max": 5,
    },
    {"t": 7.2, "event": "open", "generation": 2, "hard": True},
    {"t": 7.5, "event": "killed", "name": "w"},
    {"t": 8, "event": "lost", "worker": "w", "name": "w", "why": "silent", "step": 5},
    {"t": 8.1, "event": "join", "worker": "v", "name": "v", "step": 5},
    {"t": 8.2, "event": "drain", "worker": "v", "name": "v", "step": 5},
    {"t": 9, "event": "failed", "name": "w", "message": "m", "code": 1},
    {"t": 9.1, "event": "dropped", "events": 2},
    {"t": 9.2, "event": "skipped", "lines": 2},
]
VERDICT = {"t": 10, "event": "verdict", "code": 1, "message": "x"}
COMPLETE = {"t": 10, "event": "complete", "sha256": "x", "step": 6}
LAST_EVENTS: list[list[Event]] = [[], [VERDICT], [COMPLETE]]
WRONG_VALUES = [
    "abc",
    float("inf"),
    float("nan"),
    -(10**30),
    10**90,
    10**400,
    1e308,
    [],
    {"a": [1]},
]


class Entry:
    key = "ledger/1.jsonl"


class OneObject:
    """A store with one segment of a ledger."""

    def __init__(self, events: list[Event]) -> None:
        self.data = "\n".join(json.dumps(event) for event in events).encode()

    def list(self, prefix: str) -> "list[Entry]":
        return [Entry()]

    def get(self, key: str) -> bytes:
        return self.data


def read(events: list[Event]) -> list[Event]:
    store: Any = OneObject(events)
    return read_events(store, "ledger")


def test_every_event_of_a_run_is_read() -> None:
    events = [*RUN, VERDICT, COMPLETE]
    assert read(events) == events
    assert {event["event"] for event in events} >= EVENT_TYPES.keys() - {"loss"}


@pytest.mark.parametrize("end", LAST_EVENTS)
def test_no_value_of_a_field_prevents_the_report_of_a_training(end: list[Event]) -> None:
    events = [*RUN, *end]
    for index, event in enumerate(events):
        for name in event.keys() - {"event"}:
            for value in WRONG_VALUES:
                changed = [*events[:index], event | {name: value}, *events[index + 1 :]]
                summary = summarize_events(read(changed))
                assert describe_summary(summary)
                assert build_report(summary, None)
                assert json.dumps(summary.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    "event",
    [
        {"event": "progress", "percentage": 4, "seconds_left": "x"},
        {"event": "checkpoint", "uploaded": "x"},
        {"event": "checkpoint", "bytes": 10**90},
        {"event": "step", "step": 2**53},
        {"event": "run", "steps": "abc"},
        {"event": "run", "samples": {"a": 1}},
        {"event": "new", "t": "soon"},
    ],
)
def test_an_event_with_a_wrong_field_is_skipped_and_counted(event: Event) -> None:
    events_read = read([{"t": 1.0} | event])
    assert events_read == [{"t": 0.0, "event": "skipped", "lines": 1}]
    assert summarize_events(events_read).skipped == 1


def test_an_event_of_a_later_version_is_read() -> None:
    later_event = {"t": 1.0, "event": "later", "field": [1]}
    assert read([later_event]) == [later_event]
