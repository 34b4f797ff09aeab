"""Tests of the first command of the README, from nothing to a deployed model; all tests of this
module check the same run. The fast tests run the command with less data; the slow tests run the
command exactly as documented."""

import base64
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import (
    README,
    RECIPES,
    ROOT,
    SERVING,
    Shell,
    list_blocks,
    open_shell,
    typed_by_hand,
)
from tests.docs.pictures import TERMINAL

# The first test of this file waits for a whole run, so a test may take up to 1,000 seconds.
pytestmark = pytest.mark.timeout(1000)
ROOTLESS = os.geteuid() != 0
LESS_DATA = (
    " --set 'data.source=simulate://7?cards=150&terminals=300&days=70'"
    " --set train.epochs=1 --set gate.minimum.auc=0.5"
)


@dataclass
class FirstRun:
    """A run of the command, and observations of other processes while it ran."""

    run_command: Shell
    command: str
    output: str
    # command lines of the run's processes
    command_lines: set[str] = field(default_factory=set)
    # files and processes that another user could access
    accesses: list[str] = field(default_factory=list)
    # port → answers to another user
    answers: dict[str, set[str]] = field(default_factory=dict)
    # port → command line of the process that listens
    owners: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.run_command.folder

    def observe(self, existing_paths: set[str]) -> None:
        """Record the command lines, and try to access the run as another user."""
        processes = processes_of(self.folder)
        ports = find_listening(processes)
        self.command_lines.update({read_command_line(process) for process in processes})
        self.owners.update({f"{host}:{port}": owner for (host, port), owner in ports.items()})

        if ROOTLESS:
            return

        paths = [str(self.folder / ".rekindle"), *(shared_paths() - existing_paths)]
        task = {
            "paths": paths,
            "processes": [process.pid for process in processes],
            "ports": list(ports),
        }

        command = [sys.executable, str(ROOT / "tests/stranger.py")]

        completed = subprocess.run(
            command,
            input=json.dumps(task),
            capture_output=True,
            text=True,
            cwd="/",
            start_new_session=True,
        )

        assert completed.returncode == 0, completed.stderr
        report = json.loads(completed.stdout)
        self.accesses += report["reached"]

        for port, texts in report["answers"].items():
            self.answers.setdefault(port, set()).update(texts)


def read_command_line(process: psutil.Process) -> str:
    """Return the command line of a process; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def processes_of(folder: Path) -> list[psutil.Process]:
    """Find the processes of the project in `folder` by command line, environment or working
    directory."""
    processes = []
    for process in psutil.process_iter():
        try:
            texts = [*process.cmdline(), *process.environ().values(), process.cwd()]
        except psutil.Error:
            continue
        if any(str(folder) in text for text in texts):
            processes.append(process)
    return processes


def find_listening(processes: list[psutil.Process]) -> dict[tuple[str, int], str]:
    """Return {(address, port): command line} of listening processes."""
    ports = {}
    for process in processes:
        try:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports[connection.laddr[0], connection.laddr[1]] = read_command_line(process)
        except psutil.Error:
            continue
    return ports


def shared_paths() -> set[str]:
    """Return paths in shared directories that may belong to the run."""
    names = [(parent, name) for parent in ("/dev/shm", "/tmp") for name in ("rekindle", "step-")]
    return {str(path) for parent, name in names for path in Path(parent).glob(f"{name}*")}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(LESS_DATA, id="less data"),
        pytest.param("", id="as documented", marks=pytest.mark.slow),
    ],
)
def first_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FirstRun]:
    """Run `make run` in a folder with only the configs, and observe it until it ends."""
    folder = tmp_path_factory.mktemp("first")
    shutil.copytree(ROOT / "configs", folder / "configs")
    folder.chmod(0o755)

    # the parent folders are readable, like a home directory that others may read
    for parent in folder.parents[: len(folder.parents) - 2]:
        parent.chmod(parent.stat().st_mode | stat.S_IROTH | stat.S_IXOTH)

    existing_paths = shared_paths()
    with open_shell(folder) as run_command, ThreadPoolExecutor(1) as pool:
        first_run = FirstRun(run_command, RECIPES["make run"] + request.param, "")
        running = pool.submit(run_command, first_run.command)
        # an observation costs half a second of a core
        while not wait([running], timeout=4).done:
            first_run.observe(existing_paths)

        result = running.result()
        assert result.returncode == 0, f"{result.stdout}{result.stderr}"
        first_run.output = result.stdout
        first_run.observe(existing_paths)
        yield first_run


def find_figures(text: str) -> dict[str, float]:
    """Return the first figure of each metric in the summary of a run; last digits depend on the
    processor."""
    words = re.sub("<[^>]*>", " ", text)
    pairs = re.findall(r"\b(ap|auc|baseline has ap)\s+(\d\.\d{4})", words)
    return {name: float(value) for name, value in reversed(pairs)}


def test_the_first_command_serves_a_model_as_documented(first_run: FirstRun) -> None:
    (trial,) = re.findall(r"^try it +(.*)$", first_run.output, re.MULTILINE)
    (score,) = json.loads(first_run.run_command(trial).stdout)["predictions"]
    assert 0 < score < 1
    # use only blocks with `make run`, because the other blocks are for a cluster
    requests, *_ = list_blocks(SERVING, "sh")
    for request in requests.commands:
        answer = first_run.run_command(request.replace("127.0.0.1:8080", trial.split("/")[2]))
        assert answer.returncode == 0, request
        assert "error" not in json.loads(answer.stdout), request


def test_the_terminal_picture_matches_a_run(first_run: FirstRun) -> None:
    words = [
        line.split("  ")[0]
        for line in first_run.output[first_run.output.index("verdict") :].splitlines()
    ]
    shown_text = unescape(TERMINAL.read_text()).replace("\xa0", " ")
    missing_words = [word for word in words if f">{word} " not in shown_text]
    assert missing_words == [], "python -m tests.docs.pictures"
    if LESS_DATA not in first_run.command:
        assert find_figures(shown_text) == pytest.approx(
            find_figures(first_run.output), abs=0.01
        ), "python -m tests.docs.pictures"


def test_the_next_commands_of_the_readme_work(first_run: FirstRun) -> None:
    following = [command for command in typed_by_hand(README) if command not in RECIPES]
    for command in following:
        # this command is another whole run, which tests/docs/test_stories.py tests
        if not command.startswith("rekindle run"):
            completed = first_run.run_command(command)
            assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"


def test_no_secret_is_in_a_log_in_mlflow_or_in_a_command_line(first_run: FirstRun) -> None:
    secrets = secrets_of(first_run.folder)
    assert len(secrets) == 3
    status = json.loads(first_run.run_command("rekindle status -o json").stdout)["runs"][0]
    logs = first_run.run_command(f"rekindle logs {status['run']}").stdout
    command_lines = "\n".join(first_run.command_lines)
    assert "rekindle.training" in command_lines
    assert len(logs) > 100
    files = [file for file in (first_run.folder / ".rekindle").rglob("*") if file.is_file()]

    content_by_file = {
        str(file): file.read_bytes()
        for file in files
        if not {"services", "Secret"} & set(file.parts)
    }

    assert any(name.endswith("mlflow.db") for name in content_by_file)
    content_by_place = {
        "command lines": command_lines.encode(),
        "logs": logs.encode(),
    } | content_by_file
    secret_forms = [
        form for secret in secrets for form in (secret.encode(), base64.b64encode(secret.encode()))
    ]
    assert [
        place
        for place, text in content_by_place.items()
        if any(form in text for form in secret_forms)
    ] == []


def secrets_of(folder: Path) -> set[str]:
    """Return the secrets of the home (the directory of runs)."""
    secrets: set[str] = set()
    for file in (folder / ".rekindle/services").glob("*.json"):
        service_record: dict[str, Any] = json.loads(file.read_text())
        if "pid" not in service_record:
            secrets.update(set(service_record.values()))
    return secrets


@pytest.mark.skipif(ROOTLESS, reason="needs root")
def test_another_user_cannot_access_a_run(first_run: FirstRun) -> None:
    assert first_run.accesses == []
    services = [owner for owner in first_run.owners.values() if "local.services." in owner]
    assert len(services) == 2, first_run.owners
    assert any("rekindle.training" in owner for owner in first_run.owners.values()), (
        first_run.owners
    )

    for port, texts in first_run.answers.items():
        answer = "\n".join(texts)
        owner = first_run.owners[port]
        assert not [secret for secret in secrets_of(first_run.folder) if secret in answer], owner
        expected_text = answer.replace("/theirs", "")
        assert "rekindle_training" not in answer, (owner, answer)
        assert "theirs" not in expected_text, (owner, answer)

        if "local.services." in owner:
            assert {text[9:12] for text in texts if text.startswith("HTTP/1.1 ")} <= {
                "400",
                "401",
                "403",
            }, answer
