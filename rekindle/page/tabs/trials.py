"""The tab `trials`: the trials of a sweep with their settings, and the rungs (stages of halving)
that they reached."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from argolocal.page.sources import Run
from rekindle.errors import RekindleError
from rekindle.page.tabs.charts import LineChart, Series, format_number
from rekindle.page.tabs.records import Records

if TYPE_CHECKING:
    from rekindle.training.sweep.study import SweepStudy

FOLDER = "search"
BEST_COLOUR = 0
OTHER_COLOUR = 5


@dataclass(frozen=True)
class Rung:
    """A stage of a sweep, in which trials are compared after `percent` of their steps. `trials`:
    number of trials that reached the stage; `best`: best metric of these trials."""

    number: int
    percent: float
    trials: int
    failed: int
    best: float | None

    @property
    def best_text(self) -> str:
        return "" if self.best is None else format_number(self.best)


@dataclass(frozen=True)
class Trial:
    """A trial of a sweep. `values`: the metric of the trial at each rung, in order."""

    number: int
    is_best: bool
    state: str
    rung: int
    value: float | None
    values: list[float | None]
    steps: int
    settings: Mapping[str, Any]
    failure: str
    cost: float | None = None

    @property
    def cost_text(self) -> str:
        return "" if self.cost is None else f"{self.cost:.2g}"

    @property
    def value_text(self) -> str:
        return "" if self.value is None else format_number(self.value)

    @property
    def setting_texts(self) -> dict[str, str]:
        return {
            name: format_number(value) if isinstance(value, float) else str(value)
            for name, value in self.settings.items()
        }


@dataclass(frozen=True)
class Trials:
    """The trials of a sweep, best first. `untried`: sentences about trials that were not run
    because of the budget. `currency`: currency of the costs; "" if the prices are unknown."""

    words: str
    metric: str
    better: str
    planned: int
    rungs: list[Rung]
    trials: list[Trial]
    settings: list[str]
    untried: list[str]
    chart: LineChart | None
    problem: str = ""
    currency: str = ""


class TrialsTab:
    """The tab `trials`."""

    name = "trials"
    title = "Trials"
    content = Trials

    def __init__(self, records: Records) -> None:
        self.records = records

    def is_shown(self, run: Run) -> bool:
        return bool(self.records.facts(run).config.get("sweep"))

    def version(self, run: Run) -> str:
        """Return a text that changes when the trials of an active sweep change; "" for other
        runs."""
        if run.is_finished or not self.is_shown(run):
            return ""
        try:
            return self.records.folder_version(f"{run.name}/{FOLDER}/")
        except RekindleError:
            return ""

    def build(self, run: Run, query: Mapping[str, str]) -> Trials:
        from rekindle.documents import validate_value
        from rekindle.training.sweep.study import SweepStudy
        from rekindle.training.sweep.sweep_config import Sweep

        section = self.records.facts(run).config.get("sweep")
        if not section:
            return Trials("This run is not a sweep.", "", "lower", 0, [], [], [], [], None)

        try:
            sweep = validate_value(Sweep, section)
            study = SweepStudy(self.records.store, f"{run.name}/{FOLDER}", sweep)
            study.read()
        except (RekindleError, ValueError) as error:
            problem = f"The trials cannot be read: {error}"
            return Trials("", "", "lower", 0, [], [], [], [], None, problem)

        costs, currency = read_trial_costs(run, study)
        return describe_study(study, run.is_finished, costs, currency)


def read_trial_costs(run: Run, study: "SweepStudy") -> tuple[dict[int, float], str]:
    """Return the cost of each trial by its number, and the currency; ({}, "") if the prices are
    unknown."""
    from rekindle.training.cost import tariff as run_tariff
    from rekindle.training.sweep.costs import compute_trial_bills

    try:
        manifest = run_tariff.read_recorded_manifest(run.manifest)
        tariff = run_tariff.build_trial_tariff(manifest, run_tariff.read_prices(manifest))
        bills = compute_trial_bills(study, tariff) if tariff else {}
    except RekindleError:
        return {}, ""
    currency = tariff.prices.currency if tariff else ""
    return {number: bill.total for number, bill in bills.items()}, currency


def describe_study(
    study: "SweepStudy", is_over: bool, costs: Mapping[int, float], currency: str
) -> Trials:
    """Return the trials of a study, which is the state of a sweep. `is_over` is True if its run has
    ended. `costs`: cost of each trial by its number."""
    from rekindle.training.sweep.sweep_report import build_rows, describe_untried_trials

    sweep = study.sweep
    by_number = {trial.number: trial for trial in study.trials()}
    rows = build_rows(study)
    # the rows are sorted by rank, best first
    best = next((row["trial"] for row in rows if row[sweep.metric] is not None), None)

    trials: list[Trial] = []
    for row in rows:
        trial = by_number[row["trial"]]
        trials.append(
            Trial(
                trial.number,
                trial.number == best,
                _describe_state(row["state"], is_over),
                trial.rung + 1,
                trial.value,
                [trial.values.get(rung) for rung in range(sweep.rungs)],
                trial.steps,
                trial.settings,
                trial.failure,
                costs.get(trial.number),
            )
        )

    rungs = [_make_rung(study, rung) for rung in range(sweep.rungs)]
    settings = list(dict.fromkeys(name for trial in trials for name in trial.settings))
    return Trials(
        describe_progress(trials, sweep.trial_count, sweep.metric, is_over),
        sweep.metric,
        sweep.better,
        sweep.trial_count,
        rungs,
        trials,
        settings,
        describe_untried_trials(study),
        make_chart(study, trials),
        currency=currency,
    )


def _describe_state(trial_state: str, is_over: bool) -> str:
    """Return the state of a trial in a few words."""
    if trial_state == "trained":
        return "trained to the end"
    if trial_state == "paused":
        return "stopped early" if is_over else "paused"
    if trial_state == "waiting":
        return "not finished" if is_over else "training"
    return trial_state


def _make_rung(study: "SweepStudy", rung: int) -> Rung:
    from rekindle.training.sweep.halving import is_finite_metric, rank_trials

    values = {trial.number: trial.values[rung] for trial in study.trials() if rung in trial.values}
    ranked = rank_trials(values, 1, study.sweep.better)
    return Rung(
        rung + 1,
        round(100 * study.sweep.compute_step_share(rung), 2),
        len(values),
        sum(not is_finite_metric(value) for value in values.values()),
        values[ranked[0]] if ranked else None,
    )


def describe_progress(trials: list[Trial], planned: int, metric: str, is_over: bool) -> str:
    """Return sentences about the best trial, and the numbers of trials by state."""
    if not trials:
        return f"No trial of {planned} has started." if is_over else "No trial has started yet."

    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.state] = counts.get(trial.state, 0) + 1
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    text = f"{len(trials)} of {planned} trials were started: {states}."

    best = next((trial for trial in trials if trial.is_best), None)
    if best:
        settings = ", ".join(f"{name} {value}" for name, value in best.setting_texts.items())
        leads = "is the best" if is_over else "leads"
        text = f"Trial {best.number} {leads}: {metric} {best.value_text} with {settings}. {text}"
    return text


def make_chart(study: "SweepStudy", trials: list[Trial]) -> LineChart | None:
    """Plot the metric of each trial against the percentage of the steps."""
    series = [
        Series(
            f"trial {trial.number}",
            [
                (round(100 * study.sweep.compute_step_share(rung), 2), value)
                for rung, value in enumerate(trial.values)
                if value is not None
            ],
            BEST_COLOUR if trial.is_best else OTHER_COLOUR,
        )
        # draw the best trial last, on top
        for trial in sorted(trials, key=lambda trial: trial.is_best)
    ]
    series = [line for line in series if line.points]
    if not series:
        return None
    title = f"{study.sweep.metric} by share of the steps; the best trial is highlighted"
    return LineChart(title, "percent", series, has_marks=True)
