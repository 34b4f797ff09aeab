"""Export the runs of a home (a directory of runs) as metrics in the Prometheus text format.

Source: prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from argolocal.page.run_list import STATES, RunRow
from argolocal.view.summary import parse_timestamp

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def format_metrics(prefix: str, rows: Iterable[RunRow]) -> str:
    """Return the metrics of runs. `prefix`: first part of the name of each metric. `rows`: the runs
    from the newest to the oldest."""
    newest_first = list(rows)
    counts = Counter((row.pipeline, row.state) for row in newest_first)
    pipelines = sorted({row.pipeline for row in newest_first})

    durations: dict[str, float] = {}
    successes: dict[str, float] = {}
    for row in newest_first:
        if row.seconds is not None:
            durations.setdefault(row.pipeline, row.seconds)
        if row.state == "succeeded" and row.finished:
            successes.setdefault(row.pipeline, parse_timestamp(row.finished))

    lines = [
        f"# HELP {prefix}_runs Number of runs by pipeline and state.",
        f"# TYPE {prefix}_runs gauge",
    ]
    for pipeline in pipelines:
        for state in STATES:
            labels = _format_labels(pipeline=pipeline, state=state)
            lines.append(f"{prefix}_runs{labels} {counts[pipeline, state]}")

    running_counts = {pipeline: counts[pipeline, "running"] for pipeline in pipelines}
    lines += _gauge(
        f"{prefix}_runs_running", "Number of runs in progress, by pipeline.", running_counts
    )
    lines += _gauge(
        f"{prefix}_runs_last_duration_seconds",
        "Duration of the newest finished run of a pipeline.",
        durations,
    )
    lines += _gauge(
        f"{prefix}_runs_last_success_timestamp_seconds",
        "Unix time of the end of the newest run of a pipeline that succeeded.",
        successes,
    )
    return "\n".join(lines) + "\n"


def _gauge(name: str, description: str, values: Mapping[str, float]) -> list[str]:
    """Return the lines of a metric with one value for each pipeline."""
    head = [f"# HELP {name} {description}", f"# TYPE {name} gauge"]
    return head + [
        f"{name}{_format_labels(pipeline=pipeline)} {value}" for pipeline, value in values.items()
    ]


def _format_labels(**values: str) -> str:
    pairs = [f'{name}="{_escape(value)}"' for name, value in values.items()]
    return f"{{{','.join(pairs)}}}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
