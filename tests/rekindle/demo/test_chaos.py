"""Tests of a short `rekindle demo chaos` with real processes."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

import psutil
import pytest

from rekindle.demo.chaos import ATTACKS
from rekindle.demo.screen import AttackRecord, DemoRecording, DemoRun, LivePicture
from tests.waiting import until

REKINDLE = str(Path(sys.executable).with_name("rekindle"))


def demo_processes(folder: Path) -> list[int]:
    """Return the pids of the living processes of a demo in `folder`."""
    return [
        p.pid for p in psutil.process_iter(["environ"]) if str(folder) in str(p.info["environ"])
    ]


@pytest.mark.slow
# the demo makes eight attacks, each with restarts of processes
@pytest.mark.timeout(600)
def test_attacks_do_not_change_the_weights(tmp_path: Path, s3_environment: dict[str, str]):
    environ = {**os.environ, **s3_environment, "REKINDLE_HOME": str(tmp_path / "home")}
    command = [
        REKINDLE,
        "demo",
        "chaos",
        "--workers",
        "2",
        "--steps",
        "90",
        "--seconds-between",
        "0",
        "-o",
        "json",
    ]

    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["equal"] is True
    assert report["sha256"] == report["sha256_undisturbed"]
    assert re.fullmatch("[0-9a-f]{64}", report["sha256"])
    signals = [attack["attack"].split()[0] for attack in report["attacks"]]
    assert signals == [attack.signal_number.name for attack in ATTACKS]
    recovered = [attack["next_step_seconds"] for attack in report["attacks"]]
    assert all(seconds is not None and seconds > 0 for seconds in recovered[:-1]), recovered
    times = [seconds for seconds in recovered if seconds is not None]
    assert report["recovery_seconds"] == {
        "median": pytest.approx(median(times), abs=0.01),
        "longest": max(times),
    }
    assert "EQUAL" in result.stderr
    assert "SIGKILL" in result.stderr
    assert demo_processes(tmp_path) == []
    assert list((tmp_path / "home/demo").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_demo_and_all_its_processes(
    tmp_path: Path, s3_environment: dict[str, str], signal_number: int, code: int
):
    environ = {**os.environ, **s3_environment, "REKINDLE_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(
        [REKINDLE, "demo", "chaos"],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    until("three processes of the demo", lambda: len(demo_processes(tmp_path)) >= 3)
    process.send_signal(signal_number)
    report, _ = process.communicate(timeout=20)
    assert process.returncode == code, report
    assert report.endswith("all processes of the demo have ended\n")
    assert "Traceback" not in report
    assert demo_processes(tmp_path) == []


def test_the_picture_shows_attacks_and_different_weights():
    from rich.console import Console

    began = 1000.0
    recording = DemoRecording(
        DemoRun("undisturbed", 1, 9, began - 9, began, 9, "aa"),
        DemoRun("under attack", 2, 9, began, began + 20, 9, "bb"),
    )
    recording.disturbed.steps = [(began + step, step) for step in range(1, 10)]
    recording.timelines = {
        "worker-0": [(began, "training"), (began + 5, "dead"), (began + 12, "training")]
    }

    recording.attacks.append(
        AttackRecord(
            5.0,
            "SIGKILL worker-0",
            ("worker-0",),
            9,
            {1},
            5,
            next_step_after_s=0.07,
            back_after_s=7.0,
        )
    )

    recording.equal = False
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(LivePicture(recording, console).draw())
    text = console.export_text()
    assert "✖" in text
    assert "╌" in text
    assert "0.07 s" in text
    assert "nothing" in text
    assert "7.00 s" in text
    assert "DIFFERENT" in text
    assert "EQUAL" not in text
