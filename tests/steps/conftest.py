"""A small simulated dataset in three shards, and two models trained on it for a moment, one better than the other."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.workload import dataset_facts, prepare
from steps.fraud.config import Data, Model
from steps.fraud.data import boosting

WORLD = "simulate://5?cards=150&terminals=200&days=70"


@pytest.fixture(scope="session", autouse=True)
def few_trees() -> None:
    """A world this small needs no more, and most of the time of `prepare` would be theirs."""
    boosting.SHAPE["max_iter"] = 40


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
    """train(steps, seed) → a model directory as the step leaves it."""
    import torch
    from safetensors.torch import save_file

    from steps import fraud

    def trained(steps: int, seed: int = 0, noise: float = 0, **shape: Any) -> Path:
        torch.manual_seed(seed)
        samples = fraud.dataset(small_dataset, "train")
        section = Model(width=16, hidden=16, heads=2, dropout=0.0, **shape)
        model: Any = fraud.model(section, dataset_facts(small_dataset))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            fraud.loss(model, samples.batch(torch.randint(len(samples), (64,)))).backward()
            optimizer.step()
        if noise:
            torch.nn.init.normal_(model.head.weight, std=noise)
        folder = tmp_path_factory.mktemp("model")
        save_file(model.state_dict(), folder / "model.safetensors")
        sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        facts = {"sha256": sha256, "workload": "steps.fraud", "model": section.model_dump(mode="json"), "train": {}}
        (folder / "model.json").write_text(json.dumps(facts))
        shutil.copy(small_dataset / "dataset.json", folder)  # a champion's release has both
        shutil.copytree(small_dataset / "state", folder / "state")
        return folder

    return trained


@pytest.fixture(scope="session")
def novice(train: Train) -> Path:
    """A model that knows less than the trees that it began with."""
    return train(1, noise=1.0)


@pytest.fixture(scope="session")
def expert(train: Train) -> Path:
    """A model that has learned something."""
    return train(60)
