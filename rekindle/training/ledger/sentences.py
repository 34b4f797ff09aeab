"""Describes a training in sentences, from the Summary of its ledger."""

import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from statistics import median
from typing import Any

from argolocal.common.wording import format_duration
from rekindle.training.ledger.ledger_summary import (
    LOST,
    TRAINED,
    WAITED,
    Incident,
    Summary,
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
MAX_LINES = 24
LOSS_REASONS = {
    "connection": "connection closed",
    "silent": "silent for too long",
    "hung": "alive, but without a step for too long",
    "dropped": "not reachable by the other workers",
    "process": "a process of the program was killed",
    "unseen": "while the coordinator was unavailable",
}


def describe(summary: Summary) -> list[str]:
    """Return lines about the result, the incidents, the checkpoints and the use of time."""
    if not summary.intervals:
        return ["No worker has trained yet."]

    if summary.ended - summary.began > 20 * 3600:
        time_format = "%Y-%m-%d %H:%M:%S"
    else:
        time_format = "%H:%M:%S"

    incidents = [list(group) for _, group in groupby(summary.incidents, _group_key)]
    dated = [(group[0].t, _describe_incidents(group, summary)) for group in incidents]
    for event in summary.restored:
        source = RESTORE_SOURCES.get(str(event.get("tier")))
        if source:
            dated.append(
                (event["t"], f"{summary.unit[:-1]} {event.get('step')} was restored from {source}.")
            )

    for event in summary.unsaved:
        seconds = format_duration(event["seconds"])
        text = f"the program stopped on SIGTERM without a save: {seconds} of work were repeated."
        dated.append((event["t"], text))

    lines = [
        f"{time.strftime(time_format, time.localtime(t))}  {text}" for t, text in sorted(dated)
    ]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES // 2 : -MAX_LINES // 2] = [f"… {len(lines) - MAX_LINES} similar lines …"]

    totals = [
        line
        for describe in (
            _describe_stops,
            _describe_checkpoints,
            _describe_use_of_time,
            _describe_gaps,
        )
        for line in describe(summary)
    ]
    return [_describe_result(summary), *lines, *totals]


def format_worker_time(seconds: float, summary: Summary) -> str:
    """Format worker-seconds: `15 worker-seconds`, `2.1 GPU-hours`."""
    unit = "worker" if summary.run.get("device", "cpu") == "cpu" else "GPU"
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} {unit}-hours"
    if seconds < 10:
        return f"{seconds:.2g} {unit}-seconds"
    return f"{seconds:.0f} {unit}-seconds"


def _describe_result(summary: Summary) -> str:
    total_steps = summary.run.get("steps")
    first_step = summary.first_step
    if total_steps and total_steps != summary.steps:
        end = f"{summary.steps} of {total_steps}"
    else:
        end = f"{summary.steps}"

    if summary.unit == "checkpoints":
        steps = f"wrote {end} checkpoint{'s' * (end != '1')}"
    elif first_step:
        steps = f"trained {summary.steps - first_step} steps ({first_step} to {end})"
    else:
        steps = f"trained {end} steps"

    count = len(summary.intervals)
    start = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(summary.began))

    text = (
        f"{count} worker{'s' * (count > 1)} {steps} in"
        f" {format_duration(summary.training_seconds)}, {summary.steps_per_second:.3g}"
        f" {summary.unit}/s; with starts and pauses it took"
        f" {format_duration(summary.ended - summary.began)}, since {start}."
    )

    if summary.state == "failed":
        return f"{text} Then the run was aborted: {summary.message}"

    if summary.state != "complete":
        newest = time.strftime("%H:%M:%S", time.localtime(summary.ended))
        text += _describe_progress(summary.progress)
        return f"{text} The run is not complete; the newest entry of its ledger is of {newest}."

    is_early = total_steps and summary.steps < total_steps
    if is_early:
        return (
            f"{text} The training stopped early: the validation loss stopped falling"
            " (train.patience)."
        )

    return text


def _describe_progress(progress: Mapping[str, Any]) -> str:
    """Return " 45 % are done, about 3 min are left.", from the newest report of a program."""
    percentage = progress.get("percentage")
    if percentage is None:
        return ""

    seconds_left = progress.get("seconds_left")
    if seconds_left is None:
        return f" {percentage} % are done."
    return f" {percentage} % are done, about {format_duration(seconds_left)} are left."


def _group_key(incident: Incident) -> tuple[object, ...]:
    return (
        incident.kind,
        incident.why,
        incident.resumed,
        incident.step,
        incident.kind == "failed" and incident.name,
    )


def _describe_incidents(group: list[Incident], summary: Summary) -> str:
    first = group[0]
    last = group[-1]
    many = len(group) > 1
    names = ", ".join(shorten_worker_name(incident.name) for incident in group)

    if first.resumed is not None:
        pause = format_duration(first.resumed - first.t)
    else:
        pause = ""

    if first.kind == "coordinator":
        return "the coordinator restarted" + (
            "; the workers continued without it." if first.left else "."
        )

    if first.kind == "join":
        return f"{names} joined" + (f" and trained {pause} later." if pause else ".")
    if first.kind == "failed":
        return f"{names} failed {_describe_step(first, summary)}: {first.why}"

    reason = LOSS_REASONS.get(first.why, first.why)
    if first.kind == "lost":
        end = f"{'were' if many else 'was'} lost ({reason})"
    else:
        end = "left on request"

    text = f"{names} {end} {_describe_step(first, summary)}"
    if not pause:
        return f"{text}; no worker trained after that."

    who = "the others" if last.left else "no worker was left. Training"
    text += f"; {who} continued {'' if first.seen else 'at most '}{pause} later."
    if first.kind == "lost":
        text += _describe_repeated_work(first, summary)

    backs = [incident.back - incident.t for incident in group if incident.back is not None]
    if last.left and backs:
        text += f" {'They were' if many else 'It was'} back after {format_duration(max(backs))}."

    return text


def _describe_step(incident: Incident, summary: Summary) -> str:
    """Describe the step of an incident, such as `at step 309`."""
    unit = summary.unit[:-1]
    if incident.step:
        position = f"at {unit} {incident.step}"
    else:
        position = f"before the first recorded {unit}"
    if incident.seen:
        return position
    return f"{position} or later, at this time or later"


def _describe_repeated_work(loss: Incident, summary: Summary) -> str:
    """Describe the work that was repeated after the loss of a worker."""
    work = f"{format_worker_time(loss.cost, summary)} of work" if loss.cost else ""

    if not loss.seen:
        if loss.repeated:
            minimum = f" At least {_format_steps(loss.repeated)} repeated"
        else:
            minimum = ""

        return (
            f"{minimum or ' How many steps were repeated is unknown'}: the ledger lacks the last"
            " steps."
        )

    if summary.run.get("program"):
        return f" {work[:1].upper()}{work[1:]} since its last save was repeated." if work else ""

    if loss.repeated:
        text = f" {_format_steps(loss.repeated)} repeated"
    else:
        text = " No step was lost"

    join = "," if loss.repeated else ", but"
    if work:
        return f"{text}{join} {work}."

    return f"{text}."


def _format_steps(count: int) -> str:
    if count == 1:
        return "1 step was"
    return f"{count} steps were"


def _describe_stops(summary: Summary) -> Iterator[str]:
    pauses = [
        i.resumed - i.t
        for i in summary.incidents
        if i.kind == "lost" and i.left and i.resumed is not None
    ]
    if len(pauses) > 2:
        usual = format_duration(median(pauses))
        longest = format_duration(max(pauses))
        yield (
            f"{len(pauses)} losses stopped the other workers for {usual} (median), at most"
            f" {longest}."
        )


def _describe_checkpoints(summary: Summary) -> Iterator[str]:
    checkpoints = summary.checkpoints
    if checkpoints:
        count = len(checkpoints)
        size, sent = (
            sum(event.get(key, 0) for event in checkpoints) / 1e6 for key in ("bytes", "uploaded")
        )
        spent = sum(event.get("seconds", 0.0) for event in checkpoints) / count
        yield (
            f"{count} durable checkpoint{'s' * (count > 1)} of {size / count:.3g} MB,"
            f" {format_duration(spent)} each, during training; {sent:.3g} MB uploaded in total."
        )


def _describe_use_of_time(summary: Summary) -> Iterator[str]:
    amounts = {kind: summary.worker_seconds(kind) for kind in (TRAINED, WAITED, LOST)}
    total = sum(amounts.values())
    if total:
        trained, waited, lost = (format_percent(value / total) for value in amounts.values())
        worker_time = format_worker_time(total, summary)
        yield f"{trained} of {worker_time} trained, {waited} waited, {lost} lost."


def _describe_gaps(summary: Summary) -> Iterator[str]:
    if summary.dropped:
        yield (
            f"{summary.dropped} events were dropped, because the object store was unavailable for"
            " too long."
        )
    if summary.skipped:
        yield f"{summary.skipped} damaged or duplicate lines of the ledger were skipped."
