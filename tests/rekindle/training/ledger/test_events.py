"""Every recorded event can be read, even if the object store fails for a while, and training never
waits for it."""

import json
import threading
import uuid
from typing import Any

import pytest

from rekindle.errors import StorageError
from rekindle.storage import Store
from rekindle.training.ledger import events as ledger
from rekindle.training.ledger.events import Ledger, read_events
from tests.waiting import until


@pytest.fixture
def prefix() -> str:
    return f"ledgers/{uuid.uuid4().hex}"


def test_events_of_several_writers_are_sorted_by_time(s3: Store, prefix: str) -> None:
    first_ledger = Ledger(lambda: s3, prefix)
    second_ledger = Ledger(lambda: s3, prefix)
    first_ledger.note("coordinator", id="a")
    # the second coordinator has taken over; the clock of the second coordinator is different
    second_ledger.note("coordinator", id="b", t=1.5)
    first_ledger.note("step", step=1)
    for each in (first_ledger, second_ledger):
        each.close()
    assert [(e["event"], e.get("id")) for e in read_events(s3, prefix)] == [
        ("coordinator", "b"),
        ("coordinator", "a"),
        ("step", None),
    ]


def test_a_full_segment_is_followed_by_the_next(s3: Store, prefix: str) -> None:
    book = Ledger(lambda: s3, prefix)
    for number in range(3000):
        book.note("lost", name="w", why="x" * 200, number=number)
    book.close()
    assert len(list(s3.list(prefix))) > 2
    assert [event["number"] for event in read_events(s3, prefix)] == list(range(3000))


def test_damaged_and_duplicate_lines_are_skipped_and_counted(s3: Store, prefix: str) -> None:
    valid_event = {"t": 1.0, "event": "step", "step": 1}
    lines = [
        json.dumps(valid_event),
        json.dumps(valid_event),
        '{"t": 2, "ev',
        '{"t": "soon", "event": "step"}',
        "[1]",
        "[" * 5000,
        '{"t": NaN, "event": "step"}',
        '{"t": 1e400, "event": "step"}',
        f'{{"t": 1{"0" * 400}, "event": "step"}}',
        "\xff",
    ]
    s3.put(f"{prefix}/1-a-0.jsonl", "\n".join(lines).encode("latin-1"))
    assert read_events(s3, prefix) == [valid_event, {"t": 1.0, "event": "skipped", "lines": 9}]


def test_without_a_ledger_the_list_of_events_is_empty(s3: Store, prefix: str) -> None:
    assert read_events(s3, prefix) == []


class UnavailableStore:
    """A store that is unavailable until `back` is set."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.back = threading.Event()
        self.asked = threading.Event()

    def open(self) -> Store:
        self.asked.set()
        if not self.back.is_set():
            raise StorageError("unavailable")
        return self.store


def test_events_wait_in_memory_while_the_store_is_unavailable(
    s3: Store, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "STEP_DELAY_S", 0.01)
    unavailable = UnavailableStore(s3)
    book = Ledger(unavailable.open, prefix)
    book.note("join", name="a")
    assert unavailable.asked.wait(10)
    book.note("join", name="b")
    unavailable.back.set()
    book.close()
    assert [event["name"] for event in read_events(s3, prefix)] == ["a", "b"]


class FailingStore:
    """A store whose first requests fail in different ways, and keep references to their data."""

    def __init__(self, store: Store) -> None:
        self.store, self.failures, self.held = (
            store,
            [StorageError("torn"), RuntimeError("odd")],
            list[memoryview](),
        )

    def put(self, key: str, data: bytes | bytearray) -> None:
        if self.failures:
            self.held.append(memoryview(data))
            raise self.failures.pop()
        self.store.put(key, data)


def test_later_events_are_written_after_any_failed_request(
    s3: Store, prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "STEP_DELAY_S", 0.01)
    store: Any = FailingStore(s3)
    book = Ledger(lambda: store, prefix)
    book.note("join", name="a")
    until("both requests to fail", lambda: not store.failures)
    book.note("join", name="b")
    book.close()
    assert [event["name"] for event in read_events(s3, prefix)] == ["a", "b"]
    assert capsys.readouterr().err.count("the ledger is waiting for the object store") == 1


def test_close_gives_up_on_an_unavailable_store_after_its_timeout_with_a_message(
    s3: Store, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Ledger(UnavailableStore(s3).open, prefix)
    book.note("join", name="a")
    book.close(0.1)
    assert f"not in the object store ({prefix})" in capsys.readouterr().err


def test_memory_is_bounded_and_step_events_are_dropped_first(
    s3: Store, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_WAITING_EVENTS", 100)
    unavailable = UnavailableStore(s3)
    book = Ledger(unavailable.open, prefix)

    for step in range(1000):
        book.note("step", step=step)
        if step % 100 == 0:
            book.note("lost", name=str(step), why="connection")

    unavailable.back.set()
    book.close()
    events = read_events(s3, prefix)
    kinds = [event["event"] for event in events]
    assert kinds.count("lost") == 10
    assert 0 < kinds.count("step") <= 100
    assert sum(e["events"] for e in events if e["event"] == "dropped") == 1000 - kinds.count("step")


def test_values_that_json_cannot_represent_are_recorded_as_text(s3: Store, prefix: str) -> None:
    book = Ledger(lambda: s3, prefix)
    book.note("odd", value={(1, 2): 3})
    book.note("path", value=object)
    book.close()
    assert [event["event"] for event in read_events(s3, prefix)] == ["odd", "path"]
