"""Plots of an evaluation as PNG files: scores, precision-recall, calibration, kinds of fraud,
weeks."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from steps.fraud.ranking import average_precision, counts

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]
COLOUR = {"candidate": "#c2410c", "champion": "#475569", "baseline": "#0f766e"}
ALARM_SCORE = 0.5  # scores from here on count as alarms


def draw(
    folder: Path,
    labels: Ints,
    scenarios: Ints,
    scores: dict[str, Floats],
    parts: list[dict[str, Any]],
) -> None:
    """Write plots into `folder`. `scores`: name of a model → its scores [n] of the rows, which have
    `labels` and `scenarios`."""
    folder.mkdir(parents=True, exist_ok=True)

    with matplotlib.rc_context(
        {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    ):
        for name, picture in {
            "scores": lambda axes: _histogram(axes, labels, scores["candidate"]),
            "precision_recall": lambda axes: _precision_recall(axes, labels, scores),
            "calibration": lambda axes: _calibration(axes, labels, scores),
            "scenarios": lambda axes: _scenarios(axes, labels, scenarios, scores["candidate"]),
            "weeks": lambda axes: _weeks(axes, parts, list(scores)),
        }.items():
            figure = Figure(figsize=(5, 3.4))
            axes = figure.add_axes((0.14, 0.15, 0.82, 0.75))
            picture(axes)
            figure.savefig(folder / f"{name}.png", dpi=110)


def _histogram(axes: Axes, labels: Ints, scores: Floats) -> None:
    bins = np.linspace(0, 1, 41).tolist()
    for value, name, colour in ((0, "genuine", "#94a3b8"), (1, "fraud", COLOUR["candidate"])):
        axes.hist(scores[labels == value], bins, label=name, color=colour, alpha=0.7)
    axes.set(yscale="log", xlabel="score", ylabel="transactions", title="Scores of the candidate")
    axes.legend()


def _precision_recall(axes: Axes, labels: Ints, scores: dict[str, Floats]) -> None:
    for name, values in scores.items():
        frauds, called = counts(values, labels)
        finds_more = np.diff(frauds, prepend=0) > 0
        recall = frauds[finds_more] / frauds[-1]
        precision = frauds[finds_more] / called[finds_more]
        axes.plot(recall, precision, label=name, color=COLOUR[name], drawstyle="steps-pre")

    axes.set(
        xlabel="recall",
        ylabel="precision",
        xlim=(0, 1),
        ylim=(0, 1.02),
        title="Precision and recall",
    )

    axes.legend()


def _calibration(axes: Axes, labels: Ints, scores: dict[str, Floats]) -> None:
    edges = np.array([0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9, 1])
    for name, values in scores.items():
        bucket = np.digitize(values, edges[1:-1])
        count = np.bincount(bucket, minlength=len(edges) - 1)
        kept = count >= 20
        stated = np.bincount(bucket, values, len(edges) - 1)[kept] / count[kept]
        observed = np.bincount(bucket, labels, len(edges) - 1)[kept] / count[kept]
        axes.plot(stated, observed, "o-", label=name, color=COLOUR[name])

    axes.plot([1e-4, 1], [1e-4, 1], "--", color="#cbd5e1")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1e-4)

    axes.set(
        xlim=(1e-4, 1.2),
        ylim=(0, 1.2),
        xlabel="stated",
        ylabel="share of frauds",
        title="Calibration",
    )

    axes.legend()


def _scenarios(axes: Axes, labels: Ints, scenarios: Ints, scores: Floats) -> None:
    """Draw a table with a row for each kind of fraud: the number of frauds, the fraction of them
    above ALARM_SCORE, and the AP against genuine rows."""
    rows = []

    for kind in np.unique(scenarios[labels == 1]):
        chosen = (labels == 1) & (scenarios == kind)
        against = chosen | (labels == 0)
        ap = average_precision(scores[against], labels[against])
        name = f"scenario {kind}" if kind else "not known"

        rows.append(
            [
                name,
                f"{chosen.sum():,}",
                f"{(scores[chosen] >= ALARM_SCORE).mean():.0%}",
                f"{ap:.3f}",
            ]
        )

    false = int(((labels == 0) & (scores >= ALARM_SCORE)).sum())
    rows.append(["genuine", f"{(labels == 0).sum():,}", f"{false:,} alarms", ""])
    axes.axis("off")
    axes.set_title(f"Kinds of fraud (alarm: score ≥ {ALARM_SCORE:g})")
    axes.table(
        rows, colLabels=["kind", "transactions", "alarm", "AP"], loc="center", cellLoc="center"
    ).scale(1, 1.5)


def _weeks(axes: Axes, parts: list[dict[str, Any]], names: list[str]) -> None:
    x = np.arange(len(parts))
    width = 0.8 / len(names)

    for number, name in enumerate(names):
        heights = [week[name]["ap"] for week in parts]
        bars = axes.bar(
            x + (number - (len(names) - 1) / 2) * width,
            heights,
            width,
            label=name,
            color=COLOUR[name],
        )
        axes.bar_label(bars, fmt="%.3f", fontsize=7)

    axes.set_xticks(x, [week["name"] for week in parts])
    axes.set(ylabel="AP", title="Average precision by test week", ylim=(0, 1))
    axes.legend()
