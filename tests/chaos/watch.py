"""The log lines and training steps of all processes of a run, ordered by time."""

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

GENERATION = re.compile(r"generation (\d+): (.+)")


@dataclass
class Step:
    """The start of a training step in a process."""

    time: float
    pid: int
    name: str
    step: int


@dataclass
class Watch:
    """Reads the logs and the toy workload's journal while they grow."""

    journal: Path
    # Each log line is a tuple of its time, the name of its process and its text.
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    # newest step that any process has started
    newest: int = -1
    # (time, number) of each generation of the worker group
    generations: list[tuple[float, int]] = field(default_factory=list)
    last_progress: float = field(default_factory=time.time)
    # killed worker → newest step in its shared memory
    snapshots: dict[str, int] = field(default_factory=dict)
    # descriptions of processes that started with a step before the step in `snapshots`
    setbacks: list[str] = field(default_factory=list)
    # open file, incomplete line
    _files: dict[Path, tuple[int, str]] = field(default_factory=dict)
    _names: dict[Path, str] = field(default_factory=dict)

    def add(self, log: Path, name: str) -> None:
        """Read the log of the process `name`, too, on each call of `poll`."""
        self._names[log] = name

    def say(self, text: str) -> None:
        """Add a line to the ordered log of the run, under the name "operator"."""
        self.last_progress = time.time()
        self.lines.append((self.last_progress, "OPERATOR", text))

    def record_snapshot(self, name: str, step: int) -> None:
        """Record the newest step in the shared memory of a killed worker, because a new process
        must not start with an earlier step."""
        self.snapshots[name] = max(step, self.snapshots.get(name, -1))

    def poll(self) -> None:
        """Read the new lines of all logs and of the journal."""
        for path in (self.journal, *self._names):
            for line in self._read_new_lines(path):
                if path == self.journal:
                    start, pid, name, step = line.split()
                    self._add_step(Step(float(start), int(pid), name, int(step)))
                else:
                    self.lines.append((time.time(), self._names[path], line))
                    if self._names[path].startswith("coordinator") and (
                        generation_line := GENERATION.search(line)
                    ):
                        self.last_progress = time.time()
                        self.generations.append((self.last_progress, int(generation_line[1])))

    def _add_step(self, step: Step) -> None:
        is_first = all(other.pid != step.pid for other in reversed(self.steps))
        self.steps.append(step)
        if is_first and step.step < (saved_step := self.snapshots.get(step.name, -1)):
            details = f"starts with step {step.step}, its shared memory had {saved_step}"
            self.setbacks.append(f"{step.name} ({step.pid}) {details}")
        if step.step > self.newest or is_first:
            text = f"({step.pid}) starts step {step.step}"
            self.lines.append((step.time, step.name, text))
        self.newest = max(self.newest, step.step)
        self.last_progress = time.time()

    def _read_new_lines(self, path: Path) -> list[str]:
        if path not in self._files:
            if not path.exists():
                return []
            self._files[path] = os.open(path, os.O_RDONLY), ""
        file, incomplete = self._files[path]
        data = os.read(file, 1 << 20)
        if not data:
            return []
        *lines, incomplete = (incomplete + data.decode(errors="replace")).split("\n")
        self._files[path] = file, incomplete
        return lines

    def close(self) -> None:
        """Close the files of the logs and the journal."""
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()
        self._names.clear()

    def losses(self) -> list[str]:
        """Return a text for each avoidable loss of work: a live process went back to an earlier
        step, or a new process started with an earlier step than the newest step in its shared
        memory."""
        newest_step_by_pid: dict[int, int] = {}
        losses = list(self.setbacks)
        for step in self.steps:
            if step.step < newest_step_by_pid.get(step.pid, -1):
                setback = (
                    f"was set back from step {newest_step_by_pid[step.pid]} to step {step.step}"
                )
                losses.append(f"{step.name} ({step.pid}) {setback}")
            newest_step_by_pid[step.pid] = step.step
        return losses

    def repeated_steps(self) -> int:
        """Return the number of steps that were repeated because all processes with newer weights were
        dead."""
        newest_step = -1
        repeated_count = 0
        for step in self.steps:
            # a difference of one step is not a loss of work, because some processes start a step
            # later than others
            if step.step < newest_step - 1:
                repeated_count += newest_step - step.step
                newest_step = step.step
            newest_step = max(newest_step, step.step)
        return repeated_count

    def story(self) -> str:
        """Return the log lines of all processes, ordered by time."""
        lines = sorted(self.lines, key=lambda line: line[0])
        return "\n".join(
            f"{when - lines[0][0]:8.3f} {name:14} {text}" for when, name, text in lines
        )
