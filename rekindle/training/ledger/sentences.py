"""Describes a training in sentences, from the LedgerSummary of its ledger."""

import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from statistics import median
from typing import Any

from argolocal.common.wording import format_duration
from rekindle.kubernetes_names import ON_DEMAND_CAPACITY, SPOT_CAPACITY
from rekindle.training.ledger.events import Event
from rekindle.training.ledger.ledger_summary import (
    LOST_KIND,
    TRAINED_KIND,
    WAITED_KIND,
    Incident,
    LedgerSummary,
    format_percent,
    shorten_worker_name,
)

RESTORE_SOURCES = {
    "hot": "the node's shared memory",
    "disk": "the node's disk",
    "durable": "the object store",
}
# maximum number of lines about incidents; if there are more, only the first and the last lines are
# shown
MAX_INCIDENT_LINES = 24
# a time in the queue that is shorter than this number of seconds is not described
MIN_QUEUED_SECONDS = 1.0
# a workflow that ends deletes the job; the workers may then end this long before the exit handler
MIN_UNENDED_WAIT_S = 300.0
LOSS_REASONS = {
    "connection": "connection closed",
    "silent": "silent for too long",
    "hung": "alive, but without a step for too long",
    "dropped": "not reachable by the other workers",
    "process": "a process of the program was killed",
    "unseen": "while the coordinator was unavailable",
}


def describe_summary(ledger_summary: LedgerSummary) -> list[str]:
    """Return lines about the result, the incidents, the checkpoints and the use of time."""
    if not ledger_summary.intervals:
        return ["No worker has trained yet."]

    if ledger_summary.ended - ledger_summary.began > 20 * 3600:
        time_format = "%Y-%m-%d %H:%M:%S"
    else:
        time_format = "%H:%M:%S"

    incident_groups = [
        list(incident_group)
        for _, incident_group in groupby(ledger_summary.incidents, _make_incident_group_key)
    ]
    dated_sentences = [
        (incident_group[0].t, _describe_incidents(incident_group, ledger_summary))
        for incident_group in incident_groups
    ]
    for restored_event in ledger_summary.restored:
        restore_source = RESTORE_SOURCES.get(str(restored_event.get("tier")))
        if restore_source:
            sentence = (
                f"{ledger_summary.unit[:-1]} {restored_event.get('step')} was restored from"
                f" {restore_source}."
            )
            dated_sentences.append((restored_event["t"], sentence))

    dated_sentences += [
        (change_event["t"], _describe_on_demand_change(change_event))
        for change_event in ledger_summary.on_demand_changes
    ]
    for unsaved_event in ledger_summary.unsaved:
        duration_text = format_duration(unsaved_event["seconds"])
        sentence = (
            f"the program stopped on SIGTERM without a save: {duration_text} of work were repeated."
        )
        dated_sentences.append((unsaved_event["t"], sentence))

    incident_lines = [
        f"{time.strftime(time_format, time.localtime(sentence_time_s))}  {sentence}"
        for sentence_time_s, sentence in sorted(dated_sentences)
    ]
    if len(incident_lines) > MAX_INCIDENT_LINES:
        incident_lines[MAX_INCIDENT_LINES // 2 : -MAX_INCIDENT_LINES // 2] = [
            f"… {len(incident_lines) - MAX_INCIDENT_LINES} similar lines …"
        ]

    total_sentences = [
        total_sentence
        for describe_part in (
            _describe_stops,
            _describe_checkpoints,
            _describe_use_of_time,
            _describe_queue_time,
            _describe_harvest,
            _describe_capacity,
            _describe_gaps,
        )
        for total_sentence in describe_part(ledger_summary)
    ]
    return [_describe_result(ledger_summary), *incident_lines, *total_sentences]


def format_worker_time(worker_seconds: float, ledger_summary: LedgerSummary) -> str:
    """Format worker-seconds: Format the time of workers, such as `15 worker-seconds` or `2.1
    GPU-hours`."""
    worker_unit = "worker" if ledger_summary.run.get("device", "cpu") == "cpu" else "GPU"
    if worker_seconds >= 7200:
        return f"{worker_seconds / 3600:.1f} {worker_unit}-hours"
    if worker_seconds < 10:
        return f"{worker_seconds:.2g} {worker_unit}-seconds"
    return f"{worker_seconds:.0f} {worker_unit}-seconds"


def _describe_result(ledger_summary: LedgerSummary) -> str:
    total_steps = ledger_summary.run.get("steps")
    first_step = ledger_summary.first_step
    if total_steps and total_steps != ledger_summary.steps:
        last_step_text = f"{ledger_summary.steps} of {total_steps}"
    else:
        last_step_text = f"{ledger_summary.steps}"

    if ledger_summary.unit == "checkpoints":
        steps_text = f"wrote {last_step_text} checkpoint{'s' * (last_step_text != '1')}"
    elif first_step:
        steps_text = (
            f"trained {ledger_summary.steps - first_step} steps ({first_step} to {last_step_text})"
        )
    else:
        steps_text = f"trained {last_step_text} steps"

    worker_count = len(ledger_summary.intervals)
    start_text = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(ledger_summary.began))

    result_text = (
        f"{worker_count} worker{'s' * (worker_count > 1)} {steps_text} in"
        f" {format_duration(ledger_summary.training_seconds)},"
        f" {ledger_summary.steps_per_second:.3g}"
        f" {ledger_summary.unit}/s; with starts and pauses it took"
        f" {format_duration(ledger_summary.ended - ledger_summary.began)}, since {start_text}."
    )

    if ledger_summary.state == "failed":
        return f"{result_text} Then the run was aborted: {ledger_summary.message}"

    if ledger_summary.state != "complete":
        newest_time_text = time.strftime("%H:%M:%S", time.localtime(ledger_summary.ended))
        result_text += _describe_progress(ledger_summary.progress)
        return (
            f"{result_text} The run is not complete; the newest entry of its ledger is of"
            f" {newest_time_text}."
        )

    is_ended_early = total_steps and ledger_summary.steps < total_steps
    if is_ended_early:
        return (
            f"{result_text} The training stopped early: the validation loss stopped falling"
            " (train.patience)."
        )

    return result_text


def _describe_progress(newest_progress: Mapping[str, Any]) -> str:
    """Return a sentence such as " 45 % are done, about 3 min are left.", from the newest report of
    a program."""
    percentage = newest_progress.get("percentage")
    if percentage is None:
        return ""

    seconds_left = newest_progress.get("seconds_left")
    if seconds_left is None:
        return f" {percentage} % are done."
    return f" {percentage} % are done, about {format_duration(seconds_left)} are left."


def _make_incident_group_key(incident: Incident) -> tuple[object, ...]:
    return (
        incident.kind,
        incident.why,
        incident.resumed,
        incident.step,
        incident.kind == "failed" and incident.name,
    )


def _describe_incidents(incident_group: list[Incident], ledger_summary: LedgerSummary) -> str:
    first_incident = incident_group[0]
    last_incident = incident_group[-1]
    are_several = len(incident_group) > 1
    worker_names = ", ".join(
        _describe_worker(incident.name, ledger_summary) for incident in incident_group
    )

    if first_incident.resumed is not None:
        pause_text = format_duration(first_incident.resumed - first_incident.t)
    else:
        pause_text = ""

    if first_incident.kind == "coordinator":
        return "the coordinator restarted" + (
            "; the workers continued without it." if first_incident.left else "."
        )

    if first_incident.kind == "join":
        return f"{worker_names} joined" + (
            f" and trained {pause_text} later." if pause_text else "."
        )
    if first_incident.kind == "failed":
        return (
            f"{worker_names} failed {_describe_step(first_incident, ledger_summary)}:"
            f" {first_incident.why}"
        )

    loss_reason = LOSS_REASONS.get(first_incident.why, first_incident.why)
    if first_incident.kind == "lost":
        loss_text = f"{'were' if are_several else 'was'} lost ({loss_reason})"
    else:
        loss_text = "left on request"

    incident_text = f"{worker_names} {loss_text} {_describe_step(first_incident, ledger_summary)}"
    if not pause_text:
        return f"{incident_text}; no worker trained after that."

    remaining_workers_text = "the others" if last_incident.left else "no worker was left. Training"
    incident_text += (
        f"; {remaining_workers_text} continued"
        f" {'' if first_incident.seen else 'at most '}{pause_text} later."
    )
    if first_incident.kind == "lost":
        incident_text += _describe_repeated_work(first_incident, ledger_summary)

    replacement_times_s = [
        incident.back - incident.t for incident in incident_group if incident.back is not None
    ]
    if last_incident.left and replacement_times_s:
        incident_text += (
            f" {'They were' if are_several else 'It was'} back after"
            f" {format_duration(max(replacement_times_s))}."
        )

    return incident_text


def _describe_worker(worker_name: str, ledger_summary: LedgerSummary) -> str:
    """Return the short name of a worker, such as `worker-1` or `6d5f8c-x7k2p (harvested)`."""
    short_name = shorten_worker_name(worker_name)
    worker_kind = ledger_summary.describe_worker_kind(worker_name)
    return f"{short_name} ({worker_kind})" if worker_kind else short_name


def _describe_step(incident: Incident, ledger_summary: LedgerSummary) -> str:
    """Describe the step of an incident, such as `at step 309`."""
    step_unit = ledger_summary.unit[:-1]
    if incident.step:
        step_text = f"at {step_unit} {incident.step}"
    else:
        step_text = f"before the first recorded {step_unit}"
    if incident.seen:
        return step_text
    return f"{step_text} or later, at this time or later"


def _describe_repeated_work(loss_incident: Incident, ledger_summary: LedgerSummary) -> str:
    """Describe the work that was repeated after the loss of a worker."""
    lost_work_text = (
        f"{format_worker_time(loss_incident.cost, ledger_summary)} of work"
        if loss_incident.cost
        else ""
    )

    if not loss_incident.seen:
        if loss_incident.repeated:
            minimum_text = f" At least {_format_steps(loss_incident.repeated)} repeated"
        else:
            minimum_text = ""

        return (
            f"{minimum_text or ' How many steps were repeated is unknown'}: the ledger lacks the"
            " last steps."
        )

    if ledger_summary.run.get("program"):
        return (
            f" {lost_work_text[:1].upper()}{lost_work_text[1:]} since its last save was repeated."
            if lost_work_text
            else ""
        )

    if loss_incident.repeated:
        repeated_text = f" {_format_steps(loss_incident.repeated)} repeated"
    else:
        repeated_text = " No step was lost"

    conjunction = "," if loss_incident.repeated else ", but"
    if lost_work_text:
        return f"{repeated_text}{conjunction} {lost_work_text}."

    return f"{repeated_text}."


def _format_steps(step_count: int) -> str:
    if step_count == 1:
        return "1 step was"
    return f"{step_count} steps were"


def _describe_stops(ledger_summary: LedgerSummary) -> Iterator[str]:
    pause_seconds = [
        incident.resumed - incident.t
        for incident in ledger_summary.incidents
        if incident.kind == "lost" and incident.left and incident.resumed is not None
    ]
    if len(pause_seconds) > 2:
        median_pause_text = format_duration(median(pause_seconds))
        longest_pause_text = format_duration(max(pause_seconds))
        yield (
            f"{len(pause_seconds)} losses stopped the other workers for {median_pause_text}"
            f" (median), at most {longest_pause_text}."
        )


def _describe_checkpoints(ledger_summary: LedgerSummary) -> Iterator[str]:
    checkpoint_events = ledger_summary.checkpoints
    if checkpoint_events:
        checkpoint_count = len(checkpoint_events)
        total_mb, uploaded_mb = (
            sum(checkpoint_event.get(key, 0) for checkpoint_event in checkpoint_events) / 1e6
            for key in ("bytes", "uploaded")
        )
        mean_upload_seconds = (
            sum(checkpoint_event.get("seconds", 0.0) for checkpoint_event in checkpoint_events)
            / checkpoint_count
        )
        yield (
            f"{checkpoint_count} durable checkpoint{'s' * (checkpoint_count > 1)} of"
            f" {total_mb / checkpoint_count:.3g} MB, {format_duration(mean_upload_seconds)}"
            f" each, during training; {uploaded_mb:.3g} MB uploaded in total."
        )


def _describe_use_of_time(ledger_summary: LedgerSummary) -> Iterator[str]:
    seconds_by_kind = {
        interval_kind: ledger_summary.compute_worker_seconds(interval_kind)
        for interval_kind in (TRAINED_KIND, WAITED_KIND, LOST_KIND)
    }
    total_seconds = sum(seconds_by_kind.values())
    if total_seconds:
        trained_percent, waited_percent, lost_percent = (
            format_percent(kind_seconds / total_seconds)
            for kind_seconds in seconds_by_kind.values()
        )
        worker_time_text = format_worker_time(total_seconds, ledger_summary)
        yield (
            f"{trained_percent} of {worker_time_text} trained, {waited_percent} waited,"
            f" {lost_percent} lost."
        )


def _describe_queue_time(ledger_summary: LedgerSummary) -> Iterator[str]:
    queued_worker_seconds = sum(ledger_summary.queued_by_worker.values())
    if ledger_summary.queued_seconds >= MIN_QUEUED_SECONDS:
        yield (
            "The job was queued (in a queue, for nodes, or until its processes had started) for"
            f" {format_duration(ledger_summary.queued_seconds)}, during which no worker was alive."
        )
    if queued_worker_seconds >= MIN_QUEUED_SECONDS:
        yield (
            f"In addition to their time above, the workers of the job were queued for"
            f" {format_worker_time(queued_worker_seconds, ledger_summary)}."
        )


def describe_unended_wait(ledger_summary: LedgerSummary, queue_name: str, end_time_s: float) -> str:
    """Return why a training that has not ended was waiting when its workflow ended, or "" if the
    training was not waiting. `queue_name`: name of the queue of the training's job, or ""."""
    if ledger_summary.state != "running":
        return ""

    alive_intervals = [
        interval for intervals in ledger_summary.intervals.values() for interval in intervals
    ]
    place_text = f"in the queue {queue_name} or for nodes" if queue_name else "for nodes"
    if not alive_intervals:
        return f"no worker has started: the job waited {place_text}."

    waiting_seconds = end_time_s - max(interval.end for interval in alive_intervals)
    if waiting_seconds < MIN_UNENDED_WAIT_S:
        return ""
    return (
        f"no worker was alive for the last {format_duration(waiting_seconds)}: the job waited"
        f" {place_text}. Its checkpoints stay, so `rekindle resume` continues it."
    )


def _describe_harvest(ledger_summary: LedgerSummary) -> Iterator[str]:
    harvest = ledger_summary.harvest
    if not harvest:
        return

    worker_count = len(ledger_summary.harvested)
    step_count = ledger_summary.steps - ledger_summary.first_step
    yield (
        f"{worker_count} harvested worker{'s' * (worker_count > 1)} trained for"
        f" {format_worker_time(harvest.worker_seconds, ledger_summary)} and computed about"
        f" {harvest.steps:.0f} of the {step_count} {ledger_summary.unit}."
    )
    if harvest.steps:
        if harvest.is_measured:
            basis_text = "with the speed that was measured without them"
        else:
            basis_text = "if the other workers had computed their share, at the same speed"
        yield (
            "Without the harvested workers, the training would have taken an estimated"
            f" {format_duration(harvest.seconds_without)} instead of"
            f" {format_duration(harvest.seconds)}, without pauses ({basis_text})."
        )


def _describe_on_demand_change(change_event: Event) -> str:
    """Describe a change of the number of on-demand workers."""
    difference = change_event["workers"] - change_event["previous"]
    worker_count = abs(difference)
    duration_text = format_duration(change_event["seconds"])
    workers_text = f"{worker_count} on-demand worker{'s were' if worker_count != 1 else ' was'}"
    if difference > 0:
        return f"{workers_text} requested, because spot nodes had been missing for {duration_text}."
    return f"{workers_text} released, because workers had been on spot nodes for {duration_text}."


def _describe_capacity(ledger_summary: LedgerSummary) -> Iterator[str]:
    capacity_seconds = ledger_summary.capacity_seconds
    on_demand_seconds = capacity_seconds.get(ON_DEMAND_CAPACITY, 0.0)
    if on_demand_seconds:
        spot_time = format_worker_time(capacity_seconds.get(SPOT_CAPACITY, 0.0), ledger_summary)
        on_demand_time = format_worker_time(on_demand_seconds, ledger_summary)
        yield (
            f"Workers were alive for {spot_time} on spot nodes, and for {on_demand_time} on"
            " on-demand nodes."
        )


def _describe_gaps(ledger_summary: LedgerSummary) -> Iterator[str]:
    if ledger_summary.dropped:
        yield (
            f"{ledger_summary.dropped} events were dropped, because the object store was"
            " unavailable for too long."
        )
    if ledger_summary.skipped:
        yield f"{ledger_summary.skipped} damaged or duplicate lines of the ledger were skipped."
