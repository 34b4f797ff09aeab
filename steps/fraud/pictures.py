"""Plots of an evaluation as PNG files: scores, precision-recall, calibration, kinds of fraud,
weeks."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from steps.fraud.ranking import average_precision, count_flagged

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]
COLOUR = {"candidate": "#c2410c", "champion": "#475569", "baseline": "#0f766e"}
# smallest score that counts as an alarm
ALARM_SCORE = 0.5


def draw(
    plot_folder: Path,
    labels: Ints,
    scenarios: Ints,
    scores_by_model: dict[str, Floats],
    evaluated_weeks: list[dict[str, Any]],
) -> None:
    """Write the plots of an evaluation into `plot_folder`. `scores_by_model`: name of a model → its
    scores [n] of the rows, which have `labels` and `scenarios`."""
    plot_folder.mkdir(parents=True, exist_ok=True)

    with matplotlib.rc_context(
        {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    ):
        for plot_name, draw_picture in {
            "scores": lambda axes: _draw_histogram(axes, labels, scores_by_model["candidate"]),
            "precision_recall": lambda axes: _precision_recall(axes, labels, scores_by_model),
            "calibration": lambda axes: _draw_calibration(axes, labels, scores_by_model),
            "scenarios": lambda axes: _draw_scenarios(
                axes, labels, scenarios, scores_by_model["candidate"]
            ),
            "weeks": lambda axes: _draw_weeks(axes, evaluated_weeks, list(scores_by_model)),
        }.items():
            figure = Figure(figsize=(5, 3.4))
            axes = figure.add_axes((0.14, 0.15, 0.82, 0.75))
            draw_picture(axes)
            figure.savefig(plot_folder / f"{plot_name}.png", dpi=110)


def _draw_histogram(axes: Axes, labels: Ints, scores: Floats) -> None:
    bin_edges = np.linspace(0, 1, 41).tolist()
    for label_value, label_name, bar_colour in (
        (0, "genuine", "#94a3b8"),
        (1, "fraud", COLOUR["candidate"]),
    ):
        axes.hist(
            scores[labels == label_value], bin_edges, label=label_name, color=bar_colour, alpha=0.7
        )
    axes.set(yscale="log", xlabel="score", ylabel="transactions", title="Scores of the candidate")
    axes.legend()


def _precision_recall(axes: Axes, labels: Ints, scores_by_model: dict[str, Floats]) -> None:
    for model_name, model_scores in scores_by_model.items():
        fraud_counts, flagged_counts = count_flagged(model_scores, labels)
        finds_more = np.diff(fraud_counts, prepend=0) > 0
        recall = fraud_counts[finds_more] / fraud_counts[-1]
        precision = fraud_counts[finds_more] / flagged_counts[finds_more]
        axes.plot(
            recall, precision, label=model_name, color=COLOUR[model_name], drawstyle="steps-pre"
        )

    axes.set(
        xlabel="recall",
        ylabel="precision",
        xlim=(0, 1),
        ylim=(0, 1.02),
        title="Precision and recall",
    )

    axes.legend()


def _draw_calibration(axes: Axes, labels: Ints, scores_by_model: dict[str, Floats]) -> None:
    bucket_edges = np.array([0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9, 1])
    for model_name, model_scores in scores_by_model.items():
        bucket_by_row = np.digitize(model_scores, bucket_edges[1:-1])
        bucket_sizes = np.bincount(bucket_by_row, minlength=len(bucket_edges) - 1)
        is_large_bucket = bucket_sizes >= 20
        stated_probabilities = (
            np.bincount(bucket_by_row, model_scores, len(bucket_edges) - 1)[is_large_bucket]
            / bucket_sizes[is_large_bucket]
        )
        observed_fractions = (
            np.bincount(bucket_by_row, labels, len(bucket_edges) - 1)[is_large_bucket]
            / bucket_sizes[is_large_bucket]
        )
        axes.plot(
            stated_probabilities,
            observed_fractions,
            "o-",
            label=model_name,
            color=COLOUR[model_name],
        )

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


def _draw_scenarios(axes: Axes, labels: Ints, scenarios: Ints, candidate_scores: Floats) -> None:
    """Draw a table with a row for each kind of fraud: the number of frauds, the fraction of them
    above ALARM_SCORE, and the AP against genuine rows."""
    table_rows = []

    for scenario_number in np.unique(scenarios[labels == 1]):
        is_of_scenario = (labels == 1) & (scenarios == scenario_number)
        is_compared_row = is_of_scenario | (labels == 0)
        scenario_ap = average_precision(candidate_scores[is_compared_row], labels[is_compared_row])
        scenario_name = f"scenario {scenario_number}" if scenario_number else "not known"

        table_rows.append(
            [
                scenario_name,
                f"{is_of_scenario.sum():,}",
                f"{(candidate_scores[is_of_scenario] >= ALARM_SCORE).mean():.0%}",
                f"{scenario_ap:.3f}",
            ]
        )

    false_alarm_count = int(((labels == 0) & (candidate_scores >= ALARM_SCORE)).sum())
    table_rows.append(["genuine", f"{(labels == 0).sum():,}", f"{false_alarm_count:,} alarms", ""])
    axes.axis("off")
    axes.set_title(f"Kinds of fraud (alarm: score ≥ {ALARM_SCORE:g})")
    axes.table(
        table_rows,
        colLabels=["kind", "transactions", "alarm", "AP"],
        loc="center",
        cellLoc="center",
    ).scale(1, 1.5)


def _draw_weeks(axes: Axes, evaluated_weeks: list[dict[str, Any]], model_names: list[str]) -> None:
    week_positions = np.arange(len(evaluated_weeks))
    bar_width = 0.8 / len(model_names)

    for model_index, model_name in enumerate(model_names):
        bar_heights = [week_metrics[model_name]["ap"] for week_metrics in evaluated_weeks]
        drawn_bars = axes.bar(
            week_positions + (model_index - (len(model_names) - 1) / 2) * bar_width,
            bar_heights,
            bar_width,
            label=model_name,
            color=COLOUR[model_name],
        )
        axes.bar_label(drawn_bars, fmt="%.3f", fontsize=7)

    axes.set_xticks(week_positions, [week_metrics["name"] for week_metrics in evaluated_weeks])
    axes.set(ylabel="AP", title="Average precision by test week", ylim=(0, 1))
    axes.legend()
