"""Tests of Ctrl-C during imports, and signals to a run that a script started in the background."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rekindle.cli.processes import (
    DEMO,
    REKINDLE,
    make_shell_workflow,
    run_rekindle,
    wait_until_started,
    write_manifest,
)

# a program that sends itself SIGINT at the import whose number is the first argument
DRIVER = """
import atexit, os, sys

class Countdown:
    left = int(sys.argv.pop(1))

    def find_spec(self, name, path=None, target=None):
        Countdown.left -= 1
        if not Countdown.left:
            os.kill(os.getpid(), 2)

sys.meta_path.insert(0, Countdown())
from rekindle.__main__ import main
atexit.register(lambda: print("left:", Countdown.left, file=sys.stderr))
main()
"""
# numbers of imports; the first eight precede the handler of `rekindle.__main__`
FIRST_IMPORT = 9
MAX_IMPORTS = 20_000
STEP_HELP = ("step", "steps.prepare", "--help")
# the signals are ignored as in a script that starts `nohup ... &`
IGNORE_SIGNALS_COMMAND = ["bash", "-c", 'trap "" HUP INT QUIT; exec "$@"', "bash"]


@pytest.mark.parametrize(
    ("arguments", "interval"),
    [
        *((("render", DEMO), 290), (STEP_HELP, 45)),
        *(
            pytest.param(arguments, 7, marks=pytest.mark.slow)
            for arguments in (("render", DEMO), STEP_HELP)
        ),
    ],
)
def test_ctrl_c_at_any_import_exits_with_130_without_a_traceback(
    tmp_path: Path, arguments: tuple[str, ...], interval: int
):
    number = FIRST_IMPORT
    interrupted = 0

    while True:
        command = [sys.executable, "-c", DRIVER, str(number), *arguments]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        if "left: " in result.stderr and int(result.stderr.rpartition("left: ")[2]) > 0:
            # all imports were done before the signal
            break

        assert result.returncode == 130, number
        assert result.stderr.strip() == "", number
        assert number < MAX_IMPORTS, number

        number = number + interval
        interrupted = interrupted + 1

    assert result.returncode == 0, result.stderr
    assert interrupted > 2, result.stderr


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "stop"])
def test_a_run_in_the_background_of_a_script_can_be_stopped(tmp_path: Path, how: str):
    file = write_manifest(
        tmp_path / "w.yaml", make_shell_workflow(("long", "echo begun; sleep 100; exit 0"))
    )
    process = subprocess.Popen(
        [*IGNORE_SIGNALS_COMMAND, REKINDLE, "run", "--manifest", file],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    assert wait_until_started(process, tmp_path)

    if how == "stop":
        result = run_rekindle("stop", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout == "stopped four\n", result.stderr
    else:
        process.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)

    output, _ = process.communicate(timeout=20)
    assert process.returncode == {"Ctrl-C": 130, "SIGTERM": 143, "stop": 1}[how], output
    assert "Traceback" not in output


@pytest.mark.slow
def test_steps_of_a_background_run_ignore_no_signal(tmp_path: Path):
    script = "grep SigIgn /proc/self/status; kill -INT $$; echo survived"
    file = write_manifest(tmp_path / "w.yaml", make_shell_workflow(("step", script)))
    command = [*IGNORE_SIGNALS_COMMAND, REKINDLE, "run", "--manifest", file]
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=60
    )
    (log,) = tmp_path.glob(".rekindle/runs/four/logs/*.log")
    lines = log.read_text().splitlines()
    (ignored,) = [int(line.split()[-1], 16) for line in lines]
    # signals above 31 belong to the C library
    assert not ignored & (1 << 31) - 1, lines
    assert result.returncode == 1
