"""Events of a training, as workers record them."""

from typing import Any

from rekindle.training.ledger.accounting import summarize_events
from rekindle.training.ledger.ledger_summary import LedgerSummary


def summarize(*lines: tuple[Any, ...]) -> LedgerSummary:
    """Return the summary of events that are written as (time, name, {fields})."""
    return summarize_events(
        {"t": t, "event": event, **(fields[0] if fields else {})} for t, event, *fields in lines
    )


def make_join(*names: str) -> list[tuple[Any, ...]]:
    return [(0, "join", {"worker": f"id-{name}", "name": name, "step": -1}) for name in names]


def make_lost(t: float, name: str, reason: str = "connection") -> tuple[Any, ...]:
    return (t, "lost", {"worker": f"id-{name}", "name": name, "why": reason})


def make_generation(t: float, number: int, step: int, *members: str) -> tuple[Any, ...]:
    return (t, "generation", {"generation": number, "members": list(members), "step": step})


def make_step(t: float, number: int) -> tuple[Any, ...]:
    return (t, "step", {"step": number})


def make_start(*names: str) -> list[tuple[Any, ...]]:
    """Return the events of a coordinator and its workers, which train from second 2."""
    return [
        (0, "coordinator", {"id": "c1"}),
        *make_join(*names),
        make_generation(2, 1, -1, *names),
        (2, "restored", {"step": 0, "tier": "none"}),
    ]
