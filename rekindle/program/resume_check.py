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
from rekindle.program.checkpoints.file_checks import FileStructure, check_file
from rekindle.program.checkpoints.folder import FileState, find_any_file, is_unit_file
from rekindle.program.checkpoints.formats import map_sizes_by_path
from rekindle.program.checkpoints.watch import FolderWatch, LocalCheckpoint, WatchSettings
from rekindle.program.config import ProgramConfig
from rekindle.program.opened_files import FileOpenWatcher
from rekindle.program.processes.commands import (
    count_processes,
    is_process_count_known,
    make_command,
    make_environments,
    make_placeholder_values,
)
from rekindle.program.processes.environment import (
    ProcessLayout,
    find_free_port,
    make_node_variables,
)
from rekindle.program.processes.python_program import make_executable_command
from rekindle.program.processes.working_folder import find_working_folder

LISTING_INTERVAL_S = 0.1
# maximum number of seconds until the first save, also after the restart
SAVE_TIMEOUT_S = 120.0
# matches a counter in the output, such as `step 50`, `epoch: 3`, `iteration=7`
COUNTER_PATTERN = re.compile(r"\b(step|epoch|iter(?:ation)?)s?\b\W{0,3}(\d+)", re.IGNORECASE)


@dataclass
class ResumeCheck:
    """The check of one training program. `model`: the settings of the section `model`; `dataset`:
    folder of the dataset that the step `prepare` has written; `folder`: empty folder for the
    checkpoints and the output; `timeout_s`: maximum time until the first save, also after the
    restart."""

    program: ProgramConfig
    model: Mapping[str, object]
    dataset: Path
    folder: Path
    timeout_s: float = SAVE_TIMEOUT_S
    saves: list[LocalCheckpoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checkpoints = self.folder / "checkpoints"
        self.checkpoints.mkdir(parents=True)
        self.process_count = count_processes(self.program)
        watch_settings = WatchSettings(
            processes=self.process_count if is_process_count_known(self.program) else 0,
            marker=self.program.marker,
            quiet_s=1.0,
        )
        self.watch = FolderWatch(self.checkpoints, watch_settings, self._are_processes_alive)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start_time_s = time.time()
        # modification times of each checkpoint that was seen in an incomplete state
        self.incomplete_versions: defaultdict[str, set[int]] = defaultdict(set)
        # True if the only checkpoint is complete because the program ended by itself, so that a
        # kill would have left no complete checkpoint
        self.counted_at_end = False

    def run(self) -> dict[str, Any]:
        """Return the findings about the program by the names checkpoint, bytes, seconds, interval_s
        and resumed_at. Raises CodeError with the first problem because of which work could be
        lost."""
        with self._running_program(None) as output_file:
            first_save = self._wait_for_save("has saved nothing", output_file)
            check_findings = _describe_save(first_save)
            self._wait_until(lambda: self._is_over() or len(self.saves) > 1, self.timeout_s / 4)
            if len(self.saves) > 1:
                check_findings["interval_s"] = round(_compute_interval_s(self.saves), 3)
            if _is_overwritten_in_place(self.saves):
                check_findings["overwritten"] = True
            has_ended = self._is_over()

        self.watch.settle(has_succeeded=has_ended)
        newest_checkpoint = self._find_newest_checkpoint()
        if has_ended:
            check_findings["finished"] = True
            check_findings["counted_at_end"] = self.counted_at_end
            return check_findings

        check_findings["resumed_at"] = self._resume(newest_checkpoint, output_file)
        return check_findings

    def _resume(self, checkpoint: LocalCheckpoint, earlier_output: Path) -> str:
        """Start the program again, and return the path of the next checkpoint. Raises CodeError if
        the program does not continue from `checkpoint`."""
        self.saves.clear()
        checkpoint_path = self.checkpoints / checkpoint.path
        open_watcher = FileOpenWatcher(checkpoint_path)
        try:
            with self._running_program(checkpoint_path) as output_file:
                self._wait_until(
                    lambda: open_watcher.was_file_opened() or bool(self.saves) or self._is_over()
                )
                if not open_watcher.was_file_opened():
                    raise CodeError(
                        f"the program did not open {checkpoint.path} after its restart, so it began"
                        " again: set program.resume to the arguments that let it continue from"
                        " {checkpoint}, or let it continue from the newest file in {checkpoints}."
                    )
                self._wait_for_save("has saved nothing after its restart", output_file)
        finally:
            open_watcher.close()

        newest_save = self.saves[0]
        first_counter = _find_counter(output_file)
        earlier_counter = _find_counter(earlier_output)
        is_earlier_step = (
            newest_save.step is not None
            and checkpoint.step is not None
            and newest_save.step <= checkpoint.step
        )
        is_repeated = (
            newest_save.step is None
            and first_counter is not None
            and first_counter == earlier_counter
        )
        if is_earlier_step or is_repeated:
            raise CodeError(
                f"the program opened {checkpoint.path} after its restart, but began again at its"
                f" first step (its next checkpoint is {newest_save.path}): let it continue at the"
                " step of the checkpoint."
            )
        return newest_save.path

    def _wait_for_save(self, problem: str, output_file: Path) -> LocalCheckpoint:
        """Wait for the first complete checkpoint, and return it. Raises CodeError, whose message
        contains `problem`, if the program ends or the time limit is reached before the first
        complete checkpoint."""
        start_s = time.monotonic()
        self._wait_until(lambda: bool(self.saves) or self._is_over())
        if self.saves:
            return self.saves[0]

        process_exit_codes = [
            process.returncode for process in self.processes if process.returncode
        ]
        if process_exit_codes:
            output_lines = output_file.read_text(errors="replace").strip().splitlines() or [
                "no output"
            ]
            raise CodeError(
                f"the program ended with exit code {process_exit_codes[0]}: {output_lines[-1]}"
            )

        if self._is_over():
            self.watch.settle(has_succeeded=True)
            self._count_saves()
            if self.saves:
                first_save = self.saves[0]
                # after a kill, a file is complete if its content shows its end
                has_end = (
                    first_save.unit.is_file
                    and check_file(self.checkpoints / first_save.path).structure
                    is not FileStructure.NONE
                )
                incomplete_versions = self.incomplete_versions[first_save.path]
                self.counted_at_end = len(incomplete_versions) > 1 and not has_end
                return first_save

        elapsed_seconds = time.monotonic() - start_s
        if self.watch.incomplete:
            incomplete_path, reason = next(iter(self.watch.incomplete.items()))
            raise CodeError(
                f"the program {problem} that is complete within {elapsed_seconds:.0f} s:"
                f" {incomplete_path}: {reason}. Let it write under another name and rename it, or"
                " name the file that it writes last in program.marker."
            )
        ending_words = "ended" if self._is_over() else "ran for"
        if unknown_file := find_any_file(self.checkpoints):
            raise CodeError(
                f"the program {problem} that is known as a checkpoint ({ending_words}"
                f" {elapsed_seconds:.0f} s): the name of {unknown_file} has neither a step, such"
                " as step-100, nor an ending such as .pt. Let it write such a name, or a folder"
                " with the file program.marker."
            )
        if misplaced_path := self._find_misplaced_save():
            raise CodeError(
                f"the program {problem} in {{checkpoints}}, but {misplaced_path} in its working"
                " folder, which a pod loses: pass it the folder {checkpoints} in program.command,"
                f" and delete {misplaced_path}."
            )
        raise CodeError(
            f"the program {problem} ({ending_words} {elapsed_seconds:.0f} s): after a loss it"
            " would begin again. Let it save into {checkpoints}, and more often."
        )

    def _find_misplaced_save(self) -> str:
        """Return the path of a checkpoint that the program wrote to the working folder by mistake;
        "" if none exists."""
        working_folder = find_working_folder(self.program.command)
        try:
            unit_files = [path for path in working_folder.iterdir() if is_unit_file(path.name)]
            new_files = [path for path in unit_files if path.stat().st_mtime >= self.start_time_s]
        except OSError:
            return ""
        return str(min(new_files, default=""))

    def _find_newest_checkpoint(self) -> LocalCheckpoint:
        complete_checkpoints = list(self.watch.complete.values())
        if not complete_checkpoints:
            incomplete_path, reason = next(
                iter(self.watch.incomplete.items()), ("its checkpoint", "missing")
            )
            raise CodeError(
                f"a SIGKILL left no complete checkpoint on the node: {incomplete_path}: {reason}."
                " Let the program write under another name and rename it."
            )
        return max(
            complete_checkpoints,
            key=lambda local_checkpoint: (
                local_checkpoint.step or -1,
                local_checkpoint.unit.newest_ns,
            ),
        )

    @contextmanager
    def _running_program(self, checkpoint_path: Path | None) -> Iterator[Path]:
        """Start the program; yield the file with its output, and kill it at the end."""
        process_layout = ProcessLayout(
            0, (self.process_count,), "127.0.0.1", find_free_port("127.0.0.1"), 0
        )
        values_by_placeholder = make_placeholder_values(
            process_layout, self.checkpoints, checkpoint_path, self.model
        )
        values_by_placeholder.update({"dataset": self.dataset, "run_id": ""})
        shared_variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **make_node_variables(process_layout, "check"),
        }
        shared_variables.pop("MLFLOW_RUN_ID", None)
        command = make_executable_command(make_command(self.program, values_by_placeholder))

        self.watch.begin()
        log_descriptor, log_name = tempfile.mkstemp(dir=self.folder, suffix=".log")
        with os.fdopen(log_descriptor, "wb") as log_stream:
            try:
                self.processes = [
                    subprocess.Popen(
                        command,
                        env=environment,
                        cwd=find_working_folder(self.program.command),
                        stdin=subprocess.DEVNULL,
                        stdout=log_stream,
                        stderr=log_stream,
                        start_new_session=True,
                    )
                    for environment in make_environments(
                        self.program, process_layout, values_by_placeholder, shared_variables
                    )
                ]
            except OSError as error:
                reason = f"program.command: {command[0]} cannot be started ({error.strerror})."
                raise CodeError(reason) from error
        try:
            yield Path(log_name)
        finally:
            for process in self.processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _are_processes_alive(self) -> bool:
        return all(process.poll() in (None, 0) for process in self.processes)

    def _is_over(self) -> bool:
        return (
            all(process.poll() is not None for process in self.processes)
            or not self._are_processes_alive()
        )

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float = 0.0) -> None:
        """List the checkpoint folder repeatedly until the condition is true or the time limit is
        reached."""
        deadline_s = time.monotonic() + (timeout_s or self.timeout_s)
        while not condition() and time.monotonic() < deadline_s:
            time.sleep(LISTING_INTERVAL_S)
            self.watch.look()
            self._count_saves()
            for path in self.watch.incomplete:
                self.incomplete_versions[path].add(_find_newest_change_ns(self.watch.files[path]))

    def _count_saves(self) -> None:
        counted_versions = [
            (local_checkpoint.path, local_checkpoint.unit.files) for local_checkpoint in self.saves
        ]
        initial_files = self.watch.started_with
        for unit_path, local_checkpoint in self.watch.complete.items():
            is_new = initial_files.get(unit_path) != local_checkpoint.unit.files
            if is_new and (unit_path, local_checkpoint.unit.files) not in counted_versions:
                self.saves.append(local_checkpoint)


def _describe_save(first_save: LocalCheckpoint) -> dict[str, Any]:
    checkpoint_unit = first_save.unit
    return {
        "checkpoint": first_save.path,
        "format": first_save.format,
        "bytes": sum(map_sizes_by_path(checkpoint_unit.files).values()),
        "save_s": round((checkpoint_unit.newest_ns - checkpoint_unit.oldest_ns) / 1e9, 3),
    }


def _find_newest_change_ns(states_by_path: Mapping[str, FileState]) -> int:
    return max((file_state.mtime_ns for file_state in states_by_path.values()), default=0)


def _compute_interval_s(saves: list[LocalCheckpoint]) -> float:
    """Return the seconds between the first two saves."""
    return abs(saves[1].unit.newest_ns - saves[0].unit.newest_ns) / 1e9


def _is_overwritten_in_place(saves: list[LocalCheckpoint]) -> bool:
    """Return True if the program overwrites a checkpoint in place, so that a kill may leave an
    incomplete file."""
    return any(
        earlier_save.path == later_save.path
        and earlier_save.unit.is_file
        and earlier_save.unit.inode == later_save.unit.inode
        for earlier_save, later_save in pairwise(saves)
    )


def _find_counter(output_file: Path) -> int | None:
    """Return the first step or epoch number in the output of a program."""
    counter_match = COUNTER_PATTERN.search(output_file.read_text(errors="replace"))
    return int(counter_match[2]) if counter_match else None
