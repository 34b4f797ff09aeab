"""A sweep that does not fit the program that it trains is refused before it starts, in one
sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.manifest.config import Loaded, load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from tests.rekindle.program.pods import PROGRAMS

CONFIG: dict[str, Any] = {
    "name": "line",
    "pipeline": "pipelines.sweep",
    "workload": "tests.rekindle.program.slopes",
    "data": {"source": "simulate://0"},
    "program": {
        "command": [str(PROGRAMS / "line.py"), "{checkpoints}", "{model.rate}"],
        "result": "{checkpoints}/final.json",
    },
    "sweep": {
        "trials": 4,
        "metric": "error",
        "space": {"model": {"rate": {"low": 0.1, "high": 0.4}}},
    },
}


def load(tmp_path: Path, *sets: str) -> Loaded:
    file = tmp_path / "line.yaml"
    file.write_text(json.dumps(CONFIG))
    return load_config(file, sets)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "sweep.rungs=2",
            "sweep.rungs is 2: a program cannot pause at a rung, so each trial trains to its end."
            " Remove sweep.rungs",
        ),
        (
            "sweep.space.train={learning_rate: [0.1]}",
            "sweep.space.train.learning_rate: a program does not get the section `train`. Add the"
            " setting to the section `model`, pass it to the program as {model.learning_rate}, and"
            " search sweep.space.model.learning_rate",
        ),
        (
            "sweep.space.model={degree: [1, 2]}",
            "sweep.space.model.degree: the program does not get this setting. Add the placeholder"
            " {model.degree} to program.command, or remove the setting from sweep.space",
        ),
        ("sweep.space.model={rates: [0.1]}", 'Did you mean "rate"?'),
        ("sweep.space.model={rate: [-1]}", "sweep.space.model.rate: -1: "),
        ("sweep.sampler=grid", "sweep.space.model.rate is continuous: a grid needs a step"),
    ],
)
def test_a_sweep_that_does_not_fit_the_program_is_refused(
    setting: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, setting)
    assert message in str(refused.value)


def test_the_trials_of_a_program_have_one_rung_and_their_pods_get_the_program(
    tmp_path: Path,
) -> None:
    loaded = load(tmp_path)
    assert getattr(loaded.config, "sweep").rungs == 1  # noqa: B009

    templates = render_manifest(loaded.config)["spec"]["templates"]
    (trials,) = [
        task
        for template in templates
        for task in template.get("dag", {}).get("tasks", [])
        if task["name"] == "trials"
    ]
    parameters = {item["name"]: item["value"] for item in trials["arguments"]["parameters"]}
    assert json.loads(parameters["sweep"])["rungs"] == 1
    assert json.loads(parameters["program"])["command"] == CONFIG["program"]["command"]

    # the default shared memory of a pod, 64 MB, is too small for the batches of a DataLoader
    (pod,) = [template for template in templates if template["name"] == "trial"]
    assert "/dev/shm" in [mount["mountPath"] for mount in pod["container"]["volumeMounts"]]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_the_trials_of_a_program_get_its_secrets(tmp_path: Path) -> None:
    loaded = load(tmp_path, "program.secrets=[HF_TOKEN]")
    templates = render_manifest(loaded.config)["spec"]["templates"]
    (pod,) = [template for template in templates if template["name"] == "trial"]
    reference = {"name": "rekindle-program", "key": "HF_TOKEN"}
    variable = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}
    assert variable in pod["container"]["env"]
