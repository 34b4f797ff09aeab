"""Benchmarks of single commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REKINDLE = str(Path(sys.executable).with_name("rekindle"))
FINISHED = (0, 3)  # exit codes of `rekindle run`: model released, model not released


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "REKINDLE_HOME": str(home)}


def rekindle(
    folder: Path, home: Path, *arguments: str, codes: tuple[int, ...] = FINISHED
) -> dict[str, Any]:
    """Run a command of Rekindle in `folder`, and return its JSON output. Raises SystemExit for
    other exit codes."""
    command = [REKINDLE, *arguments, "-o", "json"]
    done = subprocess.run(
        command, cwd=folder, env=environment(home), stdout=subprocess.PIPE, text=True
    )
    if done.returncode not in codes or not done.stdout:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def down(home: Path) -> None:
    """Stop the services and servers of a home."""
    subprocess.run([REKINDLE, "down"], env=environment(home), stdout=subprocess.DEVNULL)
