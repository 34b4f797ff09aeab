"""Tests of steps as commands: typed inputs, outputs in the right files, and clear errors."""

import base64
import json
import math
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from argolocal.common import program
from rekindle.errors import ConfigError, DataError
from rekindle.step import (
    MAX_PARAMETER_BYTES,
    Artifact,
    StepInputs,
    StepOutputs,
    decode_parameter,
    encode_parameter,
    format_output,
    format_parameter,
    load_step_module,
    main,
    parse_inputs,
    write_outputs,
)
from rekindle.workload import load as load_workload

STEPS = [
    f"steps.{name}"
    for name in ("prepare", "train", "evaluate", "release", "serve", "verify", "report")
]


class Inputs(StepInputs):
    text: str = Field(description="any text")
    count: int = Field(default=1, ge=1)
    rate: float = 0.5
    flag: bool = False
    items: list[int] = Field(default_factory=list)
    table: dict[str, float] = Field(default_factory=dict)


@given(
    st.builds(
        Inputs,
        text=st.text(),
        count=st.integers(1, 10**9),
        rate=st.floats(allow_nan=False, allow_infinity=False),
        flag=st.booleans(),
        items=st.lists(st.integers()),
        table=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
    )
)
def test_every_value_survives_conversion_to_an_argo_parameter(inputs: Inputs) -> None:
    texts = {name: format_parameter(getattr(inputs, name)) for name in Inputs.model_fields}
    assert parse_inputs(Inputs, texts) == inputs


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({}, ["--text is missing"]),
        ({"text": "x", "count": "0"}, ["--count is '0'", "greater than or equal to 1"]),
        ({"text": "x", "items": "[1,"}, ["--items is '[1,'", "JSON"]),
        ({"text": "x", "items": '["a"]'}, ["--items.0 is 'a'", "integer"]),
    ],
)
def test_the_error_of_a_wrong_input_has_its_value_and_rule(
    texts: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_inputs(Inputs, texts)
    assert all(word in str(caught.value) for word in words)


def test_outputs_are_written_to_their_target_files(tmp_path: Path) -> None:
    class Outputs(StepOutputs):
        report: Artifact
        rows: int

    (tmp_path / "created").mkdir()
    (tmp_path / "created" / "a").write_text("1")
    targets = {"report": tmp_path / "deep" / "report", "rows": tmp_path / "deep" / "rows"}
    write_outputs(Outputs(report=tmp_path / "created", rows=3), targets)
    assert (targets["report"] / "a").read_text() == "1"
    assert targets["rows"].read_text() == "3"


@pytest.mark.parametrize(
    "value", [{"a": "{{workflow.uid}}"}, ["{{{=1}}}", {"b": {}}], {"{{x}}": [[]]}]
)
def test_an_output_of_json_has_no_template_tags(value: object) -> None:
    text = format_output("report", value)
    assert "{{" not in text
    assert json.loads(text) == value


def test_an_output_of_text_with_a_template_tag_is_refused() -> None:
    with pytest.raises(
        DataError, match=r'the output note is .*workflow.uid.* must not contain "{{"'
    ):
        format_output("note", "id {{workflow.uid}}")


class Interval(BaseModel):
    low: float
    high: float


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda number: number, "figure"),
        (lambda number: {"rmse": 1.0, "auc": number}, "figure.auc"),
        (lambda number: [{"auc": (0.5, number)}], r"figure\[0\].auc\[1\]"),
        (lambda number: Interval(low=number, high=1.0), "figure.low"),
    ],
)
def test_an_output_that_is_not_finite_is_refused_by_its_name(
    number: float, wrap: Callable[[float], Any], place: str
) -> None:
    with pytest.raises(
        DataError, match=rf"^the output {place} is {number}: it must be a finite number"
    ):
        format_output("figure", wrap(number))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rate", "nan"),
        ("rate", "inf"),
        ("table", '{"a": NaN}'),
        ("table", '{"a": 1e999}'),
        ("items", "[Infinity]"),
    ],
)
def test_an_input_that_is_not_finite_is_refused_by_its_flag(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--{name}\S* is "):
        parse_inputs(Inputs, {"text": "", name: text})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rekindle", "step", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_a_misspelt_step_flag_or_output_is_one_clear_error() -> None:
    unknown = run("steps.prepar")
    assert unknown.returncode == 78
    assert 'Did you mean "steps.prepare"?' in unknown.stderr
    output = run("steps.prepare", "--output", "digst=x")
    assert output.returncode == 78
    assert 'Did you mean "digest"?' in output.stderr
    missing = run("steps.prepare")
    assert missing.returncode == 78
    assert "is missing" in missing.stderr
    assert "Traceback" not in unknown.stderr + output.stderr + missing.stderr


@pytest.mark.parametrize("name", STEPS)
def test_every_step_documents_its_inputs(name: str) -> None:
    step = load_step_module(name)
    assert step.__doc__
    assert f"rekindle step {name} " in step.__doc__
    undocumented = [n for n, f in [*step.Inputs.model_fields.items()] if not f.description]
    assert not undocumented


def test_loading_steps_imports_no_heavy_library_and_a_replay_no_torch() -> None:
    heavy = ["torch", "mlflow", "polars", "sklearn", "matplotlib", "boto3"]
    code = (
        f"import sys, json; from rekindle.step import load_step_module; [load_step_module(name) for name in {STEPS}]; "
        f"loaded = [m for m in {heavy} if m in sys.modules]; import steps.fraud.replays; "
        "print(json.dumps([loaded, 'torch' in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == [[], False]


def test_a_module_without_the_names_of_a_workload_is_rejected() -> None:
    with pytest.raises(ConfigError, match="lacks Data, Model"):
        load_workload("json")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_workload("no.such.module")


def test_a_misspelt_optional_function_of_a_workload_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipes = load_workload("tests.rekindle.training.recipes")
    schedule = recipes.schedule  # type: ignore[attr-defined]
    monkeypatch.delattr(recipes, "schedule")
    monkeypatch.setattr(recipes, "shedule", schedule, raising=False)
    with pytest.raises(
        ConfigError, match=r'defines shedule\(step, total\).* Did you mean "schedule"\?'
    ):
        load_workload("tests.rekindle.training.recipes")


def test_a_workload_function_with_wrong_arguments_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipes = load_workload("tests.rekindle.training.recipes")
    monkeypatch.setattr(recipes, "schedule", lambda step: 1.0)
    with pytest.raises(
        ConfigError, match=r"schedule\(step\) cannot be called as schedule\(step, total\)"
    ):
        load_workload("tests.rekindle.training.recipes")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("raise ValueError('no such column')", 70, "ValueError: no such column."),
        ("json.loads('{')", 70, "JSONDecodeError: Expecting property name"),
        ("open('/no/such/file')", 70, "FileNotFoundError: "),
        ("raise TimeoutError('busy')", 1, ""),
        ("raise urllib3.exceptions.HTTPError('503')", 1, ""),
        ("import xgboots", 70, "ModuleNotFoundError: No module named 'xgboots'"),
    ],
)
def test_an_exception_of_a_step_has_its_line_and_is_retried_only_if_transient(
    tmp_path: Path, line: str, code: int, message: str
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.rekindle]\n")
    step = tmp_path / "steps/clean.py"
    step.parent.mkdir()

    step.write_text(
        "import json, urllib3\nfrom rekindle import StepInputs, StepOutputs\n"
        "class Inputs(StepInputs): ...\nclass Outputs(StepOutputs): ...\n"
        f"def run(inputs):\n    {line}\n"
    )

    command = [sys.executable, "-m", "rekindle", "step", "steps.clean"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == code, process.stderr
    assert "Traceback" in process.stderr

    if message:
        assert f"\nerror: {step}:6: {message}" in process.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dta=x"], '--dta=x is not an input of steps.prepare. Did you mean "--data"?'),
        (
            ["--data"],
            "argument --data: expected one argument. See `rekindle step steps.prepare --help`.",
        ),
        (["x"], "x is not an input of steps.prepare."),
    ],
)
def test_a_wrong_flag_is_one_line_with_the_nearest_flag(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["steps.prepare", *arguments]) == 78
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_the_status_of_a_run_gets_no_password_from_an_error_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv(program.TERMINATION_LOG_VARIABLE, str(log))
    assert main(["steps.prepare", "http://ann:hunter2@h/a?sig=hunter2"]) == 78
    assert log.read_text().startswith("http://h/a?… is not an input")
    assert "hunter2" not in capsys.readouterr().err


def test_a_small_parameter_cannot_fill_the_memory_of_a_command() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(MAX_PARAMETER_BYTES + 1), 9)).decode()
    assert len(bomb) < 20_000
    with pytest.raises(ValueError, match="more than 10,000,000 bytes after decompression"):
        decode_parameter(bomb)

    text = "x" * MAX_PARAMETER_BYTES
    assert decode_parameter(encode_parameter(text)) == text


def test_an_incomplete_parameter_is_refused() -> None:
    packed = base64.b64encode(zlib.compress(b"{}")[:-1]).decode()
    with pytest.raises(ValueError, match="it is incomplete"):
        decode_parameter(packed)
