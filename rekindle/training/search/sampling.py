"""Chooses the settings of new trials by a sampler of Optuna.

Each call creates the Optuna study again from the previous trials, so no other state can be lost.
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

RANDOM_TRIALS = 10  # number of random start-up trials of tpe (Optuna's default)


def ask(
    sweep: Sweep, previous: Sequence[Trial], count: int, default: Settings, whole: Mapping[str, bool]
) -> list[Trial]:
    """Return `count` new trials. The first trial of the sweep gets the `default` settings, if any.

    `whole`: by path, True if a range consists of integers.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {path: distribution(choice, whole.get(path, False)) for path, choice in sweep.choices()}
    study = optuna.create_study(direction="minimize", sampler=_sampler(sweep, len(previous), space))
    sign = 1 if sweep.better == "lower" else -1
    for trial in previous:  # the sampler compares values of the first rung, since all trials have reached that rung
        value = trial.values.get(0)
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        study.add_trial(
            create_trial(
                state=state,
                value=None if value is None else sign * value,
                params={path: _encode(space[path], value) for path, value in trial.settings.items()},
                distributions=space,
                system_attrs=trial.attrs,
            )
        )
    if default and not previous and sweep.sampler != "grid":
        study.enqueue_trial({path: _encode(space[path], value) for path, value in default.items()})
    optuna_trials = [study.ask(space) for _ in range(count)]
    attrs = [study.trials[trial.number].system_attrs if sweep.sampler == "grid" else {} for trial in optuna_trials]
    settings = [{path: _decode(space[path], value) for path, value in trial.params.items()} for trial in optuna_trials]
    new_trials = zip(optuna_trials, settings, attrs, strict=True)
    return [Trial(trial.number, values, attributes) for trial, values, attributes in new_trials]


def distribution(choice: Choice, whole: bool) -> Any:
    """Return the Optuna distribution of a setting. Values of a list are JSON, since Optuna rejects list values."""
    if choice.choices:
        return CategoricalDistribution([json.dumps(value) for value in choice.choices])
    assert choice.low is not None and choice.high is not None
    if whole:
        return IntDistribution(int(choice.low), int(choice.high), choice.log, int(choice.step) or 1)
    return FloatDistribution(choice.low, choice.high, choice.log, choice.step or None)


def _sampler(sweep: Sweep, trials: int, space: Mapping[str, Any]) -> Any:
    seed = sweep.seed + trials  # a different seed for each round
    if sweep.sampler == "grid":
        return GridSampler({path: _points(values) for path, values in space.items()}, seed=sweep.seed)
    if sweep.sampler == "random":
        return RandomSampler(seed)
    # unfinished trials of a batch count as bad; otherwise all trials of the batch would be similar
    return TPESampler(seed=seed, n_startup_trials=min(RANDOM_TRIALS, max(1, sweep.count // 3)), constant_liar=True)


def _points(values: Any) -> list[Any]:
    if isinstance(values, CategoricalDistribution):
        return list(values.choices)
    count = int((values.high - values.low) / values.step + 1e-9) + 1
    return [values.low + number * values.step for number in range(count)]


def _encode(setting: Any, value: Any) -> Any:
    return json.dumps(value) if isinstance(setting, CategoricalDistribution) else value


def _decode(setting: Any, value: Any) -> Any:
    return json.loads(value) if isinstance(setting, CategoricalDistribution) else value
