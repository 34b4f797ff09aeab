"""The settings of new trials, chosen by a sampler of Optuna. Imported only where a search runs.

The study of Optuna is made anew of the trials before: it keeps nothing, so there is nothing to lose.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import GridSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from rekindle.training.search.config import Choice, Settings, Sweep
from rekindle.training.search.rounds import Trial

STARTUP = 10  # results before which tpe chooses at random, as Optuna's default


def ask(sweep: Sweep, before: Sequence[Trial], count: int, default: Settings, whole: Mapping[str, bool]) -> list[Trial]:
    """`count` new trials after those `before`; the very first is that of the `default` settings, if there are any.

    `whole`: by path, whether a range is of whole numbers.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {path: distribution(choice, whole.get(path, False)) for path, choice in sweep.choices()}
    study = optuna.create_study(direction="minimize", sampler=_sampler(sweep, len(before), space))
    sign = 1 if sweep.better == "lower" else -1
    for trial in before:  # their first values: those are of as many steps
        value = trial.values.get(0)
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        study.add_trial(
            create_trial(
                state=state,
                value=None if value is None else sign * value,
                params={path: _encoded(space[path], value) for path, value in trial.settings.items()},
                distributions=space,
                system_attrs=trial.attrs,
            )
        )
    if default and not before and sweep.sampler != "grid":
        study.enqueue_trial({path: _encoded(space[path], value) for path, value in default.items()})
    asked = [study.ask(space) for _ in range(count)]
    attrs = [study.trials[trial.number].system_attrs if sweep.sampler == "grid" else {} for trial in asked]
    settings = [{path: _decoded(space[path], value) for path, value in trial.params.items()} for trial in asked]
    chosen = zip(asked, settings, attrs, strict=True)
    return [Trial(trial.number, values, attributes) for trial, values, attributes in chosen]


def distribution(choice: Choice, whole: bool) -> Any:
    """What Optuna calls the values of a setting; those of a list are JSON, for it takes no lists."""
    if choice.choices:
        return CategoricalDistribution([json.dumps(value) for value in choice.choices])
    assert choice.low is not None and choice.high is not None
    if whole:
        return IntDistribution(int(choice.low), int(choice.high), choice.log, int(choice.step) or 1)
    return FloatDistribution(choice.low, choice.high, choice.log, choice.step or None)


def _sampler(sweep: Sweep, trials: int, space: Mapping[str, Any]) -> Any:
    seed = sweep.seed + trials  # of other choices in each round
    if sweep.sampler == "grid":
        return GridSampler({path: _points(values) for path, values in space.items()}, seed=sweep.seed)
    if sweep.sampler == "random":
        return RandomSampler(seed)
    # a batch is chosen at once: those without a result yet count as bad, or all would be alike
    return TPESampler(seed=seed, n_startup_trials=min(STARTUP, max(1, sweep.count // 3)), constant_liar=True)


def _points(values: Any) -> list[Any]:
    if isinstance(values, CategoricalDistribution):
        return list(values.choices)
    count = int((values.high - values.low) / values.step + 1e-9) + 1
    return [values.low + number * values.step for number in range(count)]


def _encoded(values: Any, value: Any) -> Any:
    return json.dumps(value) if isinstance(values, CategoricalDistribution) else value


def _decoded(values: Any, value: Any) -> Any:
    return json.loads(value) if isinstance(values, CategoricalDistribution) else value
