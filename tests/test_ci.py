"""CI runs each test once, so a flaky test cannot pass by repetition."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT

FIRST_TIME = """
from pathlib import Path

def test_it():
    runs = Path("runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) > 1
"""


@pytest.mark.slow
def test_a_test_that_only_passes_when_repeated_fails_ci(tmp_path: Path) -> None:
    commands = (ROOT / ".ci/run").read_text().splitlines()
    assert commands.count("make test") == 1, commands
    (options,) = re.findall(
        r"^test: install\n\t@\$\(BIN\)/python (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(FIRST_TIME)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    command = [sys.executable, *shlex.split(options.replace("-n 4", "-n 1"))]
    completed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert completed.returncode == 1, completed.stdout
    assert "1 failed" in completed.stdout, completed.stdout
    assert (tmp_path / "runs").read_text() == "x"
