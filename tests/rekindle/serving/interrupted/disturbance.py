"""Interrupt a real command at seeded moments, given by the number of a change that it makes.

The counted changes are requests through proxies in front of the real services, and changes of
object files.
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

# outage of a service that the command survives
OUTAGE_S = 2.0
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Moment:
    """An interruption before or after a change: the command is killed, or the changed service is
    unavailable."""

    number: int
    is_before: bool
    kill: bool
    # counts only changes whose name contains this
    name: str = ""

    @classmethod
    def draw(cls, draw: Random, max_number: int) -> "Moment":
        return cls(draw.randint(1, max_number), draw.random() < 0.4, draw.random() < 0.65)

    def __str__(self) -> str:
        kind = "killed" if self.kill else "service unavailable"
        return f"{kind} {'before' if self.is_before else 'after'} {self.name}{self.number}"


@dataclass
class Disturbance:
    """A command, the changes that it makes, and the moment at which it is interrupted."""

    moment: Moment | None
    changes: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    matching: int = 0
    reached: bool = False
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, proxy: Proxy, brief: bool) -> None:
        """Count the changes through a proxy; `brief` is True if an outage ends while the command
        still runs."""

        def on_request(write: Write) -> None:
            change = f"{write.method} {write.path.partition('?')[0]}"
            with self.lock:
                if self.count(change) and self.moment and self.moment.is_before:
                    self.disturb(proxy, brief)

        def on_answer(write: Write) -> None:
            with self.lock:
                if self.reached and self.moment and not self.moment.is_before:
                    self.disturb(proxy, brief)

        proxy.before = on_request
        proxy.after = on_answer
        proxy.away = False

    def watch_files(self, folder: Path, over: threading.Event) -> None:
        """Count the changes of the specs of the objects in a folder, but not the changes of their
        status."""
        versions: dict[Path, tuple[int, str]] = {}
        is_first = True

        while not over.wait(0.002):
            for path in folder.glob("*/*.json"):
                try:
                    changed = path.stat().st_mtime_ns
                    text = path.read_text()
                except FileNotFoundError:
                    continue

                if versions.get(path, (0, ""))[0] == changed:
                    continue

                spec = json.dumps(json.loads(text).get("spec"), sort_keys=True)
                if not is_first and versions.get(path, (0, ""))[1] != spec:
                    with self.lock:
                        if (
                            self.count(f"{path.parent.name}/{path.stem}")
                            and self.moment
                            and self.moment.kill
                        ):
                            self.disturb(None, True)

                versions[path] = changed, spec

            is_first = False

    def count(self, change: str) -> bool:
        """Record a change; return True if the command must be interrupted at this change."""
        self.changes.append(change)
        if self.moment and not self.reached and self.moment.name in change:
            self.matching += 1
            self.reached = self.matching == self.moment.number
            return self.reached
        return False

    def disturb(self, proxy: Proxy | None, brief: bool) -> None:
        """Interrupt the command; further calls do nothing."""
        assert self.moment
        assert self.process
        if self.done:
            return
        self.done = True
        if self.moment.kill:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        elif proxy:
            proxy.away = True
            if brief:
                threading.Timer(OUTAGE_S, setattr, (proxy, "away", False)).start()

    def run(
        self, command: list[str], folder: Path, environment: Mapping[str, str]
    ) -> tuple[int, str, str]:
        """Run the command to its end, and return the command's exit code, stdout and stderr."""
        pipe = subprocess.PIPE

        with self.lock:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdout=pipe,
                stderr=pipe,
                text=True,
                start_new_session=True,
            )

        try:
            stdout, stderr = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            stdout, stderr = self.process.communicate()
            return 124, stdout, f"not finished after {DEADLINE_S} s: {stderr}"

        return self.process.returncode, stdout, stderr
