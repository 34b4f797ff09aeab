"""Sums up the events of a ledger. ledger_summary.py defines the events and the Summary."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from rekindle.training.ledger.events import Event
from rekindle.training.ledger.ledger_summary import (
    LOST,
    TRAINED,
    UNSEEN,
    WAITED,
    Incident,
    Interval,
    Summary,
)


def summarize(events: Iterable[Event]) -> Summary:
    """Sum up the events of a run, which must be ordered by time. Invalid events are skipped and
    counted."""
    accounts = Accounts()
    for event in events:
        accounts.apply(event)
    return accounts.close()


@dataclass
class _Life:
    """The intervals of one process; the last one grows while the process is alive."""

    name: str
    intervals: list[Interval] = field(default_factory=list)
    alive: bool = False

    def switch(self, t: float, kind: str | None) -> None:
        """Start an interval of another `kind` at `t`; None: the process is dead from `t` on."""
        if self.alive:
            self.intervals[-1].end = t
            if self.intervals[-1].kind == kind:
                return
        self.alive = kind is not None
        if kind:
            self.intervals.append(Interval(t, t, kind))

    def cut(self, t: float) -> None:
        """Remove everything after `t`, because the process was dead."""
        self.alive = False
        self.intervals = [
            Interval(s.start, min(s.end, t), s.kind) for s in self.intervals if s.start < t
        ]

    def relabel(self, start: float, end: float, kind: str) -> float:
        """Change the trained intervals between two times to `kind`; returns their seconds."""
        if self.alive:
            self.intervals[-1].end = max(self.intervals[-1].start, end)

        index = len(self.intervals)
        changed = 0.0

        while index and self.intervals[index - 1].end > start:
            index -= 1
            interval = self.intervals[index]
            if interval.kind == TRAINED and interval.start < end:
                cuts = [
                    interval.start,
                    max(interval.start, start),
                    min(interval.end, end),
                    interval.end,
                ]

                pieces = [
                    Interval(a, b, k)
                    for a, b, k in zip(cuts, cuts[1:], (TRAINED, kind, TRAINED), strict=False)
                ]
                self.intervals[index : index + 1] = [
                    piece for piece in pieces if piece.start < piece.end
                ]
                changed += cuts[2] - cuts[1]

        return changed


@dataclass
class _Pause:
    """The time between two groups."""

    opened: float | None = None  # when the previous group was asked to stop after its step
    broken: float | None = None  # when the previous group broke
    unseen: bool = False  # a member died at an unknown time
    until: float = 0.0  # when the next group started
    restored: int | None = None  # the newest step that a member of the next group restored
    incidents: list[Incident] = field(default_factory=list)

    @property
    def is_hard(self) -> bool:
        return self.unseen or self.broken is not None


class Accounts:
    """Processes the events in order; each event has a method `on_<name>`."""

    def __init__(self) -> None:
        self.summary = Summary()
        self.lives: dict[str, _Life] = {}
        self.group: set[str] = set()  # ids of the live members of the newest group
        self.pause = _Pause()
        # the pause before a group without survivors, until its first step is known
        self.unsure: _Pause | None = None
        # id of a worker → time of its last sign of life, until it joins the new coordinator
        self.unconfirmed: dict[str, float] = {}
        # (time, step) of the newest work: without work that was repeated
        self.points: list[tuple[float, int]] = []
        self.step_seconds: float | None = None
        # True if the newest step is the last one that the workers completed
        self.last_step_known = False
        self.failed: set[str] = set()  # names of workers that reported an error
        # name of a lost worker that has not returned yet → the incident of its loss
        self.missing: dict[str, Incident] = {}
        self.coordinators = 0
        # restart of the coordinator, until the next group trains
        self.restart: Incident | None = None
        self.latest: float | None = None

    def apply(self, event: Event) -> None:
        name = event["event"]
        t = event["t"]
        if self.latest is None:
            self.summary.began = self.latest = t

        t = max(t, self.latest)
        counts = self.summary.counts
        try:
            handler = getattr(self, f"on_{name}", None)
            if handler:
                handler(t, event)
        except (KeyError, TypeError, ValueError, OverflowError):
            # int(float("inf")) raises OverflowError
            self.summary.skipped += 1

        counts[name] = counts.get(name, 0) + 1
        self.latest = t

    def close(self) -> Summary:
        summary = self.summary
        t = self.latest or 0.0
        self._end_all(t)
        for life in self.lives.values():
            summary.intervals.setdefault(life.name, []).extend(life.intervals)
        summary.ended = t
        return summary

    def on_run(self, t: float, event: Event) -> None:
        self.summary.run = {key: value for key, value in event.items() if key not in ("t", "event")}

    def on_coordinator(self, t: float, event: Event) -> None:
        self._new_epoch(t)
        self.coordinators += 1
        if self.coordinators > 1 and (
            restart := self._incident(t, "coordinator", str(event.get("id", "")))
        ):
            self.restart = restart
            restart.left = 0

    def on_join(self, t: float, event: Event) -> None:
        id = _id(event)
        name = str(event.get("name", "?"))
        alive = [other for other, life in self.lives.items() if life.alive and life.name == name]

        # a worker may have been known by its name only, and report its id now
        is_new = id == name if name in alive else id not in alive
        # the end of the worker's previous process was not recorded
        if alive and is_new and alive[0] not in self.unconfirmed:
            self._new_epoch(t)

        if (
            id != name
            and self.unconfirmed.pop(id, None) is not None
            and self.restart
            and id in self.group
        ):
            self.restart.left += 1

        self._mark_dead([name])
        if self.summary.generations and name not in [life.name for life in self.lives.values()]:
            self._incident(t, "join", name)

        life = self.lives.setdefault(id, _Life(name))
        # an earlier event had only the worker's name
        if id != name and name in self.lives and not life.alive:
            named = self.lives.pop(name)
            life.intervals = life.intervals + named.intervals
            life.alive = named.alive
            self.group = {id if member == name else member for member in self.group}

        if not life.alive:
            life.switch(t, WAITED)

    def on_lost(self, t: float, event: Event) -> None:
        id = _id(event)
        kind = event["event"]
        life = self.lives.get(id)
        self.unconfirmed.pop(id, None)

        if not (life and life.alive):
            return
        if kind == "lost" and id in self.group and self.pause.broken is None:
            self.pause.broken = t

        self.group.discard(id)
        life.switch(t, None)
        if life.name in self.failed:
            self.failed.discard(life.name)
        else:
            incident = self._incident(t, kind, life.name, str(event.get("why", "")))
            if incident and isinstance(event.get("step"), int):
                incident.step = max(incident.step or 0, event["step"])

    on_drain = on_lost

    def on_failed(self, t: float, event: Event) -> None:
        name = str(event.get("name", "?"))
        if name not in self.failed:
            self.failed.add(name)
            self._incident(t, "failed", name, str(event.get("message", "")))

    def on_open(self, t: float, event: Event) -> None:
        if event.get("hard"):
            self.pause.broken = t if self.pause.broken is None else self.pause.broken
            for life in self.lives.values():
                if life.alive:
                    life.switch(t, WAITED)
        elif self.pause.opened is None:
            self.pause.opened = t

    def on_generation(self, t: float, event: Event) -> None:
        step = int(event.get("step", -1))
        names = [str(name) for name in event.get("members") or []]
        self._mark_dead([life.name for life in self.lives.values() if life.name not in names])
        self.unconfirmed = {}
        self.restart = None
        self.summary.state = "running"
        self.summary.generations += 1
        ids = {life.name: id for id, life in self.lives.items() if life.alive}

        for name in names:
            if name not in ids:  # the event `join` of this worker was not recorded
                ids[name] = name
                self.lives.setdefault(name, _Life(name)).switch(t, WAITED)

        members = {ids[name] for name in names}
        self._regroup(t, step, members)
        for id, life in self.lives.items():
            if life.alive:
                life.switch(t, TRAINED if id in members else WAITED)

        for name in names:
            incident = self.missing.pop(name, None)
            if incident:
                incident.back = t

    def on_restored(self, t: float, event: Event) -> None:
        self.summary.restored.append(event)
        step = int(event["step"])
        tier = str(event.get("tier", ""))

        for incident in (self.unsure or self.pause).incidents:
            # a restored step was completed before
            if tier in ("hot", "durable") and incident.kind == "lost":
                incident.step = max(step, incident.step or 0)

        if self.unsure or not self.group - self.unconfirmed.keys():
            for incident in (self.unsure or self.pause).incidents:
                incident.tier = "hot" if "hot" in (tier, incident.tier) else tier

        if self.unsure:
            self._resume(self.unsure, step)
        # while the group has live members, the worker receives their state
        elif not self.group - self.unconfirmed.keys():
            self.pause.restored = max(step, self.pause.restored or 0)

    def on_step(self, t: float, event: Event) -> None:
        step = int(event["step"])
        self._infer_start(step)
        self.last_step_known = event.get("last") is True
        if self.restart and not self.restart.left:  # the group trains without a coordinator
            self.restart.left = len(self.group)
        if step > self.points[-1][1] if self.points else True:
            self._point(t, step)

    def on_checkpoint(self, t: float, event: Event) -> None:
        for name in ("bytes", "seconds"):
            number = event.get(name, 0)
            if not (isinstance(number, int | float) and 0 <= number < math.inf):
                raise ValueError(f"{name} of a checkpoint is no number")
        self.summary.checkpoints.append(event)

    def on_dropped(self, t: float, event: Event) -> None:
        self.summary.dropped += int(event["events"])

    def on_skipped(self, t: float, event: Event) -> None:
        self.summary.skipped += int(event["lines"])

    def on_verdict(self, t: float, event: Event) -> None:
        summary = self.summary
        if summary.state != "complete":
            summary.state, summary.message = "failed", str(event.get("message", ""))
            summary.code = int(event.get("code", 1))
        self._end_all(t)

    def on_complete(self, t: float, event: Event) -> None:
        if "step" in event:
            self.on_step(t, event)
        self.summary.state, self.summary.sha256 = "complete", str(event.get("sha256", ""))
        self.summary.message = ""
        self.summary.code = 0
        self.group = set()  # the training may be continued later, as that of a trial of a sweep
        for life in self.lives.values():
            life.switch(t, None)

    def _new_epoch(self, t: float) -> None:
        """Handle a new coordinator: a worker that does not join it died after its last known sign
        of life."""
        if self.summary.state == "failed":
            self.summary.state = "running"
            self.summary.message = ""
            self.summary.code = 0
        for id, life in self.lives.items():
            if life.alive:
                self.unconfirmed.setdefault(id, t if self.latest is None else self.latest)

    def _mark_dead(self, names: list[str]) -> None:
        """Mark the workers in `names` that did not join the new coordinator as dead."""
        for id, t in list(self.unconfirmed.items()):
            life = self.lives[id]
            if life.name in names:
                del self.unconfirmed[id]
                life.switch(t, None)
                life.cut(t)
                self.pause.unseen = self.pause.unseen or id in self.group
                self.group.discard(id)
                self._incident(t, "lost", life.name, UNSEEN)

    def _incident(self, t: float, kind: str, name: str, reason: str = "") -> Incident | None:
        """Record an incident unless the run has ended."""
        if self.summary.state != "running":
            return None
        survivors = sum(life.alive for id, life in self.lives.items() if id in self.group)
        step = self.points[-1][1] if self.points else None
        seen = reason != UNSEEN or self.last_step_known
        incident = Incident(t, kind, name, reason, step, seen, survivors)
        self.summary.incidents.append(incident)
        self.pause.incidents.append(incident)
        if kind in ("lost", "drain", "failed"):
            self.missing[name] = incident
        return incident

    def _end_all(self, t: float) -> None:
        pause = self.unsure or self.pause
        if pause.is_hard and self.points:
            self._relabel(self._finish_time(self.points[-1][1], t), t, LOST)
        for life in self.lives.values():
            life.switch(t, None)

    def _regroup(self, t: float, step: int, members: set[str]) -> None:
        """Start the next group, at `step` if it has a member of the previous group; else a later
        event has the step."""
        pause = self.pause
        survivors = self.group & members

        pause.until, self.pause, self.group = t, _Pause(), members
        for incident in pause.incidents:
            incident.resumed = t

        if survivors:
            self._infer_start(step)
            self._resume(pause, step)
            return

        for incident in pause.incidents:
            incident.left = 0 if incident.kind != "coordinator" else incident.left

        if self.unsure:
            self.unsure.until = t
            self.unsure.unseen = True
            self.unsure.incidents += pause.incidents
        else:
            self.unsure = pause

    def _infer_start(self, step: int) -> None:
        """Derive the first step of the group, if it is still unknown, from its current `step`."""
        if self.unsure:
            newest = min(step, self.points[-1][1]) if self.points else step
            self._resume(
                self.unsure,
                newest if self.unsure.restored is None else min(step, self.unsure.restored),
            )

    def _resume(self, pause: _Pause, step: int) -> None:
        """Let the group after `pause` start at `step`: all work beyond that step is lost."""
        self.unsure, step = None, max(step, 0)
        if self.points:
            newest = self.points[-1][1]
            when = self._finish_time(step, pause.until if pause.broken is None else pause.broken)

            is_soft = not pause.is_hard
            if is_soft and step >= newest:
                when = max(when, pause.until if pause.opened is None else pause.opened)
                self._relabel(when, pause.until, WAITED)
            else:
                cost = self._relabel(when, pause.until, LOST)
                for incident in pause.incidents:
                    incident.repeated = max(0, newest - step)
                    incident.cost = cost

            self.summary.repeated += max(0, newest - step)
            while self.points and (self.points[-1][1] > step or self.points[-1][0] > when):
                self.points.pop()

            self.summary.steps = step
            if step > newest:
                self._point(when, step)
            else:
                self.points.append((when, step))

        self._point(pause.until, step)

    def _relabel(self, start: float, end: float, kind: str) -> float:
        return sum(life.relabel(start, end, kind) for life in self.lives.values())

    def _point(self, t: float, step: int) -> None:
        if self.points and step > self.points[-1][1]:
            self.step_seconds = (t - self.points[-1][0]) / (step - self.points[-1][1])
        self.points.append((t, step))
        self.summary.points.append((t, step))
        self.summary.steps = max(self.summary.steps, step)

    def _finish_time(self, step: int, limit: float) -> float:
        """Return when `step` was finished: interpolated between two points, or extrapolated from
        the last point."""
        index = bisect_left(self.points, step, key=lambda point: point[1])
        if index == 0:
            return self.points[0][0]

        if index < len(self.points):
            (t0, s0), (t1, s1) = self.points[index - 1 : index + 1]
            return t0 + (t1 - t0) * (step - s0) / (s1 - s0)

        last_time, last_step = self.points[-1]
        later_steps = step - last_step
        if self.step_seconds is None:
            step_seconds = (limit - last_time) / (later_steps + 1)
        else:
            step_seconds = self.step_seconds

        return max(last_time, min(last_time + later_steps * step_seconds, limit))


def _id(event: Event) -> str:
    return str(event.get("worker") or event.get("name", "?"))
