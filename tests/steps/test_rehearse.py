"""Rehearsals: a workload that cannot be trained is refused after a few rows, and a sound one passes."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.manifest.config import load_config
from rekindle.training.rehearsal import CERTAIN_ERRORS
from steps import rehearse
from tests.commands import ROOT
from tests.rekindle.training.untrainable import FAULTS, TEMPLATE, optimizer, write_workload

GENERATED = ("class Data(DataConfig):\n    def first_rows(self, rows, folder):\n        return None\n", "synthetic://7")

MOVING = """
class Data(DataConfig):
    until: str = ""

    def at(self, time):
        return self.model_copy(update={"until": time.isoformat()})
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find workloads in the test's folder."""
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def report(sections: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    values = {name: sections[name] for name in ("workload", "data", "model", "train")}
    step = rehearse.Inputs(**values, **inputs)
    try:
        return rehearse.run(step).report
    finally:
        shutil.rmtree(step.workdir)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_untrainable_workload_is_refused_after_a_few_rows(fault: str, tmp_path: Path) -> None:
    code, sentence = FAULTS[fault]
    result = report(write_workload(tmp_path, fault, code))
    assert result["error"].startswith(sentence)
    assert "\n" not in result["error"]
    assert result["exit_code"] in CERTAIN_ERRORS[result["stage"]]


@pytest.mark.parametrize("config", ["digits", *(pytest.param(n, marks=pytest.mark.slow) for n in ("language", "demo"))])
def test_the_example_workloads_pass_the_rehearsal(config: str) -> None:
    values = load_config(ROOT / f"configs/{config}.yaml", environment={}).config.model_dump(mode="json")
    result = report(values, thorough=True)
    assert "error" not in result
    assert result["flops_per_step"] > 0
    assert all(0 <= value < 10 for value in result["metrics"].values())


def test_the_report_describes_batch_model_and_step(tmp_path: Path) -> None:
    result = report(write_workload(tmp_path, "sound", TEMPLATE), thorough=True)
    assert result["rows"] == 1000
    assert [value["shape"] for value in result["batch"]] == [[32, 2], [32]]
    weight = {"name": "1.weight", "shape": [32, 2], "dtype": "float32", "trained": True}
    assert weight in result["parameters"]
    assert result["state_bytes"] >= 3 * 4 * (32 * 2 + 32 + 32 + 1 + 2 + 2)
    assert result["flops_per_step"] == 8 * 3 * 2 * 32 * (2 * 32 + 32)  # forward, and backward to inputs and weights
    assert result["metrics"].keys() == {"rmse"}
    assert isinstance(result["prediction"], float)


def test_a_model_is_built_from_example_facts_if_its_data_is_unavailable(tmp_path: Path) -> None:
    definition, source = GENERATED
    code = optimizer("return torch.optim.LBFGS(model.parameters())").replace("Data = DataConfig", definition)
    code = code.replace("BatchNorm1d(2)", 'BatchNorm1d(facts["columns"])')
    sections = write_workload(tmp_path, "unknown", code) | {"data": {"source": source}}
    unknown = report(sections)
    assert unknown["stage"] == "facts"
    assert unknown["stage"] not in CERTAIN_ERRORS
    sections |= write_workload(tmp_path, "known", f"{code}\n\nexample_facts = {{'columns': 2}}\n")
    result = report(sections | {"data": {"source": source}})
    assert result["error"].startswith("the workload's optimizer LBFGS cannot make a step")
    assert result["rows"] == 0


def test_too_few_rows_do_not_refuse_a_workload(tmp_path: Path) -> None:
    sections = write_workload(tmp_path, "few", TEMPLATE)
    (tmp_path / "power.csv").write_text("hour,temperature,kwh\n1,2,3\n")
    result = report(sections)
    assert result["stage"] not in CERTAIN_ERRORS or result["exit_code"] not in CERTAIN_ERRORS[result["stage"]]


@pytest.mark.parametrize(
    ("empty", "problem"),
    [("rows[:0]", "power.csv does not contain a row of the moving window."), ("1 / 0", "ZeroDivisionError: ")],
)
def test_an_empty_window_is_an_error_that_names_its_end(tmp_path: Path, empty: str, problem: str) -> None:
    code = TEMPLATE.replace("Data = DataConfig", MOVING)
    code = code.replace("    cut = int", f'    rows = {empty} if data.until > "2024-04" else rows\n    cut = int')
    sections = write_workload(tmp_path, f"moving {len(empty)}", code)
    result = report(sections, thorough=True, scheduled="2024-05-06T03:00:00Z")
    assert (result["stage"], problem in result["error"]) == ("prepare", True)
    assert "2024-05-06T03:00:00Z" in result["error"] and "-p scheduled-time=TIME" in result["error"]
    result = report(sections, thorough=True, scheduled="2024-03-25T03:00:00Z")
    assert ("error" not in result, result["rows"]) == (True, 3000), "its first rows could lie before the window"


def test_a_large_model_is_built_without_memory(tmp_path: Path) -> None:
    code = TEMPLATE.replace("nn.Linear(2, section.hidden)", "nn.Linear(2, 1_000_000_000)")
    code = code.replace("nn.Linear(section.hidden, 1)", "nn.Linear(1_000_000_000, 1)")
    result = report(write_workload(tmp_path, "large", code))
    assert "error" not in result
    assert result["device"] == "meta"
    assert result["state_bytes"] > 48_000_000_000
