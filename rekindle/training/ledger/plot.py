"""Draws the timeline of a run: the intervals of each worker by kind, above a curve of the steps per
second."""

from pathlib import Path
from typing import Any

from argolocal.common.wording import format_duration
from rekindle.training.ledger.ledger_summary import (
    LOST,
    TRAINED,
    WAITED,
    Summary,
    format_percent,
    shorten_worker_name,
)

COLOURS = {TRAINED: "#0f766e", WAITED: "#cbd5e1", LOST: "#dc2626"}
# kind of incident → label, marker, colour
INCIDENT_MARKS = {
    "lost": ("worker lost", "X", "#7f1d1d"),
    "drain": ("left on request", "v", "#1d4ed8"),
    "failed": ("failed", "D", "#7f1d1d"),
}
MAX_NAMES = 40  # number of workers above which the plot shows only how many workers trained
TIME_UNITS = (
    (3 * 86400.0, 86400.0, "days"),
    (2 * 3600.0, 3600.0, "hours"),
    (300.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)


def draw(summary: Summary, file: Path) -> None:
    """Draw the timeline to `file`, whose suffix determines the format. Raises ImportError if
    matplotlib is missing."""
    import matplotlib
    from matplotlib.figure import Figure

    scale, unit = next(
        (scale, unit)
        for minimum, scale, unit in TIME_UNITS
        if summary.ended - summary.began >= minimum
    )
    # sort worker names by number, so that worker-10 follows worker-9
    names = sorted(summary.intervals, key=lambda name: (len(name), name))
    rows_height = min(9.0, max(0.9, 0.3 * len(names)))
    height = rows_height + 2.6

    with matplotlib.rc_context(
        {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    ):
        figure = Figure(figsize=(11, height))
        x = 0.11
        width = 0.865
        worker_axes = figure.add_axes((x, 1.75 / height, width, rows_height / height))
        speed_axes = figure.add_axes((x, 0.5 / height, width, 1.05 / height), sharex=worker_axes)
        _draw_workers(worker_axes, summary, names, scale)
        _draw_incidents(worker_axes, summary, names, scale)
        _draw_speed(speed_axes, summary, scale)
        speed_axes.set(
            xlabel=f"{unit} since the start",
            ylabel="steps/s",
            xlim=(0, _duration_s(summary) / scale),
        )
        worker_axes.tick_params(axis="x", labelbottom=False)
        worker_axes.set_title(_format_title(summary), loc="left", pad=24)

        worker_axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=8,
            frameon=False,
            fontsize=8,
            borderaxespad=0.2,
            handlelength=1.2,
            columnspacing=1.4,
        )

        figure.savefig(file, dpi=130, bbox_inches="tight")


def _draw_workers(axes: Any, summary: Summary, names: list[str], scale: float) -> None:
    for kind, colour in COLOURS.items():
        for row, name in enumerate(names):
            spans = [span for span in summary.intervals[name] if span.kind == kind]
            bars = [
                ((span.start - summary.began) / scale, (span.end - span.start) / scale)
                for span in spans
            ]
            # the edge makes a bar of a hundredth of a second visible
            axes.broken_barh(
                bars, (row - 0.34, 0.68), facecolor=colour, edgecolor=colour, linewidth=0.4
            )

        axes.broken_barh([], (0, 0), facecolor=colour, label=kind)

    axes.set_ylim(max(1, len(names)) - 0.5, -0.5)
    if len(names) <= MAX_NAMES:
        axes.set_yticks(range(len(names)), [shorten_worker_name(name)[-20:] for name in names])
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(names)} workers")

    axes.tick_params(axis="y", length=0)


def _draw_incidents(axes: Any, summary: Summary, names: list[str], scale: float) -> None:
    for kind, (label, marker, colour) in INCIDENT_MARKS.items():
        incidents = [
            incident
            for incident in summary.incidents
            if incident.kind == kind and incident.name in names
        ]
        if incidents:
            times = [(incident.t - summary.began) / scale for incident in incidents]
            rows = [names.index(incident.name) for incident in incidents]

            axes.scatter(
                times,
                rows,
                s=34,
                marker=marker,
                c=colour,
                edgecolors="white",
                linewidths=0.7,
                zorder=4,
                label=label,
                clip_on=False,
            )

    restarts = [incident for incident in summary.incidents if incident.kind == "coordinator"]
    for number, incident in enumerate(restarts):
        axes.axvline(
            (incident.t - summary.began) / scale,
            color="#7c3aed",
            linestyle=(0, (3, 2)),
            linewidth=1.1,
            zorder=3,
            label="coordinator restarted" if number == 0 else None,
        )

    if summary.checkpoints:
        times = [(event["t"] - summary.began) / scale for event in summary.checkpoints]
        axes.scatter(
            times,
            [len(names) - 0.5] * len(times),
            s=22,
            marker="^",
            c="#475569",
            zorder=4,
            clip_on=False,
            linewidths=0,
            label="durable checkpoint",
        )


def _draw_speed(axes: Any, summary: Summary, scale: float) -> None:
    import numpy as np

    length = _duration_s(summary)
    edges = np.linspace(0, length, int(max(2, min(200, length))) + 1)
    updates = [0]
    times = [0.0]
    previous_step = summary.points[0][1] if summary.points else 0

    for t, step in summary.points:
        updates.append(updates[-1] + max(0, step - previous_step))  # including repeated steps
        times.append(t - summary.began)
        previous_step = step

    rate = np.diff(np.interp(edges, times, updates)) / np.diff(edges)
    axes.stairs(rate, edges / scale, fill=True, color=COLOURS[TRAINED], alpha=0.25)
    axes.stairs(rate, edges / scale, color=COLOURS[TRAINED], linewidth=1)
    axes.set_ylim(0, max(1e-9, 1.1 * float(rate.max())))


def _format_title(summary: Summary) -> str:
    total = sum(summary.worker_seconds(kind) for kind in COLOURS) or 1.0
    shares = ", ".join(
        f"{format_percent(summary.worker_seconds(kind) / total)} {kind}" for kind in COLOURS
    )
    duration_text = format_duration(summary.ended - summary.began)
    steps = f"{summary.steps} {summary.unit}"
    return f"{steps}, {len(summary.intervals)} workers in {duration_text}: {shares}"


def _duration_s(summary: Summary) -> float:
    return max(summary.ended - summary.began, 1e-3)
