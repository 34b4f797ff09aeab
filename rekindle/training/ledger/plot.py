"""Draws the timeline of a run: the intervals of each worker by kind, above a curve of the steps per
second."""

from pathlib import Path
from typing import Any

from argolocal.common.wording import format_duration
from rekindle.training.ledger.ledger_summary import (
    LOST_KIND,
    TRAINED_KIND,
    WAITED_KIND,
    LedgerSummary,
    format_percent,
    shorten_worker_name,
)

COLOUR_BY_KIND = {TRAINED_KIND: "#0f766e", WAITED_KIND: "#cbd5e1", LOST_KIND: "#dc2626"}
# kind of incident → label, marker, colour
INCIDENT_MARKS = {
    "lost": ("worker lost", "X", "#7f1d1d"),
    "drain": ("left on request", "v", "#1d4ed8"),
    "failed": ("failed", "D", "#7f1d1d"),
}
# number of workers above which the plot shows only how many workers trained
MAX_NAMED_WORKERS = 40
TIME_UNITS = (
    (3 * 86400.0, 86400.0, "days"),
    (2 * 3600.0, 3600.0, "hours"),
    (300.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)


def draw_timeline(ledger_summary: LedgerSummary, image_path: Path) -> None:
    """Draw the timeline to `image_path`, whose suffix determines the format. Raises ImportError if
    matplotlib is missing."""
    import matplotlib
    from matplotlib.figure import Figure

    unit_seconds, time_unit = next(
        (unit_seconds, time_unit)
        for minimum_seconds, unit_seconds, time_unit in TIME_UNITS
        if ledger_summary.ended - ledger_summary.began >= minimum_seconds
    )
    # sort worker names by number, so that worker-10 follows worker-9
    worker_names = sorted(
        ledger_summary.intervals, key=lambda worker_name: (len(worker_name), worker_name)
    )
    rows_height = min(9.0, max(0.9, 0.3 * len(worker_names)))
    figure_height = rows_height + 2.6

    with matplotlib.rc_context(
        {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    ):
        figure = Figure(figsize=(11, figure_height))
        axes_left = 0.11
        axes_width = 0.865
        worker_axes = figure.add_axes(
            (axes_left, 1.75 / figure_height, axes_width, rows_height / figure_height)
        )
        speed_axes = figure.add_axes(
            (axes_left, 0.5 / figure_height, axes_width, 1.05 / figure_height), sharex=worker_axes
        )
        _draw_workers(worker_axes, ledger_summary, worker_names, unit_seconds)
        _draw_incidents(worker_axes, ledger_summary, worker_names, unit_seconds)
        _draw_speed(speed_axes, ledger_summary, unit_seconds)
        speed_axes.set(
            xlabel=f"{time_unit} since the start",
            ylabel="steps/s",
            xlim=(0, _compute_duration_s(ledger_summary) / unit_seconds),
        )
        worker_axes.tick_params(axis="x", labelbottom=False)
        worker_axes.set_title(_format_title(ledger_summary), loc="left", pad=24)

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

        figure.savefig(image_path, dpi=130, bbox_inches="tight")


def _draw_workers(
    worker_axes: Any, ledger_summary: LedgerSummary, worker_names: list[str], unit_seconds: float
) -> None:
    for interval_kind, colour in COLOUR_BY_KIND.items():
        for row_index, worker_name in enumerate(worker_names):
            intervals_of_kind = [
                time_interval
                for time_interval in ledger_summary.intervals[worker_name]
                if time_interval.kind == interval_kind
            ]
            horizontal_bars = [
                (
                    (time_interval.start - ledger_summary.began) / unit_seconds,
                    (time_interval.end - time_interval.start) / unit_seconds,
                )
                for time_interval in intervals_of_kind
            ]
            # draw an edge, so that a bar of a hundredth of a second is visible
            worker_axes.broken_barh(
                horizontal_bars,
                (row_index - 0.34, 0.68),
                facecolor=colour,
                edgecolor=colour,
                linewidth=0.4,
            )

        worker_axes.broken_barh([], (0, 0), facecolor=colour, label=interval_kind)

    worker_axes.set_ylim(max(1, len(worker_names)) - 0.5, -0.5)
    if len(worker_names) <= MAX_NAMED_WORKERS:
        worker_axes.set_yticks(
            range(len(worker_names)),
            [_make_label(worker_name, ledger_summary) for worker_name in worker_names],
        )
    else:
        worker_axes.set_yticks([])
        worker_axes.set_ylabel(f"{len(worker_names)} workers")

    worker_axes.tick_params(axis="y", length=0)


def _make_label(worker_name: str, ledger_summary: LedgerSummary) -> str:
    short_name = shorten_worker_name(worker_name)
    worker_kind = ledger_summary.describe_worker_kind(worker_name)
    if worker_kind:
        return f"{short_name[-9:]} {worker_kind}"
    return short_name[-20:]


def _draw_incidents(
    worker_axes: Any, ledger_summary: LedgerSummary, worker_names: list[str], unit_seconds: float
) -> None:
    for incident_kind, (label, marker, colour) in INCIDENT_MARKS.items():
        incidents = [
            incident
            for incident in ledger_summary.incidents
            if incident.kind == incident_kind and incident.name in worker_names
        ]
        if incidents:
            incident_times = [
                (incident.t - ledger_summary.began) / unit_seconds for incident in incidents
            ]
            incident_rows = [worker_names.index(incident.name) for incident in incidents]

            worker_axes.scatter(
                incident_times,
                incident_rows,
                s=34,
                marker=marker,
                c=colour,
                edgecolors="white",
                linewidths=0.7,
                zorder=4,
                label=label,
                clip_on=False,
            )

    coordinator_restarts = [
        incident for incident in ledger_summary.incidents if incident.kind == "coordinator"
    ]
    for restart_number, incident in enumerate(coordinator_restarts):
        worker_axes.axvline(
            (incident.t - ledger_summary.began) / unit_seconds,
            color="#7c3aed",
            linestyle=(0, (3, 2)),
            linewidth=1.1,
            zorder=3,
            label="coordinator restarted" if restart_number == 0 else None,
        )

    if ledger_summary.checkpoints:
        checkpoint_times = [
            (checkpoint_event["t"] - ledger_summary.began) / unit_seconds
            for checkpoint_event in ledger_summary.checkpoints
        ]
        worker_axes.scatter(
            checkpoint_times,
            [len(worker_names) - 0.5] * len(checkpoint_times),
            s=22,
            marker="^",
            c="#475569",
            zorder=4,
            clip_on=False,
            linewidths=0,
            label="durable checkpoint",
        )


def _draw_speed(speed_axes: Any, ledger_summary: LedgerSummary, unit_seconds: float) -> None:
    import numpy as np

    duration_s = _compute_duration_s(ledger_summary)
    bin_edges_s = np.linspace(0, duration_s, int(max(2, min(200, duration_s))) + 1)
    # number of updates until each point, including repeated steps
    update_counts = [0]
    point_times_s = [0.0]
    previous_step = ledger_summary.points[0][1] if ledger_summary.points else 0

    for point_time_s, step in ledger_summary.points:
        update_counts.append(update_counts[-1] + max(0, step - previous_step))
        point_times_s.append(point_time_s - ledger_summary.began)
        previous_step = step

    updates_per_second = np.diff(np.interp(bin_edges_s, point_times_s, update_counts)) / np.diff(
        bin_edges_s
    )
    speed_axes.stairs(
        updates_per_second,
        bin_edges_s / unit_seconds,
        fill=True,
        color=COLOUR_BY_KIND[TRAINED_KIND],
        alpha=0.25,
    )
    speed_axes.stairs(
        updates_per_second,
        bin_edges_s / unit_seconds,
        color=COLOUR_BY_KIND[TRAINED_KIND],
        linewidth=1,
    )
    speed_axes.set_ylim(0, max(1e-9, 1.1 * float(updates_per_second.max())))


def _format_title(ledger_summary: LedgerSummary) -> str:
    total_seconds = (
        sum(
            ledger_summary.compute_worker_seconds(interval_kind) for interval_kind in COLOUR_BY_KIND
        )
        or 1.0
    )
    shares_text = ", ".join(
        f"{format_percent(ledger_summary.compute_worker_seconds(interval_kind) / total_seconds)}"
        f" {interval_kind}"
        for interval_kind in COLOUR_BY_KIND
    )
    duration_text = format_duration(ledger_summary.ended - ledger_summary.began)
    steps_text = f"{ledger_summary.steps} {ledger_summary.unit}"
    return (
        f"{steps_text}, {len(ledger_summary.intervals)} workers in {duration_text}: {shares_text}"
    )


def _compute_duration_s(ledger_summary: LedgerSummary) -> float:
    return max(ledger_summary.ended - ledger_summary.began, 1e-3)
