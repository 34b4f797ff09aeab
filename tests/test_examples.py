"""Each example workload runs from its config to a served model, as in the docs."""

import json
import shutil
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, open_shell


def send_request(url: str, body: Any = None) -> Any:
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"content-type": "application/json"})
    ) as response:
        return json.load(response)


@pytest.mark.slow
# each of these tests is a whole run
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "settings", "metric"),
    [
        ("digits", ["train.epochs=4", "gate.minimum.accuracy=0.8"], "accuracy"),
        ("language", ["train.steps=60", "gate.maximum.bits_per_byte=4.5"], "bits_per_byte"),
    ],
)
def test_an_example_becomes_a_served_model(
    name: str,
    settings: list[str],
    metric: str,
    tmp_path: Path,
    s3_environment: dict[str, str],
    mlflow_server: str,
) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with open_shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as run_command:
        # all tests share MLflow, and each process has its own bucket
        model_name = f"{name}-{uuid.uuid4().hex[:6]}"
        sets = " ".join(f"--set {setting}" for setting in [f"name={model_name}", *settings])
        completed = run_command(f"rekindle run configs/{name}.yaml {sets} -o json")
        assert completed.returncode == 0, completed.stderr
        result = json.loads(completed.stdout)
        assert result["verdict"] == "release"
        assert next(iter(result["metrics"])) == metric
        model = f"{result['endpoint']}/v1/models/{model_name}"
        (prediction,) = send_request(f"{model}:predict", send_request(f"{model}/example"))[
            "predictions"
        ]
        assert set(prediction) >= (
            {"digit", "probabilities"} if name == "digits" else {"bits", "bytes"}
        )

        with pytest.raises(urllib.error.HTTPError, match="422"):
            send_request(f"{model}:predict", {"instances": [{"pixels": 1, "text": ""}]})
