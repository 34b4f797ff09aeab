"""Skipped tests are reported, and fail in CI unless TESTS_MAY_SKIP allows them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no moon here")
@pytest.mark.parametrize("night", range(2))
def test_tides(night): ...

def test_the_sea():
    pytest.skip("no sea here")

def test_land(): ...
"""


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"CI": "true", "TESTS_MAY_SKIP": "no moon here"}, 1),
        ({"CI": "true", "TESTS_MAY_SKIP": "no moon here, no sea here"}, 0),
        ({}, 0),
        ({"CI": "true"}, 1),
    ],
)
def test_a_skip_is_reported_and_fails_in_ci_unless_allowed(
    tmp_path: Path, settings: dict[str, str], code: int
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]")

    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CI", "TESTS_MAY_SKIP", "PYTEST_ADDOPTS")
    }

    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips"]
    environment = inherited | {"PYTHONPATH": str(ROOT)} | settings
    completed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert completed.returncode == code, completed.stdout
    assert "NOT TESTED HERE: 2 tests, no moon here" in completed.stdout
    assert "NOT TESTED HERE: 1 tests, no sea here" in completed.stdout
    assert ("unless TESTS_MAY_SKIP has: " in completed.stdout) == bool(code)
