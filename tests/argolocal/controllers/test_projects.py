"""Projects that share a home: each Deployment runs its own code, and errors are reported
immediately."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.runner.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects
from tests.argolocal.controllers.releases import is_rolled_out, make_serving_workflow
from tests.ports import free_port
from tests.waiting import until

SERVER = """
import http.server, os, pathlib, sys
from rekindle.errors import {error}
from rekindle.step import StepInputs, StepOutputs

FOLDER = pathlib.Path(__file__).parents[1]

class Inputs(StepInputs): pass
class Outputs(StepOutputs): pass

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{{FOLDER.name}} {{sys.executable}}".encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)

def run(inputs):
    print("a server starts", flush=True)
    if (FOLDER / "wrong").exists():
        raise {error}("the data of the world are wrong: remove the file.")
    http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8080), Handler).serve_forever()
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    home = tmp_path / "home"
    yield {**os.environ, "REKINDLE_HOME": str(home)}
    LocalCluster(home).down()


def make_project(folder: Path, error: str = "ConfigError") -> Path:
    (folder / "steps").mkdir(parents=True)
    (folder / "steps/server.py").write_text(SERVER.format(error=error))
    (folder / "pyproject.toml").write_text("[tool.rekindle]\n")
    return folder


def make_virtual_environment(folder: Path) -> str:
    """Return a virtual environment with all packages of the environment of this process."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(path for path in sys.path if path.endswith("-packages"))
    (site_packages,) = folder.glob("lib/*/site-packages")
    (site_packages / "all.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    return str(folder / "bin/python")


def run_command(
    *arguments: str, folder: Path, environment: dict[str, str], python: str = sys.executable
) -> Any:
    line = [python, "-P", "-m", "rekindle", *arguments]
    return subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=150
    )


@pytest.mark.slow
def test_a_failed_release_restarts_after_a_rollback_scaled_it_down_and_up(
    tmp_path: Path, environment: dict[str, str]
):
    folder = make_project(tmp_path / "wind")
    port = free_port()
    (folder / "w.yaml").write_text(json.dumps(make_serving_workflow("wind", port)))
    (folder / "wrong").touch()
    assert (
        run_command(
            "run", "--manifest", "w.yaml", folder=folder, environment=environment
        ).returncode
        == 1
    )
    objects = LocalObjects(LocalCluster(tmp_path / "home"))
    objects.patch("Deployment", "wind", {"spec": {"replicas": 0}})
    (folder / "wrong").unlink()
    objects.patch("Deployment", "wind", {"spec": {"replicas": 1}})
    assert "ProgressDeadlineExceeded" not in json.dumps(objects.find("Deployment", "wind"))
    until(
        "it serves",
        lambda: is_rolled_out((objects.find("Deployment", "wind") or {}).get("status") or {}),
    )


@pytest.mark.slow
def test_two_projects_in_one_home_each_serve_their_own_code_with_their_own_python(
    tmp_path: Path, environment: dict[str, str]
):
    pythons = {"wind": sys.executable, "power": make_virtual_environment(tmp_path / "venv")}
    for name, python in pythons.items():
        folder = make_project(tmp_path / name)
        port = free_port()
        (folder / "w.yaml").write_text(json.dumps(make_serving_workflow(name, port)))
        result = run_command(
            "run", "--manifest", "w.yaml", folder=folder, environment=environment, python=python
        )
        assert result.returncode == 0, result.stdout + result.stderr
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
            assert answer.read().decode() == f"{name} {python}"


@pytest.mark.slow
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("error", "code"), [("ConfigError", 78), ("CodeError", 70), ("DataError", 65)]
)
def test_a_server_with_a_fatal_error_restarts_only_when_the_run_is_resumed(
    tmp_path: Path, environment: dict[str, str], error: str, code: int
):
    folder = make_project(tmp_path / "wind", error)
    port = free_port()
    (folder / "w.yaml").write_text(json.dumps(make_serving_workflow("wind", port)))
    (folder / "wrong").touch()
    result = run_command("run", "--manifest", "w.yaml", folder=folder, environment=environment)
    assert result.returncode == 1
    assert "cause   the data of the world are wrong: remove the file." in result.stderr
    (log,) = (tmp_path / "home/deployments/wind/logs").glob("*.log")
    assert log.read_text().count("a server starts") == 1
    assert f"ended with code {code}, which a restart cannot fix" in log.read_text()
    (folder / "wrong").unlink()
    result = run_command("resume", folder=folder, environment=environment)
    assert result.returncode == 0, result.stdout + result.stderr

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        assert answer.read().decode().startswith("wind ")
