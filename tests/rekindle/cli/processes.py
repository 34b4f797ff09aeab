"""Run the command `rekindle` as real processes, with small manifests."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests import builders
from tests.forked import Prompt
from tests.waiting import until

REKINDLE = str(Path(sys.executable).with_name("rekindle"))
ROOT = Path(__file__).parents[3]
DEMO = str(ROOT / "configs/demo.yaml")


def run_rekindle(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return start_prompt().run(
        [str(argument) for argument in args], cwd, {**os.environ, **environment}
    )


@cache
def start_prompt() -> Prompt:
    """Return the process that forks commands, which all tests of this process share."""
    return Prompt(ROOT, os.environ).__enter__()


def make_shell_workflow(*scripts: tuple[str, str], **spec: Any) -> dict[str, Any]:
    """Return a manifest that runs (name, shell script) pairs one after the other."""
    tasks = []
    templates = []

    for index, (name, script) in enumerate(scripts):
        tasks.append(
            {"name": name, "template": name} | ({"depends": scripts[index - 1][0]} if index else {})
        )
        templates.append(
            {"name": name, "script": {"image": "python:3.11", "command": ["sh"], "source": script}}
        )

    main_template = {"name": "main", "dag": {"tasks": tasks}}

    return builders.make_workflow(main_template, *templates, name="four", **spec)


def write_manifest(path: Path, manifest: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(manifest))
    return str(path)


def wait_until_started(process: subprocess.Popen[Any], tmp_path: Path) -> list[psutil.Process]:
    """Wait until the step of the run prints `begun`, and return the processes of the run."""
    logs = tmp_path / ".rekindle/runs"
    until(
        "the step to begin",
        lambda: any("begun" in log.read_text() for log in logs.glob("*/logs/*.log")),
    )
    return psutil.Process(process.pid).children(recursive=True)
