"""A workload offers one model or several families; a wrong definition of families is refused before
anything runs."""

from typing import Any

import pytest

from rekindle import Fitted, Metric, blocks, families
from rekindle.blocks.manifest.config import load_config
from rekindle.errors import ConfigError
from rekindle.workload import load

PRODUCT = "tests.rekindle.training.selection.product"
SETS = (f"workload={PRODUCT}", "name=product", "data.source=numbers://3")


def model(section: Any, facts: Any) -> Any:
    raise AssertionError


fit_without_samples: Any = lambda model: None  # noqa: E731


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"model": model}, "defines both model and families: it must define one of them"),
        ({"families": None}, "defines neither model nor families nor load: it must define model"),
        ({"families": {}}, r"families is \{\}: it must be a dict with names"),
        ({"families": [model]}, r"families is \[.*\]: it must be a dict with names"),
        (
            {"families": {"Big Net": model}},
            r"families is .*: it must be a dict with names of lower-case letters",
        ),
        (
            {"families": {"net": 3}},
            r'families\["net"\] is 3: it must be a function \(section, facts\)',
        ),
        (
            {"families": {"net": lambda section: model}},
            r'families\["net"\]\(section\) cannot be called as',
        ),
        (
            {"families": {"net": Fitted(model, fit_without_samples)}},
            r'families\["net"\].fit\(model\) cannot be called',
        ),
        ({"chosen_by": "accuracy"}, r"chosen_by is 'accuracy': it must be a rekindle.Metric"),
    ],
)
def test_a_wrong_definition_of_families_is_refused(
    names: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    product: Any = load(PRODUCT)
    for name, value in names.items():
        if value is None:
            monkeypatch.delattr(product, name)
        else:
            monkeypatch.setattr(product, name, value, raising=False)
    with pytest.raises(ConfigError, match=sentence):
        load(PRODUCT)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ("train.validation=0",),
            (
                r"the families line, network, and validation chooses between them: set"
                r" train.validation, such as 0.1"
            ),
        ),
        (
            ("families=[lime]",),
            r'has no family "lime"\. Did you mean "line"\? Its families: line, network\.',
        ),
        (("train.validation=0.1", "families=['']"), r'has no family ""'),
        (("train.validation=0.1", "families=[line, line]"), r'families contains "line" twice'),
    ],
)
def test_a_config_must_name_existing_families_and_validate_several(
    settings: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(
            "configs/digits.yaml", [*SETS, "gate.minimum={}", "gate.maximum={rmse: 1}", *settings]
        )


def render_tasks(*settings: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the tasks of a pipeline that trains the given families, by the name of each task."""
    config = load_config(
        "configs/digits.yaml", [*SETS, "gate.minimum={}", "gate.maximum={rmse: 1}", *settings]
    ).config
    with blocks.pipeline(config) as workflow:
        blocks.evaluate(blocks.train(blocks.prepare(), **options))
    [main_template] = (
        template
        for template in workflow.to_dict()["spec"]["templates"]
        if template["name"] == "main"
    )
    return {task["name"]: task for task in main_template["dag"]["tasks"]}


def test_all_families_are_trained_and_one_is_chosen() -> None:
    tasks = render_tasks("train.validation=0.1")
    assert {"train-line", "train-network", "choose"} <= tasks.keys()
    assert tasks["choose"]["depends"] == "train-line && train-network"
    assert tasks["evaluate"]["depends"].startswith("choose")
    assert tasks["train-line"]["template"] == "fit"


def test_a_single_family_is_trained_as_one_model() -> None:
    assert "choose" not in render_tasks("families=[network]")
    assert "train" in render_tasks("families=[network]")
    assert render_tasks("train.validation=0.1", family="line")["fit"]["template"] == "fit"


def test_initial_weights_need_the_name_of_their_family() -> None:
    with pytest.raises(ConfigError, match=r"`start` has the weights of one family: name it"):
        render_tasks("train.validation=0.1", start="releases/product/1")


def test_families_are_chosen_by_the_loss_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    product: Any = load(PRODUCT)
    assert families.get_selection_metric(product) == Metric("loss", better="lower")
    monkeypatch.setattr(product, "chosen_by", Metric("accuracy"), raising=False)
    assert families.get_selection_metric(load(PRODUCT)).gain(1.0) == 1.0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("blocks.choose(data, {})", "the models are named nothing: pass at least two, by name"),
        ("blocks.choose(data, [line, line])", "the models are .*: pass at least two, by name"),
        ("blocks.choose(data, {'line': line})", "the models are named line: pass at least two"),
        (
            "blocks.choose(data, {'Line': line, 'other': line})",
            "the models are named Line, other: pass at least two",
        ),
        (
            "blocks.choose(data, {'a': line, 'b': blocks.train(data, family='line', train=other)})",
            "b may have seen",
        ),
        ("blocks.choose(data, {'a': line, 'b': data})", 'does not provide "model"'),
    ],
)
def test_a_choice_needs_two_models_with_the_same_held_out_samples(call: str, sentence: str) -> None:
    settings = [*SETS, "gate.minimum={}", "gate.maximum={rmse: 1}", "train.validation=0.1"]
    config = load_config("configs/digits.yaml", settings).config
    with pytest.raises(ConfigError, match=sentence), blocks.pipeline(config):
        data = blocks.prepare()
        line = blocks.train(data, family="line", task="line")
        names = {
            "blocks": blocks,
            "data": data,
            "line": line,
            "other": config.train.model_copy(update={"seed": 9}),
        }
        eval(call, names)


def test_a_value_that_is_not_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load(PRODUCT), "measures", {"mae": print}, raising=False)
    with pytest.raises(ConfigError, match=r"measures is \{'mae': .*: it must be a function"):
        load(PRODUCT)


def test_a_training_that_names_no_family_is_refused_if_there_are_several() -> None:
    with pytest.raises(ConfigError, match=r'has no family ""\..* Its families: line, network\.'):
        families.build(load(PRODUCT), "", None, {})
