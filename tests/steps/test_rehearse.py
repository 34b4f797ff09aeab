"""Tests of rehearsals: a workload that cannot be trained is refused after a few rows, and a correct
workload is accepted."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.manifest.config import load_config
from rekindle.step import format_output
from rekindle.training.rehearsal import CERTAIN_EXIT_CODES_BY_STAGE
from rekindle.view.rehearsal_report import format_rehearsal_report
from steps import rehearse
from tests.commands import ROOT
from tests.rekindle.training.untrainable import (
    EMBED,
    FAULTS,
    MEAN,
    TEMPLATE,
    make_network_source,
    make_optimizer_source,
    write_workload,
)

GENERATED = (
    "class Data(DataConfig):\n    def first_rows(self, rows, folder):\n        return None\n",
    "synthetic://7",
)

MOVING_WINDOW_CODE = """
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


def make_report(sections: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    values = {name: sections[name] for name in ("workload", "data", "model", "train")}
    values["program"] = sections.get("program") or {}
    step = rehearse.Inputs(**values, **inputs)
    try:
        return rehearse.run(step).report
    finally:
        shutil.rmtree(step.workdir)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_untrainable_workload_is_refused_after_a_few_rows(fault: str, tmp_path: Path) -> None:
    code, sentence = FAULTS[fault]
    result = make_report(write_workload(tmp_path, fault, code))
    assert result["error"].startswith(sentence)
    assert "\n" not in result["error"]
    assert result["exit_code"] in CERTAIN_EXIT_CODES_BY_STAGE[result["stage"]]


@pytest.mark.parametrize(
    "config", ["digits", *(pytest.param(n, marks=pytest.mark.slow) for n in ("language", "demo"))]
)
def test_the_example_workloads_pass_the_rehearsal(config: str) -> None:
    values = load_config(ROOT / f"configs/{config}.yaml", environment={}).config.model_dump(
        mode="json"
    )
    result = make_report(values, thorough=True)
    assert "error" not in result
    families = result.get("families", {"": result}).values()
    assert sum(family.get("flops_per_step", 0) for family in families) > 0
    assert all(0 <= value < 10 for family in families for value in family["metrics"].values())


def test_the_report_describes_batch_model_and_step(tmp_path: Path) -> None:
    result = make_report(write_workload(tmp_path, "sound", TEMPLATE), thorough=True)
    assert result["rows"] == 1000
    assert [value["shape"] for value in result["batch"]] == [[32, 2], [32]]
    weight = {"name": "1.weight", "shape": [32, 2], "dtype": "float32", "trained": True}
    assert weight in result["parameters"]
    assert result["state_bytes"] >= 3 * 4 * (32 * 2 + 32 + 32 + 1 + 2 + 2)
    # the FLOPs of the forward pass, and of the backward pass to inputs and weights
    assert result["flops_per_step"] == 8 * 3 * 2 * 32 * (2 * 32 + 32)
    assert result["metrics"].keys() == {"rmse"}
    assert isinstance(result["prediction"], float)


def test_a_model_is_built_from_example_facts_if_its_data_is_unavailable(tmp_path: Path) -> None:
    definition, source = GENERATED
    code = make_optimizer_source("return torch.optim.LBFGS(model.parameters())").replace(
        "Data = DataConfig", definition
    )
    code = code.replace("BatchNorm1d(2)", 'BatchNorm1d(facts["columns"])')
    sections = write_workload(tmp_path, "unknown", code) | {"data": {"source": source}}
    unknown = make_report(sections)
    assert unknown["stage"] == "facts"
    assert unknown["stage"] not in CERTAIN_EXIT_CODES_BY_STAGE
    sections.update(
        write_workload(tmp_path, "known", f"{code}\n\nexample_facts = {{'columns': 2}}\n")
    )
    result = make_report(sections | {"data": {"source": source}})
    assert result["error"].startswith("the workload's optimizer LBFGS cannot make a step")
    assert result["rows"] == 0


def test_too_few_rows_do_not_refuse_a_workload(tmp_path: Path) -> None:
    sections = write_workload(tmp_path, "few", TEMPLATE)
    (tmp_path / "power.csv").write_text("hour,temperature,kwh\n1,2,3\n")
    result = make_report(sections)
    assert (
        result["stage"] not in CERTAIN_EXIT_CODES_BY_STAGE
        or result["exit_code"] not in CERTAIN_EXIT_CODES_BY_STAGE[result["stage"]]
    )


@pytest.mark.parametrize(
    ("empty", "problem"),
    [
        ("rows[:0]", "power.csv does not contain a row of the moving window."),
        ("1 / 0", "ZeroDivisionError: "),
    ],
)
def test_an_empty_window_is_an_error_that_names_its_end(
    tmp_path: Path, empty: str, problem: str
) -> None:
    code = TEMPLATE.replace("Data = DataConfig", MOVING_WINDOW_CODE)
    code = code.replace(
        "    cut = int", f'    rows = {empty} if data.until > "2024-04" else rows\n    cut = int'
    )
    sections = write_workload(tmp_path, f"moving {len(empty)}", code)
    result = make_report(sections, thorough=True, scheduled="2024-05-06T03:00:00Z")
    assert result["stage"] == "prepare"
    assert problem in result["error"]
    assert "2024-05-06T03:00:00Z" in result["error"]
    assert "-p scheduled-time=TIME" in result["error"]
    result = make_report(sections, thorough=True, scheduled="2024-03-25T03:00:00Z")
    assert "error" not in result
    assert result["rows"] == 3000, "its first rows could lie before the window"


def test_a_large_model_is_built_without_memory(tmp_path: Path) -> None:
    code = TEMPLATE.replace("nn.Linear(2, section.hidden)", "nn.Linear(2, 1_000_000_000)")
    code = code.replace("nn.Linear(section.hidden, 1)", "nn.Linear(1_000_000_000, 1)")
    result = make_report(write_workload(tmp_path, "large", code))
    assert "error" not in result
    assert result["device"] == "meta"
    assert result["state_bytes"] > 48_000_000_000


FITTED_MODEL_CODE = """

def fit(model, samples):
    import torch

    inputs, kwh = samples.batch(torch.arange(len(samples)))
    model[-2].bias.copy_(kwh.mean())


families = {"fitted": rekindle.Fitted(network, fit)}
"""
NEGATIVES = "(model(inputs) - kwh).square().mean() + model(torch.rand_like(inputs)).square().mean()"


def make_fitted_workload(code: str, loss: str = MEAN, fit: str = FITTED_MODEL_CODE) -> str:
    """Return a workload with a fitted family instead of a model."""
    code = code.replace("def model(", "def network(").replace(MEAN, loss)
    return (
        code.replace(
            "    inputs, kwh = batch\n", "    import torch\n\n    inputs, kwh = batch\n"
        ).replace(
            "from rekindle import DataConfig", "import rekindle\nfrom rekindle import DataConfig"
        )
        + fit
    )


def test_the_loss_of_a_fitted_family_may_draw_random_negatives(tmp_path: Path) -> None:
    result = make_report(
        write_workload(tmp_path, "negatives", make_fitted_workload(TEMPLATE, NEGATIVES)),
        thorough=True,
    )
    assert "error" not in result
    assert result["families"]["fitted"]["validation"].keys() == {"loss"}


def test_a_fit_may_draw_random_numbers_from_torch(tmp_path: Path) -> None:
    code = make_fitted_workload(
        TEMPLATE, fit=FITTED_MODEL_CODE.replace("kwh.mean()", "kwh.mean() + torch.rand(1)")
    )
    draws = '        self.rows = torch.from_numpy(np.load(path / f"{split}.npy"))\n'
    assert draws in code
    code = code.replace(draws, f"{draws}        self.order = torch.randperm(len(self.rows))\n")
    assert "error" not in make_report(write_workload(tmp_path, "random fit", code), thorough=True)


@pytest.mark.parametrize(
    ("loss", "fit", "sentence"),
    [
        (
            MEAN.replace(".mean()", ".mean() * random.random()"),
            FITTED_MODEL_CODE,
            "family fitted: `loss` was ",
        ),
        (
            MEAN,
            FITTED_MODEL_CODE.replace("kwh.mean()", "kwh.mean() + random.random()"),
            'family fitted: the family "fitted" was',
        ),
    ],
)
def test_random_numbers_that_no_seed_repeats_are_refused_where_they_are(
    loss: str, fit: str, sentence: str, tmp_path: Path
) -> None:
    code = "import random\n" + make_fitted_workload(TEMPLATE, loss, fit)
    result = make_report(write_workload(tmp_path, f"unseeded {len(loss)}", code), thorough=True)
    assert result["error"].startswith(sentence)
    assert result["exit_code"] == 78


ROWS = '        self.rows = torch.from_numpy(np.load(path / f"{split}.npy"))\n'
BATCH = "    inputs, kwh = batch\n"
PREDICT = "    import torch\n\n    return model("
EXAMPLES = "    for hour, temp"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (ROWS, f"{ROWS}        if split == 'train':\n            self.rows[24 * 60]\n"),
        (BATCH, f"{BATCH}    [1][1 - HOURS // 2000]\n"),
        (EXAMPLES, f"    dataset(path, 'test').rows[24 * 20]\n{EXAMPLES}"),
        (PREDICT, PREDICT.replace("return", "[1][1 - HOURS // 2000]\n    return")),
    ],
    ids=["dataset", "loss", "examples", "predict"],
)
def test_rows_that_are_too_few_for_the_workload_are_no_error(
    old: str, new: str, tmp_path: Path
) -> None:
    assert old in TEMPLATE
    code = TEMPLATE.replace(old, new).replace(
        "    cut = int", "    globals()['HOURS'] = len(rows)\n    cut = int"
    )
    sections = write_workload(tmp_path, f"month {len(new)}", code)
    result = make_report(sections, thorough=True)
    assert "error" not in result
    assert result["rows"] == 3000
    assert "IndexError" in result["first_rows_error"]
    assert "first rows are not enough, so all rows were used: " in format_rehearsal_report(result)
    assert make_report(sections)["may_need_more_rows"], (
        "`lint` and `run` try all rows before they refuse the workload"
    )


def test_an_error_that_all_rows_have_is_reported_as_it_is(tmp_path: Path) -> None:
    code = TEMPLATE.replace(ROWS, f"{ROWS}        self.rows[24 * 365]\n")
    result = make_report(write_workload(tmp_path, "year", code), thorough=True)
    assert "IndexError" in result["error"]
    assert "on a few rows" not in result["error"]
    assert "first_rows_error" not in result
    assert "--rows" not in format_rehearsal_report(result)


def test_a_newest_row_without_a_time_zone_is_named(tmp_path: Path) -> None:
    code = TEMPLATE.replace(
        "Prepared(rows=len(rows))", 'Prepared(rows=len(rows), newest="2024-03-01T12:00:00")'
    )
    result = make_report(write_workload(tmp_path, "zone", code), thorough=True)
    assert result["error"].startswith(
        "newest of `prepare` is '2024-03-01T12:00:00': it must be an ISO 8601 text with"
    )


UNPREPARED = make_network_source(EMBED, "return self.net(x)").replace(
    "Data = DataConfig", GENERATED[0]
)
LARGE_MODEL_CODE = make_network_source(
    "self.ids = nn.Embedding(100_000_001, 1, sparse=True)", "return self.net(x)"
)


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        (LARGE_MODEL_CODE, True),
        (UNPREPARED, True),
        (LARGE_MODEL_CODE.replace("sparse=True)", "sparse=True).requires_grad_(False)"), False),
        (LARGE_MODEL_CODE.replace("sparse=True", "sparse=False"), False),
    ],
)
def test_sparse_gradients_are_refused_even_if_no_step_is_tried(
    code: str, is_refused: bool, tmp_path: Path
) -> None:
    sections = write_workload(tmp_path, f"large {len(code)}", code)
    sections.update({"data": {"source": GENERATED[1]}} if "first_rows" in code else {})
    result = make_report(sections)
    assert ("has sparse gradients" in result.get("error", "")) == is_refused
    assert ("error" in result) == is_refused
    if is_refused:
        assert result["exit_code"] in CERTAIN_EXIT_CODES_BY_STAGE[result["stage"]]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_figure_that_is_undefined_after_one_step_is_null(value: str, tmp_path: Path) -> None:
    code = TEMPLATE.replace("((predictions - truths) ** 2).mean() ** 0.5", f'float("{value}")')
    result = make_report(write_workload(tmp_path, f"undefined {value}", code), thorough=True)
    assert "error" not in result
    assert result["metrics"] == {"rmse": None}
    assert "metrics     rmse not a number" in format_rehearsal_report(result)
    assert format_output("report", result)


PROGRAM = {
    "workload": "tests.rekindle.program.slopes",
    "data": {"source": "none://1"},
    "model": {},
    "train": {},
    "program": {"command": ["train.py"]},
}


COUNTER = """
import os, sys, time
path = sys.argv[1] + "/state.json"
step = int(open(path).read()) if os.path.exists(path) else 0
while True:
    time.sleep(1.5)
    step += 1
    with open(path + ".tmp", "w") as file:
        file.write(str(step))
    os.replace(path + ".tmp", path)
"""


def test_a_program_is_killed_and_started_again_before_the_run(tmp_path: Path) -> None:
    script = tmp_path / "counter.py"
    script.write_text(COUNTER)
    program = {"command": [str(script), "{checkpoints}"]}
    result = make_report(PROGRAM | {"program": program}, thorough=True)
    assert result["rows"] == 20
    assert result["program"]["checkpoint"] == "state.json"
    lines = format_rehearsal_report(result).splitlines()
    assert lines[0] == "data        20 rows"
    assert "resume      continued after SIGKILL; the next save was state.json" in lines


def test_an_invalid_test_row_of_a_program_is_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.rekindle.program.slopes.examples", lambda path: [({"y": 1}, 2.0)])
    result = make_report(PROGRAM, thorough=True)
    assert result["stage"] == "examples"
    assert result["error"].startswith("`examples` gives test row 0, which is not a valid instance")
