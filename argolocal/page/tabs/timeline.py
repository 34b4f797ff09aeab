"""The tab `timeline`: when each step waited, started and ran.

?open=NODE    a row for each iteration of the loop NODE
?zoom=4       a time axis that is four times as wide
?page=2       the second page of rows
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from argolocal.common import causes
from argolocal.common.wording import format_duration
from argolocal.errors import ConfigError
from argolocal.page.sources import Run
from argolocal.page.tabs.timeline_bars import (
    Bar,
    Piece,
    Stage,
    divide_loop,
    divide_step,
    find_parents,
    seconds_in,
)
from argolocal.view import summary
from argolocal.view.summary import Step, parse_timestamp

MAX_ROWS = 200
# a loop with more iterations is one row until the user opens it
MAX_OPEN_ITERATIONS = 8
ZOOMS = (1, 2, 4, 8, 16)
MAX_TICKS = 6
# seconds between the ticks of the axis
TICK_INTERVALS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
)
DAY_S = 86400


@dataclass(frozen=True)
class Tick:
    """A tick of the time axis. `position`: percent of the axis. `since_start`: time since the start
    of the run, as a text. `clock`: local time, as a text."""

    position: float
    since_start: str
    clock: str


@dataclass(frozen=True)
class TimelineRow:
    """A row for a step, an iteration of a loop, or a whole loop with `count` iterations. `open`,
    `close` are the URLs that open or close the loop, or ""."""

    name: str
    label: str
    depth: int
    phase: str
    bars: list[Bar]
    started: str | None
    waiting_seconds: float
    starting_seconds: float
    running_seconds: float
    attempts: int
    count: int
    message: str
    open: str
    close: str


@dataclass(frozen=True)
class Timeline:
    """The steps of a run on a time axis. `now`: position of the current time in percent, or None if
    the run is finished. `not_started`: steps that have no bar, because they have not started.
    `zooms`: zoom factor → URL."""

    rows: list[TimelineRow]
    ticks: list[Tick]
    now: float | None
    time_zone: str
    seconds: float
    not_started: list[str]
    zoom: int
    zooms: dict[int, str]
    page: int
    pages: int
    previous_page: str
    next_page: str


class TimelineTab:
    """The tab `timeline`."""

    name = "timeline"
    title = "Timeline"
    content = Timeline

    def is_shown(self, run: Run) -> bool:
        return True

    def build(self, run: Run, query: Mapping[str, str]) -> Any:
        zoom = _parse_number(query, "zoom", 1)
        if zoom not in ZOOMS:
            raise ConfigError(f"zoom is {zoom}: it must be one of {', '.join(map(str, ZOOMS))}.")
        open_name = query.get("open", "")

        steps = summary.list_steps(run.name, run.status, summary.list_planned_tasks(run.manifest))
        started_steps = [step for step in steps if step.node]
        axis = _find_axis(run, started_steps)
        rows = _make_rows(run, started_steps, axis, open_name)

        pages = max(1, -(-len(rows) // MAX_ROWS))
        page = min(max(1, _parse_number(query, "page", 1)), pages)

        def address(**changes: object) -> str:
            values = {"open": open_name, "zoom": zoom, "page": page, **changes}
            pairs = {key: value for key, value in values.items() if value not in ("", 1)}
            return f"/runs/{run.name}/timeline?{urlencode(pairs)}"

        shown_rows = [
            row.describe(address(open=row.step.name), address(open="", page=1))
            for row in rows[(page - 1) * MAX_ROWS : page * MAX_ROWS]
        ]
        now = None if run.is_finished else 100.0
        return Timeline(
            shown_rows,
            axis.ticks(zoom),
            now,
            datetime.fromtimestamp(axis.start).astimezone().tzname() or "",
            round(axis.end - axis.start, 3),
            [step.label for step in steps if not step.node],
            zoom,
            {value: address(zoom=value) for value in ZOOMS},
            page,
            pages,
            address(page=page - 1) if page > 1 else "",
            address(page=page + 1) if page < pages else "",
        )


@dataclass(frozen=True)
class Axis:
    """The time axis: from the start of a run to its end, or to the current time, in unix
    seconds."""

    start: float
    end: float

    def position(self, time: float) -> float:
        """Return the position of a time in percent."""
        share = (time - self.start) / max(self.end - self.start, 0.001)
        return round(100 * min(1.0, max(0.0, share)), 3)

    def ticks(self, zoom: int) -> list[Tick]:
        """Return the ticks of the axis: about MAX_TICKS in the visible part, which is 1/zoom of the
        axis."""
        length_s = self.end - self.start
        whole_days_s = max(1, round(length_s / DAY_S / MAX_TICKS / zoom)) * DAY_S
        long_enough = (
            interval for interval in TICK_INTERVALS if length_s / interval <= MAX_TICKS * zoom
        )
        interval_s = next(long_enough, whole_days_s)
        count = int(length_s / interval_s) + 1
        return [
            Tick(
                self.position(self.start + index * interval_s),
                "0 s" if index == 0 else _format_offset(index * interval_s),
                _format_clock(self.start + index * interval_s, interval_s),
            )
            for index in range(count)
        ]


@dataclass(frozen=True)
class _Row:
    """A row of the timeline, with the step or loop that it shows, and the time spans of its
    bars."""

    step: Step
    depth: int
    pieces: list[Piece]
    bars: list[Bar]
    attempts: int = 0
    count: int = 0
    is_open: bool = False
    can_be_opened: bool = False

    def describe(self, open_address: str, close_address: str) -> TimelineRow:
        step = self.step
        return TimelineRow(
            step.name,
            step.label,
            self.depth,
            step.phase,
            self.bars,
            step.started,
            seconds_in(self.pieces, Stage.WAITING),
            seconds_in(self.pieces, Stage.STARTING),
            seconds_in(self.pieces, Stage.RUNNING),
            self.attempts,
            self.count,
            causes.extract_cause(step.message),
            open_address if self.can_be_opened else "",
            close_address if self.is_open else "",
        )


def _make_rows(run: Run, steps: Sequence[Step], axis: Axis, open_name: str) -> list[_Row]:
    """Return the rows of the timeline. A retried step and its attempts share one row. The
    iterations of a large loop share one row, too."""
    parents = find_parents(run.status)
    rows: list[_Row] = []
    index = 0
    while index < len(steps):
        step = steps[index]
        end = index + 1
        while end < len(steps) and steps[end].depth > step.depth:
            end += 1

        children = [child for child in steps[index + 1 : end] if child.depth == step.depth + 1]

        if step.kind == "Retry":
            attempts = children or [step]
            pieces = [
                piece
                for attempt in attempts
                for piece in divide_step(run, attempt, parents, axis.end)
            ]
            rows.append(_Row(step, step.depth, pieces, _draw(pieces, axis), len(attempts)))
            index = end
        elif step.kind == "TaskGroup":
            is_small = len(children) <= MAX_OPEN_ITERATIONS
            is_open = is_small or open_name == step.name or open_name.startswith(f"{step.name}(")
            pieces = divide_loop(run, children, parents, axis.end)
            rows.append(
                _Row(
                    step,
                    step.depth,
                    pieces,
                    _draw(pieces, axis),
                    count=len(children),
                    is_open=is_open and not is_small,
                    can_be_opened=not is_open,
                )
            )
            index = index + 1 if is_open else end
        else:
            pieces = divide_step(run, step, parents, axis.end)
            rows.append(_Row(step, step.depth, pieces, _draw(pieces, axis)))
            index += 1
    return rows


def _draw(pieces: Sequence[Piece], axis: Axis) -> list[Bar]:
    """Return a bar for each time span."""
    bars: list[Bar] = []
    for piece in pieces:
        x = axis.position(piece.start)
        width = max(0.0, round(axis.position(piece.end) - x, 3))
        title = f"{piece.stage.value} {format_duration(round(piece.end - piece.start, 3))}"
        bars.append(Bar(piece.stage, piece.phase, x, width, title))
    return bars


def _find_axis(run: Run, steps: Sequence[Step]) -> Axis:
    """Return the time axis that contains all steps of a run."""
    starts = [parse_timestamp(step.started) for step in steps if step.started]
    start = min(starts, default=parse_timestamp(run.created) if run.created else time.time())
    ends = [parse_timestamp(step.finished) for step in steps if step.finished]
    end = max(ends, default=start)
    if run.phase == "Running":
        end = max(end, time.time())
    return Axis(start, max(end, start + 0.001))


def _format_clock(time: float, interval: float) -> str:
    """Format a unix time as local time, with the precision that the interval between two ticks
    requires."""
    local_time = datetime.fromtimestamp(time)
    if interval < 1:
        return local_time.strftime("%H:%M:%S.%f")[:-4]
    if interval < 60:
        return local_time.strftime("%H:%M:%S")
    if interval < DAY_S:
        return local_time.strftime("%H:%M")
    return local_time.strftime("%d %b")


def _format_offset(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 60:
        return f"{seconds:g} s"
    if seconds < 3600:
        return f"{seconds / 60:g} min"
    if seconds < DAY_S:
        return f"{seconds / 3600:g} h"
    return f"{seconds / DAY_S:g} d"


def _parse_number(query: Mapping[str, str], key: str, default: int) -> int:
    text = query.get(key, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 6:
        raise ConfigError(f"{key} is {text[:40]!r}: it must be a number.")
    return int(text)
