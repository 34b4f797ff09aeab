"""Presents the result of a sweep as rows, as a table and as a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.training.cost.bill import format_amount
from rekindle.training.sweep.halving import Trial, is_finite, rank_trials
from rekindle.training.sweep.study import Study
from rekindle.training.sweep.sweep_config import Choice


def build_rows(study: Study) -> list[dict[str, Any]]:
    """Return one row per started trial: the highest rung first, and within a rung the best
    metric."""
    trials = {trial.number: trial for trial in study.trials()}
    order: list[int] = []
    for rung in reversed(range(study.sweep.rungs)):
        values = {trial.number: trial.value for trial in study.trials() if trial.rung == rung}
        order += rank_trials(values, len(values), study.sweep.better)
    order += [number for number in trials if number not in order]
    return [_build_row(trials[number], study.sweep.rungs, study.sweep.metric) for number in order]


def _build_row(trial: Trial, rungs: int, metric: str) -> dict[str, Any]:
    is_finished = trial.rung == rungs - 1
    if trial.failure:
        state = "failed"
    elif is_finished:
        state = "trained"
    elif trial.values:
        state = "paused"
    else:
        state = "waiting"

    progress = {
        "rung": trial.rung + 1,
        "steps": trial.steps,
        "sha256": trial.sha256,
        "why": trial.failure,
    }

    return {
        "trial": trial.number,
        "state": state,
        metric: trial.value,
        **trial.settings,
        **progress,
    }


def format_table(study: Study, costs: Mapping[int, float] | None = None) -> list[str]:
    """Format the rows as the lines of a table. `costs`: cost of each trial by number."""
    paths = [path for path, _ in study.sweep.choices()]
    more = ["cost"] if costs else []

    titles = [
        "trial",
        study.sweep.metric,
        *(path.partition(".")[2] for path in paths),
        "steps",
        *more,
        "state",
    ]

    names = ["trial", study.sweep.metric, *paths, "steps", *more, "state"]
    extended_rows = [
        row | {"cost": format_amount((costs or {}).get(row["trial"], 0.0))}
        for row in build_rows(study)
    ]
    lines = [[_format_cell(row[name]) for name in names] for row in extended_rows]
    widths = [max(map(len, column)) for column in zip(titles, *lines, strict=True)]

    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [titles, *lines]
    ]


def describe_untried(study: Study) -> list[str]:
    """Describe in sentences the trials and rungs that the budget has prevented; [] if it was
    sufficient."""
    stop = study.budget_stop
    if not stop:
        return []

    sweep = study.sweep
    trials = study.trials()
    if sweep.budget.money:
        money = f" ({sweep.budget.money:g} at the prices of this run)"
    else:
        money = ""

    trained = sum(trial.rung == sweep.rungs - 1 for trial in trials)
    lines = [
        f"The budget of {stop['limit']:.3g} hours{money} ended the search after {stop['hours']:.3g}"
        f" hours: {len(trials)} of {sweep.trial_count} trials were started, {trained} trained to"
        " the end."
    ]

    for path, choice in sweep.choices():
        tried = [trial.settings[path] for trial in trials if path in trial.settings]
        missing = [value for value in choice.choices if value not in tried]
        if missing:
            lines.append(f"{path}: the values {', '.join(map(str, missing))} were not tried.")
        elif not choice.choices and tried:
            low = min(tried)
            high = max(tried)
            lines.append(
                f"{path}: {low:.4g} to {high:.4g} of {choice.low:g} to {choice.high:g} was tried."
            )

    return lines


def _format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return "-"
    return str(value)


def plot_results(study: Study, file: Path) -> None:
    """Plot the metric of each trial by rung, and by the value of each setting."""
    from matplotlib.figure import Figure

    choices = list(study.sweep.choices())
    figure = Figure(figsize=(4 * (1 + len(choices)), 3.6), layout="tight")
    steps_axis, *setting_axes = figure.subplots(1, 1 + len(choices), squeeze=False)[0]
    winner = build_rows(study)[0]["trial"]

    for trial in study.trials():
        points = [
            (study.sweep.step_share(rung), value)
            for rung, value in sorted(trial.values.items())
            if is_finite(value)
        ]

        is_winner = trial.number == winner
        style: dict[str, Any] = (
            {"color": "C1", "zorder": 3} if is_winner else {"color": "C0", "alpha": 0.5}
        )
        steps_axis.plot(
            [x for x, _ in points], [y for _, y in points], marker="o", markersize=4, **style
        )

    steps_axis.set_xscale("log")
    shares = [study.sweep.step_share(rung) for rung in range(study.sweep.rungs)]
    steps_axis.set_xticks(shares, [f"{share:.0%}" for share in shares])
    steps_axis.minorticks_off()

    steps_axis.set(
        xlabel="share of the steps",
        ylabel=study.sweep.metric,
        title=f"{len(study.trials())} trials",
    )

    for axis, (path, choice) in zip(setting_axes, choices, strict=True):
        _draw_setting(axis, path, choice, study.trials(), winner)
        axis.set(xlabel=path)

    figure.savefig(file, dpi=120)


def _draw_setting(
    axis: Any, path: str, choice: Choice, trials: Sequence[Trial], winner: int
) -> None:
    finished_trials = [trial for trial in trials if is_finite(trial.value)]
    values = [trial.settings[path] for trial in finished_trials]
    if choice.choices:
        values = [choice.choices.index(value) for value in values]
        axis.set_xticks(range(len(choice.choices)), map(str, choice.choices))

    axis.scatter(
        values,
        [trial.value for trial in finished_trials],
        c=[trial.rung for trial in finished_trials],
        cmap="viridis_r",
    )
    for trial, value in zip(finished_trials, values, strict=True):
        if trial.number == winner:
            axis.scatter(
                [value], [trial.value], facecolors="none", edgecolors="C1", s=120, linewidths=2
            )

    if choice.log:
        axis.set_xscale("log")
