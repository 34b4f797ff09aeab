"""Adds up the events of a ledger: see account.py for the events and the account.

summary = account(read(store, prefix))
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from rekindle.ledger.events import Event
from rekindle.ledger.report import LOST, TRAINED, WAITED, Incident, Interval, Summary


def summarize(events: Iterable[Event]) -> Summary:
    """Add up the events of a run, which are in the order of time. What makes no sense is skipped and counted."""
    book = _Book()
    for event in events:
        book.take(event)
    return book.close()


@dataclass
class _Life:
    """One process: its spans; the last one grows while it lives."""

    name: str
    intervals: list[Interval] = field(default_factory=list)
    alive: bool = False

    def turn(self, t: float, kind: str | None) -> None:
        """From now on it does something else; None: it is dead."""
        if self.alive:
            self.intervals[-1].end = t
            if self.intervals[-1].kind == kind:
                return
        self.alive = kind is not None
        if kind:
            self.intervals.append(Interval(t, t, kind))

    def cut(self, t: float) -> None:
        """It was dead from `t` on."""
        self.alive = False
        self.intervals = [Interval(s.start, min(s.end, t), s.kind) for s in self.intervals if s.start < t]

    def relabel(self, start: float, end: float, kind: str) -> float:
        """What counted as trained between two times was something else; gives the seconds."""
        if self.alive:
            self.intervals[-1].end = max(self.intervals[-1].start, end)
        at, changed = len(self.intervals), 0.0
        while at and self.intervals[at - 1].end > start:
            at -= 1
            interval = self.intervals[at]
            if interval.kind == TRAINED and interval.start < end:
                cuts = [interval.start, max(interval.start, start), min(interval.end, end), interval.end]
                parts = [Interval(a, b, k) for a, b, k in zip(cuts, cuts[1:], (TRAINED, kind, TRAINED), strict=False)]
                self.intervals[at : at + 1] = [part for part in parts if part.start < part.end]
                changed += cuts[2] - cuts[1]
        return changed


@dataclass
class _Gap:
    """The time between two groups."""

    opened: float | None = None  # the former group stops after its step from then on
    broken: float | None = None  # it was of no use from then on
    unseen: bool = False  # one of its members died, nobody knows when
    until: float = 0.0  # the next group trains
    restored: int | None = None  # the newest step that one of the next group brought, before it trained
    incidents: list[Incident] = field(default_factory=list)

    @property
    def hard(self) -> bool:
        return self.unseen or self.broken is not None


class _Book:
    """Goes through the events once, by a method `on_<name>` for each."""

    def __init__(self) -> None:
        self.found = Summary()
        self.lives: dict[str, _Life] = {}
        self.group: set[str] = set()  # ids of the newest group that live
        self.gap = _Gap()
        self.unsure: _Gap | None = None  # nobody of the former group is in this one: at which step does it begin?
        self.unheard: dict[str, float] = {}  # id → when it was last known to live, until it meets the new coordinator
        self.points: list[tuple[float, int]] = []  # (time, step) of the work that counts
        self.pace: float | None = None  # seconds a step
        self.failed: set[str] = set()  # names of those that said why they end
        self.missing: dict[str, Incident] = {}  # by the name of who is not back yet
        self.coordinators = 0
        self.latest: float | None = None

    def take(self, event: Event) -> None:
        """Count in one event."""
        name, t = event["event"], event["t"]
        if self.latest is None:
            self.found.began = self.latest = t
        t, counts = max(t, self.latest), self.found.counts
        try:
            if handler := getattr(self, f"on_{name}", None):
                handler(t, event)
        except (KeyError, TypeError, ValueError):
            self.found.skipped += 1
        counts[name] = counts.get(name, 0) + 1
        self.latest = t

    def close(self) -> Summary:
        """The account, up to the last event."""
        found, t = self.found, self.latest or 0.0
        self._everybody_ends(t)
        for life in self.lives.values():
            found.intervals.setdefault(life.name, []).extend(life.intervals)
        found.ended = t
        return found

    def on_run(self, t: float, event: Event) -> None:
        self.found.run = {key: value for key, value in event.items() if key not in ("t", "event")}

    def on_coordinator(self, t: float, event: Event) -> None:
        self._new_epoch(t)
        self.coordinators += 1
        if self.coordinators > 1:
            self._incident(t, "coordinator", str(event.get("id", "")))

    def on_join(self, t: float, event: Event) -> None:
        id, name = _id(event), str(event.get("name", "?"))
        alive = [each for each, life in self.lives.items() if life.alive and life.name == name]
        again = id == name if name in alive else id not in alive  # one known by its name only may get its id now
        if alive and again and alive[0] not in self.unheard:  # nobody saw it go
            self._new_epoch(t)
        if id != name:
            self.unheard.pop(id, None)
        self._bury([name])
        if self.found.generations and name not in [life.name for life in self.lives.values()]:
            self._incident(t, "join", name)
        life = self.lives.setdefault(id, _Life(name))
        if id != name and name in self.lives and not life.alive:  # known by its name only, from a generation
            known = self.lives.pop(name)
            life.intervals, life.alive = life.intervals + known.intervals, known.alive
            self.group = {id if each == name else each for each in self.group}
        if not life.alive:
            life.turn(t, WAITED)

    def on_lost(self, t: float, event: Event) -> None:
        self._gone(t, event, "lost")

    def on_drain(self, t: float, event: Event) -> None:
        self._gone(t, event, "drain")

    def on_failed(self, t: float, event: Event) -> None:
        name = str(event.get("name", "?"))
        if name not in self.failed:
            self.failed.add(name)
            self._incident(t, "failed", name, str(event.get("message", "")))

    def on_open(self, t: float, event: Event) -> None:
        if event.get("hard"):
            self.gap.broken = t if self.gap.broken is None else self.gap.broken
            for life in self.lives.values():
                if life.alive:
                    life.turn(t, WAITED)
        elif self.gap.opened is None:
            self.gap.opened = t

    def on_generation(self, t: float, event: Event) -> None:
        step, names = int(event.get("step", -1)), [str(name) for name in event.get("members") or []]
        self._bury([life.name for life in self.lives.values() if life.name not in names])
        self.unheard = {}
        self.found.generations += 1
        ids = {life.name: id for id, life in self.lives.items() if life.alive}
        for name in names:
            if name not in ids:  # nobody said that it came
                ids[name] = name
                self.lives.setdefault(name, _Life(name)).turn(t, WAITED)
        members = {ids[name] for name in names}
        self._regroup(t, step, members)
        for id, life in self.lives.items():
            if life.alive:
                life.turn(t, TRAINED if id in members else WAITED)
        for name in names:
            if incident := self.missing.pop(name, None):
                incident.back = t

    def on_restored(self, t: float, event: Event) -> None:
        self.found.restored.append(event)
        step = int(event["step"])
        if self.unsure:
            self._settle(self.unsure, step)
        elif not self.group - self.unheard.keys():  # else it is a newcomer's, whom the others will give theirs
            self.gap.restored = max(step, self.gap.restored or 0)

    def on_step(self, t: float, event: Event) -> None:
        step = int(event["step"])
        self._guess(step)
        if step > self.points[-1][1] if self.points else True:
            self._point(t, step)

    def on_checkpoint(self, t: float, event: Event) -> None:
        self.found.checkpoints.append(event)

    def on_dropped(self, t: float, event: Event) -> None:
        self.found.dropped += int(event["events"])

    def on_skipped(self, t: float, event: Event) -> None:
        self.found.skipped += int(event["lines"])

    def on_verdict(self, t: float, event: Event) -> None:
        found = self.found
        if found.state != "complete":
            found.state, found.message, found.code = "failed", str(event.get("message", "")), int(event.get("code", 1))
        self._everybody_ends(t)

    def on_complete(self, t: float, event: Event) -> None:
        if "step" in event:
            self.on_step(t, event)
        self.found.state, self.found.sha256 = "complete", str(event.get("sha256", ""))
        self.found.message, self.found.code = "", 0
        for life in self.lives.values():
            life.turn(t, None)

    def _new_epoch(self, t: float) -> None:
        """Whoever does not come back died unseen, after we last heard anything of it."""
        if self.found.state == "failed":
            self.found.state, self.found.message, self.found.code = "running", "", 0
        for id, life in self.lives.items():
            if life.alive:
                self.unheard.setdefault(id, t if self.latest is None else self.latest)

    def _bury(self, names: list[str]) -> None:
        """Those of `names` that nobody has heard of since the coordinator is another one are dead."""
        for id, t in list(self.unheard.items()):
            life = self.lives[id]
            if life.name in names:
                del self.unheard[id]
                life.turn(t, None)
                life.cut(t)
                self.gap.unseen = self.gap.unseen or id in self.group
                self.group.discard(id)
                self._incident(t, "lost", life.name, "unseen")

    def _gone(self, t: float, event: Event, kind: str) -> None:
        id = _id(event)
        life = self.lives.get(id)
        self.unheard.pop(id, None)
        if not (life and life.alive):
            return
        if kind == "lost" and id in self.group and self.gap.broken is None:
            self.gap.broken = t
        self.group.discard(id)
        life.turn(t, None)
        if life.name in self.failed:
            self.failed.discard(life.name)
        else:
            self._incident(t, kind, life.name, str(event.get("why", "")))

    def _incident(self, t: float, kind: str, name: str, why: str = "") -> None:
        if self.found.state == "running":
            left = sum(life.alive for id, life in self.lives.items() if id in self.group)
            incident = Incident(t, kind, name, why, self.points[-1][1] if self.points else 0, left)
            self.found.incidents.append(incident)
            self.gap.incidents.append(incident)
            if kind in ("lost", "drain", "failed"):
                self.missing[name] = incident

    def _everybody_ends(self, t: float) -> None:
        gap = self.unsure or self.gap
        if gap.hard and self.points:
            self._relabel(self._when(self.points[-1][1], t), t, LOST)
        for life in self.lives.values():
            life.turn(t, None)

    def _regroup(self, t: float, step: int, members: set[str]) -> None:
        """The next group trains: from `step` on, if it has one of the former members; else we shall hear it."""
        gap, survivors = self.gap, self.group & members
        gap.until, self.gap, self.group = t, _Gap(), members
        for incident in gap.incidents:
            incident.resumed = t
        if survivors:
            self._guess(step)
            self._settle(gap, step)
            return
        for incident in gap.incidents:
            incident.left = 0
        if self.unsure:
            self.unsure.until, self.unsure.unseen = t, True
            self.unsure.incidents += gap.incidents
        else:
            self.unsure = gap

    def _guess(self, step: int) -> None:
        """Nobody has said yet at which step the group began, but it is at `step` now."""
        if self.unsure:
            newest = min(step, self.points[-1][1]) if self.points else step
            self._settle(self.unsure, newest if self.unsure.restored is None else min(step, self.unsure.restored))

    def _settle(self, gap: _Gap, step: int) -> None:
        """The group after `gap` began at `step`: what was trained beyond it counts no more."""
        self.unsure, step = None, max(step, 0)
        if self.points:
            newest = self.points[-1][1]
            when, soft = self._when(step, gap.until if gap.broken is None else gap.broken), not gap.hard
            if soft and step >= newest:
                when = max(when, gap.until if gap.opened is None else gap.opened)
                self._relabel(when, gap.until, WAITED)
            else:
                cost = self._relabel(when, gap.until, LOST)
                for incident in gap.incidents:
                    incident.repeated, incident.cost = max(0, newest - step), cost
            self.found.repeated += max(0, newest - step)
            while self.points and (self.points[-1][1] > step or self.points[-1][0] > when):
                self.points.pop()
            self.found.steps = step
            if step > newest:
                self._point(when, step)
            else:
                self.points.append((when, step))
        self._point(gap.until, step)

    def _relabel(self, start: float, end: float, kind: str) -> float:
        return sum(life.relabel(start, end, kind) for life in self.lives.values())

    def _point(self, t: float, step: int) -> None:
        if self.points and step > self.points[-1][1]:
            self.pace = (t - self.points[-1][0]) / (step - self.points[-1][1])
        self.points.append((t, step))
        self.found.points.append((t, step))
        self.found.steps = max(self.found.steps, step)

    def _when(self, step: int, limit: float) -> float:
        """When `step` was finished: between two points, or after the last one at the pace until then."""
        at = bisect_left(self.points, step, key=lambda point: point[1])
        if at == 0:
            return self.points[0][0]
        if at < len(self.points):
            (t0, s0), (t1, s1) = self.points[at - 1 : at + 1]
            return t0 + (t1 - t0) * (step - s0) / (s1 - s0)
        last, known = self.points[-1]
        more = step - known
        pace = (limit - last) / (more + 1) if self.pace is None else self.pace
        return max(last, min(last + more * pace, limit))


def _id(event: Event) -> str:
    return str(event.get("worker") or event.get("name", "?"))
