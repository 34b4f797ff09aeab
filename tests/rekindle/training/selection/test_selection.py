"""Validation chooses the best family; a fitted family never sees the held-out samples."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle import Fitted
from rekindle import workload as workloads
from rekindle.errors import ConfigError, DataError
from rekindle.gate import Metric
from rekindle.storage import Store
from rekindle.training.computation import open_samples
from rekindle.training.selection.choice import compute_validation, find_best_family
from rekindle.training.selection.fitting import check_repeatable, check_saved_model, write_model
from rekindle.training.spec import TrainingSpec
from steps.families import choose, fit

PRODUCT = "tests.rekindle.training.selection.product"
TRAIN = {"validation": 0.2, "virtual_workers": 2}


@pytest.fixture
def product() -> Any:
    return workloads.load(PRODUCT)


@pytest.fixture
def dataset(product: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    workloads.prepare(product, product.Data(source="numbers://3"), tmp_path / "dataset")
    return tmp_path / "dataset"


def fit_line_model(dataset: Path) -> Path:
    return fit.run(
        fit.Inputs(workload=PRODUCT, family="line", dataset=dataset, digest="", train=TRAIN)
    ).model


def write_constant_network(folder: Path, value: float) -> Path:
    """Write a network that predicts `value` for every input."""
    workload: Any = workloads.load(PRODUCT)
    model = workload.network(workload.Model(), {})
    for parameter in model.parameters():
        parameter.data.zero_()
    model[2].bias.data.fill_(value)
    spec = TrainingSpec.for_local_training(PRODUCT, {}, TRAIN, "network")
    write_model(folder, model, spec.identity())
    return folder


def test_a_fitted_family_sees_the_training_samples_only(product: Any, dataset: Path) -> None:
    spec = TrainingSpec.for_local_training(PRODUCT, {}, TRAIN, "line")
    training, held_out = open_samples(spec, product, dataset)
    assert held_out
    assert len(training) == 400
    assert len(held_out) == 100
    expected = product.line(product.Model(), {})

    with torch.no_grad():
        product.fit_line(expected, training)

    first_model = fit_line_model(dataset)
    from safetensors.torch import load_file

    weights = load_file(first_model / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in expected.state_dict().items())
    description = json.loads((first_model / "model.json").read_text())
    assert description["family"] == "line"
    assert description["train"]["validation"] == 0.2


def choose_inputs(dataset: Path, store: Store, prefix: str) -> choose.Inputs:
    """Store two models, and return the inputs of the step `choose` for the choice between these
    models."""
    models = {
        "line": fit_line_model(dataset),
        "network": write_constant_network(dataset.parent / "network", 1.0),
    }
    for name, folder in models.items():
        store.upload(folder, f"{prefix}/{name}")
    keys = {name: f"{prefix}/{name}" for name in models}
    return choose.Inputs(workload=PRODUCT, models=keys, dataset=dataset, train=TRAIN)


def test_a_changed_byte_of_a_model_or_the_dataset_is_not_chosen_with(
    dataset: Path, s3: Store, s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)

    inputs = choose_inputs(dataset, s3, "changed")
    weights = s3.get("changed/network/model.safetensors")
    s3.put("changed/network/model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1]))

    with pytest.raises(
        DataError, match=r"network/model\.safetensors have the sha256 \w{64}, but model\.json has"
    ):
        choose.run(inputs)

    s3.put("changed/network/model.safetensors", weights)
    assert choose.run(inputs).family == "line"
    file = next(path for path in dataset.iterdir() if path.suffix == ".pt" or path.suffix == ".npy")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(DataError, match=f"{file.name} has the sha256"):
        choose.run(inputs)

    with pytest.raises(DataError, match=f"{file.name} has the sha256"):
        fit_line_model(dataset)


def test_a_repeated_fit_gives_the_same_files(dataset: Path) -> None:
    first_model, second_model = (
        (fit_line_model(dataset) / "model.json").read_bytes() for _ in range(2)
    )
    assert first_model == second_model


@pytest.mark.parametrize(("constant", "winner"), [(0.0, "network"), (50.0, "line")])
def test_the_family_with_the_lower_validation_loss_is_chosen(
    constant: float, winner: str, s3: Store, dataset: Path, tmp_path: Path
) -> None:
    run = f"choice-{constant:g}"
    s3.upload(fit_line_model(dataset), f"{run}/line/model")
    s3.upload(write_constant_network(tmp_path / "network", constant), f"{run}/network/model")
    models = {name: f"{run}/{name}/model" for name in ("line", "network")}
    chosen = choose.run(
        choose.Inputs(workload=PRODUCT, models=models, dataset=dataset, train=TRAIN)
    )
    description = json.loads((chosen.model / "model.json").read_text())
    values = description["chosen"]["validation"]
    assert values[winner]["loss"] == min(value["loss"] for value in values.values())
    assert (chosen.family, description["family"], description["chosen"]["family"]) == (winner,) * 3
    assert (
        s3.get(f"{run}/{winner}/model/model.safetensors")
        == (chosen.model / "model.safetensors").read_bytes()
    )


def test_validation_is_the_mean_over_all_held_out_samples(product: Any, dataset: Path) -> None:
    # the last batch is smaller than the other batches
    spec = TrainingSpec.for_local_training(PRODUCT, {}, TRAIN | {"batch_size": 33}, "line")
    _, held_out = open_samples(spec, product, dataset)
    assert held_out
    model = product.line(product.Model(), {})
    inputs, targets = held_out.batch(torch.arange(len(held_out)))
    expected = (model(inputs) - targets).square().mean().item()
    assert compute_validation(spec, product, model, held_out, torch.device("cpu"))[
        "loss"
    ] == pytest.approx(expected, rel=1e-5)


def test_the_best_finite_value_wins_in_the_direction_of_the_metric() -> None:
    values = {
        "a": {"loss": 2.0, "score": 1.0},
        "b": {"loss": 1.0, "score": 3.0},
        "c": {"loss": 1.0, "score": math.nan},
    }

    assert (
        find_best_family(values, Metric("loss", better="lower")) == "b"
    )  # of several equal models, the first one is chosen
    assert find_best_family(values, Metric("score")) == "b"
    assert find_best_family({"a": values["a"], "c": values["c"]}, Metric("score")) == "a"

    with pytest.raises(DataError, match="score of c is not a number on the held-out samples"):
        find_best_family({"c": values["c"]}, Metric("score"))

    with pytest.raises(
        ConfigError, match=r'chosen_by is Metric\("auc"\), but validation of a has loss, score'
    ):
        find_best_family(values, Metric("auc"))


def test_families_without_held_out_samples_cannot_be_compared(s3: Store, dataset: Path) -> None:
    s3.upload(fit_line_model(dataset), "unvalidated/line/model")
    inputs = choose.Inputs(
        workload=PRODUCT, models={"line": "unvalidated/line/model"}, dataset=dataset, train={}
    )
    with pytest.raises(ConfigError, match=r"set train\.validation"):
        choose.run(inputs)


def test_a_model_whose_state_is_not_tensors_is_refused(tmp_path: Path) -> None:
    class Booster(torch.nn.Module):
        def get_extra_state(self) -> Any:
            return {"trees": 3}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    with pytest.raises(
        ConfigError, match=r"_extra_state of the model is dict: .*get_extra_state return a tensor"
    ):
        write_model(tmp_path / "model", Booster(), {})


def test_a_fitted_model_that_loses_its_fit_when_it_is_saved_is_refused(
    product: Any, dataset: Path, tmp_path: Path
) -> None:
    spec = TrainingSpec.for_local_training(PRODUCT, {}, TRAIN, "line")
    samples, _ = open_samples(spec, product, dataset)
    model = product.line(product.Model(), {})
    write_model(tmp_path / "saved", model, {})
    check_saved_model(spec, product, dataset, model, samples, tmp_path / "saved")

    with torch.no_grad():
        product.fit_line(model, samples)

    with pytest.raises(
        ConfigError, match=r"has a loss of [\d.]+, and [\d.]+ if it is loaded\. Keep all"
    ):
        check_saved_model(spec, product, dataset, model, samples, tmp_path / "saved")

    write_model(tmp_path / "other", torch.nn.Linear(3, 1), {})
    with pytest.raises(ConfigError, match=r"the fitted model cannot be loaded \(.*\)\. Keep all"):
        check_saved_model(spec, product, dataset, model, samples, tmp_path / "other")


def test_a_fit_that_differs_when_it_is_repeated_is_refused(
    product: Any, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TrainingSpec.for_local_training(PRODUCT, {}, TRAIN, "line")
    samples, _ = open_samples(spec, product, dataset)
    model = product.line(product.Model(), {})

    with torch.no_grad():
        product.fit_line(model, samples)

    check_repeatable(spec, product, model, samples, {})
    draw = random.Random()

    def fit_randomly(model: Any, samples: Any) -> None:
        model[0].bias.fill_(draw.random())

    monkeypatch.setitem(product.families, "line", Fitted(product.line, fit_randomly))
    with pytest.raises(
        ConfigError, match=r'"line" was fitted twice .* loss of [\d.]+ and [\d.]+: .* fixed seed'
    ):
        check_repeatable(spec, product, model, samples, {})


def test_a_fit_that_returns_a_model_is_refused(
    product: Any, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        product.families, "line", Fitted(product.line, lambda model, samples: model)
    )
    with pytest.raises(
        ConfigError, match=r"fit\(model, samples\) returned .*: it must change `model`"
    ):
        fit.run(
            fit.Inputs(workload=PRODUCT, family="line", dataset=dataset, digest="", train=TRAIN)
        )


@pytest.mark.parametrize(("key", "value"), [("validation", 0.3), ("seed", 5)])
def test_a_model_that_may_have_seen_the_held_out_samples_is_not_compared(
    key: str, value: float, s3: Store, dataset: Path, tmp_path: Path
) -> None:
    s3.upload(fit_line_model(dataset), "seen/line/model")
    models = {"line": "seen/line/model"}
    with pytest.raises(
        ConfigError, match=rf"line was trained with train\.{key} .*, and is compared with {value}"
    ):
        choose.run(
            choose.Inputs(
                workload=PRODUCT, models=models, dataset=dataset, train=TRAIN | {key: value}
            )
        )
