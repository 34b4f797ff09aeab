"""The times of a step: waiting for its turn, starting its pod, and running."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from argolocal.page.sources import Run
from argolocal.view.summary import FINISHED, Step, timestamp

# A shorter wait is the normal time that the runner needs.
MIN_WAIT_S = 0.1
# the clocks of the journal and of the kernel differ by less
CLOCK_TOLERANCE_S = 0.1


class Stage(StrEnum):
    """A part of the time of a step, in a word."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"


@dataclass(frozen=True)
class Piece:
    """A part of the time of a step, in unix seconds."""

    stage: Stage
    start: float
    end: float
    phase: str


@dataclass(frozen=True)
class Bar:
    """A rectangle of the timeline. Position and width in percent of the axis."""

    stage: Stage
    phase: str
    x: float
    width: float
    title: str


# id of a node → the nodes that it follows
Parents = Mapping[str, Sequence[Mapping[str, Any]]]


def find_parents(status: Mapping[str, Any]) -> Parents:
    """Return the nodes that name each node as their child."""
    parents: dict[str, list[Mapping[str, Any]]] = {}
    for node in status.get("nodes", {}).values():
        for child in node.get("children") or []:
            parents.setdefault(child, []).append(node)
    return parents


def bars_of_step(run: Run, step: Step, parents: Parents, now: float) -> list[Piece]:
    """Return the parts of the time of a step. The wait between the end of the steps that it follows
    and its creation is caused by a limit, such as `parallelism`, or by the pause before a retry."""
    node = step.node or {}
    if not step.started or step.phase in ("Skipped", "Omitted", "Cached"):
        return []

    created = timestamp(step.started)
    end = timestamp(step.finished) if step.finished else max(now, created)
    pieces: list[Piece] = []

    ready = _ready_time(run, node, parents)
    if ready is not None and created - ready >= MIN_WAIT_S:
        pieces.append(Piece(Stage.WAITING, ready, created, step.phase))

    if step.phase == "Pending":
        is_waiting = bool(node.get("synchronizationStatus"))
        stage = Stage.WAITING if is_waiting else Stage.STARTING
        return [*pieces, Piece(stage, created, end, step.phase)]

    start = run.pod_starts.get(str(node.get("id")))
    if start is None or not created - CLOCK_TOLERANCE_S <= start <= end + CLOCK_TOLERANCE_S:
        return [*pieces, Piece(Stage.RUNNING, created, end, step.phase)]

    start = min(max(start, created), end)
    if start > created:
        pieces.append(Piece(Stage.STARTING, created, start, step.phase))
    return [*pieces, Piece(Stage.RUNNING, start, end, step.phase)]


def _ready_time(run: Run, node: Mapping[str, Any], parents: Parents) -> float | None:
    """Return the time at which the steps had ended that a node follows, or None if it follows
    none."""
    times: list[float] = []
    for parent in parents.get(str(node.get("id")), ()):
        if parent.get("type") == "Retry":
            times.append(_end_of_last_attempt(run, parent, node))
        elif parent.get("id") == node.get("boundaryID") or parent.get("type") == "TaskGroup":
            times.append(timestamp(parent["startedAt"]))
        elif parent.get("finishedAt"):
            times.append(timestamp(parent["finishedAt"]))
    return max(times, default=None)


def _end_of_last_attempt(run: Run, retry: Mapping[str, Any], node: Mapping[str, Any]) -> float:
    nodes = run.status["nodes"]
    ends = [
        timestamp(nodes[id]["finishedAt"])
        for id in retry.get("children") or []
        if id in nodes
        and nodes[id].get("finishedAt")
        and nodes[id]["finishedAt"] <= node["startedAt"]
    ]
    return max(ends, default=timestamp(retry["startedAt"]))


def bars_of_loop(run: Run, steps: Sequence[Step], parents: Parents, now: float) -> list[Piece]:
    """Return the times in which at least one iteration of a loop ran. Iterations that failed are
    separate pieces, so that they are seen among many."""
    pieces = [
        piece
        for step in steps
        for piece in bars_of_step(run, step, parents, now)
        if piece.stage is Stage.RUNNING
    ]
    merged: list[Piece] = []
    for is_failed in (False, True):
        chosen = [piece for piece in pieces if (piece.phase in ("Failed", "Error")) == is_failed]
        merged += _merge(sorted(chosen, key=lambda piece: piece.start))
    return merged


def _merge(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces that overlap or nearly touch. `pieces`: in the order of their starts."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and piece.start <= merged[-1].end + MIN_WAIT_S:
            last = merged[-1]
            is_finished = last.phase in FINISHED and piece.phase in FINISHED
            phase = last.phase if is_finished else "Running"
            merged[-1] = Piece(Stage.RUNNING, last.start, max(last.end, piece.end), phase)
        else:
            merged.append(piece)
    return merged


def seconds_in(pieces: Sequence[Piece], stage: Stage) -> float:
    """Return the duration of one part of the time."""
    seconds = sum(piece.end - piece.start for piece in pieces if piece.stage is stage)
    return round(seconds, 3)
