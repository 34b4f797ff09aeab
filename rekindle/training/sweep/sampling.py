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
from rekindle.training.sweep.sweep_config import SettingChoice, Settings, Sweep

# number of random start-up trials of tpe (Optuna's default)
RANDOM_TRIAL_COUNT = 10


def sample_settings(
    sweep: Sweep,
    trials: Sequence[Trial],
    default_settings: Settings,
    integer_settings: Mapping[str, bool],
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of the next trial, and attributes of the trial that later calls need
    (`Trial.attrs`).

    The first trial gets the settings `default_settings` unless they are empty. `trials`: all
    earlier trials; a trial without a value counts as running. `integer_settings` is True for the
    path of each setting with integer values.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search_space: dict[str, BaseDistribution] = {
        setting_path: make_distribution(setting_choice, integer_settings.get(setting_path, False))
        for setting_path, setting_choice in sweep.choices()
    }
    optuna_study = optuna.create_study(
        direction="minimize", sampler=_make_sampler(sweep, len(trials), search_space)
    )
    direction_sign = 1 if sweep.better == "lower" else -1

    # give the sampler the metrics at the first rung, which all trials reach
    for trial in trials:
        metric_value = trial.values.get(0)
        if 0 not in trial.values:
            trial_state = TrialState.RUNNING
        elif metric_value is None:
            trial_state = TrialState.FAIL
        else:
            trial_state = TrialState.COMPLETE

        optuna_study.add_trial(
            create_trial(
                state=trial_state,
                value=None if metric_value is None else direction_sign * metric_value,
                params={
                    setting_path: _encode_setting(search_space[setting_path], setting_value)
                    for setting_path, setting_value in trial.settings.items()
                },
                distributions=search_space,
                system_attrs=trial.attrs,
            )
        )

    if default_settings and not trials and sweep.sampler != "grid":
        optuna_study.enqueue_trial(
            {
                setting_path: _encode_setting(search_space[setting_path], setting_value)
                for setting_path, setting_value in default_settings.items()
            }
        )

    new_trial = optuna_study.ask(search_space)
    if sweep.sampler == "grid":
        trial_attributes = optuna_study.trials[new_trial.number].system_attrs
    else:
        trial_attributes = {}

    trial_settings = {
        setting_path: _decode_setting(search_space[setting_path], encoded_value)
        for setting_path, encoded_value in new_trial.params.items()
    }
    return trial_settings, trial_attributes


def make_distribution(setting_choice: SettingChoice, is_integer: bool) -> BaseDistribution:
    """Return the Optuna distribution of a setting. The values of a list become JSON texts, since
    Optuna does not accept all types."""
    if setting_choice.choices:
        return CategoricalDistribution(
            [to_json(choice_value) for choice_value in setting_choice.choices]
        )
    assert setting_choice.low is not None
    assert setting_choice.high is not None
    if is_integer:
        return IntDistribution(
            int(setting_choice.low),
            int(setting_choice.high),
            setting_choice.log,
            int(setting_choice.step) or 1,
        )
    return FloatDistribution(
        setting_choice.low, setting_choice.high, setting_choice.log, setting_choice.step or None
    )


def _make_sampler(
    sweep: Sweep, trial_count: int, search_space: Mapping[str, BaseDistribution]
) -> BaseSampler:
    # each trial gets a different seed
    sampler_seed = int(numpy.random.SeedSequence([sweep.seed, trial_count]).generate_state(1)[0])
    if sweep.sampler == "grid":
        return GridSampler(
            {
                setting_path: _list_grid_points(distribution)
                for setting_path, distribution in search_space.items()
            },
            seed=sweep.seed,
        )

    if sweep.sampler == "random":
        return RandomSampler(sampler_seed)

    # with constant_liar, the sampler assumes bad values for running trials, so that the next trials
    # differ from the running trials
    return TPESampler(
        seed=sampler_seed,
        n_startup_trials=min(RANDOM_TRIAL_COUNT, max(1, sweep.trial_count // 3)),
        constant_liar=True,
    )


def _list_grid_points(distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)

    assert isinstance(distribution, FloatDistribution | IntDistribution)
    assert distribution.step
    lowest_value = distribution.low
    point_count = int((distribution.high - lowest_value) / distribution.step + 1e-9) + 1
    return [lowest_value + point_index * distribution.step for point_index in range(point_count)]


def _encode_setting(distribution: BaseDistribution, setting_value: object) -> object:
    if isinstance(distribution, CategoricalDistribution):
        return to_json(setting_value)
    return setting_value


def _decode_setting(distribution: BaseDistribution, encoded_value: object) -> object:
    if isinstance(distribution, CategoricalDistribution):
        return json.loads(str(encoded_value))
    return encoded_value
