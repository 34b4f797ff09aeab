"""Start the commands that perform the actions of the page. A command continues when the page's
server ends. A command writes its output to a file in the home, the directory of runs."""

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from argolocal.common import homes, program
from argolocal.common.processes import make_python_command
from argolocal.errors import ArgolocalError

# folder in the home (the directory of all runs) with the output of the commands
FOLDER = "page"
START_TIMEOUT_S = 20.0
CHECK_INTERVAL_S = 0.05


class CommandFailed(ArgolocalError):
    """A command has failed before it had the effect for which it was started."""


@dataclass(frozen=True)
class StartedCommand:
    """A running command of this program, and the file that receives its output."""

    process: "subprocess.Popen[bytes]"
    output: Path

    def wait_until(self, is_done: Callable[[], bool], seconds: float = START_TIMEOUT_S) -> None:
        """Wait until `is_done()` is True or the command has succeeded, for at most `seconds`. If
        the command fails first, raise CommandFailed with the last line of its output."""
        deadline = time.monotonic() + seconds
        while not is_done():
            exit_code = self.process.poll()
            if exit_code == 0 or is_done() or time.monotonic() > deadline:
                return
            if exit_code is not None:
                lines = self.output.read_text(errors="replace").strip().splitlines()
                reason = lines[-1].removeprefix("error: ") if lines else f"exit code {exit_code}"
                raise CommandFailed(reason)
            time.sleep(CHECK_INTERVAL_S)


class Commands:
    """Starts commands of this program for one home (a directory of runs). `environ`: the
    environment variables of the commands."""

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self.home = home.resolve()
        self.environ = dict(environ) | {program.environment_variable("HOME"): str(self.home)}

    def start(self, *arguments: str) -> StartedCommand:
        """Start a command in a new session."""
        homes.create_home(self.home)
        folder = self.home / FOLDER
        folder.mkdir(exist_ok=True)
        output = folder / f"{arguments[0]}-{time.time_ns()}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                make_python_command("-m", program.name, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=self.environ,
            )
        Thread(target=process.wait, name="command", daemon=True).start()
        return StartedCommand(process, output)
