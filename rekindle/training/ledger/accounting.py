"""Computes the LedgerSummary of a ledger from its events. ledger_summary.py defines the
LedgerSummary and describes the events."""

from bisect import bisect_left
from collections.abc import Iterable

from rekindle.training.ledger.event_types import check_event
from rekindle.training.ledger.events import Event
from rekindle.training.ledger.harvest_share import measure_harvest
from rekindle.training.ledger.ledger_summary import (
    KILLED_PROCESS_REASON,
    LOST_KIND,
    TRAINED_KIND,
    UNSEEN_LOSS_REASON,
    WAITED_KIND,
    CoordinatorStart,
    Incident,
    LedgerSummary,
)
from rekindle.training.ledger.queue_time import measure_queue_time
from rekindle.training.ledger.timeline import GroupPause, ProcessTimeline


def summarize_events(ledger_events: Iterable[Event]) -> LedgerSummary:
    """Return the LedgerSummary of a run's events, which must be sorted by time. Invalid events are
    skipped and counted."""
    event_accounting = EventAccounting()
    for ledger_event in ledger_events:
        event_accounting.apply(ledger_event)
    return event_accounting.summarize()


class EventAccounting:
    """Computes a LedgerSummary event by event. The method `apply` calls the method `on_NAME` for an
    event NAME."""

    def __init__(self) -> None:
        self.summary = LedgerSummary()
        # by the id of the worker
        self.timelines: dict[str, ProcessTimeline] = {}
        # ids of the live members of the newest group
        self.group: set[str] = set()
        self.pause = GroupPause()
        # the pause before a group without members of the previous group; None once the first step
        # of the new group is known
        self.undecided_pause: GroupPause | None = None
        # id of each worker that has not yet joined the restarted coordinator → time of its last
        # sign of life
        self.unconfirmed: dict[str, float] = {}
        # (time, step) of each completed step; of a repeated step, only the last completion
        self.points: list[tuple[float, int]] = []
        self.step_seconds: float | None = None
        # True if the newest recorded step is known to be the last completed step
        self.last_step_known = False
        # names of the workers that have reported an error
        self.failed: set[str] = set()
        # name of a lost worker that has not returned yet → the incident of its loss
        self.missing: dict[str, Incident] = {}
        self.coordinators = 0
        # the incident of a coordinator restart, until the next group trains
        self.restart: Incident | None = None
        self.latest: float | None = None

    def apply(self, ledger_event: Event) -> None:
        """Account for one event, which must not be earlier than the previous event. An invalid
        event is skipped and counted."""
        event_name = ledger_event["event"]
        time_s = ledger_event["t"]
        if self.latest is None:
            self.summary.began = time_s
            self.latest = time_s

        time_s = max(time_s, self.latest)
        event_counts = self.summary.counts
        try:
            check_event(ledger_event)
        except ValueError:
            self.summary.skipped += 1
        else:
            handler = getattr(self, f"on_{event_name}", None)
            if handler:
                handler(time_s, ledger_event)

        event_counts[event_name] = event_counts.get(event_name, 0) + 1
        self.latest = time_s

    def summarize(self) -> LedgerSummary:
        ledger_summary = self.summary
        latest_time_s = self.latest or 0.0
        self._end_timelines(latest_time_s)
        for process_timeline in self.timelines.values():
            ledger_summary.intervals.setdefault(process_timeline.name, []).extend(
                process_timeline.intervals
            )
        ledger_summary.ended = latest_time_s
        measure_queue_time(ledger_summary)
        ledger_summary.harvest = measure_harvest(ledger_summary, self.points)
        return ledger_summary

    def on_run(self, time_s: float, ledger_event: Event) -> None:
        self.summary.run = {
            field_name: field_value
            for field_name, field_value in ledger_event.items()
            if field_name not in ("t", "event")
        }

    def on_progress(self, time_s: float, ledger_event: Event) -> None:
        self.summary.progress = {
            field_name: field_value
            for field_name, field_value in ledger_event.items()
            if field_name not in ("t", "event", "name")
        }

    def on_unsaved(self, time_s: float, ledger_event: Event) -> None:
        self.summary.unsaved.append(
            {**ledger_event, "t": time_s, "seconds": float(ledger_event["seconds"])}
        )

    def on_usage(self, time_s: float, ledger_event: Event) -> None:
        pod_usage = self.summary.usage.setdefault(
            str(ledger_event.get("name", "?")), {"seconds": 0.0}
        )
        earlier_s = pod_usage["seconds"]
        period_seconds = float(ledger_event["seconds"])
        total_s = earlier_s + period_seconds
        for field_name, field_value in ledger_event.items():
            if field_name.endswith("_max"):
                pod_usage[field_name] = max(pod_usage.get(field_name, 0.0), float(field_value))
            elif field_name.endswith("_mean") and total_s:
                earlier_total = pod_usage.get(field_name, 0.0) * earlier_s
                pod_usage[field_name] = round(
                    (earlier_total + float(field_value) * period_seconds) / total_s, 3
                )
        pod_usage["seconds"] = round(total_s, 3)

    def on_coordinator(self, time_s: float, ledger_event: Event) -> None:
        self._handle_new_coordinator(time_s)
        self.summary.coordinator_starts.append(
            CoordinatorStart(time_s, ledger_event.get("created"))
        )
        self.coordinators += 1
        if self.coordinators > 1 and (
            restart_incident := self._record_incident(
                time_s, "coordinator", str(ledger_event.get("id", ""))
            )
        ):
            self.restart = restart_incident
            restart_incident.left = 0

    def on_join(self, time_s: float, ledger_event: Event) -> None:
        worker_id = _read_worker_id(ledger_event)
        worker_name = str(ledger_event.get("name", "?"))
        if ledger_event.get("harvested"):
            self.summary.harvested.add(worker_name)
        if ledger_event.get("capacity"):
            self.summary.capacities[worker_name] = str(ledger_event["capacity"])

        alive_ids = [
            other_id
            for other_id, process_timeline in self.timelines.items()
            if process_timeline.alive and process_timeline.name == worker_name
        ]

        # if an earlier event lacked the id of this worker, the timeline is stored under the
        # worker's name, so an unknown id does not prove that the process is new
        is_new_process = (
            worker_id == worker_name if worker_name in alive_ids else worker_id not in alive_ids
        )
        # the ledger lacks the end of the worker's previous process, so no coordinator was running
        if alive_ids and is_new_process and alive_ids[0] not in self.unconfirmed:
            self._handle_new_coordinator(time_s)

        if (
            worker_id != worker_name
            and self.unconfirmed.pop(worker_id, None) is not None
            and self.restart
            and worker_id in self.group
        ):
            self.restart.left += 1

        self._mark_workers_dead([worker_name])
        if self.summary.generations and worker_name not in [
            process_timeline.name for process_timeline in self.timelines.values()
        ]:
            self._record_incident(time_s, "join", worker_name)

        process_timeline = self.timelines.setdefault(worker_id, ProcessTimeline(worker_name))
        # merge the timeline that an earlier event has created under the worker's name
        if (
            worker_id != worker_name
            and worker_name in self.timelines
            and not process_timeline.alive
        ):
            placeholder_timeline = self.timelines.pop(worker_name)
            process_timeline.intervals = process_timeline.intervals + placeholder_timeline.intervals
            process_timeline.alive = placeholder_timeline.alive
            self.group = {
                worker_id if member_id == worker_name else member_id for member_id in self.group
            }

        if not process_timeline.alive:
            process_timeline.switch(time_s, WAITED_KIND)

    def on_lost(self, time_s: float, ledger_event: Event) -> None:
        worker_id = _read_worker_id(ledger_event)
        event_name = ledger_event["event"]
        process_timeline = self.timelines.get(worker_id)
        self.unconfirmed.pop(worker_id, None)

        if not (process_timeline and process_timeline.alive):
            return
        if event_name == "lost" and worker_id in self.group and self.pause.broken is None:
            self.pause.broken = time_s

        self.group.discard(worker_id)
        process_timeline.switch(time_s, None)
        if process_timeline.name in self.failed:
            self.failed.discard(process_timeline.name)
        else:
            incident = self._record_incident(
                time_s, event_name, process_timeline.name, str(ledger_event.get("why", ""))
            )
            if incident and isinstance(ledger_event.get("step"), int):
                incident.step = max(incident.step or 0, ledger_event["step"])

    on_drain = on_lost

    def on_on_demand(self, time_s: float, ledger_event: Event) -> None:
        change_fields = {
            field_name: ledger_event[field_name]
            for field_name in ("workers", "previous", "seconds")
        }
        self.summary.on_demand_changes.append({"t": time_s, **change_fields})

    def on_killed(self, time_s: float, ledger_event: Event) -> None:
        # the agent of the training program survives, so no event `lost` follows
        worker_name = str(ledger_event.get("name", "?"))
        incident = self._record_incident(time_s, "lost", worker_name, KILLED_PROCESS_REASON)
        if incident:
            incident.left = max(0, incident.left - 1)

    def on_failed(self, time_s: float, ledger_event: Event) -> None:
        worker_name = str(ledger_event.get("name", "?"))
        if worker_name not in self.failed:
            self.failed.add(worker_name)
            self._record_incident(
                time_s, "failed", worker_name, str(ledger_event.get("message", ""))
            )

    def on_open(self, time_s: float, ledger_event: Event) -> None:
        if ledger_event.get("hard"):
            self.pause.broken = time_s if self.pause.broken is None else self.pause.broken
            for process_timeline in self.timelines.values():
                if process_timeline.alive:
                    process_timeline.switch(time_s, WAITED_KIND)
        elif self.pause.opened is None:
            self.pause.opened = time_s

    def on_generation(self, time_s: float, ledger_event: Event) -> None:
        step = int(ledger_event.get("step", -1))
        member_names = [str(member_name) for member_name in ledger_event.get("members") or []]
        self.summary.groups.append((time_s, len(member_names), max(0, step)))
        self.summary.harvested_members.append(
            sum(member_name in self.summary.harvested for member_name in member_names)
        )
        self._mark_workers_dead(
            [
                process_timeline.name
                for process_timeline in self.timelines.values()
                if process_timeline.name not in member_names
            ]
        )
        self.unconfirmed = {}
        self.restart = None
        self.summary.state = "running"
        self.summary.generations += 1
        id_by_name = {
            process_timeline.name: worker_id
            for worker_id, process_timeline in self.timelines.items()
            if process_timeline.alive
        }

        for member_name in member_names:
            # the ledger lacks the event `join` of this worker
            if member_name not in id_by_name:
                id_by_name[member_name] = member_name
                self.timelines.setdefault(member_name, ProcessTimeline(member_name)).switch(
                    time_s, WAITED_KIND
                )

        member_ids = {id_by_name[member_name] for member_name in member_names}
        self._start_next_group(time_s, step, member_ids)
        for worker_id, process_timeline in self.timelines.items():
            if process_timeline.alive:
                process_timeline.switch(
                    time_s, TRAINED_KIND if worker_id in member_ids else WAITED_KIND
                )

        for member_name in member_names:
            incident = self.missing.pop(member_name, None)
            if incident:
                incident.back = time_s

    def on_restored(self, time_s: float, ledger_event: Event) -> None:
        self.summary.restored.append(ledger_event)
        step = int(ledger_event["step"])
        storage_tier = str(ledger_event.get("tier", ""))

        for incident in (self.undecided_pause or self.pause).incidents:
            # the restored step must have been completed before the worker was lost
            if storage_tier in ("hot", "durable") and incident.kind == "lost":
                incident.step = max(step, incident.step or 0)

        if self.undecided_pause or not self.group - self.unconfirmed.keys():
            for incident in (self.undecided_pause or self.pause).incidents:
                incident.tier = "hot" if "hot" in (storage_tier, incident.tier) else storage_tier

        if self.undecided_pause:
            self._resume(self.undecided_pause, step)
        # a restored state is used only if no member of the group is alive; otherwise the live
        # members send their state to the worker
        elif not self.group - self.unconfirmed.keys():
            self.pause.restored = max(step, self.pause.restored or 0)

    def on_step(self, time_s: float, ledger_event: Event) -> None:
        step = int(ledger_event["step"])
        self._infer_first_step(step)
        self.last_step_known = ledger_event.get("last") is True
        # an event `step` during the restart of the coordinator shows that the group trains without
        # a coordinator
        if self.restart and not self.restart.left:
            self.restart.left = len(self.group)
        if not self.points or step > self.points[-1][1]:
            self._record_step_time(time_s, step)

    def on_checkpoint(self, time_s: float, ledger_event: Event) -> None:
        self.summary.checkpoints.append(ledger_event)

    def on_dropped(self, time_s: float, ledger_event: Event) -> None:
        self.summary.dropped += int(ledger_event["events"])

    def on_skipped(self, time_s: float, ledger_event: Event) -> None:
        self.summary.skipped += int(ledger_event["lines"])

    def on_verdict(self, time_s: float, ledger_event: Event) -> None:
        ledger_summary = self.summary
        if ledger_summary.state != "complete":
            ledger_summary.state = "failed"
            ledger_summary.message = str(ledger_event.get("message", ""))
            ledger_summary.code = int(ledger_event.get("code", 1))
        ledger_summary.end_times.append(time_s)
        self._end_timelines(time_s)

    def on_complete(self, time_s: float, ledger_event: Event) -> None:
        if "step" in ledger_event:
            self.on_step(time_s, ledger_event)
        self.summary.state = "complete"
        self.summary.sha256 = str(ledger_event.get("sha256", ""))
        self.summary.message = ""
        self.summary.code = 0
        self.summary.end_times.append(time_s)
        # reset the group, because a later process may continue the training, for example a trial of
        # a sweep
        self.group = set()
        for process_timeline in self.timelines.values():
            process_timeline.switch(time_s, None)

    def _handle_new_coordinator(self, time_s: float) -> None:
        """Handle the start of a coordinator. Any worker that does not join the new coordinator has
        died at some time after the worker's last sign of life."""
        if self.summary.state == "failed":
            self.summary.state = "running"
            self.summary.message = ""
            self.summary.code = 0
        for worker_id, process_timeline in self.timelines.items():
            if process_timeline.alive:
                self.unconfirmed.setdefault(
                    worker_id, time_s if self.latest is None else self.latest
                )

    def _mark_workers_dead(self, worker_names: list[str]) -> None:
        """Mark the workers in `worker_names` that have not joined the new coordinator as dead."""
        for worker_id, last_seen_s in list(self.unconfirmed.items()):
            process_timeline = self.timelines[worker_id]
            if process_timeline.name in worker_names:
                del self.unconfirmed[worker_id]
                process_timeline.switch(last_seen_s, None)
                process_timeline.truncate(last_seen_s)
                self.pause.unseen = self.pause.unseen or worker_id in self.group
                self.group.discard(worker_id)
                self._record_incident(
                    last_seen_s, "lost", process_timeline.name, UNSEEN_LOSS_REASON
                )

    def _record_incident(
        self, time_s: float, incident_kind: str, worker_name: str, reason: str = ""
    ) -> Incident | None:
        """Record an incident unless the run has ended."""
        if self.summary.state != "running":
            return None
        survivor_count = sum(
            process_timeline.alive
            for worker_id, process_timeline in self.timelines.items()
            if worker_id in self.group
        )
        last_step = self.points[-1][1] if self.points else None
        was_seen = reason != UNSEEN_LOSS_REASON or self.last_step_known
        incident = Incident(
            time_s, incident_kind, worker_name, reason, last_step, was_seen, survivor_count
        )
        self.summary.incidents.append(incident)
        self.pause.incidents.append(incident)
        if incident_kind in ("lost", "drain", "failed"):
            self.missing[worker_name] = incident
        return incident

    def _end_timelines(self, time_s: float) -> None:
        group_pause = self.undecided_pause or self.pause
        if group_pause.is_after_failure and self.points:
            self._relabel_trained_time(
                self._estimate_finish_time(self.points[-1][1], time_s), time_s, LOST_KIND
            )
        for process_timeline in self.timelines.values():
            process_timeline.switch(time_s, None)

    def _start_next_group(self, time_s: float, step: int, member_ids: set[str]) -> None:
        """Start the next group of workers. If the new group contains a member of the previous
        group, the new group continues at `step`; otherwise a later event shows the first step of
        the new group."""
        is_program_run = bool(self.summary.run.get("program"))
        if is_program_run and not self.points:
            # if the program has not restored or saved any state yet, it starts at step 0
            self._infer_first_step(0)

        group_pause = self.pause
        surviving_ids = self.group & member_ids

        group_pause.until = time_s
        self.pause = GroupPause()
        self.group = member_ids
        for incident in group_pause.incidents:
            incident.resumed = time_s

        # all processes of a program start again from a checkpoint, which the event `restored` names
        if surviving_ids and not is_program_run:
            self._infer_first_step(step)
            self._resume(group_pause, step)
            return

        for incident in group_pause.incidents:
            if not surviving_ids and incident.kind != "coordinator":
                incident.left = 0

        if self.undecided_pause:
            self.undecided_pause.until = time_s
            self.undecided_pause.unseen = True
            self.undecided_pause.incidents += group_pause.incidents
        else:
            self.undecided_pause = group_pause

    def _infer_first_step(self, step: int) -> None:
        """Derive the first step of the group from its current `step`, if the first step is
        unknown."""
        if self.undecided_pause:
            if self.points:
                newest_step = min(step, self.points[-1][1])
            else:
                # a program reports its first step only after some training, which began at step 0
                newest_step = 0 if self.summary.run.get("program") else step
            self._resume(
                self.undecided_pause,
                newest_step
                if self.undecided_pause.restored is None
                else min(step, self.undecided_pause.restored),
            )

    def _resume(self, group_pause: GroupPause, step: int) -> None:
        """Let the group after `group_pause` start at `step`, and count earlier work on steps after
        `step` as lost."""
        self.undecided_pause = None
        step = max(step, 0)
        if self.points:
            newest_step = self.points[-1][1]
            step_time_s = self._estimate_finish_time(
                step, group_pause.until if group_pause.broken is None else group_pause.broken
            )

            is_planned_pause = not group_pause.is_after_failure
            if is_planned_pause and step >= newest_step:
                step_time_s = max(
                    step_time_s,
                    group_pause.until if group_pause.opened is None else group_pause.opened,
                )
                self._relabel_trained_time(step_time_s, group_pause.until, WAITED_KIND)
            else:
                lost_seconds = self._relabel_trained_time(step_time_s, group_pause.until, LOST_KIND)
                for incident in group_pause.incidents:
                    incident.repeated = max(0, newest_step - step)
                    incident.cost = lost_seconds

            self.summary.repeated += max(0, newest_step - step)
            while self.points and (self.points[-1][1] > step or self.points[-1][0] > step_time_s):
                self.points.pop()

            self.summary.steps = step
            if step > newest_step:
                self._record_step_time(step_time_s, step)
            else:
                self.points.append((step_time_s, step))

        self._record_step_time(group_pause.until, step)

    def _relabel_trained_time(self, start_s: float, end_s: float, new_kind: str) -> float:
        return sum(
            process_timeline.relabel_trained_time(start_s, end_s, new_kind)
            for process_timeline in self.timelines.values()
        )

    def _record_step_time(self, time_s: float, step: int) -> None:
        if self.points and step > self.points[-1][1]:
            self.step_seconds = (time_s - self.points[-1][0]) / (step - self.points[-1][1])
        self.points.append((time_s, step))
        self.summary.points.append((time_s, step))
        self.summary.steps = max(self.summary.steps, step)

    def _estimate_finish_time(self, step: int, latest_time_s: float) -> float:
        """Estimate the time when `step` was finished, by interpolation between two points, or by
        extrapolation from the last point to at most the time `latest_time_s`."""
        index = bisect_left(self.points, step, key=lambda step_point: step_point[1])
        if index == 0:
            return self.points[0][0]

        if index < len(self.points):
            (earlier_time_s, earlier_step), (later_time_s, later_step) = self.points[
                index - 1 : index + 1
            ]
            return earlier_time_s + (later_time_s - earlier_time_s) * (step - earlier_step) / (
                later_step - earlier_step
            )

        last_time_s, last_step = self.points[-1]
        later_steps = step - last_step
        if self.step_seconds is None:
            step_seconds = (latest_time_s - last_time_s) / (later_steps + 1)
        else:
            step_seconds = self.step_seconds

        return max(last_time_s, min(last_time_s + later_steps * step_seconds, latest_time_s))


def _read_worker_id(ledger_event: Event) -> str:
    return str(ledger_event.get("worker") or ledger_event.get("name", "?"))
