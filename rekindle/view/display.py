"""Shows a run while it runs: a live tree on a terminal, timestamped lines anywhere else.

    with display.show(name, LogProgress(name, logs).of, manifest, sys.stdout) as shown:
        execute(manifest, ..., on_change=shown)

Both read only the workflow's status (plain data) and what the training says of its progress. rich is imported by the
tree alone: a piped run does not pay for it.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from rekindle.common.wording import PROGRESS
from rekindle.view.summary import FAILED, FINISHED, Status, Step, duration, leaves, planned, steps

MARKS = {
    "Succeeded": ("✔", "green"),
    "Failed": ("✘", "red"),
    "Error": ("✘", "red"),
    "Running": ("▶", "cyan"),
    "Pending": ("·", "dim"),
    "Waiting": ("·", "dim"),
    "Skipped": ("–", "dim"),
    "Omitted": ("–", "dim"),
}
MANY, REST = 200, 30  # so many steps are looked at for a thirtieth of the time
NOT_RUN = ("Skipped", "Omitted")  # as the manifest meant it
STARTING = ("PodInitializing", "ContainerCreating")  # what every pod waits for, and not for long
ProgressOf = Callable[[Step], str]  # how far a step that runs has come, in words or ""


class Shown(Protocol):
    """Takes every new status; `tick` runs a few times a second in between; `say` prints a line of its own."""

    def __call__(self, status: Status) -> None: ...

    def tick(self) -> None: ...

    def say(self, line: str) -> None: ...


@contextmanager
def show(name: str, progress: ProgressOf, manifest: Mapping[str, Any], out: TextIO) -> Iterator[Shown]:
    """The display that fits `out`."""
    shown: Shown = Tree(name, progress, manifest, out) if is_terminal(out) else Lines(name, progress, out)
    stop = threading.Event()

    def ticking() -> None:
        while not stop.wait(0.25):
            shown.tick()

    ticker = threading.Thread(target=ticking, name="display", daemon=True)
    ticker.start()
    try:
        if isinstance(shown, Tree):
            with shown.live:
                yield shown
        else:
            yield shown
    finally:
        stop.set()
        ticker.join()
        if isinstance(shown, Lines) and shown.changed:
            shown.look()


def is_terminal(out: TextIO) -> bool:
    """Whether `out` can show a live tree."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


class Lines:
    """One line for each change of a step, and one every five seconds of training.

    Of a run of many steps not every change is looked at: that would take longer than the steps.
    """

    def __init__(self, name: str, progress: ProgressOf, out: TextIO) -> None:
        self.name, self.progress, self.out = name, progress, out
        self.seen: dict[str, str] = {}
        self.waits: set[tuple[str, str]] = set()
        self.status: Status = {}
        self.due, self.changed = 0.0, False
        self.running: list[Step] = []
        self.said = ("", 0.0)
        self.lock = threading.RLock()  # the ticker, the runner, and a signal handler amid either print

    def __call__(self, status: Status) -> None:
        if not self.status:
            before = [row for row in steps(self.name, status) if row.phase in FINISHED]
            self.seen = {row.name: row.phase for row in before}
            self.say(f"{self.name} running" + (f"; {len(leaves(before))} steps were done before" if before else ""))
        self.status, self.changed = status, True
        if time.monotonic() >= self.due:
            self.look()

    def look(self) -> None:
        """Says what has changed."""
        with self.lock:
            began, self.changed = time.monotonic(), False
            rows = steps(self.name, self.status)
            self.running = [row for row in rows if row.phase == "Running"]
            for row in rows:
                if row.phase == "Pending":
                    self._waits(row)
                elif row.phase != self.seen.get(row.name):
                    self.seen[row.name] = row.phase
                    took = f" in {duration(row.seconds)}" if row.phase in FINISHED and row.seconds else ""
                    cause = f": {' '.join(row.message.split())[:200]}" if row.message and row.phase in FAILED else ""
                    self.say(f"{row.name} {row.phase.lower()}{took}{cause}")
            self.due = began + REST * (time.monotonic() - began) if len(rows) > MANY else 0.0

    def _waits(self, row: Step) -> None:
        """Once for each reason: an image that cannot be pulled, no node with room."""
        reason = row.message.partition(":")[0]
        if reason and reason not in STARTING and (row.name, reason) not in self.waits:
            self.waits.add((row.name, reason))
            self.say(f"{row.name} waits: {' '.join(row.message.split())[:200]}")

    def tick(self) -> None:
        if self.changed and time.monotonic() >= self.due:
            self.look()
        text, at = self.said
        if time.monotonic() - at < 5:
            return
        for row in self.running:
            now = self.progress(row)
            if now and now != text:
                self.said = (now, time.monotonic())
                self.say(f"{row.name} {now}")

    def say(self, line: str) -> None:
        with self.lock:
            self.out.write(f"{time.strftime('%H:%M:%S')} {line}\n")
            self.out.flush()


class Tree:
    """The steps as a tree that redraws itself in place."""

    def __init__(self, name: str, progress: ProgressOf, manifest: Mapping[str, Any], out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.name, self.progress, self.plan = name, progress, planned(manifest)
        self.status: Status = {}
        self.began = time.time()
        self.console = Console(file=out, highlight=False)
        self.live = Live(get_renderable=self.drawn, console=self.console, refresh_per_second=4)

    def __call__(self, status: Status) -> None:
        self.status = status

    def tick(self) -> None:
        """Live redraws by itself."""

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def drawn(self) -> Any:
        """The tree now. Columns: mark and step, duration, training progress or message."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        took = duration(time.time() - self.began)
        table.add_row(Text(self.name, "bold"), Text(took, "dim"), Text(self.status.get("phase") or "Pending", "dim"))
        for row in steps(self.name, self.status, self.plan):
            mark, style = MARKS[row.phase]
            note = self.progress(row) if row.phase == "Running" else " ".join(row.message.split())[:100]
            step = Text(f"{'  ' * (row.depth + 1)}{mark} {row.label}", style)
            if row.phase in NOT_RUN:
                table.add_row(step, "", Text(row.phase.lower(), "dim"))
            else:
                table.add_row(step, Text(duration(row.seconds), "dim"), note)
        return table


def progress_in(log: str) -> str:
    """`step 120/600  loss 0.0213  10 234 samples/s  12 s left` from the newest such line of a log, or nothing."""
    found = PROGRESS.findall(log)
    if not found:
        return ""
    step, total, loss, rate, eta = found[-1]
    left = duration(float(eta)).replace(".0 s", " s")
    return f"step {step}/{total}  loss {loss}  {float(rate):,.0f} samples/s  {left} left".replace(",", " ")


class LogProgress:
    """Reads it from the logs of a step's pods (`WORKFLOW-STEP*.log`)."""

    def __init__(self, name: str, logs: Path) -> None:
        self.name, self.logs = name, logs

    def of(self, row: Step) -> str:
        return progress_in(self._newest(row.label))

    def _newest(self, step: str) -> str:
        logs = sorted(self.logs.glob(f"{self.name}-{step}-worker*.log"), key=lambda path: path.stat().st_mtime)
        for path in reversed(logs):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                text = file.read().decode(errors="replace")
            if "progress step=" in text:
                return text
        return ""


def log_line(label: str, text: str, as_json: bool) -> str:
    """A line of a log with its step, for people or as an object."""
    return json.dumps({"step": label, "line": text}, ensure_ascii=False) if as_json else f"{label} | {text}"


def follow(logs: Path, stem: str, finished: Any, out: TextIO = sys.stdout, as_json: bool = False) -> None:
    """Copy the logs whose name contains `stem` to `out`, each line with its pod, until `finished()` and all is said."""
    places: dict[Path, int] = {}
    while True:
        over = finished()
        wanted = [path for path in logs.glob("*.log") if stem in path.stem]
        for path in sorted(wanted, key=lambda path: path.stat().st_mtime):
            with path.open("rb") as file:
                file.seek(places.get(path, 0))
                # a line that is still being written waits for its end, unless nobody writes any more
                for line in file:
                    if not line.endswith(b"\n") and not over:
                        break
                    places[path] = places.get(path, 0) + len(line)
                    out.write(log_line(path.stem, line.decode(errors="replace").rstrip(), as_json) + "\n")
        out.flush()
        if over:
            return
        time.sleep(0.2)
