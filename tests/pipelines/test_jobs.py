"""Tests of the examples with jobs of other frameworks, each run from its config: all replicas of a
job train one model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.storage import Store
from tests.commands import ROOT, open_shell

# number of training images, summed over all replicas
ROWS = 1437
# these tests execute whole runs
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def run(tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str) -> Iterator[Any]:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with open_shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as typed:

        def run(name: str, *settings: str) -> dict[str, Any]:
            sets = " ".join(f"--set {setting}" for setting in settings)
            result = typed(f"rekindle run configs/{name}.yaml {sets} -o json")
            assert result.returncode == 0, result.stderr
            return json.loads(result.stdout)

        yield run


def read_model(s3: Store, result: dict[str, Any], task: str) -> dict[str, Any]:
    return json.loads(s3.get(f"{result['workflow']}/{task}/model/model.json"))


def phases_by_step(result: dict[str, Any]) -> dict[str, str]:
    return {step["name"]: step["phase"] for step in result["steps"]}


def test_the_better_of_boosted_trees_and_a_network_is_released(run: Any, s3: Store) -> None:
    result = run("trees", "model.rounds=20", "train.steps=20", "gate.minimum.accuracy=0.3")
    trees = read_model(s3, result, "train-trees")
    held_out = round(0.1 * ROWS)
    assert trees["model"]["rounds"] == 20
    assert trees["replicas"] == 3
    assert trees["rows"] == ROWS - held_out
    assert "fingerprint" in read_model(s3, result, "train-network"), "only steps.train records it"
    chosen = read_model(s3, result, "choose")
    assert chosen["family"] == "stumps", "20 steps are not enough for the network"
    assert chosen["sha256"] == trees["sha256"]
    assert phases_by_step(result)["decide.ship.promote.verify"] == "Succeeded"


def test_the_processes_of_an_mpijob_train_one_model_which_is_served(run: Any, s3: Store) -> None:
    result = run("mpi", "model.rounds=10", "gate.minimum.accuracy=0.5")
    trained = read_model(s3, result, "train")
    assert trained["replicas"] == 1 + 2 * 2, "the Launcher, and every slot of its Workers"
    assert trained["rows"] == ROWS
    assert phases_by_step(result)["decide.ship.promote.verify"] == "Succeeded"
    assert result["metrics"]["accuracy"] > 0.6, "chance is 0.1"
