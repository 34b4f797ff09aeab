"""Benchmarks of single commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REKINDLE_PROGRAM = str(Path(sys.executable).with_name("rekindle"))
# exit codes of `rekindle run`: model released, model not released
FINISHED_EXIT_CODES = (0, 3)


def make_environment(home_folder: Path) -> dict[str, str]:
    return {**os.environ, "REKINDLE_HOME": str(home_folder)}


def rekindle(
    working_folder: Path,
    home_folder: Path,
    *command_arguments: str,
    allowed_exit_codes: tuple[int, ...] = FINISHED_EXIT_CODES,
) -> dict[str, Any]:
    """Run a command of Rekindle in `working_folder`, and return its JSON output. Raises SystemExit
    for an exit code that is not in `allowed_exit_codes`."""
    command = [REKINDLE_PROGRAM, *command_arguments, "-o", "json"]
    completed_process = subprocess.run(
        command,
        cwd=working_folder,
        env=make_environment(home_folder),
        stdout=subprocess.PIPE,
        text=True,
    )
    if completed_process.returncode not in allowed_exit_codes or not completed_process.stdout:
        raise SystemExit(f"{' '.join(command)} ended with exit code {completed_process.returncode}")
    return json.loads(completed_process.stdout)


def stop_services(home_folder: Path) -> None:
    """Stop the services and servers of a home (a directory of runs)."""
    subprocess.run(
        [REKINDLE_PROGRAM, "down"], env=make_environment(home_folder), stdout=subprocess.DEVNULL
    )
