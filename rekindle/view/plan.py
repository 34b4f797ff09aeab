"""Format the forecast of a run as text and as the object that `-o json` prints."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from argolocal.common.wording import cut, format_duration, visible
from argolocal.view import runs
from rekindle.operations.plan.forecast import Forecast, Row
from rekindle.operations.plan.tasks import CACHED_RESULT, CONDITIONAL, RUNS, SKIPPED
from rekindle.operations.plan.timing import Total
from rekindle.training.cost.bill import format_amount, format_money
from rekindle.training.cost.pod_requests import GIB, Replicas, count_gpus

# maximum number of characters of a reason in the table; `-o json` does not shorten reasons
MAX_REASON_LENGTH = 120
MAX_NAMES = 8  # maximum number of tasks that a line of totals names
# fraction of the total time below which a task of the critical path is not shown
MIN_TIME_SHARE = 0.01


def text(plan: Forecast) -> str:
    """Return the text of the forecast: the table of tasks, the totals, and the models that the run
    may release."""
    rows = [_cells(row) for row in plan.rows if row.status != SKIPPED]
    return visible("\n".join([runs.format_table(rows), "", *_describe_totals(plan)]))


def _cells(row: Row) -> dict[str, Any]:
    memory = row.requests.get("memory", 0.0) / GIB
    gpus = count_gpus(row.requests)
    return {
        "task": row.task,
        "plan": row.status,
        "time": _time(row),
        "runs": row.time.runs or "",
        "pods": (
            f"{'≥ ' if row.items is None else ''}{row.requests['pods']:.0f}" if row.requests else ""
        ),
        "cpu": f"{row.requests.get('cpu', 0.0):.3g}" if row.requests else "",
        "memory": f"{memory:.3g}Gi" if memory else "",
        "gpu": f"{gpus:.3g}" if gpus else "",
        **({} if row.usage.cost is None else {"cost": _cost(row, row.usage.cost)}),
        "reason": "; ".join(filter(None, [cut(row.reason.text, MAX_REASON_LENGTH), row.time.note])),
    }


def _cost(row: Row, cost: float) -> str:
    if not row.requests:
        return ""
    if row.time.seconds is None:
        return "unknown"
    return format_amount(cost)


def _time(row: Row) -> str:
    time = row.time
    if row.status == CACHED_RESULT:
        return ""
    if time.seconds is None:
        return "unknown"
    return _format_range(time.seconds, time.low, time.high)


def _limit_names(names: list[str]) -> list[str]:
    if len(names) <= MAX_NAMES:
        return names
    return [*names[: MAX_NAMES - 1], f"{len(names) - MAX_NAMES + 1} more"]


def _format_range(seconds: float, low: float, high: float) -> str:
    text = format_duration(seconds)
    shortest = format_duration(low)
    longest = format_duration(high)
    if shortest == longest:
        return text
    return f"{text} ({shortest} – {longest})"


def _describe_totals(plan: Forecast) -> Iterator[str]:
    counts = {
        status: sum(row.status == status for row in plan.rows)
        for status in (RUNS, CACHED_RESULT, CONDITIONAL)
    }
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    yield f"tasks      {', '.join(parts)}"

    at_least = "at least " if plan.unknown_tasks else ""
    unconditional = plan.unconditional_total
    total = plan.total

    if not counts[RUNS] + counts[CONDITIONAL]:
        yield "time       0 s: every task is cached"
    elif plan.former_runs:
        certain = _format_range(unconditional.seconds, unconditional.low, unconditional.high)
        yield f"time       {at_least}{certain}"
        if counts[CONDITIONAL]:
            maximum = _format_range(total.seconds, total.low, total.high)
            yield f"           {at_least}{maximum}, if all conditional tasks run"

        names = plan.former_runs
        yield f"           from {len(names)} former run{'s' * (len(names) > 1)}, newest {names[0]}"

        spans = unconditional.spans
        min_s = MIN_TIME_SHARE * unconditional.seconds
        shown_tasks = [
            task
            for task in unconditional.critical_path
            if spans[task].end - spans[task].start >= min_s
        ]
        yield f"critical   {' → '.join(_limit_names(shown_tasks or unconditional.critical_path))}"
    else:
        yield "time       unknown: former runs of this pipeline do not exist"

    if plan.unknown_tasks:
        yield f"unknown    time of {', '.join(_limit_names(plan.unknown_tasks))}"

    usage = plan.usage
    yield (
        f"peak       {plan.peak.get('pods', 0):.0f} pods, {plan.peak.get('cpu', 0.0):.3g} CPU, "
        f"{plan.peak.get('memory', 0.0) / GIB:.3g} GiB, {count_gpus(plan.peak):.3g} GPU"
    )

    if usage.cpu_seconds or not at_least:
        yield f"total      {at_least}{_usage(plan)}"
    else:
        yield "total      unknown"

    if usage.cpu_seconds and counts[CONDITIONAL] and plan.unconditional_cost is not None:
        yield (
            f"           {at_least}{format_money(plan.unconditional_cost, plan.currency)} without"
            " conditional tasks"
        )

    yield from (f"release    {release}" for release in plan.releases)
    yield from (f"capacity   {line}" for line in plan.shortages)
    yield from (f"note       {line}" for line in plan.notes)


def _usage(plan: Forecast) -> str:
    usage = plan.usage
    seconds = f"{usage.cpu_seconds:.0f} CPU-seconds, {usage.gib_seconds:.0f} GiB-seconds"
    cost = "" if usage.cost is None else f", {format_money(usage.cost, plan.currency)}"
    is_conditional = any(row.status == CONDITIONAL for row in plan.rows)
    condition = ", if all conditional tasks run" if is_conditional else ""
    return f"{seconds}, {usage.gpu_seconds:.0f} GPU-seconds{cost}{condition}"


def _pods_as_json(replicas: Replicas) -> dict[str, Any]:
    names = ("count", "pod", "queue", "is_executor")
    return {name: value for name, value in asdict(replicas).items() if name in names}


def as_json(plan: Forecast) -> dict[str, Any]:
    """Return the object that `-o json` prints."""

    def total_as_json(total: Total) -> dict[str, Any]:
        times = {
            "seconds": round(total.seconds, 3),
            "low": round(total.low, 3),
            "high": round(total.high, 3),
        }
        return times | {"critical_path": total.critical_path}

    tasks = [
        {
            "task": row.task,
            "status": row.status,
            "reason": row.reason.text,
            "compared_with": row.reason.earlier_result or None,
            "differences": [asdict(difference) for difference in row.reason.differences],
            "time": (
                asdict(row.time)
                | ({} if row.time.seconds is not None else {"low": None, "high": None})
            ),
            "items": row.items,
            "pods": [_pods_as_json(replicas) for replicas in row.pods],
            "requests": row.requests,
            **asdict(row.usage),
        }
        for row in plan.rows
    ]

    return {
        "name": plan.name,
        "runs_anything": plan.runs_anything(),
        "tasks": tasks,
        "total": total_as_json(plan.total) | {"unknown": plan.unknown_tasks},
        "without_conditional_tasks": (
            total_as_json(plan.unconditional_total) | {"cost": plan.unconditional_cost}
        ),
        "former_runs": plan.former_runs,
        "currency": plan.currency or None,
        "peak": plan.peak,
        **asdict(plan.usage),
        "releases": [asdict(release) for release in plan.releases],
        "does_not_fit": plan.shortages,
        "notes": plan.notes,
    }
