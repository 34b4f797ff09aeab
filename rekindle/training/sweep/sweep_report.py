"""Presents the result of a sweep as rows, as a table and as a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.training.cost.bill import format_amount
from rekindle.training.sweep.halving import Trial, is_finite_metric, rank_trials
from rekindle.training.sweep.study import SweepStudy
from rekindle.training.sweep.sweep_config import SettingChoice


def build_rows(study: SweepStudy) -> list[dict[str, Any]]:
    """Return one row per started trial. Rows are sorted by rung, highest first, and within a rung
    by the metric, best first."""
    trial_by_number = {trial.number: trial for trial in study.trials()}
    row_order: list[int] = []
    for rung_index in reversed(range(study.sweep.rungs)):
        metric_by_trial = {
            trial.number: trial.value for trial in study.trials() if trial.rung == rung_index
        }
        row_order += rank_trials(metric_by_trial, len(metric_by_trial), study.sweep.better)
    row_order += [trial_number for trial_number in trial_by_number if trial_number not in row_order]
    return [
        _build_row(trial_by_number[trial_number], study.sweep.rungs, study.sweep.metric)
        for trial_number in row_order
    ]


def _build_row(trial: Trial, rung_count: int, metric_name: str) -> dict[str, Any]:
    is_finished = trial.rung == rung_count - 1
    if trial.failure:
        trial_state = "failed"
    elif is_finished:
        trial_state = "trained"
    elif trial.values:
        trial_state = "paused"
    else:
        trial_state = "waiting"

    progress_fields = {
        "rung": trial.rung + 1,
        "steps": trial.steps,
        "sha256": trial.sha256,
        "why": trial.failure,
    }

    return {
        "trial": trial.number,
        "state": trial_state,
        metric_name: trial.value,
        **trial.settings,
        **progress_fields,
    }


def format_table(study: SweepStudy, cost_by_trial: Mapping[int, float] | None = None) -> list[str]:
    """Format the rows as the lines of a table. `cost_by_trial`: cost of each trial by number."""
    setting_paths = [setting_path for setting_path, _ in study.sweep.choices()]
    cost_columns = ["cost"] if cost_by_trial else []

    column_titles = [
        "trial",
        study.sweep.metric,
        *(setting_path.partition(".")[2] for setting_path in setting_paths),
        "steps",
        *cost_columns,
        "state",
    ]

    column_names = ["trial", study.sweep.metric, *setting_paths, "steps", *cost_columns, "state"]
    extended_rows = [
        table_row | {"cost": format_amount((cost_by_trial or {}).get(table_row["trial"], 0.0))}
        for table_row in build_rows(study)
    ]
    table_cells = [
        [_format_cell(table_row[column_name]) for column_name in column_names]
        for table_row in extended_rows
    ]
    column_widths = [
        max(map(len, column_cells))
        for column_cells in zip(column_titles, *table_cells, strict=True)
    ]

    return [
        "  ".join(
            f"{cell:<{width}}" for cell, width in zip(line, column_widths, strict=True)
        ).rstrip()
        for line in [column_titles, *table_cells]
    ]


def describe_untried_trials(study: SweepStudy) -> list[str]:
    """Describe in sentences the trials and rungs that the budget has prevented; [] if the budget
    was sufficient."""
    budget_stop = study.budget_stop
    if not budget_stop:
        return []

    sweep = study.sweep
    started_trials = study.trials()
    if sweep.budget.money:
        money_text = f" ({sweep.budget.money:g} at the prices of this run)"
    else:
        money_text = ""

    trained_count = sum(trial.rung == sweep.rungs - 1 for trial in started_trials)
    sentences = [
        f"The budget of {budget_stop['limit']:.3g} hours{money_text} ended the search after"
        f" {budget_stop['hours']:.3g} hours: {len(started_trials)} of {sweep.trial_count} trials"
        f" were started, {trained_count} trained to the end."
    ]

    for setting_path, setting_choice in sweep.choices():
        tried_values = [
            trial.settings[setting_path]
            for trial in started_trials
            if setting_path in trial.settings
        ]
        missing_values = [
            choice_value
            for choice_value in setting_choice.choices
            if choice_value not in tried_values
        ]
        if missing_values:
            sentences.append(
                f"{setting_path}: the values {', '.join(map(str, missing_values))} were not tried."
            )
        elif not setting_choice.choices and tried_values:
            lowest_tried = min(tried_values)
            highest_tried = max(tried_values)
            sentences.append(
                f"{setting_path}: {lowest_tried:.4g} to {highest_tried:.4g} of"
                f" {setting_choice.low:g} to {setting_choice.high:g} was tried."
            )

    return sentences


def _format_cell(cell_value: object) -> str:
    if isinstance(cell_value, float):
        return f"{cell_value:.4g}"
    if cell_value is None:
        return "-"
    return str(cell_value)


def plot_results(study: SweepStudy, image_path: Path) -> None:
    """Plot the metric of each trial by rung, and by the value of each setting."""
    from matplotlib.figure import Figure

    setting_choices = list(study.sweep.choices())
    figure = Figure(figsize=(4 * (1 + len(setting_choices)), 3.6), layout="tight")
    steps_axis, *setting_axes = figure.subplots(1, 1 + len(setting_choices), squeeze=False)[0]
    winner_number = build_rows(study)[0]["trial"]

    for trial in study.trials():
        metric_points = [
            (study.sweep.compute_step_share(rung_index), metric_value)
            for rung_index, metric_value in sorted(trial.values.items())
            if is_finite_metric(metric_value)
        ]

        is_winner = trial.number == winner_number
        line_style: dict[str, Any] = (
            {"color": "C1", "zorder": 3} if is_winner else {"color": "C0", "alpha": 0.5}
        )
        steps_axis.plot(
            [x for x, _ in metric_points],
            [y for _, y in metric_points],
            marker="o",
            markersize=4,
            **line_style,
        )

    steps_axis.set_xscale("log")
    rung_shares = [
        study.sweep.compute_step_share(rung_index) for rung_index in range(study.sweep.rungs)
    ]
    steps_axis.set_xticks(rung_shares, [f"{rung_share:.0%}" for rung_share in rung_shares])
    steps_axis.minorticks_off()

    steps_axis.set(
        xlabel="share of the steps",
        ylabel=study.sweep.metric,
        title=f"{len(study.trials())} trials",
    )

    for setting_axis, (setting_path, setting_choice) in zip(
        setting_axes, setting_choices, strict=True
    ):
        _draw_setting(setting_axis, setting_path, setting_choice, study.trials(), winner_number)
        setting_axis.set(xlabel=setting_path)

    figure.savefig(image_path, dpi=120)


def _draw_setting(
    setting_axis: Any,
    setting_path: str,
    setting_choice: SettingChoice,
    trials: Sequence[Trial],
    winner_number: int,
) -> None:
    finished_trials = [trial for trial in trials if is_finite_metric(trial.value)]
    setting_values = [trial.settings[setting_path] for trial in finished_trials]
    if setting_choice.choices:
        setting_values = [
            setting_choice.choices.index(setting_value) for setting_value in setting_values
        ]
        setting_axis.set_xticks(
            range(len(setting_choice.choices)), map(str, setting_choice.choices)
        )

    setting_axis.scatter(
        setting_values,
        [trial.value for trial in finished_trials],
        c=[trial.rung for trial in finished_trials],
        cmap="viridis_r",
    )
    for trial, setting_value in zip(finished_trials, setting_values, strict=True):
        if trial.number == winner_number:
            setting_axis.scatter(
                [setting_value],
                [trial.value],
                facecolors="none",
                edgecolors="C1",
                s=120,
                linewidths=2,
            )

    if setting_choice.log:
        setting_axis.set_xscale("log")
