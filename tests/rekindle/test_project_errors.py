"""Tests of exceptions in user code: the error message contains the line of the code, and only
temporary exceptions are retried."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import CodeError, ConfigError, DataError, RekindleError, StorageError
from rekindle.project import load_module
from rekindle.project.user_exceptions import convert_exception
from rekindle.workload import load as load_workload

STEP = """
from rekindle import StepInputs, StepOutputs

class Inputs(StepInputs):
    source: str = ""

class Outputs(StepOutputs):
    rows: int

def run(inputs):
    return Outputs(rows=rows(inputs.source))

def rows(source):
    {}
"""


def make_library_error(
    name: str, base: type[Exception] = Exception, module: str = "library"
) -> type[Exception]:
    return type(name, (base,), {"__module__": module})


def raise_and_catch(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as raised:
        return raised


@pytest.mark.parametrize(
    "error",
    [
        *(
            KeyError("kwh"),
            ValueError("x"),
            TypeError("x"),
            AttributeError("x"),
            ImportError("xgboost"),
            IndexError(3),
        ),
        *(
            ZeroDivisionError("x"),
            AssertionError(),
            NotImplementedError(),
            RecursionError("x"),
            Exception("x"),
        ),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (32x2 and 3x8)"),
        RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu"),
        *(
            FileNotFoundError(2, "no such file"),
            PermissionError(13, "denied"),
            IsADirectoryError(21, "x"),
        ),
        make_library_error("ColumnNotFoundError", module="polars.exceptions")("kwh"),
        DataError("rows are missing"),
    ],
    ids=repr,
)
def test_a_recurring_exception_is_not_retried(error: Exception) -> None:
    converted = convert_exception(raise_and_catch(error))  # type: ignore[arg-type]
    assert isinstance(converted, CodeError)
    assert converted.exit_code == 70
    assert type(error).__name__ in str(converted)
    assert "tests/rekindle/test_project_errors.py:" in str(converted)


@pytest.mark.parametrize(
    "error",
    [
        *(
            ConnectionResetError(104, "reset"),
            TimeoutError("x"),
            OSError(28, "no space left"),
            BrokenPipeError(32, "x"),
        ),
        *(MemoryError(), EOFError(), StorageError("s3 is unavailable")),
        make_library_error("ClientError", module="botocore.exceptions")("SlowDown"),
        make_library_error("ReadTimeoutError", module="urllib3.exceptions")("x"),
        make_library_error("RemoteProtocolError", module="httpx")("x"),
        make_library_error("OperationalError", make_library_error("ConnectionFailure"))("x"),
        make_library_error("OutOfMemoryError", RuntimeError, "torch")("CUDA out of memory"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        raise_and_catch(ValueError("no rows"), TimeoutError("the feature store")),
        ExceptionGroup("two", [ValueError("x"), ConnectionError("x")]),
    ],
    ids=repr,
)
def test_a_transient_exception_is_retried(error: Exception) -> None:
    converted = convert_exception(raise_and_catch(error, error.__cause__))  # type: ignore[arg-type]
    assert not isinstance(converted, CodeError)
    assert converted.exit_code == RekindleError.exit_code


def test_an_exception_of_rekindle_is_not_an_error_in_user_code() -> None:
    try:
        load_workload(3)  # type: ignore[arg-type]
    except Exception as error:
        assert not isinstance(convert_exception(error), CodeError)
    else:
        raise AssertionError("it did not fail")


def test_a_long_multiline_text_becomes_one_line_with_the_location() -> None:
    text = str(convert_exception(raise_and_catch(ValueError("a\n" * 2000))))  # type: ignore[arg-type]
    assert "\n" not in text
    assert len(text) < 800
    assert "test_project_errors.py:" in text


def test_an_assertion_without_a_text_shows_its_line() -> None:
    try:
        raise AssertionError
    except AssertionError as error:
        assert str(convert_exception(error)).endswith("AssertionError: raise AssertionError.")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a project that consists of a pipelines folder."""
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines/own.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def run_step(project: Path, body: str, **environment: str) -> Any:
    (project / "own_step.py").write_text(STEP.format(body))
    command = [sys.executable, "-m", "rekindle", "step", "own_step", "--source=kwh"]
    return subprocess.run(command, capture_output=True, text=True, cwd=project, timeout=60)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("return {}[source]", 70, "own_step.py:14: KeyError: 'kwh'."),
        (
            "import json; return json.loads(source)",
            70,
            "own_step.py:14: JSONDecodeError: Expecting value: line 1 column 1 (char 0).",
        ),
        ("import xgboots", 70, "own_step.py:14: ModuleNotFoundError: No module named 'xgboots'."),
        (
            "return open(source)",
            70,
            "own_step.py:14: FileNotFoundError: [Errno 2] No such file or directory: 'kwh'.",
        ),
        (
            "raise TimeoutError('the feature store')",
            1,
            "own_step.py:14: TimeoutError: the feature store.",
        ),
        (
            "import own_other",
            70,
            "own_other.py:3: SyntaxError: '(' was never closed (own_other.py, line 3).",
        ),
    ],
)
def test_an_exception_of_a_step_ends_with_one_line_and_its_location(
    project: Path, body: str, code: int, words: str
) -> None:
    (project / "own_other.py").write_text("\n\nx = (\n")
    process = run_step(project, body)
    assert process.returncode == code, process.stderr
    assert process.stderr.splitlines()[-1].startswith("error: ")
    assert process.stderr.strip().endswith(words)
    assert "Traceback" in process.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import os\nimport xgboots\n",
            r"own_model.py:2: ModuleNotFoundError: No module named 'xgboots'\. Install it",
        ),
        (
            "from os import nowhere\n",
            r"own_model.py:1: ImportError: cannot import name 'nowhere' from 'os'",
        ),
        ("def f(:\n", r"own_model.py:1: SyntaxError: "),
    ],
)
def test_the_error_for_a_missing_import_has_its_line(project: Path, text: str, words: str) -> None:
    (project / "own_model.py").write_text(text)
    sys.modules.pop("own_model", None)
    with pytest.raises(ConfigError, match=words) as refused:
        load_module("own_model", "workload", ())
    assert "Did you mean" not in str(refused.value)


def test_a_missing_module_of_the_project_has_the_nearest_name(project: Path) -> None:
    (project / "steps").mkdir()
    (project / "steps/card.py").write_text("")
    (project / "own_importing.py").write_text("import steps.crad\n")
    words = (
        r"own_importing.py:1: ModuleNotFoundError: .* does not have that module. Did you mean"
        r" \"steps.card\"\?"
    )
    with pytest.raises(ConfigError, match=words):
        load_module("own_importing", "workload", ())


def test_a_long_word_in_an_exception_does_not_stop_the_step() -> None:
    error = raise_and_catch(TypeError(1_000_000 * "a"))
    assert isinstance(error, Exception)
    converted = convert_exception(error)
    assert len(str(converted)) < 2000
