from typing import Any

import pytest
from pydantic import ValidationError

from rekindle.training.spec import TrainConfig


def make_config(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate(settings)


def test_more_workers_than_virtual_workers_is_an_error_with_a_remedy() -> None:
    with pytest.raises(
        ValidationError,
        match=r"train.workers is 9: it must be at most train.virtual_workers \(8\). Lower",
    ):
        make_config(workers=9)


def test_workers_outside_their_bounds_are_rejected() -> None:
    with pytest.raises(
        ValidationError, match=r"train.workers is 2: it must lie between train.min_workers \(3\)"
    ):
        make_config(workers=2, min_workers=3)


def test_the_number_of_workers_is_not_part_of_the_identity() -> None:
    assert (
        make_config(workers=1, keep_checkpoints=9).identity()
        == make_config(workers=4, max_workers=6).identity()
    )
    assert make_config(threads=2).identity() != make_config(threads=1).identity()


@pytest.mark.parametrize(
    ("schedule", "at_19", "last_rate"),
    [("linear", 0.35, 0.5 / 30), ("cosine", 0.39695, 0.00137), ("constant", 0.5, 0.5)],
)
def test_the_learning_rate_rises_once_and_never_exceeds_its_peak(
    schedule: str, at_19: float, last_rate: float
) -> None:
    settings = make_config(schedule=schedule, warmup=0.25, learning_rate=0.5)
    rates = [settings.compute_learning_rate(step, 40, 0.5) for step in range(40)]
    assert rates[:10] == sorted(rates[:10])
    assert max(rates) == 0.5 == rates[9]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] > 0
    assert (rates[19], rates[-1]) == pytest.approx((at_19, last_rate), rel=1e-3)


@pytest.mark.parametrize("name", ["patience", "keep_best"])
def test_settings_that_need_a_validation_loss_are_rejected_without_validation(name: str) -> None:
    with pytest.raises(
        ValidationError,
        match=rf"train.{name} is .*: it needs a validation loss. Set train.validation",
    ):
        make_config(**{name: 1})

    assert make_config(**{name: 1}, validation="workload").count_validation_interval(800) == 3
    for share in (1, -0.1, "half", float("nan"), None):
        with pytest.raises(
            ValidationError,
            match='it must be a share of the training samples, from 0 to below 1, or "w',
        ):
            make_config(validation=share)

    assert make_config(validation="0.25").validation == 0.25


def test_epochs_are_converted_to_steps() -> None:
    assert (
        make_config(epochs=2, batch_size=10, virtual_workers=5, workers=1).total_steps(1000) == 40
    )
    assert make_config(steps=7, epochs=2).total_steps(1000) == 7
    assert make_config(epochs=0.001).total_steps(10) == 1
