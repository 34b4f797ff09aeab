"""After a SIGTERM, a worker may use its whole grace period, and its child processes do not exit
before the worker."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rekindle.errors import ConfigError
from rekindle.training.launch import signals
from tests.rekindle.training.crew import ROOT
from tests.waiting import until

# a training loop with a DataLoader whose processes must live until the last step
SCRIPT = """
import os, sys, time
from rekindle.training.launch import signals
leaving = signals.install_sigterm_handler()
from torch.utils.data import DataLoader
batches = iter(DataLoader(range(10**6), num_workers=2))
next(batches)
assert signals.compute_seconds_left() == float("inf")
print("ready", flush=True)
leaving.wait()
for _ in range(20):
    next(batches)
print(f"left {signals.compute_seconds_left():.1f}", flush=True)
sys.exit(143)
"""


def start_script(script: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a script in a new process group, as torchrun does, and wait until it prints "ready"."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": ROOT} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def find_group_pids(group_id: int) -> list[int]:
    """Return the pids of a process group, except zombies."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        # the process has just exited in the meantime
        with suppress(OSError):
            state, _, number = path.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group_id and state != "Z":
                pids.append(int(path.parent.name))
    return pids


@pytest.mark.slow
def test_a_data_loader_survives_a_sigterm_to_the_process_group_but_ends_with_its_worker() -> None:
    process = start_script(SCRIPT, REKINDLE_GRACE="50")
    assert len(find_group_pids(process.pid)) == 3
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    # the printed seconds that are left are 90 % of the 50 s
    assert output.startswith("left 4"), output
    assert "Traceback" not in output
    assert "Error" not in output
    assert not find_group_pids(process.pid)


def test_a_data_loader_dies_with_its_worker() -> None:
    process = start_script(SCRIPT)
    process.kill()
    process.wait()
    until("the whole process group to be gone", lambda: not find_group_pids(process.pid))


def test_a_worker_that_cannot_leave_exits_before_sigkill() -> None:
    process = start_script(
        "import time; from rekindle.training.launch.signals import install_sigterm_handler; install_sigterm_handler(); "
        "print('ready', flush=True); time.sleep(60)",
        REKINDLE_GRACE="0.5",
    )
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert output == "the worker has not finished 0.45 s after SIGTERM: exiting now\n"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_an_invalid_grace_period_is_rejected(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(signals.REKINDLE_GRACE, text)
    with pytest.raises(ConfigError, match=f'REKINDLE_GRACE is "{text}"'):
        signals.read_grace_seconds()
