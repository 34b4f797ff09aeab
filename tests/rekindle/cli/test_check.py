"""Tests of `rekindle check` and `rekindle lint` of a project's workload, as real processes."""

import json
from pathlib import Path

import pytest

from tests.rekindle.cli.processes import run_rekindle
from tests.rekindle.training.untrainable import FAULTS, TEMPLATE, write_workload

FRAUD = {
    "name": "fraud",
    "workload": "steps.fraud",
    "families": ["trees"],
    "train": {"validation": 0.1},
    "data": {
        "source": "simulate://7?cards=150&terminals=300&days=91",
        "window": "8w",
        "test_weeks": 1,
    },
}


def write_config(folder: Path, name: str, code: str) -> str:
    sections = write_workload(folder, name, code)
    config = {"name": name, "workload": sections["workload"], "data": sections["data"]}
    (folder / "config.yaml").write_text(json.dumps(config))
    return "config.yaml"


def test_check_shows_model_memory_step_and_prediction(tmp_path: Path) -> None:
    config = write_config(tmp_path, "sound", TEMPLATE)
    result = run_rekindle("check", config, "--rows", "500", cwd=tmp_path)
    assert result.returncode == 0, result.stderr

    for line in (
        "data        500 rows",
        "batch       float32 [32, 2]",
        "model       Sequential: 133 parameters",
    ):
        assert line in result.stdout

    for line in (
        "1.weight: float32 [32, 2]",
        "bytes of training state per worker",
        "FLOPs",
        "metrics     rmse ",
    ):
        assert line in result.stdout


@pytest.mark.slow
def test_check_names_the_end_of_a_window_and_takes_the_scheduled_time(tmp_path: Path) -> None:
    (tmp_path / "fraud.yaml").write_text(json.dumps(FRAUD))
    result = run_rekindle("check", "fraud.yaml", cwd=tmp_path)
    assert result.returncode == 2

    for part in (
        "the data is from 2024-01-01 to 2024-03-31. data.window (8w) sets both",
        "-p scheduled-time=TIME",
    ):
        assert part in result.stdout

    result = run_rekindle(
        "check", "fraud.yaml", "-p", "scheduled-time=2024-03-25", "-o", "json", cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout
    assert json.loads(result.stdout)["rows"] > 0, result.stdout
    result = run_rekindle("check", "fraud.yaml", "-p", "time=2024-03-25", cwd=tmp_path)
    assert result.returncode == 2
    assert "uses only the parameter scheduled-time" in result.stderr


@pytest.mark.slow
def test_an_untrainable_workload_ends_with_exit_code_2(tmp_path: Path) -> None:
    code, sentence = FAULTS["buffer"]
    config = write_config(tmp_path, "buffer", code)
    result = run_rekindle("lint", config, cwd=tmp_path, REKINDLE_CACHE=str(tmp_path / "c"))
    assert result.returncode == 2
    assert sentence in result.stderr
    result = run_rekindle("check", config, "-o", "json", cwd=tmp_path)
    assert result.returncode == 2
    report = json.loads(result.stdout)
    assert report["rows"] == 1000
    assert sentence in report["error"]
