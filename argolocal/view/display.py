"""Show a run in progress as a live tree on a terminal. Without a terminal, the state of the run is
printed as lines with timestamps.

    find_error = LogErrors(name, logs, deployments).of
    with display.show_run(name, find_error, manifest, sys.stdout) as run_display:
        execute(manifest, ..., on_change=run_display)
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TextIO

from argolocal.common import causes
from argolocal.common.json_text import to_json
from argolocal.common.wording import escape_control_chars, format_duration, open_raw_stream
from argolocal.manifest.allowed_values import FAILED_PHASES
from argolocal.view.summary import (
    FINISHED_PHASES,
    Status,
    Step,
    describe_progress,
    find_applied_log,
    find_last_error,
    list_leaf_steps,
    list_planned_tasks,
    list_steps,
    list_warnings,
    read_end,
)

PHASE_MARKS = {
    "Succeeded": ("✔", "green"),
    "Failed": ("✘", "red"),
    "Error": ("✘", "red"),
    "Running": ("▶", "cyan"),
    "Pending": ("·", "dim"),
    "Waiting": ("·", "dim"),
    "Cached": ("≡", "green"),
    "Skipped": ("–", "dim"),
    "Omitted": ("–", "dim"),
}
# a run with more steps than this number is reported less often
MANY_STEPS_COUNT = 200
# in a run with many steps, maximum share of the time that the reports may take
MAX_REPORT_SHARE = 1 / 30
# phases of steps that did not run at all
NOT_RUN_PHASES = ("Skipped", "Omitted")
# reasons for which every pod is pending for a short time; these reasons are not reported
NORMAL_PENDING_REASONS = ("PodInitializing", "ContainerCreating")
# part of Argo's message about a step whose job has failed; the logs of the job contain the cause
JOB_FAILED_MESSAGE = "failure condition"
MAX_CAUSE_LENGTH = 400
# function that returns the progress of a running step, the error in the logs of the failed job of a
# step, or ""
FindProgress = Callable[[Step], str]


class RunDisplay(Protocol):
    """A display of a run. A RunDisplay is called with every new status of the run. `tick` is called
    a few times per second, and `say` prints a line."""

    def __call__(self, status: Status) -> None: ...
    def tick(self) -> None: ...
    def say(self, line: str) -> None: ...


@contextmanager
def show_run(
    run_name: str, find_progress: FindProgress, manifest: Mapping[str, Any], output_stream: TextIO
) -> Iterator[RunDisplay]:
    """Show a run on `output_stream` during the `with` block: as a tree on a terminal, else as
    lines."""
    run_display: RunDisplay
    if is_terminal(output_stream):
        run_display = TreeDisplay(run_name, find_progress, manifest, output_stream)
    else:
        run_display = LineDisplay(run_name, find_progress, output_stream)

    stop_event = threading.Event()

    def tick() -> None:
        while not stop_event.wait(0.25):
            run_display.tick()

    ticker = threading.Thread(target=tick, name="display", daemon=True)
    ticker.start()

    try:
        with run_display.live if isinstance(run_display, TreeDisplay) else nullcontext():
            yield run_display
    finally:
        stop_event.set()
        ticker.join()
        if isinstance(run_display, LineDisplay) and run_display.changed:
            run_display.report_changes()


def is_terminal(output_stream: TextIO) -> bool:
    """Return True if `output_stream` can show a live tree."""
    return output_stream.isatty() and os.environ.get("TERM") != "dumb"


class LineDisplay:
    """Prints a line for each step whose phase changes, and the progress of trainings at most every
    five seconds.

    In a run with many steps, changes are printed less often, because each report examines all
    steps. `next_report`: monotonic time of the next report. `changed` is True if the status has
    changed since the last report. `last_progress`: the last printed progress, and its monotonic
    time.
    """

    def __init__(self, name: str, find_progress: FindProgress, output_stream: TextIO) -> None:
        self.name = name
        self.progress = find_progress
        self.out = output_stream
        self.printed_phases: dict[str, str] = {}
        self.printed_reasons: set[tuple[str, str]] = set()
        self.status: Status = {}
        self.next_report = 0.0
        self.changed = False
        self.running: list[Step] = []
        self.last_progress = ("", 0.0)
        # several threads and the signal handlers print lines at the same time
        self.lock = threading.RLock()

    def __call__(self, status: Status) -> None:
        if not self.status:
            finished_steps = [
                step
                for step in list_steps(self.name, status)
                if step.phase in FINISHED_PHASES and step.phase != "Cached"
            ]

            self.printed_phases = {step.name: step.phase for step in finished_steps}
            line = f"{self.name} running"
            if finished_steps:
                line += f"; {len(list_leaf_steps(finished_steps))} steps had completed before"

            self.say(line)

        self.status = status
        self.changed = True
        if time.monotonic() >= self.next_report:
            self.report_changes()

    def report_changes(self) -> None:
        """Print all changes of the status since the last call."""
        with self.lock:
            started_at = time.monotonic()
            self.changed = False
            run_steps = list_steps(self.name, self.status)
            self.running = [step for step in run_steps if step.phase == "Running"]

            for step in run_steps:
                if step.phase == "Pending":
                    self._report_waiting(step)
                elif step.phase != self.printed_phases.get(step.name):
                    self.printed_phases[step.name] = step.phase
                    self._report_phase(step)

            if len(run_steps) > MANY_STEPS_COUNT:
                report_s = time.monotonic() - started_at
                self.next_report = started_at + report_s / MAX_REPORT_SHARE
            else:
                self.next_report = 0.0

    def _report_phase(self, step: Step) -> None:
        """Print the phase of a step, with its duration and the cause of a failure, and its
        warnings."""
        line = f"{step.name} {step.phase.lower()}"
        if step.phase in FINISHED_PHASES and step.seconds:
            line += f" in {format_duration(step.seconds)}"

        if step.phase in (*FAILED_PHASES, "Cached"):
            cause_text = find_cause(step, self.progress)
            if cause_text:
                line += f": {cause_text}"

        self.say(line)
        # skip attempts, because a retried step has the same warnings as its attempt
        if not step.label.startswith("("):
            for warning_text in list_warnings([step.node or {}]):
                self.say(f"{step.name} warning: {warning_text}")

    def _report_waiting(self, step: Step) -> None:
        """Print the reason why a pod is pending, such as an image that cannot be pulled. Each
        reason why a pod is pending is printed only once."""
        reason = step.message.partition(":")[0]
        if (
            reason
            and reason not in NORMAL_PENDING_REASONS
            and (step.name, reason) not in self.printed_reasons
        ):
            self.printed_reasons.add((step.name, reason))
            self.say(f"{step.name} is waiting: {' '.join(step.message.split())[:200]}")

    def tick(self) -> None:
        """Print the changes that were held back, and the progress of the running steps if it was
        not printed in the last five seconds."""
        if self.changed and time.monotonic() >= self.next_report:
            self.report_changes()
        last_text, printed_at = self.last_progress
        if time.monotonic() - printed_at < 5:
            return

        for step in self.running:
            progress_text = self.progress(step)
            if progress_text and progress_text != last_text:
                self.last_progress = (progress_text, time.monotonic())
                self.say(f"{step.name} {progress_text}")

    def say(self, line: str) -> None:
        with self.lock:
            self.out.write(f"{time.strftime('%H:%M:%S')} {escape_control_chars(line)}\n")
            self.out.flush()


class TreeDisplay:
    """Shows the steps as a tree that redraws in place."""

    def __init__(
        self,
        name: str,
        find_progress: FindProgress,
        manifest: Mapping[str, Any],
        output_stream: TextIO,
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self.name = name
        self.progress = find_progress
        self.plan = list_planned_tasks(manifest)
        self.status: Status = {}
        # name of a failed step → cause of its failure
        self.causes: dict[str, str] = {}
        self.started_at = time.time()
        self.console = Console(file=open_raw_stream(output_stream), highlight=False)
        self.live = Live(get_renderable=self.draw, console=self.console, refresh_per_second=4)

    def __call__(self, status: Status) -> None:
        self.status = status

    def tick(self) -> None:
        """The method does nothing, because rich's Live redraws the tree."""

    def say(self, line: str) -> None:
        self.console.print(escape_control_chars(line), markup=False)

    def draw(self) -> Any:
        """Return the current tree as a table of rich. The columns of the table are the step with
        the symbol of its phase, its duration, and its progress or message."""
        from rich.table import Table
        from rich.text import Text

        text_grid = Table.grid(padding=(0, 2))
        elapsed_text = format_duration(time.time() - self.started_at)

        text_grid.add_row(
            Text(self.name, "bold"),
            Text(elapsed_text, "dim"),
            Text(self.status.get("phase") or "Pending", "dim"),
        )

        for step in list_steps(self.name, self.status, self.plan):
            phase_mark, phase_style = PHASE_MARKS[step.phase]
            note = self.progress(step) if step.phase == "Running" else self._make_note(step)
            label_text = Text(
                f"{'  ' * (step.depth + 1)}{phase_mark} {escape_control_chars(step.label)}",
                phase_style,
            )

            if step.phase in NOT_RUN_PHASES:
                text_grid.add_row(label_text, "", Text(step.phase.lower(), "dim"))
            else:
                duration_text = Text(format_duration(step.seconds), "dim")
                text_grid.add_row(label_text, duration_text, Text(escape_control_chars(note)))

        return text_grid

    def _make_note(self, step: Step) -> str:
        """Return the cause if a step has failed, otherwise the step's message or its warnings, in
        one line."""
        if step.phase not in FAILED_PHASES:
            note = step.message or " ".join(list_warnings([step.node or {}]))
            return " ".join(note.split())[:100]
        if step.name not in self.causes:
            self.causes[step.name] = find_cause(step, self.progress)
        return self.causes[step.name]


def find_cause(step: Step, find_progress: FindProgress) -> str:
    """Return the cause of a step's failure in one line: the error in the log of the step's job, or
    else the step's message."""
    error_text = find_progress(step) if JOB_FAILED_MESSAGE in step.message else ""
    return " ".join((error_text or causes.extract_cause(step.message)).split())[:MAX_CAUSE_LENGTH]


def parse_task_name(step: Step) -> str:
    """Return the name of the task of a step or attempt, such as train for the name
    ship.train(0)."""
    return step.name.rpartition(".")[2].partition("(")[0]


class LogErrors:
    """Reads the errors of failed jobs and deployments from the logs of their pods
    (`WORKFLOW-STEP-*.log`)."""

    def __init__(self, run_name: str, log_folder: Path, deployments_folder: Path) -> None:
        self.name = run_name
        self.logs = log_folder
        self.deployments = deployments_folder

    def of(self, step: Step) -> str:
        """Return the last error in the log of a failed step, or the progress that a running step
        has reported; "" without either."""
        if step.phase not in FAILED_PHASES:
            return describe_progress(step)
        log_path = find_applied_log(
            self.name, step.node or {}, parse_task_name(step), self.logs, self.deployments
        )
        if log_path:
            return find_last_error(read_end(log_path, 65536))
        return ""


def format_log_line(label: str, text: str, as_json: bool) -> str:
    """Format a line of a log with the name of its pod, as text or as a JSON object.

    In text, only the part after the last carriage return is shown, such as the last state of a
    progress bar.
    """
    if as_json:
        return escape_control_chars(to_json({"step": label, "line": text}, ensure_ascii=False))

    text = text.rstrip("\r").rpartition("\r")[2]
    return escape_control_chars(f"{label} | {text}")


def follow(
    log_folder: Path,
    run_name: str,
    step_text: str,
    is_finished: Callable[[], bool],
    output_stream: TextIO = sys.stdout,
    as_json: bool = False,
) -> bool:
    """Copy the logs of those pods of `run_name` whose names contain `step_text` to `output_stream`.
    Each copied line starts with the name of its pod.

    Return when `is_finished()` is True and all lines of the logs are copied. Return True if any
    line was copied.
    """
    # number of bytes of each log that have been copied
    offsets: dict[Path, int] = {}

    while True:
        is_completed = is_finished()
        matching_logs = [
            path
            for path in log_folder.glob("*.log")
            # read only regular files, because a step could replace its log by a FIFO or an endless
            # device
            if step_text in path.stem.removeprefix(f"{run_name}-") and path.is_file()
        ]
        for path in sorted(matching_logs, key=lambda path: path.stat().st_mtime):
            with path.open("rb") as log_file:
                log_file.seek(offsets.get(path, 0))
                # copy an incomplete line only after all writers have exited
                for line in log_file:
                    if not line.endswith(b"\n") and not is_completed:
                        break

                    offsets[path] = offsets.get(path, 0) + len(line)
                    output_stream.write(
                        format_log_line(path.stem, line.decode(errors="replace").rstrip(), as_json)
                        + "\n"
                    )

        output_stream.flush()
        if is_completed:
            return bool(offsets)

        time.sleep(0.2)
