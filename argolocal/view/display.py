"""Show a run in progress, as a live tree on a terminal, else as lines with the time.

    with display.show(name, LogErrors(name, logs, deployments).of, manifest, sys.stdout) as shown:
        execute(manifest, ..., on_change=shown)

The tree and the lines read only the workflow's status (plain data) and the result of `progress`.
Only the tree imports rich.
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
from argolocal.common.terminal import without_escapes
from argolocal.common.wording import format_duration, visible
from argolocal.manifest.allowed_values import FAILED
from argolocal.view.summary import (
    FINISHED,
    Status,
    Step,
    applied_log,
    end_of,
    last_error,
    leaves,
    planned,
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
# maximum share of the time for examining many steps
MANY_STEPS = 200
MAX_LOOK_SHARE = 1 / 30
NOT_RUN_PHASES = ("Skipped", "Omitted")  # phases of steps that did not run
# reasons of a pending pod that are not reported
NORMAL_PENDING_REASONS = ("PodInitializing", "ContainerCreating")
# part of Argo's message for a step whose job failed; the job's logs contain the cause
JOB_FAILED = "failure condition"
MAX_CAUSE_LENGTH = 400
# a function that returns the progress of a running step, the error in the logs of a failed job, or
# ""
ProgressOf = Callable[[Step], str]


class Shown(Protocol):
    """A display, called with every new status. `tick` is called a few times per second; `say`
    prints a line."""

    def __call__(self, status: Status) -> None: ...
    def tick(self) -> None: ...
    def say(self, line: str) -> None: ...


@contextmanager
def show(
    name: str, progress: ProgressOf, manifest: Mapping[str, Any], out: TextIO
) -> Iterator[Shown]:
    """Show a run on `out`, as a tree on a terminal, else as lines."""
    shown: Shown = (
        Tree(name, progress, manifest, out) if is_terminal(out) else Lines(name, progress, out)
    )
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.25):
            shown.tick()

    ticker = threading.Thread(target=tick, name="display", daemon=True)
    ticker.start()

    try:
        with shown.live if isinstance(shown, Tree) else nullcontext():
            yield shown
    finally:
        stop.set()
        ticker.join()
        if isinstance(shown, Lines) and shown.changed:
            shown.look()


def is_terminal(out: TextIO) -> bool:
    """Return True if `out` can show a live tree."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


class Lines:
    """Prints a line for each change of a step, and the progress of trainings at most every five
    seconds.

    The steps of a run with many steps are examined less often, because this would take longer than
    the steps.
    """

    def __init__(self, name: str, progress: ProgressOf, out: TextIO) -> None:
        self.name = name
        self.progress = progress
        self.out = out
        self.printed_phases: dict[str, str] = {}
        self.printed_reasons: set[tuple[str, str]] = set()
        self.status: Status = {}
        self.next_look = 0.0
        self.changed = False
        self.running: list[Step] = []
        self.last_progress = ("", 0.0)
        self.lock = threading.RLock()  # several threads and the signal handlers print

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
        if time.monotonic() >= self.next_look:
            self.look()

    def look(self) -> None:
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
                    # an attempt has the same warnings as its step
                    if not row.label.startswith("("):
                        for text in warnings([row.node or {}]):
                            self.say(f"{row.name} warning: {text}")

            self.next_look = (
                started_at + (time.monotonic() - started_at) / MAX_LOOK_SHARE
                if len(rows) > MANY_STEPS
                else 0.0
            )

    def _report_waiting(self, row: Step) -> None:
        """Print each reason why a pod is pending once, such as an image that cannot be pulled."""
        reason = row.message.partition(":")[0]
        if (
            reason
            and reason not in NORMAL_PENDING_REASONS
            and (row.name, reason) not in self.printed_reasons
        ):
            self.printed_reasons.add((row.name, reason))
            self.say(f"{row.name} is waiting: {' '.join(row.message.split())[:200]}")

    def tick(self) -> None:
        if self.changed and time.monotonic() >= self.next_look:
            self.look()
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

        self.name, self.progress, self.plan = name, progress, planned(manifest)
        self.status: Status = {}
        self.causes: dict[str, str] = {}  # name of a failed step → cause of the failure
        self.began = time.time()
        self.console = Console(file=without_escapes(out), highlight=False)
        self.live = Live(get_renderable=self.draw, console=self.console, refresh_per_second=4)

    def __call__(self, status: Status) -> None:
        self.status = status

    def tick(self) -> None:
        """Do nothing: rich's Live redraws the tree by itself."""

    def say(self, line: str) -> None:
        self.console.print(visible(line), markup=False)

    def draw(self) -> Any:
        """Draw the current tree. Columns: mark and step, duration, training progress or message."""
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
    """Return the cause of a failure on one line: the error of the step's job, or the step's
    message."""
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
            return last_error(end_of(log, 65536))
        return ""


def log_line(label: str, text: str, as_json: bool) -> str:
    """Return a line of a log with its step, as text or as a JSON object.

    Of a line with carriage returns, the text shows what a terminal would show last, such as the end
    of a progress bar.
    """
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
    is_finished: Any,
    out: TextIO = sys.stdout,
    as_json: bool = False,
) -> bool:
    """Copy the logs of the pods of `run` with `step` in their names to `out`, each line with the
    name of its pod.

    The name of a pod starts with the name of its run, which may contain the name of a step, too.

    Return when `is_finished()` is true and all lines are copied: True if there was a line.
    """
    offsets: dict[Path, int] = {}

    while True:
        completed = is_finished()
        matching_logs = [
            path
            for path in logs.glob("*.log")
            # a step could replace its log by a FIFO or a device, which have no end
            if step in path.stem.removeprefix(f"{run}-") and path.is_file()
        ]
        for path in sorted(matching_logs, key=lambda path: path.stat().st_mtime):
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                # an incomplete line is copied only when all writers have exited
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
