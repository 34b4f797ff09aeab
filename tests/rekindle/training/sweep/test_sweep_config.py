"""A mistake in a search space is reported before anything runs, in one sentence."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from rekindle.training.sweep.sweep_config import (
    SettingChoice,
    Sweep,
    find_integer_settings,
    select_default_settings,
)

CONFIG = str(Path(__file__).parents[4] / "configs/sweep.yaml")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "sweep.space.train={rate: [0.1]}",
            "sweep.space.train.rate: train.rate is not a setting that changes",
        ),
        (
            "sweep.space.train={workers: [1, 2]}",
            "train.workers is not a setting that changes the result",
        ),
        ("sweep.space.model={chanels: [8]}", 'Did you mean "channels"?'),
        ("sweep.space.model={channels: [8, 1000]}", "sweep.space.model.channels: 1000: "),
        ("sweep.space.model={channels: {low: 8.5, high: 16}}", "sweep.space.model.channels: 8.5: "),
        (
            "sweep.space.train={learning_rate: {low: 0.1, high: 0.01}}",
            "its low is 0.1 and its high 0.01: low must",
        ),
        (
            "sweep.space.train={learning_rate: []}",
            "it must be a list of values, such as [16, 32], or have low and",
        ),
        ("sweep.space.train={learning_rate: {low: 0.1}}", "it must be a list of values"),
        (
            "sweep.space.train={learning_rate: {low: 0, high: 1, log: true}}",
            "log needs a low above 0",
        ),
        ("sweep.space.train={learning_rate: {lo: 1}}", "learning_rate.lo is not a known key"),
        ("sweep.space.data={test_share: [0.1]}", "sweep.space.data"),
        ("sweep.space={}", "sweep.space is empty"),
        ("sweep.sampler=grid", "sweep.space.model.dropout is continuous: a grid needs a step"),
        (
            "sweep.space.model={channels: {low: 8, high: 16, step: 0.5}}",
            "its step is 0.5, but model.channels is an int",
        ),
        ("sweep.metric=ap", "sweep.metric is ap: steps.digits does not define measures"),
        (
            "sweep.rungs=4",
            (
                "the first rung is after 0.333 epochs, before the first validation. Set"
                " train.validation_"
            ),
        ),
        (
            "train.validation=0",
            "Set train.validation to a share of the training samples, such as 0.1",
        ),
        ("sweep.space.train={validation: [0.1, 0.2]}", "compared by the same samples"),
    ],
)
def test_an_invalid_search_space_is_rejected_by_name(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(CONFIG, [setting])
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_the_first_trial_has_the_values_of_the_config() -> None:
    config = load_config(CONFIG).config
    sweep = getattr(config, "sweep")  # noqa: B009
    values = {"model.channels": 16, "model.dropout": 0.2, "train.learning_rate": 0.003}
    assert select_default_settings(sweep, config.train, config.model) == values
    assert find_integer_settings(sweep, config.train, config.model) == {
        path: path == "model.channels" for path in values
    }
    other = load_config(CONFIG, ["train.learning_rate=0.5"]).config
    assert (
        select_default_settings(sweep, other.train, other.model) == {}
    )  # 0.5 is not in the search space


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4), st.integers(1, 100), st.data())
def test_a_range_holds_exactly_the_decimal_numbers_on_its_steps(
    low: int, step: int, count: int, data: st.DataObject
):
    """The test gives `low` and `step` in thousandths; with steps of .1 from .1 on, .3 and .5 are in
    the range, but .35 is not."""
    choice = SettingChoice.model_validate(
        {"low": low / 1000, "high": (low + count * step) / 1000, "step": step / 1000}
    )
    number = data.draw(st.integers(0, count - 1))
    assert choice.value_count() == count + 1
    assert choice.allows((low + number * step) / 1000)
    assert choice.allows((low + count * step) / 1000)
    # the number is in the middle between two steps
    assert not choice.allows((2 * low + (2 * number + 1) * step) / 2000)
    assert not choice.allows((low - step) / 1000)
    assert not choice.allows((low + (count + 1) * step) / 1000)


PRICES = """
currency: EUR
default: cpu
spot: [{labels: {cloud.google.com/gke-spot: "true"}}]
classes: {cpu: {on_demand: {cpu_hour: 0.5, gib_hour: 0.25}, spot: {cpu_hour: 0.25, gib_hour: 0.125}}}
"""


def test_a_budget_in_money_is_converted_to_hours_by_the_prices_of_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = ["sweep.budget.money=20", "cluster.pods.train={cpu: 2, memory: 4Gi}"]
    assert get_budget_hours(sets[1:]) == 0
    with pytest.raises(
        ConfigError,
        match=r"sweep.budget.money is 20, but prices.yaml is missing.*sweep.budget.hours",
    ):
        get_budget_hours(sets)
    (tmp_path / "prices.yaml").write_text(PRICES)
    assert get_budget_hours(sets) == 10
    assert get_budget_hours([*sets, "sweep.budget.hours=3"]) == 3
    assert get_budget_hours([*sets, "cluster.pods.train.preset=gke-spot"]) == 20


def get_budget_hours(sets: list[str]) -> float:
    """Return the budget that the pods of the trials get, in hours."""
    return find_pod_sweep(sets).budget.hours


def find_pod_sweep(sets: list[str]) -> Sweep:
    """Return the sweep that the pods of the trials get."""
    workflow = render_manifest(load_config(CONFIG, sets).config)
    tasks = [
        task
        for template in workflow["spec"]["templates"]
        for task in template.get("dag", {}).get("tasks", [])
    ]
    (trials,) = [task for task in tasks if task["name"] == "trials"]
    values = {
        parameter["name"]: parameter["value"] for parameter in trials["arguments"]["parameters"]
    }
    return Sweep.model_validate_json(values["sweep"])


def test_a_grid_takes_each_integer_of_a_range_without_a_step() -> None:
    space = "sweep.space.model={channels: {low: 8, high: 10}, dropout: [0.1, 0.2]}"
    sweep = find_pod_sweep(
        [
            "sweep.sampler=grid",
            "sweep.trials=99",
            "sweep.space.train={batch_size: {low: 8, high: 16, step: 8}}",
            space,
        ]
    )

    steps = {path: choice.step for path, choice in sweep.choices()}
    assert steps == {"model.channels": 1, "model.dropout": 0, "train.batch_size": 8}

    assert {path: choice.value_count() for path, choice in sweep.choices()} == {
        "model.channels": 3,
        "model.dropout": 2,
        "train.batch_size": 2,
    }


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("gang", "labels", "annotations", "scheduler"),
    [
        ("", {}, {}, None),
        (
            "kueue",
            {"kueue.x-k8s.io/queue-name": "night", "kueue.x-k8s.io/priority-class": "low"},
            {},
            None,
        ),
        ("volcano", {}, {"scheduling.volcano.sh/queue-name": "night"}, "volcano"),
    ],
)
def test_the_pods_of_trials_have_the_queue_the_grace_period_and_the_notices_of_training_pods(
    gang: str, labels: dict[str, str], annotations: dict[str, str], scheduler: str | None
) -> None:
    sets = ["cluster.pods.train.preset=aks-spot", f"cluster.gang={gang}", "cluster.queue=night"]
    sets += ["cluster.queue_priority=low"] if gang == "kueue" else []
    templates = render_manifest(load_config(CONFIG, sets).config)["spec"]["templates"]
    (trial,) = [template for template in templates if template["name"] == "trial"]
    metadata = trial.get("metadata", {})
    assert metadata.get("labels", {}) == labels
    assert metadata.get("annotations", {}) == annotations
    assert trial.get("schedulerName") == scheduler
    assert json.loads(trial["podSpecPatch"])["terminationGracePeriodSeconds"] == 25
    env = {variable["name"]: variable["value"] for variable in trial["container"]["env"]}
    assert env == {
        "REKINDLE_GRACE": "25",
        "REKINDLE_NOTICE": "azure",
        "REKINDLE_CAPACITY": "spot",
    }
