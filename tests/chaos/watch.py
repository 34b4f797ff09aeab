"""What all processes of a run say and train, in one order of time."""

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

GENERATION = re.compile(r"generation (\d+): (.+)")


@dataclass
class Step:
    """A process begins a training step."""

    at: float
    pid: int
    name: str
    step: int


@dataclass
class Watch:
    """Reads the logs and the toy's journal as they grow."""

    journal: Path
    lines: list[tuple[float, str, str]] = field(default_factory=list)  # (time, who, text)
    steps: list[Step] = field(default_factory=list)
    newest: int = -1  # step that anybody has begun
    generations: list[tuple[float, int]] = field(default_factory=list)
    moved: float = field(default_factory=time.time)  # when anything last went on
    kept: dict[str, int] = field(default_factory=dict)  # name → newest step in its shared memory when it was killed
    setbacks: list[str] = field(default_factory=list)  # who began before that
    _files: dict[Path, tuple[int, str]] = field(default_factory=dict)  # open file, line begun
    _names: dict[Path, str] = field(default_factory=dict)

    def add(self, log: Path, name: str) -> None:
        """Read this log, too."""
        self._names[log] = name

    def say(self, text: str) -> None:
        """The operator's own line."""
        self.moved = time.time()
        self.lines.append((self.moved, "OPERATOR", text))

    def keep(self, name: str, step: int) -> None:
        """A worker was killed: no successor may begin before the newest step in its shared memory."""
        self.kept[name] = max(step, self.kept.get(name, -1))

    def poll(self) -> None:
        """Read what is new."""
        for path in (self.journal, *self._names):
            for line in self._new(path):
                if path == self.journal:
                    at, pid, name, step = line.split()
                    self._step(Step(float(at), int(pid), name, int(step)))
                else:
                    self.lines.append((time.time(), self._names[path], line))
                    if self._names[path].startswith("coordinator") and (found := GENERATION.search(line)):
                        self.moved = time.time()
                        self.generations.append((self.moved, int(found[1])))

    def _step(self, step: Step) -> None:
        known = any(other.pid == step.pid for other in reversed(self.steps))
        self.steps.append(step)
        if not known and step.step < (kept := self.kept.get(step.name, -1)):
            self.setbacks.append(f"{step.name} ({step.pid}) begins with step {step.step}, its shared memory had {kept}")
        if step.step > self.newest or not known:
            text = f"({step.pid}) begins step {step.step}"
            self.lines.append((step.at, step.name, text))
        self.newest = max(self.newest, step.step)
        self.moved = time.time()

    def _new(self, path: Path) -> list[str]:
        if path not in self._files:
            if not path.exists():
                return []
            self._files[path] = os.open(path, os.O_RDONLY), ""
        file, begun = self._files[path]
        data = os.read(file, 1 << 20)
        if not data:
            return []
        *lines, begun = (begun + data.decode(errors="replace")).split("\n")
        self._files[path] = file, begun
        return lines

    def close(self) -> None:
        """Read no more."""
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()
        self._names.clear()

    def losses(self) -> list[str]:
        """Every step lost that need not be: a living process had to go back, a new one behind its shared memory."""
        newest: dict[int, int] = {}
        found = list(self.setbacks)
        for step in self.steps:
            if step.step < newest.get(step.pid, -1):
                found.append(
                    f"{step.name} ({step.pid}) had begun step {newest[step.pid]} and was set back to {step.step}"
                )
            newest[step.pid] = step.step
        return found

    def redone(self) -> int:
        """Steps made again because all who had made them were dead."""
        newest, total = -1, 0
        for step in self.steps:
            if step.step < newest - 1:  # some still begin the step that others have just finished
                total += newest - step.step
                newest = step.step
            newest = max(newest, step.step)
        return total

    def story(self) -> str:
        """Everything, by time."""
        start = min((at for at, _, _ in self.lines), default=0.0)
        return "\n".join(
            f"{at - start:8.3f} {who:14} {text}" for at, who, text in sorted(self.lines, key=lambda x: x[0])
        )
