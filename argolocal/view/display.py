"""Show a run in progress as a live tree on a terminal. Without a terminal, print lines with
timestamps.

find_error = LogErrors(name, logs, deployments).of
with display.show(name, find_error, manifest, sys.stdout) as run_display:
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
from argolocal.common.wording import format_duration, visible, without_escapes
from argolocal.manifest.allowed_values import FAILED
from argolocal.view.summary import (
    FINISHED,
    Status,
    Step,
    applied_log,
    last_error,
    leaves,
    list_planned_tasks,
    read_end,
    steps,
    warnings,
)

MARKS = {
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
# MAX_REPORT_SHARE: maximum share of the time that reports may take in a run with more than
# MANY_STEPS steps
MANY_STEPS = 200
MAX_REPORT_SHARE = 1 / 30
NOT_RUN_PHASES = ("Skipped", "Omitted")  # phases of steps that did not run at all at all
# normal reasons for a pending pod, which are not reported
NORMAL_PENDING_REASONS = ("PodInitializing", "ContainerCreating")
# part of Argo's message for a step whose job failed; the job's logs contain the cause
JOB_FAILED = "failure condition"
MAX_CAUSE_LENGTH = 400
# function that returns the progress of a running step, the error in the logs of a failed job, or ""
ProgressOf = Callable[[Step], str]


class RunDisplay(Protocol):
    """A display of a run. It is called with every new status. `tick` is called a few times per
    second, and `say` prints a line."""

    def __call__(self, status: Status) -> None: ...
    def tick(self) -> None: ...
    def say(self, line: str) -> None: ...


@contextmanager
def show(
    name: str, progress: ProgressOf, manifest: Mapping[str, Any], out: TextIO
) -> Iterator[RunDisplay]:
    """Show a run on `out` during the `with` block: as a tree on a terminal, else as lines."""
    run_display: RunDisplay
    if is_terminal(out):
        run_display = Tree(name, progress, manifest, out)
    else:
        run_display = Lines(name, progress, out)

    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.25):
            run_display.tick()

    ticker = threading.Thread(target=tick, name="display", daemon=True)
    ticker.start()

    try:
        with run_display.live if isinstance(run_display, Tree) else nullcontext():
            yield run_display
    finally:
        stop.set()
        ticker.join()
        if isinstance(run_display, Lines) and run_display.changed:
            run_display.report_changes()


def is_terminal(out: TextIO) -> bool:
    """Return True if `out` can show a live tree."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


class Lines:
    """Prints a line for each change of a step, and the progress of trainings at most every five
    seconds.

    In a run with many steps, changes are printed less often, because each report examines all
    steps.
    """

    def __init__(self, name: str, progress: ProgressOf, out: TextIO) -> None:
        self.name = name
        self.progress = progress
        self.out = out
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
            finished = [
                row
                for row in steps(self.name, status)
                if row.phase in FINISHED and row.phase != "Cached"
            ]

            self.printed_phases = {row.name: row.phase for row in finished}
            self.say(
                f"{self.name} running"
                + (f"; {len(leaves(finished))} steps had completed before" if finished else "")
            )

        self.status = status
        self.changed = True
        if time.monotonic() >= self.next_report:
            self.report_changes()

    def report_changes(self) -> None:
        """Print all changes since the last call."""
        with self.lock:
            started_at = time.monotonic()
            self.changed = False
            rows = steps(self.name, self.status)
            self.running = [row for row in rows if row.phase == "Running"]

            for row in rows:
                if row.phase == "Pending":
                    self._report_waiting(row)
                elif row.phase != self.printed_phases.get(row.name):
                    self.printed_phases[row.name] = row.phase
                    if row.phase in FINISHED and row.seconds:
                        duration_text = f" in {format_duration(row.seconds)}"
                    else:
                        duration_text = ""

                    if row.phase in (*FAILED, "Cached"):
                        cause = cause_of(row, self.progress)
                    else:
                        cause = ""

                    self.say(
                        f"{row.name} {row.phase.lower()}{duration_text}"
                        + (f": {cause}" if cause else "")
                    )
                    # skip attempts, because a retried step has the same warnings as its attempt
                    if not row.label.startswith("("):
                        for text in warnings([row.node or {}]):
                            self.say(f"{row.name} warning: {text}")

            self.next_report = (
                started_at + (time.monotonic() - started_at) / MAX_REPORT_SHARE
                if len(rows) > MANY_STEPS
                else 0.0
            )

    def _report_waiting(self, row: Step) -> None:
        """Print the reason why a pod is pending, such as an image that cannot be pulled. Each
        reason is printed only once."""
        reason = row.message.partition(":")[0]
        if (
            reason
            and reason not in NORMAL_PENDING_REASONS
            and (row.name, reason) not in self.printed_reasons
        ):
            self.printed_reasons.add((row.name, reason))
            self.say(f"{row.name} is waiting: {' '.join(row.message.split())[:200]}")

    def tick(self) -> None:
        if self.changed and time.monotonic() >= self.next_report:
            self.report_changes()
        text, shown_at = self.last_progress
        if time.monotonic() - shown_at < 5:
            return
        for row in self.running:
            progress = self.progress(row)
            if progress and progress != text:
                self.last_progress = (progress, time.monotonic())
                self.say(f"{row.name} {progress}")

    def say(self, line: str) -> None:
        with self.lock:
            self.out.write(f"{time.strftime('%H:%M:%S')} {visible(line)}\n")
            self.out.flush()


class Tree:
    """Shows the steps as a tree that redraws in place."""

    def __init__(
        self, name: str, progress: ProgressOf, manifest: Mapping[str, Any], out: TextIO
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self.name = name
        self.progress = progress
        self.plan = list_planned_tasks(manifest)
        self.status: Status = {}
        self.causes: dict[str, str] = {}  # name of a failed step → cause of its failure
        self.began = time.time()
        self.console = Console(file=without_escapes(out), highlight=False)
        self.live = Live(get_renderable=self.draw, console=self.console, refresh_per_second=4)

    def __call__(self, status: Status) -> None:
        self.status = status

    def tick(self) -> None:
        """Do nothing, because rich's Live redraws the tree."""

    def say(self, line: str) -> None:
        self.console.print(visible(line), markup=False)

    def draw(self) -> Any:
        """Draw the current tree. Its columns are the step with a status symbol, the duration, and
        the training progress or message."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        elapsed = format_duration(time.time() - self.began)

        table.add_row(
            Text(self.name, "bold"),
            Text(elapsed, "dim"),
            Text(self.status.get("phase") or "Pending", "dim"),
        )

        for row in steps(self.name, self.status, self.plan):
            mark, style = MARKS[row.phase]
            note = Text(visible(self.progress(row) if row.phase == "Running" else self._cause(row)))
            step = Text(f"{'  ' * (row.depth + 1)}{mark} {visible(row.label)}", style)

            if row.phase in NOT_RUN_PHASES:
                table.add_row(step, "", Text(row.phase.lower(), "dim"))
            else:
                table.add_row(step, Text(format_duration(row.seconds), "dim"), note)

        return table

    def _cause(self, row: Step) -> str:
        if row.phase not in FAILED:
            return " ".join((row.message or " ".join(warnings([row.node or {}]))).split())[:100]
        if row.name not in self.causes:
            self.causes[row.name] = cause_of(row, self.progress)
        return self.causes[row.name]


def cause_of(row: Step, progress: ProgressOf) -> str:
    """Return the cause of a step's failure in one line: the error in the log of the step's job, or
    the step's message."""
    error = progress(row) if JOB_FAILED in row.message else ""
    return " ".join((error or causes.extract_cause(row.message)).split())[:MAX_CAUSE_LENGTH]


def task_of(row: Step) -> str:
    """Return the name of the task of a step or attempt: `train` of `ship.train(0)`."""
    return row.name.rpartition(".")[2].partition("(")[0]


class LogErrors:
    """Reads the errors of failed jobs and deployments from the logs of their pods
    (`WORKFLOW-STEP-*.log`)."""

    def __init__(self, name: str, logs: Path, deployments: Path) -> None:
        self.name = name
        self.logs = logs
        self.deployments = deployments

    def of(self, row: Step) -> str:
        if row.phase not in FAILED:
            return ""
        log = applied_log(self.name, row.node or {}, task_of(row), self.logs, self.deployments)
        if log:
            return last_error(read_end(log, 65536))
        return ""


def log_line(label: str, text: str, as_json: bool) -> str:
    """Format a line of a log with its step, as text or as a JSON object.

    Of a line with carriage returns, only the text after the last one is used, such as the last
    state of a progress bar."""
    if not as_json:
        text = text.rstrip("\r").rpartition("\r")[2]
    return visible(
        to_json({"step": label, "line": text}, ensure_ascii=False)
        if as_json
        else f"{label} | {text}"
    )


def follow(
    logs: Path,
    run: str,
    step: str,
    is_finished: Callable[[], bool],
    out: TextIO = sys.stdout,
    as_json: bool = False,
) -> bool:
    """Copy the logs of those pods of `run` whose names contain `step` to `out`. Each line starts
    with the name of its pod.

    Return when `is_finished()` is True and all lines are copied. The result is True if any line was
    copied.
    """
    offsets: dict[Path, int] = {}

    while True:
        completed = is_finished()
        matching_logs = [
            path
            for path in logs.glob("*.log")
            # read only regular files, because a step could replace its log by a FIFO or an endless
            # device
            if step in path.stem.removeprefix(f"{run}-") and path.is_file()
        ]
        for path in sorted(matching_logs, key=lambda path: path.stat().st_mtime):
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                # copy an incomplete line only after all writers have exited
                for line in file:
                    if not line.endswith(b"\n") and not completed:
                        break

                    offsets[path] = offsets.get(path, 0) + len(line)
                    out.write(
                        log_line(path.stem, line.decode(errors="replace").rstrip(), as_json) + "\n"
                    )

        out.flush()
        if completed:
            return bool(offsets)

        time.sleep(0.2)
