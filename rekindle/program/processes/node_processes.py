"""Starts the processes of a program on this node, copies their output, and handles signals and
exits."""

import os
import re
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from argolocal.common import exit_codes
from rekindle.program.checkpoints.paths import resolve
from rekindle.program.processes.process_parent import ProcessParent, ProcessStart
from rekindle.training.launch.launcher import list_children

TAIL_BYTES = 64 << 10  # bytes of a process's output that are kept for error messages
READ_BYTES = 1 << 18
MAX_READS = 64  # number of reads of one output before the agent continues with other work
MAX_LINE_CHARS = 500
TRACEBACK = "Traceback (most recent call last):"
FRAME = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)
# prefix that torch.distributed writes before each line of a traceback
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# the errors of torchrun and accelerate about a process that failed
LAUNCHER_ERROR = re.compile(r"^[\w.]*\.(ChildFailedError|CalledProcessError):", re.MULTILINE)
LAUNCHER_LOG = re.compile(r"[EW]\d{4} ")  # the start of a line in the log of torchrun
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
# last line of a traceback: `ValueError: text`
EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)?)(?::\s?(.*))?$"
)


@dataclass
class Process:
    """A process of the program. `exit_code`: None while the process runs; -N if signal N ended
    it."""

    index: int
    output: int  # descriptor of the pipe
    pid: int = 0
    exit_code: int | None = None
    exit_time: float = 0.0  # Unix time
    tail: bytes = b""
    unfinished_line: bytes = b""


@dataclass
class NodeProcesses:
    """The processes of one generation on this node."""

    parent: ProcessParent
    processes: list[Process] = field(default_factory=list)
    last_output_time: float = field(default_factory=time.monotonic)

    def start(self, command: Sequence[str], environments: Iterable[Mapping[str, str]]) -> None:
        """Start one process for each environment."""
        for index, environment in enumerate(environments):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self.processes.append(Process(index, reader))
            start = ProcessStart(index, tuple(command), dict(environment))
            self.parent.request(start, writer)
            os.close(writer)

    @property
    def running(self) -> list[Process]:
        return [process for process in self.processes if process.exit_code is None]

    @property
    def failures(self) -> list[Process]:
        """The processes that ended with an error, in order of their end times."""
        failed = [process for process in self.processes if process.exit_code]
        return sorted(failed, key=lambda process: process.exit_time)

    @property
    def has_finished(self) -> bool:
        """True if all processes ended with exit code 0."""
        return bool(self.processes) and all(process.exit_code == 0 for process in self.processes)

    def wait(self, seconds: float) -> None:
        """Wait for output or new processes at most `seconds`, and copy the output to stdout."""
        outputs = {process.output: process for process in self.processes if process.output >= 0}
        sources = [*outputs, self.parent.socket.fileno()]
        readable, _, _ = select.select(sources, [], [], seconds)

        for index, pid in self.parent.take_started():
            if index < len(self.processes) and not self.processes[index].pid:
                self.processes[index].pid = pid

        for source in readable:
            if source in outputs:
                self._copy_output(outputs[source])

    def give_up_starts(self) -> bool:
        """Mark the processes that have not started yet as failed; return True if any exist."""
        waiting = [process for process in self.running if not process.pid]
        for process in waiting:
            process.exit_code = exit_codes.TERMINATED
        return bool(waiting)

    def record_exit(self, pid: int, code: int) -> bool:
        """Record the exit of one of these processes; return False if `pid` is not one of them."""
        for process in self.processes:
            if process.pid == pid and process.exit_code is None:
                process.exit_code = code
                process.exit_time = time.time()
                self._copy_output(process)
                return True
        return False

    def send_signal(self, number: int) -> None:
        for process in self.running:
            if process.pid:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def find_orphans(self) -> set[int]:
        """Return the pids of processes that did not get the SIGTERM that ended their launcher, such
        as the program that a shell script has started."""
        if all(process.exit_code != -signal.SIGTERM for process in self.processes):
            return set()
        started = {process.pid for process in self.running}
        return set(list_children()) - started - {self.parent.pid}

    def kill(self) -> None:
        """Kill the processes and their process groups."""
        for process in self.running:
            if process.pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Copy the last output, and close the pipes."""
        for process in self.processes:
            self._copy_output(process)
            if process.output >= 0:
                os.close(process.output)
                process.output = -1
            self._write(process.unfinished_line)
            process.unfinished_line = b""

    def _copy_output(self, process: Process) -> None:
        """Copy complete lines to stdout, so that lines of several processes do not mix."""
        if process.output < 0:
            return

        for _ in range(MAX_READS):
            try:
                data = os.read(process.output, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                os.close(process.output)
                process.output = -1
                return

            self.last_output_time = time.monotonic()
            process.tail = (process.tail + data)[-TAIL_BYTES:]
            lines, separator, rest = (process.unfinished_line + data).rpartition(b"\n")
            if len(rest) > READ_BYTES:  # such as a progress bar, which has no line end
                lines, separator, rest = lines + separator + rest, b"", b""
            self._write(lines + separator)
            process.unfinished_line = rest

    def _write(self, data: bytes) -> None:
        with suppress(OSError, ValueError):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def describe_exit(process: Process, folder: Path) -> str:
    """Return the reason of an exit: FILE:LINE and exception of the traceback in its output, or the
    exit code with the last line. `folder`: folder of the program's own files."""
    code = process.exit_code or 0
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        # after SIGKILL or SIGTERM, the last line of the output is unrelated to the reason
        return f"was ended by {signal.Signals(-code).name}"
    if code < 0:
        try:
            text = f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            text = f"was ended by signal {-code}"
    else:
        text = f"ended with exit code {code}"

    output = process.tail.decode(errors="replace").replace("\r", "\n")
    output = _remove_launcher_report(output, folder)
    cause = _find_exception(output, folder)
    if cause:
        return f"{text}: {cause}"

    output = RANK_PREFIX.sub("", output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"{text}: {lines[-1][:MAX_LINE_CHARS]}" if lines else text


def _remove_launcher_report(output: str, folder: Path) -> str:
    """Remove the traceback of a launcher at the end of an output, and its log lines. If the
    launcher is a script of the user, its traceback is removed only if it follows another traceback.
    """
    before, found, last = output.rpartition(TRACEBACK)
    if not (found and LAUNCHER_ERROR.search(last)):
        return output

    _, is_own = _parse_traceback(last, folder)
    if is_own and TRACEBACK not in before:
        return output
    lines = before.splitlines()
    return "\n".join(line for line in lines if not LAUNCHER_LOG.match(line))


def _find_exception(output: str, folder: Path) -> str:
    """Return "FILE:LINE: exception" of the traceback in an output that shows the reason of the
    exit, or "".

    This is the last traceback that contains a line of the program; later tracebacks are from a
    launcher such as torchrun. If the output mixes several ranks, the rank that failed first counts.
    """
    tracebacks = _split_tracebacks(output)
    parsed = [(rank, *_parse_traceback(text, folder)) for rank, text in tracebacks]
    own_causes = [(rank, cause) for rank, cause, is_own in parsed if cause and is_own]
    if not own_causes:
        return parsed[-1][1] if parsed else ""

    # torch.distributed writes the prefix for an exception that ends the process
    first_rank = next((rank for rank, _ in own_causes if rank), "")
    return [cause for rank, cause in own_causes if rank == first_rank][-1]


def _split_tracebacks(output: str) -> list[tuple[str, str]]:
    """Return the tracebacks of an output in order, as (prefix of the rank or "", text)."""
    lines_of_rank: dict[str, list[str]] = {}
    tracebacks: list[tuple[str, list[str]]] = []
    for line in output.splitlines():
        match = RANK_PREFIX.match(line)
        rank = match[0].strip() if match else ""
        text = RANK_PREFIX.sub("", line)
        if TRACEBACK in text:
            lines_of_rank[rank] = []
            tracebacks.append((rank, lines_of_rank[rank]))
        elif rank in lines_of_rank:
            lines_of_rank[rank].append(text)
    return [(rank, "\n".join(lines)) for rank, lines in tracebacks]


def _parse_traceback(text: str, folder: Path) -> tuple[str, bool]:
    """Return "FILE:LINE: exception" of a traceback, or "", and whether the traceback contains a
    line of the program's own files."""
    exception = ""
    for line in text.splitlines():
        if line and not line.startswith(" ") and EXCEPTION.match(line):
            exception = line.strip()
            break

    frames = FRAME.findall(text)
    if not exception or not frames:
        return exception, False

    own_frames = [frame for frame in frames if _is_own(Path(frame[0]), folder)]
    user_frames = own_frames or [frame for frame in frames if not _is_installed(Path(frame[0]))]
    file, number = (user_frames or frames)[-1]
    with suppress(ValueError):
        file = str(resolve(Path(file)).relative_to(resolve(folder)))
    return f"{file}:{number}: {exception}", bool(user_frames)


def _is_own(file: Path, folder: Path) -> bool:
    path = file if file.is_absolute() else folder / file
    return path.is_relative_to(folder) and not _is_installed(path)


def _is_installed(file: Path) -> bool:
    """Return True for a file of an installed package or of Python itself."""
    if "site-packages" in file.parts or str(file).startswith("<frozen"):
        return True
    is_entry_point = file.parent.name == "bin" and not file.suffix  # such as `torchrun`
    return is_entry_point or file.is_relative_to(STANDARD_LIBRARY)
