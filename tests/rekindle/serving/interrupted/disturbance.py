"""Interruptions of a real command at seeded moments: the n-th change that others see of it, and what is done then.

Changes are requests that pass a proxy in front of the real services, and files of objects that others read.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.proxy import Proxy, Write

AWAY_S = 2.0  # that a service is gone from a command that does not end by that
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Moment:
    """Before or after the change of that number, the command is killed, or the service is gone that it changes."""

    number: int
    before: bool
    kill: bool
    what: str = ""  # only changes with this in their name count

    @classmethod
    def draw(cls, draw: Random, most: int) -> "Moment":
        return cls(draw.randint(1, most), draw.random() < 0.4, draw.random() < 0.65)

    def __str__(self) -> str:
        what = "killed" if self.kill else "service gone"
        return f"{what} {'before' if self.before else 'after'} {self.what}{self.number}"


@dataclass
class Disturbance:
    """One command, its changes, and the moment at which it is interrupted."""

    moment: Moment | None
    changes: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    matching: int = 0
    reached: bool = False
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, proxy: Proxy, brief: bool) -> None:
        """Count the changes through a proxy; `brief`: it returns while the command goes on."""

        def before(write: Write) -> None:
            with self.lock:
                if self.count(f"{write.method} {write.path.partition('?')[0]}") and self.moment and self.moment.before:
                    self.disturb(proxy, brief)

        def after(write: Write) -> None:
            with self.lock:
                if self.reached and self.moment and not self.moment.before:
                    self.disturb(proxy, brief)

        proxy.before, proxy.after, proxy.away = before, after, False

    def watch_files(self, folder: Path, over: threading.Event) -> None:
        """Count the changes of what the objects in a folder ask for, not those of their status."""
        known: dict[Path, tuple[int, str]] = {}
        first = True
        while not over.wait(0.002):
            for path in folder.glob("*/*.json"):
                try:
                    changed, text = path.stat().st_mtime_ns, path.read_text()
                except FileNotFoundError:
                    continue
                if known.get(path, (0, ""))[0] == changed:
                    continue
                spec = json.dumps(json.loads(text).get("spec"), sort_keys=True)
                if not first and known.get(path, (0, ""))[1] != spec:
                    with self.lock:
                        if self.count(f"{path.parent.name}/{path.stem}") and self.moment and self.moment.kill:
                            self.disturb(None, True)
                known[path] = changed, spec
            first = False

    def count(self, change: str) -> bool:
        """Note a change; whether it is that of the moment."""
        self.changes.append(change)
        if self.moment and not self.reached and self.moment.what in change:
            self.matching += 1
            self.reached = self.matching == self.moment.number
            return self.reached
        return False

    def disturb(self, proxy: Proxy | None, brief: bool) -> None:
        """Do what the moment says, once."""
        assert self.moment and self.process
        if self.done:
            return
        self.done = True
        if self.moment.kill:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        elif proxy:
            proxy.away = True
            if brief:
                threading.Timer(AWAY_S, setattr, (proxy, "away", False)).start()

    def run(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
        """Run the command to its end; gives its exit code, stdout and stderr."""
        pipe = subprocess.PIPE
        with self.lock:
            self.process = subprocess.Popen(
                command, cwd=folder, env=dict(environment), stdout=pipe, stderr=pipe, text=True, start_new_session=True
            )
        try:
            out, said = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            out, said = self.process.communicate()
            return 124, out, f"not over after {DEADLINE_S} s: {said}"
        return self.process.returncode, out, said
