"""Tests of the folder in which a program runs."""

from pathlib import Path

import pytest

from rekindle.errors import ConfigError
from rekindle.program.processes.working_folder import check_program_file, find_working_folder
from rekindle.project.folders import REFERENCE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, which the pods find after the reference project."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "jobs/finetune.py").touch()
    monkeypatch.setenv("REKINDLE_PATH", f"{REFERENCE}:{tmp_path}")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "--epochs", "3"],
        ["jobs/finetune.py"],
        ["python", "-u", "train.py"],
        ["-m", "jobs.finetune"],
        ["accelerate", "launch", "train.py"],
        ["./train.sh"],
    ],
)
def test_a_program_of_the_project_finds_its_files(folder: Path, command: list[str]) -> None:
    assert find_working_folder(command) == folder


def test_a_missing_file_is_an_error_of_the_config() -> None:
    with pytest.raises(ConfigError, match=r'"trian\.py".* does not exist'):
        check_program_file(["trian.py"])


@pytest.mark.parametrize("first_word", ["train.py", "accelerate", "-m"])
def test_other_commands_are_accepted(first_word: str) -> None:
    check_program_file([first_word, "jobs.finetune"])
