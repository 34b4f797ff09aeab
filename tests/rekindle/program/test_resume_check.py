"""Tests of the check of a program before a run, with programs that lose work in different ways."""

from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import CodeError, ConfigError
from rekindle.program.config import ProgramConfig, check_model_placeholders
from rekindle.program.resume_check import ResumeCheck
from tests.rekindle.program.losing_programs import (
    BEGINS_AGAIN,
    CONTINUES,
    ENDS_WITHOUT_SAVE,
    FAILING_PROGRAM,
    IGNORES_RESUME,
    NEVER_SAVES,
    SAVES_ELSEWHERE,
    SAVES_IN_PLACE,
    SAVES_JSON_IN_PLACE,
    SAVES_TORN,
    SAVES_UNKNOWN_NAME,
    START,
)


def check(folder: Path, body: str, timeout_s: float = 20.0, **settings: Any) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(START + body)
    program = ProgramConfig.model_validate(
        {
            "command": [str(script), "{checkpoints}"],
            "resume": ["{checkpoint}"],
            **settings,
        }
    )
    return ResumeCheck(program, {}, folder, folder / "check", timeout_s).run()


def test_a_program_that_continues_is_accepted(tmp_path: Path) -> None:
    findings = check(tmp_path, CONTINUES)
    assert findings["checkpoint"].startswith("step-")
    assert findings["bytes"] > 0
    assert findings["interval_s"] > 0
    assert findings["resumed_at"].startswith("step-")


@pytest.mark.parametrize(
    ("body", "expected"),
    [(SAVES_IN_PLACE, True), (SAVES_JSON_IN_PLACE, False)],
    ids=["no end", "json"],
)
def test_saves_of_which_a_kill_leaves_nothing_are_a_finding(
    tmp_path: Path, body: str, expected: bool
) -> None:
    assert check(tmp_path, body)["counted_at_end"] is expected


@pytest.mark.parametrize(
    ("body", "timeout_s", "message"),
    [
        (NEVER_SAVES, 1.0, r"has saved nothing \(ran for \d+ s\): after a loss it would begin"),
        (ENDS_WITHOUT_SAVE, 20.0, r"has saved nothing \(ended \d+ s\)"),
        (SAVES_UNKNOWN_NAME, 20.0, r"the name of model\.dat has neither a step, such as"),
        (SAVES_ELSEWHERE, 20.0, r"but \S+/snapshot\.pt in its working folder"),
        (SAVES_TORN, 2.0, r"nothing that is complete .* latest\.json: .*rename it"),
        (IGNORES_RESUME, 20.0, r"did not open step-\d+\.json after its restart"),
        (BEGINS_AGAIN, 20.0, r"opened step-\d+\.json .* began again at its first step"),
        (FAILING_PROGRAM, 20.0, r"exit code 1: ValueError: no data"),
    ],
    ids=["never", "ends", "unknown", "elsewhere", "torn", "ignores", "again", "fails"],
)
def test_work_that_would_be_lost_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, timeout_s: float, message: str
) -> None:
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    with pytest.raises(CodeError, match=message):
        check(tmp_path, body, timeout_s)


def test_a_command_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(CodeError, match=r"trainer-of-mine cannot be started \(No such file"):
        check(tmp_path, "", command=["trainer-of-mine"])


def test_a_placeholder_of_an_unknown_setting_is_told() -> None:
    program = ProgramConfig.model_validate({"command": ["train.py", "{model.hiden}"]})
    with pytest.raises(ConfigError, match=r'hiden.*Did you mean "?hidden'):
        check_model_placeholders(program, {"hidden": 3})
