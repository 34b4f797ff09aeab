"""Tests of `rekindle check` of a training program, as a real process: one sentence before the run
says how much work a loss would cost."""

import json
from pathlib import Path

import pytest

from tests.rekindle.cli.processes import ROOT, run_rekindle
from tests.rekindle.program.losing_programs import (
    BEGINS_AGAIN,
    CONTINUES,
    ENDS_WITHOUT_SAVE,
    IGNORES_RESUME,
    NEVER_SAVES,
    SAVES_TORN,
    START,
)

CONFIG = {
    "name": "slopes",
    "workload": "slopes",
    "data": {"source": "rows.csv"},
    "program": {"command": ["train.py", "{checkpoints}"], "resume": ["{checkpoint}"]},
}


def check(folder: Path, body: str) -> tuple[int, str]:
    """Return the exit code and the last line of `rekindle check`."""
    workload = (ROOT / "tests/rekindle/program/slopes.py").read_text()
    (folder / "slopes.py").write_text(workload)
    (folder / "rows.csv").write_text("x\n1\n")
    (folder / "train.py").write_text(START + body)
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    result = run_rekindle("check", "config.yaml", cwd=folder)
    return result.returncode, result.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_program_that_continues_passes(tmp_path: Path) -> None:
    code, line = check(tmp_path, CONTINUES)
    assert code == 0, line


@pytest.mark.fast_cases(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ENDS_WITHOUT_SAVE, "has saved nothing (ended"),
        (IGNORES_RESUME, "after its restart, so it began again: set program.resume"),
        (BEGINS_AGAIN, "began again at its first step"),
        (NEVER_SAVES.replace("60", "3600"), "has saved nothing (ran for 120 s): after a loss it"),
        (SAVES_TORN, "Let it write under another name and rename it"),
    ],
    ids=["ends", "ignores", "again", "never", "torn"],
)
def test_work_that_would_be_lost_is_one_line(tmp_path: Path, body: str, message: str) -> None:
    code, line = check(tmp_path, body)
    assert code == 2, line
    assert line.startswith("error       the program "), line
    assert message in line
