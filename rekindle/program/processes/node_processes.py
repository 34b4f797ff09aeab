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

# bytes of a process's output that are kept for error messages
TAIL_BYTES = 64 << 10
READ_BYTES = 1 << 18
# number of reads of one output before the agent continues with other work
MAX_READS = 64
MAX_LINE_CHARS = 500
TRACEBACK_START = "Traceback (most recent call last):"
FRAME_PATTERN = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)
# prefix that torch.distributed writes before each line of a traceback
RANK_PREFIX_PATTERN = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# matches the errors of torchrun and accelerate about a process that failed
LAUNCHER_ERROR_PATTERN = re.compile(
    r"^[\w.]*\.(ChildFailedError|CalledProcessError):", re.MULTILINE
)
# the start of a line in the log of torchrun
LAUNCHER_LOG_PATTERN = re.compile(r"[EW]\d{4} ")
STANDARD_LIBRARY_FOLDER = Path(sysconfig.get_path("stdlib"))
# matches the last line of a traceback, for example: `ValueError: text`
EXCEPTION_PATTERN = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)?)(?::\s?(.*))?$"
)


@dataclass
class ProgramProcess:
    """A process of the training program. `exit_code` is None while the process runs; -N if signal N
    ended it."""

    index: int
    # file descriptor of the pipe with the output of the process
    output: int
    pid: int = 0
    exit_code: int | None = None
    exit_time: float = 0.0  # Unix time
    tail: bytes = b""
    unfinished_line: bytes = b""


@dataclass
class NodeProcesses:
    """The processes of one generation on this node."""

    parent: ProcessParent
    processes: list[ProgramProcess] = field(default_factory=list)
    last_output_time: float = field(default_factory=time.monotonic)

    def start(self, command: Sequence[str], environments: Iterable[Mapping[str, str]]) -> None:
        """Start one process for each environment."""
        for process_index, environment in enumerate(environments):
            read_descriptor, write_descriptor = os.pipe()
            os.set_blocking(read_descriptor, False)
            self.processes.append(ProgramProcess(process_index, read_descriptor))
            process_start = ProcessStart(process_index, tuple(command), dict(environment))
            self.parent.request(process_start, write_descriptor)
            os.close(write_descriptor)

    @property
    def running(self) -> list[ProgramProcess]:
        return [process for process in self.processes if process.exit_code is None]

    @property
    def failures(self) -> list[ProgramProcess]:
        """The processes of this node that ended with an error, in order of their end times."""
        failed_processes = [process for process in self.processes if process.exit_code]
        return sorted(failed_processes, key=lambda process: process.exit_time)

    @property
    def has_finished(self) -> bool:
        """True if all processes ended with exit code 0."""
        return bool(self.processes) and all(process.exit_code == 0 for process in self.processes)

    def wait(self, seconds: float) -> None:
        """Wait for output or new processes at most `seconds`, and copy the output to stdout."""
        process_by_output = {
            process.output: process for process in self.processes if process.output >= 0
        }
        watched_descriptors = [*process_by_output, self.parent.socket.fileno()]
        readable_descriptors, _, _ = select.select(watched_descriptors, [], [], seconds)

        for process_index, pid in self.parent.take_started():
            if process_index < len(self.processes) and not self.processes[process_index].pid:
                self.processes[process_index].pid = pid

        for readable_descriptor in readable_descriptors:
            if readable_descriptor in process_by_output:
                self._copy_output(process_by_output[readable_descriptor])

    def give_up_starts(self) -> bool:
        """Mark the processes that have not started yet as failed; return True if such processes
        exist."""
        unstarted_processes = [process for process in self.running if not process.pid]
        for process in unstarted_processes:
            process.exit_code = exit_codes.TERMINATED
        return bool(unstarted_processes)

    def record_exit(self, pid: int, exit_code: int) -> bool:
        """Record the exit of the process `pid`; return False if `pid` is not a process of this
        generation."""
        for process in self.processes:
            if process.pid == pid and process.exit_code is None:
                process.exit_code = exit_code
                process.exit_time = time.time()
                self._copy_output(process)
                return True
        return False

    def send_signal(self, signal_number: int) -> None:
        for process in self.running:
            if process.pid:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal_number)

    def find_orphans(self) -> set[int]:
        """Return the pids of processes that did not get the SIGTERM that ended their launcher, such
        as the program that a shell script has started."""
        if all(process.exit_code != -signal.SIGTERM for process in self.processes):
            return set()
        started_pids = {process.pid for process in self.running}
        return set(list_children()) - started_pids - {self.parent.pid}

    def kill(self) -> None:
        """Kill the processes of the program and their process groups."""
        for process in self.running:
            if process.pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Copy the last output of the processes, and close the pipes."""
        for process in self.processes:
            self._copy_output(process)
            if process.output >= 0:
                os.close(process.output)
                process.output = -1
            self._write_output(process.unfinished_line)
            process.unfinished_line = b""

    def _copy_output(self, program_process: ProgramProcess) -> None:
        """Copy complete lines to stdout, so that lines of several processes do not mix."""
        if program_process.output < 0:
            return

        for _ in range(MAX_READS):
            try:
                output_bytes = os.read(program_process.output, READ_BYTES)
            except BlockingIOError:
                return
            if not output_bytes:
                os.close(program_process.output)
                program_process.output = -1
                return

            self.last_output_time = time.monotonic()
            program_process.tail = (program_process.tail + output_bytes)[-TAIL_BYTES:]
            complete_lines, separator, unfinished_line = (
                program_process.unfinished_line + output_bytes
            ).rpartition(b"\n")
            complete_output = complete_lines + separator
            # a progress bar, for example, writes a long line without a line end
            if len(unfinished_line) > READ_BYTES:
                complete_output += unfinished_line
                unfinished_line = b""
            self._write_output(complete_output)
            program_process.unfinished_line = unfinished_line

    def _write_output(self, output_bytes: bytes) -> None:
        with suppress(OSError, ValueError):
            sys.stdout.buffer.write(output_bytes)
            sys.stdout.buffer.flush()


def describe_exit(program_process: ProgramProcess, working_folder: Path) -> str:
    """Return the reason why a process has exited, as FILE:LINE and exception of the traceback in
    its output, or as the exit code with the last line of the output. `working_folder`: folder of
    the program's own files."""
    exit_code = program_process.exit_code or 0
    if exit_code in (-signal.SIGKILL, -signal.SIGTERM):
        # after SIGKILL or SIGTERM, the last line of the output is unrelated to the reason
        return f"was ended by {signal.Signals(-exit_code).name}"
    if exit_code < 0:
        try:
            exit_description = f"was ended by {signal.Signals(-exit_code).name}"
        except ValueError:
            exit_description = f"was ended by signal {-exit_code}"
    else:
        exit_description = f"ended with exit code {exit_code}"

    output_text = program_process.tail.decode(errors="replace").replace("\r", "\n")
    output_text = _remove_launcher_report(output_text, working_folder)
    cause = _find_exception(output_text, working_folder)
    if cause:
        return f"{exit_description}: {cause}"

    output_text = RANK_PREFIX_PATTERN.sub("", output_text)
    output_lines = [line.strip() for line in output_text.splitlines() if line.strip()]
    return (
        f"{exit_description}: {output_lines[-1][:MAX_LINE_CHARS]}"
        if output_lines
        else exit_description
    )


def _remove_launcher_report(output_text: str, working_folder: Path) -> str:
    """Remove the traceback of a launcher at the end of an output, and its log lines. If the
    launcher is a script of the user, its traceback is removed only if it follows another traceback.
    """
    text_before, traceback_marker, last_traceback = output_text.rpartition(TRACEBACK_START)
    if not (traceback_marker and LAUNCHER_ERROR_PATTERN.search(last_traceback)):
        return output_text

    _, is_own_traceback = _parse_traceback(last_traceback, working_folder)
    if is_own_traceback and TRACEBACK_START not in text_before:
        return output_text
    lines_before = text_before.splitlines()
    return "\n".join(line for line in lines_before if not LAUNCHER_LOG_PATTERN.match(line))


def _find_exception(output_text: str, working_folder: Path) -> str:
    """Return "FILE:LINE: exception" of the traceback in an output that shows the reason of the
    exit, or "".

    The chosen traceback is the last traceback with a line of the program, because later tracebacks
    are from a launcher such as torchrun. If the output mixes several ranks, the rank that failed
    first counts.
    """
    tracebacks = _split_tracebacks(output_text)
    parsed_tracebacks = [
        (rank_prefix, *_parse_traceback(traceback_text, working_folder))
        for rank_prefix, traceback_text in tracebacks
    ]
    own_rank_causes = [
        (rank_prefix, cause)
        for rank_prefix, cause, is_own_traceback in parsed_tracebacks
        if cause and is_own_traceback
    ]
    if not own_rank_causes:
        return parsed_tracebacks[-1][1] if parsed_tracebacks else ""

    # torch.distributed writes the prefix of the rank for an exception that ends the process
    first_rank_prefix = next((rank_prefix for rank_prefix, _ in own_rank_causes if rank_prefix), "")
    return [cause for rank_prefix, cause in own_rank_causes if rank_prefix == first_rank_prefix][-1]


def _split_tracebacks(output_text: str) -> list[tuple[str, str]]:
    """Return the tracebacks of an output in order, as (prefix of the rank or "", text)."""
    lines_by_rank: dict[str, list[str]] = {}
    tracebacks: list[tuple[str, list[str]]] = []
    for line in output_text.splitlines():
        prefix_match = RANK_PREFIX_PATTERN.match(line)
        rank_prefix = prefix_match[0].strip() if prefix_match else ""
        unprefixed_line = RANK_PREFIX_PATTERN.sub("", line)
        if TRACEBACK_START in unprefixed_line:
            lines_by_rank[rank_prefix] = []
            tracebacks.append((rank_prefix, lines_by_rank[rank_prefix]))
        elif rank_prefix in lines_by_rank:
            lines_by_rank[rank_prefix].append(unprefixed_line)
    return [
        (rank_prefix, "\n".join(traceback_lines)) for rank_prefix, traceback_lines in tracebacks
    ]


def _parse_traceback(traceback_text: str, working_folder: Path) -> tuple[str, bool]:
    """Return "FILE:LINE: exception" of a traceback, or "", and whether the traceback contains a
    line of the program's own files."""
    exception_line = ""
    for line in traceback_text.splitlines():
        if line and not line.startswith(" ") and EXCEPTION_PATTERN.match(line):
            exception_line = line.strip()
            break

    frames = FRAME_PATTERN.findall(traceback_text)
    if not exception_line or not frames:
        return exception_line, False

    own_frames = [frame for frame in frames if _is_own_file(Path(frame[0]), working_folder)]
    user_frames = own_frames or [
        frame for frame in frames if not _is_installed_file(Path(frame[0]))
    ]
    frame_file, line_number = (user_frames or frames)[-1]
    with suppress(ValueError):
        frame_file = str(resolve(Path(frame_file)).relative_to(resolve(working_folder)))
    return f"{frame_file}:{line_number}: {exception_line}", bool(user_frames)


def _is_own_file(source_file: Path, working_folder: Path) -> bool:
    absolute_path = source_file if source_file.is_absolute() else working_folder / source_file
    return absolute_path.is_relative_to(working_folder) and not _is_installed_file(absolute_path)


def _is_installed_file(source_file: Path) -> bool:
    """Return True for a file of an installed package or of Python itself."""
    if "site-packages" in source_file.parts or str(source_file).startswith("<frozen"):
        return True
    # the file is the entry point of an installed package, such as `torchrun`
    is_entry_point = source_file.parent.name == "bin" and not source_file.suffix
    return is_entry_point or source_file.is_relative_to(STANDARD_LIBRARY_FOLDER)
