"""A training in the queue of the server of one machine gives the model of a run in the
foreground."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from argolocal.server.server_lock import find_server
from argolocal.view import runs
from tests.commands import BIN, ROOT, open_shell, typed_by_hand
from tests.waiting import until

PAGE = ROOT / "docs/one-machine.md"
SMALL_CONFIG = {
    "REKINDLE_DATA__SOURCE": "simulate://7?cards=150&terminals=300&days=70",
    "REKINDLE_TRAIN__EPOCHS": "1",
    "REKINDLE_GATE__MINIMUM": "{auc: 0.01}",
}


@pytest.mark.slow
@pytest.mark.timeout(900)  # three trainings
def test_a_queued_run_and_a_run_without_a_server_have_the_same_model(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    home = tmp_path / ".rekindle"
    first_block, schedule, listing, queued = typed_by_hand(PAGE)

    with open_shell(tmp_path, **SMALL_CONFIG) as run_in_shell:

        def run(command: str) -> str:
            completed = run_in_shell(command)
            assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"
            return completed.stdout

        foreground_run = json.loads(run(f"{first_block} --no-cache -o json"))
        run(schedule)
        assert "demo" in run(listing)

        server = subprocess.Popen(
            [BIN / "rekindle", "server"], cwd=tmp_path, env=dict(run_in_shell.environ)
        )
        try:
            until("the server", lambda: find_server(home))
            name = json.loads(run(f"{queued} --no-cache -o json"))["workflow"]
            run_next_to_server = json.loads(run(f"{first_block} --no-cache -o json"))
            until(
                "the queued run", lambda: runs.load_status(home, name)["phase"] == "Succeeded", 600
            )
            scheduled_run = json.loads(run("rekindle run-now demo --local -o json"))["workflow"]
            until(
                "the run of the schedule",
                lambda: runs.load_status(home, scheduled_run)["phase"] == "Succeeded",
                600,
            )
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)

        outcomes = [
            json.loads(run(f"rekindle status {item} -o json")) for item in (name, scheduled_run)
        ]
        models = {item["model_sha256"] for item in (foreground_run, run_next_to_server, *outcomes)}
        assert len(models) == 1
