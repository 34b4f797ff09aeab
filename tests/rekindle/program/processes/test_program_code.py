"""A run with a program counts as unchanged only if the files of the program can be determined."""

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.cache import run_code
from rekindle.program.processes.program_code import explain_unknown_code, find_script


def find_reason(project: Path, *command: str, **settings: Any) -> str:
    section = json.dumps({"command": command, **settings})
    container = {"args": ["-m", "rekindle.program.agent", f"--program={section}"]}
    manifest = {"spec": {"templates": [{"container": container}]}}
    folders = [str(project)]
    modules = run_code.list_named_modules(manifest, folders)
    return explain_unknown_code(run_code.program_sections(manifest), modules, folders)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "tools").mkdir(parents=True)
    for name in ("train.py", "tools/run.py", "tools/__init__.py", "run.sh", "a b.py"):
        (folder / name).write_text("")
    (tmp_path / "outside.py").write_text("")
    monkeypatch.setenv("REKINDLE_PATH", str(folder))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "{checkpoints}"],
        ["python", "-u", "tools/run.py"],
        ["-m", "tools.run"],
        ["torchrun", "--nproc_per_node=2", "train.py", "--epochs", "3"],
        ["torchrun", "-m", "tools.run"],
        ["-m", "torch.distributed.run", "train.py"],
        ["-m", "pydantic"],
    ],
)
def test_the_files_of_a_python_program_are_covered(project: Path, command: list[str]) -> None:
    assert find_reason(project, *command) == ""


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "run.sh"],
        ["./run.sh"],
        ["python", "-c", "import train"],
        ["../outside.py"],
        ["a b.py"],
        ["missing.py"],
        ["-m", "missing"],
        ["train_{model.kind}.py"],
        ["torchrun", "--no-python", "train.py"],
        ["torchrun"],
    ],
)
def test_a_program_whose_files_cannot_be_told_is_never_taken_for_unchanged(
    project: Path, command: list[str]
) -> None:
    assert "it is unknown which files the program" in find_reason(project, *command)


def test_a_program_that_imports_from_other_folders_is_never_taken_for_unchanged(
    project: Path,
) -> None:
    reason = find_reason(project, "train.py", environment={"PYTHONPATH": "/shared"})
    assert "program.environment.PYTHONPATH" in reason


def test_a_command_that_is_known_only_at_run_time_is_never_taken_for_unchanged() -> None:
    assert "only at run time" in explain_unknown_code(['{"command": "{{x}}"}'], [], [])
    assert explain_unknown_code(["{}", "{{inputs.parameters.program}}"], [], []) == ""


def test_a_command_without_arguments_runs_no_script() -> None:
    assert find_script(["accelerate"]) == ""
    assert find_script(["accelerate", "launch", "train.py"]) == "train.py"
