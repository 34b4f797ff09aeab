"""Divide the time of a step into stages: waiting until it may start, starting its pod, and
running."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from argolocal.manifest.allowed_values import FAILED_PHASES
from argolocal.page.sources import Run
from argolocal.view.summary import FINISHED_PHASES, Step, parse_timestamp

# minimum time of a wait that is shown; the runner itself needs up to this many seconds to start a
# step
MIN_WAIT_S = 0.1
# times from the journal and from the kernel differ by less than this number of seconds
CLOCK_TOLERANCE_S = 0.1


class Stage(StrEnum):
    """The state of a step during a time span."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"


@dataclass(frozen=True)
class Piece:
    """A time span that a step spends in one stage. `start` and `end`: unix seconds."""

    stage: Stage
    start: float
    end: float
    phase: str


@dataclass(frozen=True)
class Bar:
    """A rectangle of the timeline. `x` and `width`: percent of the axis. `title`: stage and
    duration in words."""

    stage: Stage
    phase: str
    x: float
    width: float
    title: str


# id of a node → its parent nodes
Parents = Mapping[str, Sequence[Mapping[str, Any]]]


def find_parents(status: Mapping[str, Any]) -> Parents:
    """Return the parents of each node: the nodes whose field `children` contains it."""
    parents: dict[str, list[Mapping[str, Any]]] = {}
    for node in status.get("nodes", {}).values():
        for child in node.get("children") or []:
            parents.setdefault(child, []).append(node)
    return parents


def divide_step(run: Run, step: Step, parents: Parents, now: float) -> list[Piece]:
    """Return the time spans of the stages of a step. A step waits from the end of its predecessors
    until the creation of its node, for example because of `parallelism` or the delay before a
    retry. `now`: end of the last time span of a step that has not finished, in unix seconds."""
    node = step.node or {}
    if not step.started or step.phase in ("Skipped", "Omitted", "Cached"):
        return []

    created = parse_timestamp(step.started)
    end = parse_timestamp(step.finished) if step.finished else max(now, created)
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
    """Return the time at which all predecessors of a node had ended, or None if the node has no
    predecessors."""
    times: list[float] = []
    for parent in parents.get(str(node.get("id")), ()):
        if parent.get("type") == "Retry":
            times.append(_end_of_last_attempt(run, parent, node))
        elif parent.get("id") == node.get("boundaryID") or parent.get("type") == "TaskGroup":
            times.append(parse_timestamp(parent["startedAt"]))
        elif parent.get("finishedAt"):
            times.append(parse_timestamp(parent["finishedAt"]))
    return max(times, default=None)


def _end_of_last_attempt(run: Run, retry: Mapping[str, Any], node: Mapping[str, Any]) -> float:
    """Return the unix time at which the attempt before the attempt `node` ended. For the first
    attempt, return the start of the Retry node."""
    nodes = run.status["nodes"]
    attempts = [nodes[node_id] for node_id in retry.get("children") or [] if node_id in nodes]
    ends = [
        parse_timestamp(attempt["finishedAt"])
        for attempt in attempts
        if attempt.get("finishedAt") and attempt["finishedAt"] <= node["startedAt"]
    ]
    return max(ends, default=parse_timestamp(retry["startedAt"]))


def divide_loop(run: Run, steps: Sequence[Step], parents: Parents, now: float) -> list[Piece]:
    """Return the time spans in which at least one iteration of a loop ran. Failed iterations get
    separate time spans, so that they remain visible."""
    pieces = [
        piece
        for step in steps
        for piece in divide_step(run, step, parents, now)
        if piece.stage is Stage.RUNNING
    ]
    failed = [piece for piece in pieces if piece.phase in FAILED_PHASES]
    unfailed_pieces = [piece for piece in pieces if piece.phase not in FAILED_PHASES]
    return [*_merge(unfailed_pieces), *_merge(failed)]


def _merge(pieces: Sequence[Piece]) -> list[Piece]:
    """Join time spans that overlap or nearly touch. Return the joined time spans sorted by their
    start."""
    merged_pieces: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if merged_pieces and piece.start <= merged_pieces[-1].end + MIN_WAIT_S:
            last = merged_pieces.pop()
            is_finished = last.phase in FINISHED_PHASES and piece.phase in FINISHED_PHASES
            phase = last.phase if is_finished else "Running"
            piece = Piece(Stage.RUNNING, last.start, max(last.end, piece.end), phase)

        merged_pieces.append(piece)

    return merged_pieces


def seconds_in(pieces: Sequence[Piece], stage: Stage) -> float:
    """Return the total number of seconds of the time spans with this stage."""
    seconds = sum(piece.end - piece.start for piece in pieces if piece.stage is stage)
    return round(seconds, 3)
