"""Tests a program before a run: whether it saves complete checkpoints, and continues from a
checkpoint after a SIGKILL."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rekindle.errors import CodeError
from rekindle.program.checkpoints.file_checks import Structure, check_file
from rekindle.program.checkpoints.folder import FileState, find_file, is_unit_file
from rekindle.program.checkpoints.formats import sizes_of
from rekindle.program.checkpoints.watch import LocalCheckpoint, Watch, WatchSettings
from rekindle.program.config import ProgramConfig
from rekindle.program.opened_files import OpenedFiles
from rekindle.program.processes.commands import (
    count_processes,
    knows_processes,
    make_command,
    make_environments,
    placeholder_values,
)
from rekindle.program.processes.environment import Layout, find_free_port, node_variables
from rekindle.program.processes.python_program import executable_command
from rekindle.program.processes.working_folder import find_working_folder

LOOK_INTERVAL_S = 0.1
TIMEOUT_S = 120.0  # maximum time until the first save, also after the restart
# `step 50`, `epoch: 3`, `iteration=7`
COUNTER = re.compile(r"\b(step|epoch|iter(?:ation)?)s?\b\W{0,3}(\d+)", re.IGNORECASE)


@dataclass
class ResumeCheck:
    """One check. `model`: the section `model`; `dataset`: folder that `prepare` has written;
    `folder`: empty folder for the checkpoints and the output."""

    program: ProgramConfig
    model: Mapping[str, object]
    dataset: Path
    folder: Path
    timeout_s: float = TIMEOUT_S
    saves: list[LocalCheckpoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checkpoints = self.folder / "checkpoints"
        self.checkpoints.mkdir(parents=True)
        self.process_count = count_processes(self.program)
        settings = WatchSettings(
            processes=self.process_count if knows_processes(self.program) else 0,
            marker=self.program.marker,
            quiet_s=1.0,
        )
        self.watch = Watch(self.checkpoints, settings, self._is_alive)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.started_at = time.time()
        # modification times of each checkpoint that was seen in an incomplete state
        self.incomplete_versions: defaultdict[str, set[int]] = defaultdict(set)
        # True if a kill between two saves would have left no complete checkpoint
        self.counted_at_end = False

    def run(self) -> dict[str, Any]:
        """Return the findings: checkpoint, bytes, seconds, interval_s and resumed_at. Raises
        CodeError with the first problem that would lose work."""
        with self._started(None) as output:
            first = self._wait_for_save("has saved nothing", output)
            findings = _describe_save(first)
            self._wait(lambda: self._is_over() or len(self.saves) > 1, self.timeout_s / 4)
            if len(self.saves) > 1:
                findings["interval_s"] = round(_interval(self.saves), 3)
            if _is_overwritten(self.saves):
                findings["overwritten"] = True
            is_over = self._is_over()

        self.watch.settle(succeeded=is_over)
        checkpoint = self._newest()
        if is_over:
            findings["finished"] = True
            findings["counted_at_end"] = self.counted_at_end
            return findings

        findings["resumed_at"] = self._resume(checkpoint, output)
        return findings

    def _resume(self, checkpoint: LocalCheckpoint, earlier_output: Path) -> str:
        """Start the program again, and return the path of the next checkpoint. Raises CodeError if
        the program does not continue from `checkpoint`."""
        self.saves.clear()
        path = self.checkpoints / checkpoint.path
        opened = OpenedFiles(path)
        try:
            with self._started(path) as output:
                self._wait(lambda: opened.any or bool(self.saves) or self._is_over())
                if not opened.any:
                    raise CodeError(
                        f"the program did not open {checkpoint.path} after its restart, so it began"
                        " again: set program.resume to the arguments that let it continue from"
                        " {checkpoint}, or let it continue from the newest file in {checkpoints}."
                    )
                self._wait_for_save("has saved nothing after its restart", output)
        finally:
            opened.close()

        newest = self.saves[0]
        began = _find_counter(output)
        reached = _find_counter(earlier_output)
        is_earlier = (
            newest.step is not None
            and checkpoint.step is not None
            and newest.step <= checkpoint.step
        )
        is_repeated = newest.step is None and began is not None and began == reached
        if is_earlier or is_repeated:
            raise CodeError(
                f"the program opened {checkpoint.path} after its restart, but began again at its"
                f" first step (its next checkpoint is {newest.path}): let it continue at the step"
                " of the checkpoint."
            )
        return newest.path

    def _wait_for_save(self, problem: str, output: Path) -> LocalCheckpoint:
        """Return the first complete checkpoint. Raises CodeError."""
        start = time.monotonic()
        self._wait(lambda: bool(self.saves) or self._is_over())
        if self.saves:
            return self.saves[0]

        codes = [process.returncode for process in self.processes if process.returncode]
        if codes:
            lines = output.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise CodeError(f"the program ended with exit code {codes[0]}: {lines[-1]}")

        if self._is_over():
            self.watch.settle(succeeded=True)
            self._count_saves()
            if self.saves:
                first = self.saves[0]
                # after a kill, a file is complete if its content shows its end
                has_end = (
                    first.unit.is_file
                    and check_file(self.checkpoints / first.path).structure is not Structure.NONE
                )
                versions = self.incomplete_versions[first.path]
                self.counted_at_end = len(versions) > 1 and not has_end
                return first

        seconds = time.monotonic() - start
        if self.watch.incomplete:
            path, reason = next(iter(self.watch.incomplete.items()))
            raise CodeError(
                f"the program {problem} that is complete within {seconds:.0f} s: {path}: {reason}."
                " Let it write under another name and rename it, or name the file that it writes"
                " last in program.marker."
            )
        end = "ended" if self._is_over() else "ran for"
        if unknown := find_file(self.checkpoints):
            raise CodeError(
                f"the program {problem} that is known as a checkpoint ({end} {seconds:.0f} s): the"
                f" name of {unknown} has neither a step, such as step-100, nor an ending such as"
                " .pt. Let it write such a name, or a folder with the file program.marker."
            )
        if misplaced := self._find_misplaced_save():
            raise CodeError(
                f"the program {problem} in {{checkpoints}}, but {misplaced} in its working folder,"
                " which a pod loses: pass it the folder {checkpoints} in program.command, and"
                f" delete {misplaced}."
            )
        raise CodeError(
            f"the program {problem} ({end} {seconds:.0f} s): after a loss it would begin again. Let"
            " it save into {checkpoints}, and more often."
        )

    def _find_misplaced_save(self) -> str:
        """Return the path of a checkpoint that the program wrote to the working folder by mistake;
        "" if none exists."""
        folder = find_working_folder(self.program.command)
        try:
            files = [path for path in folder.iterdir() if is_unit_file(path.name)]
            new = [path for path in files if path.stat().st_mtime >= self.started_at]
        except OSError:
            return ""
        return str(min(new, default=""))

    def _newest(self) -> LocalCheckpoint:
        complete = list(self.watch.complete.values())
        if not complete:
            path, reason = next(iter(self.watch.incomplete.items()), ("its checkpoint", "missing"))
            raise CodeError(
                f"a SIGKILL left no complete checkpoint on the node: {path}: {reason}. Let the"
                " program write under another name and rename it."
            )
        return max(complete, key=lambda item: (item.step or -1, item.unit.newest_ns))

    @contextmanager
    def _started(self, checkpoint: Path | None) -> Iterator[Path]:
        """Start the program; yield the file with its output, and kill it at the end."""
        layout = Layout(0, (self.process_count,), "127.0.0.1", find_free_port("127.0.0.1"), 0)
        values = placeholder_values(layout, self.checkpoints, checkpoint, self.model)
        values.update({"dataset": self.dataset, "run_id": ""})
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **node_variables(layout, "check")}
        variables.pop("MLFLOW_RUN_ID", None)
        command = executable_command(make_command(self.program, values))

        self.watch.begin()
        descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".log")
        with os.fdopen(descriptor, "wb") as output:
            try:
                self.processes = [
                    subprocess.Popen(
                        command,
                        env=environment,
                        cwd=find_working_folder(self.program.command),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                    for environment in make_environments(self.program, layout, values, variables)
                ]
            except OSError as error:
                reason = f"program.command: {command[0]} cannot be started ({error.strerror})."
                raise CodeError(reason) from error
        try:
            yield Path(name)
        finally:
            for process in self.processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _is_alive(self) -> bool:
        return all(process.poll() in (None, 0) for process in self.processes)

    def _is_over(self) -> bool:
        return all(process.poll() is not None for process in self.processes) or not self._is_alive()

    def _wait(self, condition: Callable[[], bool], timeout_s: float = 0.0) -> None:
        """List the checkpoint folder repeatedly until the condition is true or the time limit is
        reached."""
        end = time.monotonic() + (timeout_s or self.timeout_s)
        while not condition() and time.monotonic() < end:
            time.sleep(LOOK_INTERVAL_S)
            self.watch.look()
            self._count_saves()
            for path in self.watch.incomplete:
                self.incomplete_versions[path].add(_newest_ns(self.watch.files[path]))

    def _count_saves(self) -> None:
        counted = [(item.path, item.unit.files) for item in self.saves]
        started_with = self.watch.started_with
        for path, item in self.watch.complete.items():
            is_new = started_with.get(path) != item.unit.files
            if is_new and (path, item.unit.files) not in counted:
                self.saves.append(item)


def _describe_save(save: LocalCheckpoint) -> dict[str, Any]:
    unit = save.unit
    return {
        "checkpoint": save.path,
        "format": save.format,
        "bytes": sum(sizes_of(unit.files).values()),
        "save_s": round((unit.newest_ns - unit.oldest_ns) / 1e9, 3),
    }


def _newest_ns(files: Mapping[str, FileState]) -> int:
    return max((state.mtime_ns for state in files.values()), default=0)


def _interval(saves: list[LocalCheckpoint]) -> float:
    """Return the seconds between the first two saves."""
    return abs(saves[1].unit.newest_ns - saves[0].unit.newest_ns) / 1e9


def _is_overwritten(saves: list[LocalCheckpoint]) -> bool:
    """Return True if the program overwrites a checkpoint in place, so that a kill may leave an
    incomplete file."""
    return any(
        first.path == second.path and first.unit.is_file and first.unit.inode == second.unit.inode
        for first, second in pairwise(saves)
    )


def _find_counter(output: Path) -> int | None:
    """Return the first step or epoch in the output of a program."""
    match = COUNTER.search(output.read_text(errors="replace"))
    return int(match[2]) if match else None
