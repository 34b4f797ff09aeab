"""A mistake in a search space is told before anything runs, in one sentence."""

from pathlib import Path

import pytest

from rekindle.blocks.manifest.config import load_config
from rekindle.errors import ConfigError
from rekindle.training.search.config import default, whole_numbers

CONFIG = str(Path(__file__).parents[4] / "configs/sweep.yaml")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sweep.space.train={rate: [0.1]}", "sweep.space.train.rate: there is no setting train.rate that changes"),
        ("sweep.space.train={workers: [1, 2]}", "there is no setting train.workers that changes a result"),
        ("sweep.space.model={chanels: [8]}", 'Did you mean "channels"?'),
        ("sweep.space.model={channels: [8, 1000]}", "sweep.space.model.channels: 1000: "),
        ("sweep.space.model={channels: {low: 8.5, high: 16}}", "sweep.space.model.channels: 8.5: "),
        ("sweep.space.train={learning_rate: {low: 0.1, high: 0.01}}", "its low is 0.1 and its high 0.01: that range"),
        ("sweep.space.train={learning_rate: []}", "it must be a list of values, such as [16, 32], or have low and"),
        ("sweep.space.train={learning_rate: {low: 0.1}}", "it must be a list of values"),
        ("sweep.space.train={learning_rate: {low: 0, high: 1, log: true}}", "log needs a low above 0"),
        ("sweep.space.train={learning_rate: {lo: 1}}", "learning_rate.lo is not a known key"),
        ("sweep.space.data={test_share: [0.1]}", "sweep.space.data"),
        ("sweep.space={}", "sweep.space is empty"),
        ("sweep.sampler=grid", "sweep.space.model.dropout is a range of any numbers: a grid needs its step"),
        ("sweep.metric=ap", "sweep.metric is ap: steps.digits defines no measures"),
        (
            "sweep.rungs=4",
            "the first of them is after 0.333 epochs, before the first validation. Set train.validation_",
        ),
        ("train.validation=0", "Set train.validation, such as 0.1"),
        ("sweep.space.train={validation: [0.1, 0.2]}", "compared by the same samples"),
    ],
)
def test_a_wrong_search_space_is_refused_by_its_name(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(CONFIG, [setting])
    assert message in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_the_first_trial_is_that_of_the_config_itself() -> None:
    config = load_config(CONFIG).config
    sweep = getattr(config, "sweep")  # noqa: B009
    own = {"model.channels": 16, "model.dropout": 0.2, "train.learning_rate": 0.003}
    assert default(sweep, config.train, config.model) == own
    assert whole_numbers(sweep, config.train, config.model) == {path: path == "model.channels" for path in own}
    other = load_config(CONFIG, ["train.learning_rate=0.5"]).config
    assert default(sweep, other.train, other.model) == {}  # which is not among the choices
