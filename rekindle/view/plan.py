"""Format the forecast of a run as text and as the object that `-o json` prints."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from argolocal.common.wording import escape_control_chars, format_duration, truncate
from argolocal.view import runs
from rekindle.operations.plan.forecast import Forecast, TaskForecast
from rekindle.operations.plan.tasks import (
    CACHED_STATUS,
    CONDITIONAL_STATUS,
    RUNS_STATUS,
    SKIPPED_STATUS,
)
from rekindle.operations.plan.timing import TotalEstimate
from rekindle.training.cost.bill import format_amount, format_money
from rekindle.training.cost.pod_requests import GIB_BYTES, PodReplicas, count_gpus

# maximum number of characters of a reason in the table; `-o json` does not shorten reasons
MAX_REASON_LENGTH = 120
# maximum number of tasks that a line of totals names
MAX_NAMES = 8
# fraction of the total time below which a task of the critical path is not shown
MIN_TIME_SHARE = 0.01


def format_forecast(run_forecast: Forecast) -> str:
    """Return the text of the forecast: the table of tasks, the totals, and the models that the run
    may release."""
    task_rows = [
        _format_cells(task_row)
        for task_row in run_forecast.rows
        if task_row.status != SKIPPED_STATUS
    ]
    return escape_control_chars(
        "\n".join([runs.format_table(task_rows), "", *_describe_totals(run_forecast)])
    )


def _format_cells(task_row: TaskForecast) -> dict[str, Any]:
    memory_gib = task_row.requests.get("memory", 0.0) / GIB_BYTES
    gpu_count = count_gpus(task_row.requests)
    return {
        "task": task_row.task,
        "plan": task_row.status,
        "time": _format_time(task_row),
        "runs": task_row.time.runs or "",
        "pods": (
            f"{'≥ ' if task_row.items is None else ''}{task_row.requests['pods']:.0f}"
            if task_row.requests
            else ""
        ),
        "cpu": f"{task_row.requests.get('cpu', 0.0):.3g}" if task_row.requests else "",
        "memory": f"{memory_gib:.3g}Gi" if memory_gib else "",
        "gpu": f"{gpu_count:.3g}" if gpu_count else "",
        **(
            {}
            if task_row.usage.cost is None
            else {"cost": _format_cost(task_row, task_row.usage.cost)}
        ),
        "reason": "; ".join(
            filter(None, [truncate(task_row.reason.text, MAX_REASON_LENGTH), task_row.time.note])
        ),
    }


def _format_cost(task_row: TaskForecast, row_cost: float) -> str:
    if not task_row.requests:
        return ""
    if task_row.time.seconds is None:
        return "unknown"
    return format_amount(row_cost)


def _format_time(task_row: TaskForecast) -> str:
    task_time = task_row.time
    if task_row.status == CACHED_STATUS:
        return ""
    if task_time.seconds is None:
        return "unknown"
    return _format_range(task_time.seconds, task_time.low, task_time.high)


def _limit_names(task_names: list[str]) -> list[str]:
    if len(task_names) <= MAX_NAMES:
        return task_names
    return [*task_names[: MAX_NAMES - 1], f"{len(task_names) - MAX_NAMES + 1} more"]


def _format_range(seconds: float, low_seconds: float, high_seconds: float) -> str:
    range_text = format_duration(seconds)
    shortest_text = format_duration(low_seconds)
    longest_text = format_duration(high_seconds)
    if shortest_text == longest_text:
        return range_text
    return f"{range_text} ({shortest_text} – {longest_text})"


def _describe_totals(run_forecast: Forecast) -> Iterator[str]:
    count_by_status = {
        status: sum(task_row.status == status for task_row in run_forecast.rows)
        for status in (RUNS_STATUS, CACHED_STATUS, CONDITIONAL_STATUS)
    }
    count_texts = [f"{count} {status}" for status, count in count_by_status.items() if count]
    yield f"tasks      {', '.join(count_texts)}"

    at_least = "at least " if run_forecast.unknown_tasks else ""
    unconditional = run_forecast.unconditional_total
    maximum_total = run_forecast.total

    if not count_by_status[RUNS_STATUS] + count_by_status[CONDITIONAL_STATUS]:
        yield "time       0 s: every task is cached"
    elif run_forecast.former_runs:
        unconditional_text = _format_range(
            unconditional.seconds, unconditional.low, unconditional.high
        )
        yield f"time       {at_least}{unconditional_text}"
        if count_by_status[CONDITIONAL_STATUS]:
            maximum_text = _format_range(
                maximum_total.seconds, maximum_total.low, maximum_total.high
            )
            yield f"           {at_least}{maximum_text}, if all conditional tasks run"

        former_run_names = run_forecast.former_runs
        yield (
            f"           from {len(former_run_names)} former"
            f" run{'s' * (len(former_run_names) > 1)}, newest {former_run_names[0]}"
        )

        task_spans = unconditional.spans
        min_shown_seconds = MIN_TIME_SHARE * unconditional.seconds
        shown_tasks = [
            task_name
            for task_name in unconditional.critical_path
            if task_spans[task_name].end - task_spans[task_name].start >= min_shown_seconds
        ]
        yield f"critical   {' → '.join(_limit_names(shown_tasks or unconditional.critical_path))}"
    else:
        yield "time       unknown: former runs of this pipeline do not exist"

    if run_forecast.unknown_tasks:
        yield f"unknown    time of {', '.join(_limit_names(run_forecast.unknown_tasks))}"

    usage = run_forecast.usage
    yield (
        f"peak       {run_forecast.peak.get('pods', 0):.0f} pods,"
        f" {run_forecast.peak.get('cpu', 0.0):.3g} CPU, "
        f"{run_forecast.peak.get('memory', 0.0) / GIB_BYTES:.3g} GiB,"
        f" {count_gpus(run_forecast.peak):.3g} GPU"
    )

    if usage.cpu_seconds or not at_least:
        yield f"total      {at_least}{_describe_usage(run_forecast)}"
    else:
        yield "total      unknown"

    if (
        usage.cpu_seconds
        and count_by_status[CONDITIONAL_STATUS]
        and run_forecast.unconditional_cost is not None
    ):
        yield (
            "          "
            f" {at_least}{format_money(run_forecast.unconditional_cost, run_forecast.currency)}"
            " without conditional tasks"
        )

    yield from (f"release    {release}" for release in run_forecast.releases)
    yield from (f"capacity   {line}" for line in run_forecast.shortages)
    yield from (f"note       {line}" for line in run_forecast.notes)


def _describe_usage(run_forecast: Forecast) -> str:
    resource_usage = run_forecast.usage
    usage_text = (
        f"{resource_usage.cpu_seconds:.0f} CPU-seconds, {resource_usage.gib_seconds:.0f}"
        " GiB-seconds"
    )
    cost_text = (
        ""
        if resource_usage.cost is None
        else f", {format_money(resource_usage.cost, run_forecast.currency)}"
    )
    is_conditional = any(task_row.status == CONDITIONAL_STATUS for task_row in run_forecast.rows)
    condition_text = ", if all conditional tasks run" if is_conditional else ""
    return f"{usage_text}, {resource_usage.gpu_seconds:.0f} GPU-seconds{cost_text}{condition_text}"


def _pods_as_json(replicas: PodReplicas) -> dict[str, Any]:
    field_names = ("count", "pod", "queue", "is_executor")
    return {name: value for name, value in asdict(replicas).items() if name in field_names}


def build_forecast_object(run_forecast: Forecast) -> dict[str, Any]:
    """Return the forecast as the object that `-o json` prints."""

    def total_as_json(time_total: TotalEstimate) -> dict[str, Any]:
        time_fields = {
            "seconds": round(time_total.seconds, 3),
            "low": round(time_total.low, 3),
            "high": round(time_total.high, 3),
        }
        return time_fields | {"critical_path": time_total.critical_path}

    task_objects = [
        {
            "task": task_row.task,
            "status": task_row.status,
            "reason": task_row.reason.text,
            "compared_with": task_row.reason.earlier_result or None,
            "differences": [asdict(difference) for difference in task_row.reason.differences],
            "time": (
                asdict(task_row.time)
                | ({} if task_row.time.seconds is not None else {"low": None, "high": None})
            ),
            "items": task_row.items,
            "pods": [_pods_as_json(replicas) for replicas in task_row.pods],
            "requests": task_row.requests,
            **asdict(task_row.usage),
        }
        for task_row in run_forecast.rows
    ]

    return {
        "name": run_forecast.name,
        "runs_anything": run_forecast.would_run_anything(),
        "tasks": task_objects,
        "total": total_as_json(run_forecast.total) | {"unknown": run_forecast.unknown_tasks},
        "without_conditional_tasks": (
            total_as_json(run_forecast.unconditional_total)
            | {"cost": run_forecast.unconditional_cost}
        ),
        "former_runs": run_forecast.former_runs,
        "currency": run_forecast.currency or None,
        "peak": run_forecast.peak,
        **asdict(run_forecast.usage),
        "releases": [asdict(release) for release in run_forecast.releases],
        "does_not_fit": run_forecast.shortages,
        "notes": run_forecast.notes,
    }
