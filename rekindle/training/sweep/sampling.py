"""Chooses the settings of a new trial by a sampler of Optuna.

Each call creates the Optuna study again from the previous trials, so no other state can be lost.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import GridSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from argolocal.common.json_text import to_json
from rekindle.training.sweep.halving import Trial
from rekindle.training.sweep.sweep_config import Choice, Settings, Sweep

COMPLETE = TrialState.COMPLETE
RANDOM_TRIALS = 10  # number of random start-up trials of tpe (Optuna's default)


def ask(
    sweep: Sweep, trials: Sequence[Trial], default: Settings, whole: Mapping[str, bool]
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of the next trial, and attributes for later calls. The first trial gets
    `default`, if any.

    `trials`: all earlier trials; those without a value count as running. `whole`: by path, True if
    a range consists of integers.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {path: distribution(choice, whole.get(path, False)) for path, choice in sweep.choices()}
    study = optuna.create_study(direction="minimize", sampler=_sampler(sweep, len(trials), space))
    sign = 1 if sweep.better == "lower" else -1

    # the sampler compares values of the first rung, since all trials reach that rung
    for trial in trials:
        value = trial.values.get(0)
        if 0 not in trial.values:
            state = TrialState.RUNNING
        else:
            if value is None:
                state = TrialState.FAIL
            else:
                state = COMPLETE

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

    new = study.ask(space)
    if sweep.sampler == "grid":
        attrs = study.trials[new.number].system_attrs
    else:
        attrs = {}

    return {path: _decode(space[path], value) for path, value in new.params.items()}, attrs


def distribution(choice: Choice, is_integer: bool) -> Any:
    """Return the Optuna distribution of a setting. Values of a list are JSON, since Optuna rejects
    list values."""
    if choice.choices:
        return CategoricalDistribution([to_json(value) for value in choice.choices])
    assert choice.low is not None
    assert choice.high is not None
    if is_integer:
        return IntDistribution(int(choice.low), int(choice.high), choice.log, int(choice.step) or 1)
    return FloatDistribution(choice.low, choice.high, choice.log, choice.step or None)


def _sampler(sweep: Sweep, trial_count: int, space: Mapping[str, Any]) -> Any:
    # another seed for each trial
    seed = int(numpy.random.SeedSequence([sweep.seed, trial_count]).generate_state(1)[0])
    if sweep.sampler == "grid":
        return GridSampler(
            {path: _points(values) for path, values in space.items()}, seed=sweep.seed
        )

    if sweep.sampler == "random":
        return RandomSampler(seed)

    # running trials count as bad; otherwise the next trials would be similar to them
    return TPESampler(
        seed=seed,
        n_startup_trials=min(RANDOM_TRIALS, max(1, sweep.trial_count // 3)),
        constant_liar=True,
    )


def _points(values: Any) -> list[Any]:
    if isinstance(values, CategoricalDistribution):
        return list(values.choices)
    count = int((values.high - values.low) / values.step + 1e-9) + 1
    return [values.low + number * values.step for number in range(count)]


def _encode(setting: Any, value: Any) -> Any:
    if isinstance(setting, CategoricalDistribution):
        return to_json(value)
    return value


def _decode(setting: Any, value: Any) -> Any:
    if isinstance(setting, CategoricalDistribution):
        return json.loads(value)
    return value
