"""Tests of a step before `prepare`: the step gets the section `data`, and `prepare` runs after it
on the output of the step."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle import blocks
from rekindle.blocks.manifest.config import Config, load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.blocks.wiring import WiringError
from rekindle.step import load_step_module, main
from tests.commands import ROOT, write_files

PAGES = ("your-own-model.md", "your-own-pipeline.md")
OWN_DATA = "import pathlib\n\nclass Data(Data):\n    lookup: pathlib.Path\n\n"
MODULES = ("power", "clean", "cleaned")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Load the config of the example in docs/your-own-pipeline.md."""
    for page in PAGES:
        write_files(ROOT / "docs" / page, tmp_path)
    shutil.copy(ROOT / "template/data/power.csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    for module in MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    return load_config("cleaned.yaml", [], {}).config


def arguments_of(manifest: dict[str, Any], task: str) -> tuple[dict[str, Any], str]:
    tasks = {
        t["name"]: t
        for template in manifest["spec"]["templates"]
        for t in template.get("dag", {}).get("tasks", [])
    }
    arguments = tasks[task]["arguments"]
    values = {p["name"]: p["value"] for p in arguments["parameters"]}
    return values | {a["name"]: a["s3"]["key"] for a in arguments.get("artifacts", [])}, tasks[
        task
    ].get("depends", "")


def test_the_example_passes_the_section_and_prepares_the_artifact(
    config: Config, tmp_path: Path
) -> None:
    manifest = render_manifest(config)
    values, _ = arguments_of(manifest, "clean")
    assert json.loads(values["data"])["source"] == str(tmp_path / "power.csv")
    prepared, depends = arguments_of(manifest, "prepare")
    assert depends == "clean"
    assert prepared["source"] == "{{workflow.name}}/clean/rows"
    (tmp_path / "power.csv").write_text("hour,temperature,kwh\n1,2,3\n4,,6\n")
    assert main(["clean", f"--data={values['data']}", f"--output=rows={tmp_path / 'rows'}"]) == 0
    assert (tmp_path / "rows").read_text() == "hour,temperature,kwh\n1,2,3"


def test_a_text_replaces_the_source_and_orders_the_steps(config: Config, tmp_path: Path) -> None:
    (tmp_path / "clean.py").write_text(
        "from rekindle import StepInputs, StepOutputs\n\nclass Inputs(StepInputs):\n    data:"
        " dict\n\nclass Outputs(StepOutputs):\n    uri: str\n\ndef run(inputs): ...\n"
    )
    with blocks.pipeline(config) as workflow:
        cleaned = blocks.step("clean", data=config.data)
        blocks.prepare(source=cleaned.outputs.uri)

    values, depends = arguments_of(workflow.to_dict(), "prepare")
    assert (
        json.loads(values["data"])["source"]
        == "{{=toJson(string(tasks.clean.outputs.parameters.uri))[1:-1]}}"
    )
    assert "clean" in depends


def test_a_task_instead_of_its_output_is_refused(config: Config) -> None:
    with (
        pytest.raises(WiringError, match=r"source is the task clean: pass an output"),
        blocks.pipeline(config),
    ):
        blocks.prepare(source=blocks.step("clean", data=config.data))  # pyright: ignore[reportArgumentType]


def test_the_cache_reads_all_files_of_the_section(config: Config, tmp_path: Path) -> None:
    (tmp_path / "own_files.py").write_text(
        (tmp_path / "power.py").read_text().replace("class Model(", f"{OWN_DATA}class Model(")
    )
    step = load_step_module("steps.prepare")
    data = {"source": "power.csv", "lookup": str(tmp_path / "power.py")}
    inputs = step.Inputs.model_validate({"workload": "own_files", "data": data, "workflow": "w"})
    assert list(step.REUSE.data_read(inputs)) == ["power.csv", str(tmp_path / "power.py")]
