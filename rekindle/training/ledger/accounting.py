"""Computes the Summary of a ledger from its events. ledger_summary.py defines the Summary and the
events."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from rekindle.training.ledger.event_types import check_event
from rekindle.training.ledger.events import Event
from rekindle.training.ledger.ledger_summary import (
    KILLED_PROCESS,
    LOST,
    LOST_WITHOUT_COORDINATOR,
    TRAINED,
    WAITED,
    Incident,
    Interval,
    Summary,
)


def summarize(events: Iterable[Event]) -> Summary:
    """Return the Summary of a run's events, which must be sorted by time. Invalid events are
    skipped and counted."""
    accounts = EventAccounting()
    for event in events:
        accounts.apply(event)
    return accounts.summarize()


@dataclass
class _ProcessTimeline:
    """The intervals of one worker process. While the process is alive, its last interval has no
    final end."""

    name: str
    intervals: list[Interval] = field(default_factory=list)
    alive: bool = False

    def switch(self, t: float, kind: str | None) -> None:
        """Start an interval of the given kind at time `t`; None means that the process is dead from
        then on."""
        if self.alive:
            self.intervals[-1].end = t
            if self.intervals[-1].kind == kind:
                return
        self.alive = kind is not None
        if kind:
            self.intervals.append(Interval(t, t, kind))

    def truncate(self, t: float) -> None:
        """Remove all time after `t` from the intervals, because the process was dead by then."""
        self.alive = False
        self.intervals = [
            Interval(s.start, min(s.end, t), s.kind) for s in self.intervals if s.start < t
        ]

    def relabel_trained(self, start: float, end: float, kind: str) -> float:
        """Change the intervals of kind `trained` between `start` and `end` to `kind`; return their
        total length in seconds."""
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
    """The pause between the end of one group and the start of the next."""

    opened: float | None = (
        None  # time when the coordinator told the previous group to stop after its current step
    )
    broken: float | None = None  # time when the previous group broke
    unseen: bool = False  # True if a member died at a time that is unknown
    until: float = 0.0  # time when the next group started
    # newest step that a member of the next group has restored from a snapshot or a checkpoint
    restored: int | None = None
    incidents: list[Incident] = field(default_factory=list)

    @property
    def is_hard(self) -> bool:
        return self.unseen or self.broken is not None


class EventAccounting:
    """Computes a Summary event by event: `apply` calls the method `on_NAME` for an event NAME."""

    def __init__(self) -> None:
        self.summary = Summary()
        self.lives: dict[str, _ProcessTimeline] = {}
        self.group: set[str] = set()  # ids of the live members of the newest group
        self.pause = _Pause()
        # the pause before a group without members of the previous group, until the first step of
        # the new group is known
        self.unsure: _Pause | None = None
        # id of each worker that has not yet joined the restarted coordinator → time of its last
        # sign of life
        self.unconfirmed: dict[str, float] = {}
        # (time, step) of each completed step; of a repeated step, only the last completion
        self.points: list[tuple[float, int]] = []
        self.step_seconds: float | None = None
        # True if the newest recorded step is known to be the last that was completed
        self.last_step_known = False
        self.failed: set[str] = set()  # names of workers that reported an error
        # name of a lost worker that has not returned yet → the incident of its loss
        self.missing: dict[str, Incident] = {}
        self.coordinators = 0
        # the incident of a coordinator restart, until the next group trains
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
            check_event(event)
        except ValueError:
            self.summary.skipped += 1
        else:
            handler = getattr(self, f"on_{name}", None)
            if handler:
                handler(t, event)

        counts[name] = counts.get(name, 0) + 1
        self.latest = t

    def summarize(self) -> Summary:
        summary = self.summary
        t = self.latest or 0.0
        self._end_timelines(t)
        for life in self.lives.values():
            summary.intervals.setdefault(life.name, []).extend(life.intervals)
        summary.ended = t
        return summary

    def on_run(self, t: float, event: Event) -> None:
        self.summary.run = {key: value for key, value in event.items() if key not in ("t", "event")}

    def on_progress(self, t: float, event: Event) -> None:
        self.summary.progress = {
            key: value for key, value in event.items() if key not in ("t", "event", "name")
        }

    def on_unsaved(self, t: float, event: Event) -> None:
        self.summary.unsaved.append({**event, "t": t, "seconds": float(event["seconds"])})

    def on_usage(self, t: float, event: Event) -> None:
        usage = self.summary.usage.setdefault(str(event.get("name", "?")), {"seconds": 0.0})
        earlier_s = usage["seconds"]
        seconds = float(event["seconds"])
        total_s = earlier_s + seconds
        for name, value in event.items():
            if name.endswith("_max"):
                usage[name] = max(usage.get(name, 0.0), float(value))
            elif name.endswith("_mean") and total_s:
                earlier = usage.get(name, 0.0) * earlier_s
                usage[name] = round((earlier + float(value) * seconds) / total_s, 3)
        usage["seconds"] = round(total_s, 3)

    def on_coordinator(self, t: float, event: Event) -> None:
        self._handle_new_coordinator(t)
        self.coordinators += 1
        if self.coordinators > 1 and (
            restart := self._record_incident(t, "coordinator", str(event.get("id", "")))
        ):
            self.restart = restart
            restart.left = 0

    def on_join(self, t: float, event: Event) -> None:
        id = _worker_id(event)
        name = str(event.get("name", "?"))
        alive = [other for other, life in self.lives.items() if life.alive and life.name == name]

        # if an earlier event lacked the id of this worker, its timeline is stored under its name:
        # then an id does not mean a new process
        is_new = id == name if name in alive else id not in alive
        # the ledger lacks the end of the worker's previous process
        if alive and is_new and alive[0] not in self.unconfirmed:
            self._handle_new_coordinator(t)

        if (
            id != name
            and self.unconfirmed.pop(id, None) is not None
            and self.restart
            and id in self.group
        ):
            self.restart.left += 1

        self._mark_dead([name])
        if self.summary.generations and name not in [life.name for life in self.lives.values()]:
            self._record_incident(t, "join", name)

        life = self.lives.setdefault(id, _ProcessTimeline(name))
        # merge the timeline that an earlier event has created under the worker's name
        if id != name and name in self.lives and not life.alive:
            named = self.lives.pop(name)
            life.intervals = life.intervals + named.intervals
            life.alive = named.alive
            self.group = {id if member == name else member for member in self.group}

        if not life.alive:
            life.switch(t, WAITED)

    def on_lost(self, t: float, event: Event) -> None:
        id = _worker_id(event)
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
            incident = self._record_incident(t, kind, life.name, str(event.get("why", "")))
            if incident and isinstance(event.get("step"), int):
                incident.step = max(incident.step or 0, event["step"])

    on_drain = on_lost

    def on_killed(self, t: float, event: Event) -> None:
        # the agent of the program survives, so no event `lost` follows
        name = str(event.get("name", "?"))
        incident = self._record_incident(t, "lost", name, KILLED_PROCESS)
        if incident:
            incident.left = max(0, incident.left - 1)

    def on_failed(self, t: float, event: Event) -> None:
        name = str(event.get("name", "?"))
        if name not in self.failed:
            self.failed.add(name)
            self._record_incident(t, "failed", name, str(event.get("message", "")))

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
        self.summary.groups.append((t, len(names), max(0, step)))
        self._mark_dead([life.name for life in self.lives.values() if life.name not in names])
        self.unconfirmed = {}
        self.restart = None
        self.summary.state = "running"
        self.summary.generations += 1
        ids = {life.name: id for id, life in self.lives.items() if life.alive}

        for name in names:
            # the ledger lacks the event `join` of this worker
            if name not in ids:
                ids[name] = name
                self.lives.setdefault(name, _ProcessTimeline(name)).switch(t, WAITED)

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
            # the restored step must have been completed before the worker was lost
            if tier in ("hot", "durable") and incident.kind == "lost":
                incident.step = max(step, incident.step or 0)

        if self.unsure or not self.group - self.unconfirmed.keys():
            for incident in (self.unsure or self.pause).incidents:
                incident.tier = "hot" if "hot" in (tier, incident.tier) else tier

        if self.unsure:
            self._resume(self.unsure, step)
        # a restored state is used only if no member of the group is alive; otherwise the live
        # members send their state to the worker
        elif not self.group - self.unconfirmed.keys():
            self.pause.restored = max(step, self.pause.restored or 0)

    def on_step(self, t: float, event: Event) -> None:
        step = int(event["step"])
        self._infer_start(step)
        self.last_step_known = event.get("last") is True
        # a step while the coordinator restarts: the group trains without a coordinator
        if self.restart and not self.restart.left:
            self.restart.left = len(self.group)
        if step > self.points[-1][1] if self.points else True:
            self._record_point(t, step)

    def on_checkpoint(self, t: float, event: Event) -> None:
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
        self._end_timelines(t)

    def on_complete(self, t: float, event: Event) -> None:
        if "step" in event:
            self.on_step(t, event)
        self.summary.state, self.summary.sha256 = "complete", str(event.get("sha256", ""))
        self.summary.message = ""
        self.summary.code = 0
        # reset the group, because a later process may continue the training, for example a trial of
        # a sweep
        self.group = set()
        for life in self.lives.values():
            life.switch(t, None)

    def _handle_new_coordinator(self, t: float) -> None:
        """Handle the start of a coordinator: any worker that does not join the new coordinator has
        died at some time after its last sign of life."""
        if self.summary.state == "failed":
            self.summary.state = "running"
            self.summary.message = ""
            self.summary.code = 0
        for id, life in self.lives.items():
            if life.alive:
                self.unconfirmed.setdefault(id, t if self.latest is None else self.latest)

    def _mark_dead(self, names: list[str]) -> None:
        """Mark the workers in `names` that have not joined the new coordinator as dead."""
        for id, t in list(self.unconfirmed.items()):
            life = self.lives[id]
            if life.name in names:
                del self.unconfirmed[id]
                life.switch(t, None)
                life.truncate(t)
                self.pause.unseen = self.pause.unseen or id in self.group
                self.group.discard(id)
                self._record_incident(t, "lost", life.name, LOST_WITHOUT_COORDINATOR)

    def _record_incident(self, t: float, kind: str, name: str, reason: str = "") -> Incident | None:
        """Record an incident unless the run has ended."""
        if self.summary.state != "running":
            return None
        survivors = sum(life.alive for id, life in self.lives.items() if id in self.group)
        step = self.points[-1][1] if self.points else None
        seen = reason != LOST_WITHOUT_COORDINATOR or self.last_step_known
        incident = Incident(t, kind, name, reason, step, seen, survivors)
        self.summary.incidents.append(incident)
        self.pause.incidents.append(incident)
        if kind in ("lost", "drain", "failed"):
            self.missing[name] = incident
        return incident

    def _end_timelines(self, t: float) -> None:
        pause = self.unsure or self.pause
        if pause.is_hard and self.points:
            self._relabel_trained_time(self._estimate_finish_time(self.points[-1][1], t), t, LOST)
        for life in self.lives.values():
            life.switch(t, None)

    def _regroup(self, t: float, step: int, members: set[str]) -> None:
        """Start the next group. If the group contains a member of the previous group, it continues
        at `step`; otherwise a later event shows its first step."""
        is_program = bool(self.summary.run.get("program"))
        if is_program and not self.points:
            # the program has not restored or saved any state yet, so it starts at step 0
            self._infer_start(0)

        pause = self.pause
        survivors = self.group & members

        pause.until, self.pause, self.group = t, _Pause(), members
        for incident in pause.incidents:
            incident.resumed = t

        # all processes of a program start again from a checkpoint, which the event `restored` names
        if survivors and not is_program:
            self._infer_start(step)
            self._resume(pause, step)
            return

        for incident in pause.incidents:
            if not survivors and incident.kind != "coordinator":
                incident.left = 0

        if self.unsure:
            self.unsure.until = t
            self.unsure.unseen = True
            self.unsure.incidents += pause.incidents
        else:
            self.unsure = pause

    def _infer_start(self, step: int) -> None:
        """Derive the first step of the group from its current `step`, if the first step is
        unknown."""
        if self.unsure:
            if self.points:
                newest = min(step, self.points[-1][1])
            else:
                # a program first reports a step after some work, so its group started at 0
                newest = 0 if self.summary.run.get("program") else step
            self._resume(
                self.unsure,
                newest if self.unsure.restored is None else min(step, self.unsure.restored),
            )

    def _resume(self, pause: _Pause, step: int) -> None:
        """Let the group after `pause` start at `step`, and count work after that step as lost."""
        self.unsure, step = None, max(step, 0)
        if self.points:
            newest = self.points[-1][1]
            when = self._estimate_finish_time(
                step, pause.until if pause.broken is None else pause.broken
            )

            is_soft = not pause.is_hard
            if is_soft and step >= newest:
                when = max(when, pause.until if pause.opened is None else pause.opened)
                self._relabel_trained_time(when, pause.until, WAITED)
            else:
                cost = self._relabel_trained_time(when, pause.until, LOST)
                for incident in pause.incidents:
                    incident.repeated = max(0, newest - step)
                    incident.cost = cost

            self.summary.repeated += max(0, newest - step)
            while self.points and (self.points[-1][1] > step or self.points[-1][0] > when):
                self.points.pop()

            self.summary.steps = step
            if step > newest:
                self._record_point(when, step)
            else:
                self.points.append((when, step))

        self._record_point(pause.until, step)

    def _relabel_trained_time(self, start: float, end: float, kind: str) -> float:
        return sum(life.relabel_trained(start, end, kind) for life in self.lives.values())

    def _record_point(self, t: float, step: int) -> None:
        if self.points and step > self.points[-1][1]:
            self.step_seconds = (t - self.points[-1][0]) / (step - self.points[-1][1])
        self.points.append((t, step))
        self.summary.points.append((t, step))
        self.summary.steps = max(self.summary.steps, step)

    def _estimate_finish_time(self, step: int, limit: float) -> float:
        """Estimate the time when `step` was finished, by interpolation between two points, or by
        extrapolation from the last point to at most the time `limit`."""
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


def _worker_id(event: Event) -> str:
    return str(event.get("worker") or event.get("name", "?"))
