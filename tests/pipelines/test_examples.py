"""The example pipelines, each run from its config as in the documentation."""

import hashlib
import json
import shutil
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.content.dataset import FILE_LIST
from rekindle.storage import Store
from tests.commands import ROOT, open_shell
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # whole runs
Run = Callable[..., dict[str, Any]]
SUFFIX = uuid.uuid4().hex[:6]
QUICK_SETTINGS = "train.steps=60 gate.minimum.accuracy=0.3"


@pytest.fixture
def typed(tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str) -> Iterator[Any]:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with open_shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as typed:
        yield typed


@pytest.fixture
def run(typed: Any) -> Run:
    def run(name: str, settings: str = "", code: int = 0) -> dict[str, Any]:
        sets = " ".join(
            f"--set {setting}" for setting in [f"name={make_unique_name(name)}", *settings.split()]
        )
        result = typed(f"rekindle run configs/{name}.yaml {sets} -o json")
        assert result.returncode == code, result.stderr
        return json.loads(result.stdout)

    return run


def make_unique_name(name: str) -> str:
    """Return a unique name of a model, because all test processes share MLflow, although each
    process has its own bucket."""
    return f"{name}-{SUFFIX}"


def fetch_json(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def list_succeeded_steps(result: dict[str, Any]) -> set[str]:
    return {step["name"] for step in result["steps"] if step["phase"] == "Succeeded"}


def test_the_better_of_two_networks_is_released_and_served(run: Run, s3: Store) -> None:
    result = run("nightly", QUICK_SETTINGS)
    shipped = {
        name.split(".")[1]
        for name in list_succeeded_steps(result)
        if name.startswith("decide.ship-")
    }
    assert len(shipped) == 1
    served = fetch_json(f"{result['endpoint']}/v1/models/{make_unique_name('nightly')}")
    models = {
        f"ship-{name}": json.loads(s3.get(f"{result['workflow']}/train-{name}/model/model.json"))
        for name in ("small", "wide")
    }
    assert [models[name]["sha256"] for name in shipped] == [served["sha256"]]
    assert models["ship-small"]["model"]["channels"] == 8
    assert models["ship-wide"]["model"]["channels"] == 16
    datasets = {task: f"{result['workflow']}/{task}/dataset" for task in ("prepare", "shifted")}
    rows = {
        task: json.loads(s3.get(f"{key}/dataset.json"))["rows"] for task, key in datasets.items()
    }
    assert rows["shifted"] > 3 * rows["prepare"]
    digests = {
        task: hashlib.sha256(s3.get(f"{key}/{FILE_LIST}")).hexdigest()
        for task, key in datasets.items()
    }
    assert digests["shifted"] == models["ship-small"]["digest"] != digests["prepare"]


def test_files_are_scored_with_the_same_results_as_the_server(
    typed: Any, run: Run, s3: Store
) -> None:
    model = f"{run('digits', f'{QUICK_SETTINGS} serve.max_batch=1')['endpoint']}/v1/models/{make_unique_name('digits')}"
    example = fetch_json(f"{model}/example")
    body = json.dumps(example).encode()

    request = urllib.request.Request(f"{model}:predict", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        (prediction,) = json.load(answer)["predictions"]

    line = json.dumps(example["instances"][0]).encode() + b"\n"
    for day, rows in (("01", 1), ("03/early", 2), ("03/late", 150)):
        s3.put(f"october/{day}", rows * line)

    result = run("scoring", f"scoring.files=october scoring.model={make_unique_name('digits')}")
    scored = {
        entry.key.rpartition("/")[2]: entry.key for entry in s3.list(f"{result['workflow']}/score/")
    }
    lines = {name: s3.get(key).decode().splitlines() for name, key in scored.items()}

    assert {name: len(predictions) for name, predictions in lines.items()} == {
        "01": 1,
        "early": 2,
        "late": 150,
    }

    assert all(
        json.loads(text) == prediction for predictions in lines.values() for text in predictions
    )
    s3.put("october/04", line + b'{"pixels": 1}\n')
    failed = run(
        "scoring", f"scoring.files=october scoring.model={make_unique_name('digits')}", code=1
    )
    assert (
        "04, lines 1 to 2: instances[1].pixels"
        in typed(f"rekindle logs {failed['workflow']} score").stdout
    )


def test_fine_tuning_starts_with_the_weights_of_a_release(typed: Any, run: Run, s3: Store) -> None:
    base = run("language", "train.steps=40 gate.maximum.bits_per_byte=9")
    # the model of the next example uses the same port
    typed("rekindle down")
    one_step = "train.steps=1 train.learning_rate=1e-9 gate.maximum.bits_per_byte=0.1"
    tuned = run("finetuning", f"{one_step} finetuning.base={make_unique_name('language')}", code=3)
    fresh = run("language", f"{one_step} data.source=python://code", code=3)
    metric = "bits_per_byte"
    # the fine-tuned model has the knowledge of its base model
    assert tuned["metrics"][metric] < fresh["metrics"][metric] - 0.5
    description = json.loads(s3.get(f"{tuned['workflow']}/train/model/model.json"))
    assert description["start"].startswith(f"releases/{make_unique_name('language')}/")
    assert description["sha256"] != base["model_sha256"]


def test_a_model_is_released_after_approval(typed: Any, tmp_path: Path) -> None:
    sets = f"--set name={make_unique_name('approved')} --set train.steps=60 --set gate.minimum.accuracy=0.3"
    typed(f"(rekindle run configs/approval.yaml {sets} -o json > result.json 2> log.txt &)")
    log = tmp_path / "log.txt"

    until(
        "the run to ask for approval",
        lambda: "rekindle resume" in log.read_text(),
        120,
        evidence=log.read_text,
    )

    run = next(word for word in log.read_text().split() if word.startswith("approved-"))
    steps = json.loads(typed(f"rekindle status {run} -o json").stdout)["steps"]
    assert "decide.ship.release" not in {step["name"] for step in steps}
    assert typed(f"rekindle resume {run}").returncode == 0
    file = tmp_path / "result.json"

    until(
        "the run to end",
        lambda: file.read_text().strip().endswith("}"),
        120,
        evidence=log.read_text,
    )

    result = json.loads(file.read_text())
    assert result["verdict"] == "release"
    assert "decide.ship.promote.verify" in list_succeeded_steps(result)
