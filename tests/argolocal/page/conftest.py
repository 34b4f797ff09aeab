"""Fixtures: a home with a few runs, the process of its page, and a browser."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.common.json_text import to_json
from tests.browser import PageServer, close_browser_after, start_page
from tests.browser import browser as browser

MARKUP = "<img src=x onerror=document.title='hacked'>"


def run_workflow(home: Path, manifest: dict[str, Any]) -> None:
    """Run a workflow to its end with `argolocal run`; the run may fail."""
    file = home.parent / "workflow.json"
    file.write_text(to_json(manifest))
    command = [sys.executable, "-m", "argolocal", "run", str(file), "--yes"]
    environ = {**os.environ, "ARGOLOCAL_HOME": str(home)}
    process = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert process.returncode in (0, 1), process.stderr


def make_page_workflow(name: str, tasks: list[dict[str, Any]], **spec: object) -> dict[str, Any]:
    """Return a workflow with the templates `say` and `fail`."""
    say = {
        "name": "say",
        "inputs": {"parameters": [{"name": "text", "value": "hello"}]},
        "container": {"image": "bash:5", "command": ["echo", "{{inputs.parameters.text}}"]},
    }
    fail = {
        "name": "fail",
        "container": {
            "image": "bash:5",
            "command": ["bash", "-c", f"echo 'about to fail'; echo \"error: {MARKUP}\"; exit 3"],
        },
    }
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": "main",
            "templates": [{"name": "main", "dag": {"tasks": tasks}}, say, fail],
            **spec,
        },
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a run that succeeded and a run that failed."""
    home = tmp_path_factory.mktemp("page") / "home"
    for manifest in (
        make_page_workflow("good-run", [{"name": "first", "template": "say"}]),
        make_page_workflow(
            "bad-run",
            [
                {"name": "first", "template": "say"},
                {"name": "second", "template": "fail", "depends": "first"},
                {"name": "third", "template": "say", "depends": "second"},
            ],
        ),
    ):
        run_workflow(home, manifest)
    return home


@pytest.fixture(scope="module")
def page(home: Path) -> Iterator[PageServer]:
    with start_page(home) as server:
        yield server


# close the browser after the end of all fixtures
@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    close_browser_after(Path(__file__).parent, nextitem)
