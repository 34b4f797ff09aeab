"""Chooses the settings of a new trial with a sampler of Optuna.

Each call creates a new Optuna study from the previous trials, so that the sampler keeps no state
between calls.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from argolocal.common.json_text import to_json
from rekindle.training.sweep.halving import Trial
from rekindle.training.sweep.sweep_config import Choice, Settings, Sweep

RANDOM_TRIALS = 10  # number of random start-up trials of tpe (Optuna's default)


def sample_settings(
    sweep: Sweep, trials: Sequence[Trial], default: Settings, integer_settings: Mapping[str, bool]
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of the next trial, and attributes that later calls need (`Trial.attrs`).

    The first trial gets the settings `default` unless they are empty. `trials`: all earlier trials;
    a trial without a value counts as running. `integer_settings`: True for the path of each setting
    with integer values.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, BaseDistribution] = {
        path: make_distribution(choice, integer_settings.get(path, False))
        for path, choice in sweep.choices()
    }
    study = optuna.create_study(
        direction="minimize", sampler=_make_sampler(sweep, len(trials), space)
    )
    sign = 1 if sweep.better == "lower" else -1

    # the sampler gets the values of the first rung, which all trials reach
    for trial in trials:
        value = trial.values.get(0)
        if 0 not in trial.values:
            state = TrialState.RUNNING
        elif value is None:
            state = TrialState.FAIL
        else:
            state = TrialState.COMPLETE

        study.add_trial(
            create_trial(
                state=state,
                value=None if value is None else sign * value,
                params={
                    path: _encode(space[path], value) for path, value in trial.settings.items()
                },
                distributions=space,
                system_attrs=trial.attrs,
            )
        )

    if default and not trials and sweep.sampler != "grid":
        study.enqueue_trial({path: _encode(space[path], value) for path, value in default.items()})

    new_trial = study.ask(space)
    if sweep.sampler == "grid":
        attrs = study.trials[new_trial.number].system_attrs
    else:
        attrs = {}

    return {path: _decode(space[path], value) for path, value in new_trial.params.items()}, attrs


def make_distribution(choice: Choice, is_integer: bool) -> BaseDistribution:
    """Return the Optuna distribution of a setting. The values of a list become JSON texts, since
    Optuna does not accept all types."""
    if choice.choices:
        return CategoricalDistribution([to_json(value) for value in choice.choices])
    assert choice.low is not None
    assert choice.high is not None
    if is_integer:
        return IntDistribution(int(choice.low), int(choice.high), choice.log, int(choice.step) or 1)
    return FloatDistribution(choice.low, choice.high, choice.log, choice.step or None)


def _make_sampler(
    sweep: Sweep, trial_count: int, space: Mapping[str, BaseDistribution]
) -> BaseSampler:
    # each trial gets a different seed
    seed = int(numpy.random.SeedSequence([sweep.seed, trial_count]).generate_state(1)[0])
    if sweep.sampler == "grid":
        return GridSampler(
            {path: _list_grid_points(values) for path, values in space.items()}, seed=sweep.seed
        )

    if sweep.sampler == "random":
        return RandomSampler(seed)

    # constant_liar: the sampler assumes bad values for running trials, so that the next trials
    # differ from them
    return TPESampler(
        seed=seed,
        n_startup_trials=min(RANDOM_TRIALS, max(1, sweep.trial_count // 3)),
        constant_liar=True,
    )


def _list_grid_points(distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)

    assert isinstance(distribution, FloatDistribution | IntDistribution)
    assert distribution.step
    low = distribution.low
    count = int((distribution.high - low) / distribution.step + 1e-9) + 1
    return [low + number * distribution.step for number in range(count)]


def _encode(distribution: BaseDistribution, value: object) -> object:
    if isinstance(distribution, CategoricalDistribution):
        return to_json(value)
    return value


def _decode(distribution: BaseDistribution, value: object) -> object:
    if isinstance(distribution, CategoricalDistribution):
        return json.loads(str(value))
    return value
