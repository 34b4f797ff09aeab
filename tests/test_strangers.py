"""Another user of the machine reads, writes and ends nothing, while a pipeline runs and when it serves."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import ROOT, shell

ROOTLESS = os.geteuid() != 0


def ours(folder: Path) -> list[psutil.Process]:
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
            command = " ".join(process.cmdline())
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports[connection.laddr[0], connection.laddr[1]] = command
        except psutil.Error:
            continue
    return ports


def shared_places() -> set[str]:
    """What lies where everybody may write, and could be of a run."""
    return {
        str(path)
        for parent in ("/dev/shm", "/tmp")
        for name in ("rekindle", "step-")
        for path in Path(parent).glob(f"{name}*")
    }


def visit(folder: Path, before: set[str]) -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
    """What a stranger reached, what ports said to him, and whose they are."""
    processes = ours(folder)
    ports = listening(processes)
    places = [str(folder / ".rekindle"), *(shared_places() - before)]
    task = {"places": places, "processes": [process.pid for process in processes], "ports": list(ports)}
    command = [sys.executable, str(ROOT / "tests/stranger.py")]
    done = subprocess.run(
        command, input=json.dumps(task), capture_output=True, text=True, cwd="/", start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer["reached"], answer["said"], {f"{host}:{port}": what for (host, port), what in ports.items()}


def secrets_of(folder: Path) -> set[str]:
    """The secrets of the home, as far as they exist by now."""
    found: set[str] = set()
    for file in (folder / ".rekindle/services").glob("*.json"):
        content = json.loads(file.read_text())
        if "pid" not in content:
            found |= set(content.values())
    return found


@pytest.mark.skipif(ROOTLESS, reason="only root can become another user")
@pytest.mark.timeout(600)  # a whole run
def test_another_user_reads_writes_and_ends_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[: len(tmp_path.parents) - 2]:  # as a home directory that others may look into
        parent.chmod(parent.stat().st_mode | stat.S_IROTH | stat.S_IXOTH)
    before, reached, said, whose = shared_places(), [], {}, {}
    with shell(tmp_path, REKINDLE_TRAIN__WORKERS="2") as typed, ThreadPoolExecutor(1) as pool:
        running = pool.submit(typed, f"rekindle run {ROOT}/configs/digits.yaml -o json")
        visits = 0
        while not running.done() or not visits:
            hits, answers, owners = visit(tmp_path, before)
            reached, visits = reached + hits, visits + 1
            whose |= owners
            for port, texts in answers.items():
                said.setdefault(port, set()).update(texts)
        done = running.result()
        assert done.returncode == 0 and json.loads(done.stdout)["verdict"] == "release", done.stderr
        hits, answers, owners = visit(tmp_path, before)
        lines = [word for process in ours(tmp_path) for word in process.cmdline()]
        secrets = secrets_of(tmp_path)
        assert len(secrets) == 3 and not [line for line in lines if any(secret in line for secret in secrets)]
    assert reached + hits == []
    services = [what for what in whose.values() if "local.services." in what]
    assert len(services) == 2 and any("rekindle.training" in what for what in whose.values()), whose
    for port, texts in said.items():
        answer = "\n".join(texts)
        assert not [secret for secret in secrets if secret in answer], whose[port]
        assert "rekindle_training" not in answer and "theirs" not in answer.replace("/theirs", ""), (
            whose[port],
            answer,
        )
        if "local.services." in whose[port]:
            assert {text[9:12] for text in texts if text.startswith("HTTP/1.1 ")} <= {"400", "401", "403"}, answer
