"""The README's first command, from nothing to a model that answers: one run, and all that look at it."""

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

from tests.commands import README, RECIPES, ROOT, SERVING, Shell, blocks, shell, typed_by_hand
from tests.docs.pictures import TERMINAL

pytestmark = pytest.mark.timeout(600)  # a whole run
ROOTLESS = os.geteuid() != 0


@dataclass
class FirstRun:
    """What was typed and said, and what was seen from outside meanwhile."""

    typed: Shell
    said: str
    lines: set[str] = field(default_factory=set)  # the command lines of its processes
    reached: list[str] = field(default_factory=list)  # by another user: files, processes
    answers: dict[str, set[str]] = field(default_factory=dict)  # to another user, by port
    owners: dict[str, str] = field(default_factory=dict)  # the command line of who listens there

    @property
    def folder(self) -> Path:
        return self.typed.folder

    def look(self, before: set[str]) -> None:
        """Note the command lines, and send another user of the machine."""
        processes = processes_of(self.folder)
        ports = listening(processes)
        self.lines |= {line(process) for process in processes}
        self.owners |= {f"{host}:{port}": owner for (host, port), owner in ports.items()}
        if ROOTLESS:
            return
        places = [str(self.folder / ".rekindle"), *(shared_places() - before)]
        task = {"places": places, "processes": [process.pid for process in processes], "ports": list(ports)}
        command = [sys.executable, str(ROOT / "tests/stranger.py")]
        done = subprocess.run(
            command, input=json.dumps(task), capture_output=True, text=True, cwd="/", start_new_session=True
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        self.reached += answer["reached"]
        for port, texts in answer["said"].items():
            self.answers.setdefault(port, set()).update(texts)


def line(process: psutil.Process) -> str:
    """Its command line; "" when it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes of the project in `folder`: by their command line, environment or working directory."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values(), process.cwd()]
        except psutil.Error:
            continue
        if any(str(folder) in word for word in words):
            found.append(process)
    return found


def listening(processes: list[psutil.Process]) -> dict[tuple[str, int], str]:
    """Addresses and ports on which they listen, with their command lines."""
    ports = {}
    for process in processes:
        try:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports[connection.laddr[0], connection.laddr[1]] = line(process)
        except psutil.Error:
            continue
    return ports


def shared_places() -> set[str]:
    """What lies where everybody may write, and could be of a run."""
    names = [(parent, name) for parent in ("/dev/shm", "/tmp") for name in ("rekindle", "step-")]
    return {str(path) for parent, name in names for path in Path(parent).glob(f"{name}*")}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstRun]:
    """`make run` in a folder that has only the configs; somebody looks at it from outside until it has ended."""
    folder = tmp_path_factory.mktemp("first")
    shutil.copytree(ROOT / "configs", folder / "configs")
    folder.chmod(0o755)
    for parent in folder.parents[: len(folder.parents) - 2]:  # as a home directory that others may look into
        parent.chmod(parent.stat().st_mode | stat.S_IROTH | stat.S_IXOTH)
    before = shared_places()
    with shell(folder) as typed, ThreadPoolExecutor(1) as pool:
        first = FirstRun(typed, "")
        running = pool.submit(typed, RECIPES["make run"])
        while not wait([running], timeout=4).done:  # a look costs half a second of a core
            first.look(before)
        done = running.result()
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        first.said = done.stdout
        first.look(before)
        yield first


def figures(text: str) -> dict[str, float]:
    """The first figure of each metric in the summary of a run; another processor may give other last digits."""
    words = re.sub("<[^>]*>", " ", text)
    pairs = re.findall(r"\b(ap|auc|baseline has ap)\s+(\d\.\d{4})", words)
    return {name: float(value) for name, value in reversed(pairs)}


def test_the_first_command_ends_with_a_model_that_answers_as_the_pages_say(first: FirstRun) -> None:
    (trial,) = re.findall(r"^try it +(.*)$", first.said, re.MULTILINE)
    (score,) = json.loads(first.typed(trial).stdout)["predictions"]
    assert 0 < score < 1
    for request in [command for block in blocks(SERVING, "sh") for command in block.commands]:
        answer = first.typed(request.replace("127.0.0.1:8080", trial.split("/")[2]))
        assert answer.returncode == 0 and "error" not in json.loads(answer.stdout), request


def test_the_picture_of_the_terminal_is_of_such_a_run(first: FirstRun) -> None:
    words = [each.split("  ")[0] for each in first.said[first.said.index("verdict") :].splitlines()]
    shown = unescape(TERMINAL.read_text()).replace("\xa0", " ")
    assert all(f">{word} " in shown for word in words), "python -m tests.docs.pictures"
    assert figures(shown) == pytest.approx(figures(first.said), abs=0.01), "python -m tests.docs.pictures"


def test_what_the_readme_types_next_works(first: FirstRun) -> None:
    following = [command for command in typed_by_hand(README) if command not in RECIPES]
    for command in following:
        if not command.startswith("rekindle run"):  # another whole run: docs/test_stories.py
            done = first.typed(command)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_no_secret_is_in_a_log_in_mlflow_or_in_a_command_line(first: FirstRun) -> None:
    secrets = secrets_of(first.folder)
    assert len(secrets) == 3
    status = json.loads(first.typed("rekindle status -o json").stdout)["runs"][0]
    logs = first.typed(f"rekindle logs {status['run']}").stdout
    lines = "\n".join(first.lines)
    assert "rekindle.training" in lines and len(logs) > 100
    files = [file for file in (first.folder / ".rekindle").rglob("*") if file.is_file()]
    kept = {str(file): file.read_bytes() for file in files if not {"services", "Secret"} & set(file.parts)}
    assert any(name.endswith("mlflow.db") for name in kept)
    places = {"command lines": lines.encode(), "logs": logs.encode()} | kept
    forms = [form for secret in secrets for form in (secret.encode(), base64.b64encode(secret.encode()))]
    assert [place for place, text in places.items() if any(form in text for form in forms)] == []


def secrets_of(folder: Path) -> set[str]:
    """The secrets of the home."""
    found: set[str] = set()
    for file in (folder / ".rekindle/services").glob("*.json"):
        content: dict[str, Any] = json.loads(file.read_text())
        if "pid" not in content:
            found |= set(content.values())
    return found


@pytest.mark.skipif(ROOTLESS, reason="needs root")
def test_another_user_reads_writes_and_ends_nothing(first: FirstRun) -> None:
    assert first.reached == []
    services = [owner for owner in first.owners.values() if "local.services." in owner]
    assert len(services) == 2 and any("rekindle.training" in owner for owner in first.owners.values()), first.owners
    for port, texts in first.answers.items():
        answer, owner = "\n".join(texts), first.owners[port]
        assert not [secret for secret in secrets_of(first.folder) if secret in answer], owner
        theirs = answer.replace("/theirs", "")
        assert "rekindle_training" not in answer and "theirs" not in theirs, (owner, answer)
        if "local.services." in owner:
            assert {text[9:12] for text in texts if text.startswith("HTTP/1.1 ")} <= {"400", "401", "403"}, answer
