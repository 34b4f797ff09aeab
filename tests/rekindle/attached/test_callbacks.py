"""Tests of the callbacks for Hugging Face and Lightning, in a single process whose training is
interrupted."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parent / "callback_programs.py"

RunProgram = Callable[..., dict[str, str]]


@pytest.fixture
def run_program(tmp_path: Path) -> RunProgram:
    """Run a program with a callback; return the values that it prints."""

    def run(kind: str, folder: str, *, kill_at: int = 0) -> dict[str, str]:
        memory = tmp_path / folder / "shm"
        memory.mkdir(parents=True, exist_ok=True)
        variables: dict[str, Any] = {
            **os.environ,
            "REKINDLE_SHM": str(memory),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, str(PROGRAMS), kind, str(tmp_path / folder), str(kill_at)]
        result = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert result.returncode == (-9 if kill_at else 0), result.stderr
        pairs = [line.split("=", 1) for line in result.stdout.splitlines() if "=" in line]
        return {name: value for name, value in pairs}

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["huggingface", "lightning"])
def test_a_killed_trainer_continues_with_the_same_samples_and_weights(
    run_program: RunProgram, kind: str
) -> None:
    undisturbed = run_program(kind, "undisturbed")
    run_program(kind, "killed", kill_at=7)
    resumed = run_program(kind, "killed")
    assert (undisturbed["resumed"], resumed["resumed"]) == ("False", "True")
    assert undisturbed["samples"].endswith(resumed["samples"])
    assert len(resumed["samples"]) < len(undisturbed["samples"])
    assert resumed["weights"] == undisturbed["weights"]
