"""Fixtures: a small simulated dataset in three shards, and two briefly trained models, one of which
is better than the other."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.content.dataset import FILE_LIST
from rekindle.content.dataset_record import DATASET
from rekindle.workload import prepare, read_dataset_facts
from steps.fraud.data import boosting
from steps.fraud.fraud_config import Data, Model

WORLD = "simulate://5?cards=150&terminals=200&days=70"


@pytest.fixture(scope="session", autouse=True)
def few_trees() -> None:
    """Fit fewer trees than by default: these trees are enough for the small data, and more trees
    would take most of the time of `prepare`."""
    boosting.BOOSTING_SETTINGS["max_iter"] = 40


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset directory with two test weeks."""
    from steps import fraud

    path = tmp_path_factory.mktemp("data") / "dataset"
    prepare(fraud, Data(source=WORLD, test_weeks=2, shard_rows=7000), path)
    return path


Train = Callable[..., Path]


@pytest.fixture(scope="session")
def train(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return the function train(steps, seed), which returns a model directory in the form that the
    step `train` writes."""
    import torch
    from safetensors.torch import save_file

    from rekindle import families
    from steps import fraud

    def train_model(
        steps: int, seed: int = 0, noise: float = 0, family: str = "transformer", **shape: Any
    ) -> Path:
        torch.manual_seed(seed)
        samples = fraud.dataset(small_dataset, "train")
        section = Model(width=16, hidden=16, heads=2, dropout=0.0, **shape)
        model: Any = families.build(fraud, family, section, read_dataset_facts(small_dataset))
        parameters = [*model.parameters()]
        optimizer = torch.optim.AdamW(parameters or [torch.zeros(1)], lr=1e-2)

        for _ in range(steps):
            optimizer.zero_grad()
            fraud.loss(model, samples.batch(torch.randint(len(samples), (64,)))).backward()
            optimizer.step()

        if noise:
            torch.nn.init.normal_(model.head.weight, std=noise)

        folder = tmp_path_factory.mktemp("model")
        save_file(model.state_dict(), folder / "model.safetensors")
        sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()

        facts = {
            "sha256": sha256,
            "workload": "steps.fraud",
            "family": family,
            "model": section.model_dump(mode="json"),
            "train": {},
        }

        (folder / "model.json").write_text(json.dumps(facts))

        for name in (DATASET, FILE_LIST):  # the same files are in the release of a champion
            shutil.copy(small_dataset / name, folder)

        shutil.copytree(small_dataset / "state", folder / "state")
        return folder

    return train_model


@pytest.fixture(scope="session")
def novice(train: Train) -> Path:
    """A model that is worse than the trees from which its training started."""
    return train(1, noise=1.0)


@pytest.fixture(scope="session")
def expert(train: Train) -> Path:
    """A model that is better than the trees."""
    return train(60)


@pytest.fixture(scope="session")
def boosted(train: Train) -> Path:
    """A model of the family of boosted trees."""
    return train(0, family="trees")
