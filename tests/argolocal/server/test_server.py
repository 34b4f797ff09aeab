"""The server runs queued workflows in processes that continue after the server has died."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from argolocal.common import homes
from argolocal.server.server_lock import ServerLock, find_server
from argolocal.server.systemd import make_unit
from argolocal.state.journal import Busy, RunFiles
from tests.argolocal.server.running import (
    find_runner,
    load_phase,
    shared_folder,
    start_server,
    submit_script,
    wait_for_phase,
)
from tests.waiting import until


def test_queued_runs_survive_their_server_and_a_killed_run_continues(tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = shared_folder(home)
    count = folder / "count"
    wait_for_gate = "echo once >> /shared/count; until test -e /shared/gate; do sleep 0.05; done"
    submit_script(home, "survivor", wait_for_gate)
    submit_script(home, "killed", wait_for_gate)

    with start_server(home, "--parallelism", "2") as server:
        survivor = find_runner(home, "survivor")
        killed = find_runner(home, "killed")
        until("both steps", lambda: count.exists() and count.read_text() == "once\n" * 2)

        server.kill()
        assert find_server(home) is None
        os.kill(killed, signal.SIGKILL)
        until("the death of the run", lambda: RunFiles(home, "killed").runner() is None)
        assert RunFiles(home, "survivor").runner() == survivor

        submit_script(home, "later", "true")
        server.start()
        assert find_runner(home, "killed") != killed
        until("the step again", lambda: count.read_text() == "once\n" * 3)
        # two runs are active, so the queue must wait
        assert load_phase(home, "later") == "Pending"

        (folder / "gate").touch()
        for name in ("survivor", "killed", "later"):
            wait_for_phase(home, name, "Succeeded")
        until("an empty queue", lambda: not any((home / "queue").iterdir()))
        assert count.read_text() == "once\n" * 3


def test_a_damaged_schedule_and_the_death_of_the_fork_server_do_not_stop_the_queue(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    submit_script(home, "first", "true")
    damaged = home / "objects/CronWorkflow/damaged.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")

    with start_server(home) as server:
        wait_for_phase(home, "first", "Succeeded")
        assert server.process
        (fork_server,) = psutil.Process(server.process.pid).children()
        fork_server.kill()
        submit_script(home, "second", "true")
        wait_for_phase(home, "second", "Succeeded")
    assert server.read_output().count("damaged.json is malformed") == 1


def test_a_second_server_of_a_home_names_the_first(tmp_path: Path) -> None:
    with ServerLock(tmp_path, 7070):
        assert find_server(tmp_path) is not None
        with (
            pytest.raises(Busy, match=rf"pid {os.getpid()}, http://127\.0\.0\.1:7070"),
            ServerLock(tmp_path, 7071),
        ):
            pass
    assert find_server(tmp_path) is None


def test_a_run_is_queued_without_a_server_and_the_user_learns_how_it_starts(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    manifest = tmp_path / "hello.yaml"
    manifest.write_text(
        "{apiVersion: argoproj.io/v1alpha1, kind: Workflow, metadata: {name: hello}, spec:"
        " {entrypoint: main, templates: [{name: main, container: {image: busybox,"
        " command: [echo, hello]}}]}}"
    )
    result = subprocess.run(
        [sys.executable, "-m", "argolocal", "run", str(manifest), "--queue"],
        env={**os.environ, "ARGOLOCAL_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == (
        "hello is queued, and starts when a server runs: `argolocal server` starts one\n"
    )
    assert load_phase(home, "hello") == "Pending"


@pytest.mark.parametrize("manager", ["user", "system"])
def test_systemd_accepts_the_unit_and_restarts_the_server_without_its_runs(
    tmp_path: Path, manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "50% of $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    home = folder / "home"
    homes.create_home(home)
    unit = make_unit(manager, home, 2, 7070)
    assert "KillMode=process\n" in unit
    assert "Restart=always\n" in unit
    assert "server --parallelism 2 --port 7070\n" in unit
    assert ("After=network-online.target" in unit) == (manager == "system")

    program = shutil.which("systemd-analyze")
    if not program:
        pytest.skip("needs systemd-analyze")
    file = tmp_path / "argolocal.service"
    file.write_text(unit)
    result = subprocess.run([program, "verify", str(file)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
