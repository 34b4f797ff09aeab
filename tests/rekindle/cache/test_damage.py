"""A damaged artifact is not reused: the step runs, and later runs reuse the new artifact."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle import project
from rekindle.storage import Store

STEP = '''
"""Makes numbers."""
from rekindle import Artifact, Reuse, StepInputs, StepOutputs
REUSE = Reuse()

class Inputs(StepInputs):
    seed: str

class Outputs(StepOutputs):
    numbers: Artifact

def run(inputs):
    folder = inputs.workdir / "numbers"
    folder.mkdir()
    (folder / "a").write_text("12345")
    return Outputs(numbers=folder)
'''


@pytest.fixture
def run_step(tmp_path: Path, s3: Store, s3_environment: dict[str, str]) -> Callable[..., str]:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps/making.py").write_text(STEP)

    def run(task: str, reuse: str = "yes") -> str:
        """Run the step as a task of a run, store its artifact, and return its standard error."""
        task_key = f"{tmp_path.name}-{task}/making".replace("_", "-")
        target = tmp_path / task

        flags = [
            f"--seed={tmp_path.name}",
            f"--entry={task_key}",
            f"--reuse={reuse}",
            f"--output=numbers={target}",
        ]

        command = [sys.executable, "-P", "-m", "rekindle", "step", "steps.making", *flags]
        variables = os.environ | s3_environment | {project.PATH_VARIABLE: str(tmp_path)}
        result = subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stderr
        assert (target / "a").read_text() == "12345"
        s3.upload(target, f"{task_key}/numbers")

        return result.stderr

    return run


def damage_artifact(store: Store, folder: Path, task: str) -> None:
    """Change a byte of the artifact that a task has stored."""
    store.put(f"{folder.name}-{task}/making/numbers/a".replace("_", "-"), b"12346")


def test_a_damaged_artifact_is_computed_again_and_replaced(
    tmp_path: Path, s3: Store, run_step: Callable[..., str]
) -> None:
    assert run_step("first") == ""
    assert "cached: outputs of" in run_step("second")

    damage_artifact(s3, tmp_path, "first")
    said = run_step("third")
    assert "cannot be reused, so the step runs" in said
    assert "in the cache: it was changed" in said
    assert "-third/making, computed in" in run_step("fourth")


@pytest.mark.slow
def test_without_the_cache_a_damaged_entry_is_replaced(
    tmp_path: Path, s3: Store, run_step: Callable[..., str]
) -> None:
    run_step("first")
    damage_artifact(s3, tmp_path, "first")
    assert run_step("second", reuse="no") == ""
    assert "-second/making, computed in" in run_step("third")
