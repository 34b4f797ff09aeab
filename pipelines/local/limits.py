"""The memory that a container may use, where this system lets a process make cgroups beside or below its own.

    memory = limited(container, "pod.main")     # None: it has no limit, or there can be none here
    memory.enter()                              # in the container's process, before its program
    memory.close()                              # once it is over; memory.exceeded: the kernel has killed for it

Source: the kernel's admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst. In version 2 a cgroup with processes cannot
limit some of them, so a limited one lies beside the runner's, which users own below their systemd's app.slice.
"""

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?", re.ASCII)
PREFIX = "rekindle-"
FILES = ({"memory.limit_in_bytes": ""}, {"memory.max": "", "memory.swap.max": "0", "memory.oom.group": "1"})
EVENTS = ("memory.oom_control", "memory.events")


def quantity(text: Any) -> Decimal:
    """A number as Kubernetes writes it: 512Mi, 1.5G, 500m, 1e3. Raises ValueError."""
    found = QUANTITY.fullmatch(str(text)) if not isinstance(text, bool) else None
    if not found:
        raise ValueError(f"{text!r} is no quantity")
    number, unit = found.groups(default="")
    if unit.endswith("i"):
        return Decimal(number) * 1024 ** (1 + "KMGTPE".index(unit[0]))
    if unit[1:]:
        return Decimal(number + unit)
    return Decimal(number) * Decimal(1000) ** ("num kMGTPE".index(unit or " ") - 3)


class Memory:
    """One cgroup; `exceeded` is known once it is closed."""

    def __init__(self, folder: Path, version: int, limit: int) -> None:
        self.folder, self.version, self.exceeded = folder, version, False
        folder.mkdir()
        for file, value in FILES[version - 1].items():
            with contextlib.suppress(FileNotFoundError) if value else contextlib.nullcontext():  # what a kernel lacks
                (folder / file).write_text(value or str(limit))

    def enter(self) -> None:
        """Moves this process into it."""
        (self.folder / "cgroup.procs").write_text("0")

    def close(self) -> None:
        """Reads what happened and removes the cgroup; one in which something still runs is left to the next run."""
        with contextlib.suppress(FileNotFoundError):
            found = re.search(r"^oom_kill (\d+)$", (self.folder / EVENTS[self.version - 1]).read_text(), re.MULTILINE)
            self.exceeded = bool(found and int(found[1]))
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def given(container: Mapping[str, Any]) -> Any:
    """What a container's `resources.limits.memory` says, or None."""
    return ((container.get("resources") or {}).get("limits") or {}).get("memory")


def limited(container: Mapping[str, Any], name: str) -> Memory | None:
    """A cgroup for one container. Raises OSError and, for a limit that is no quantity, ValueError."""
    limit = int(quantity(given(container) or 0))
    if not limit or not (place := _place()):
        return None
    folder, version = place
    return Memory(folder / f"{PREFIX}{name[:150]}-{uuid.uuid4().hex[:8]}", version, limit)


def available() -> bool:
    """Whether there can be limits here."""
    return _place() is not None


@cache
def _place() -> tuple[Path, int] | None:
    """Where cgroups can be made, and of which version; tried once, by a child that enters one."""
    for folder, version in _own():
        for stale in folder.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # one that is in use stays
                stale.rmdir()
        with contextlib.suppress(OSError):
            memory = Memory(folder / f"{PREFIX}{uuid.uuid4().hex}", version, 1 << 30)
            entered = _enters(memory)
            memory.close()
            if entered:
                return folder, version
    return None


def _own() -> Iterator[tuple[Path, int]]:
    """The runner's cgroup and the one above it, where these limit memory."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            type, _, options = mount[mount.index("-") + 1 :]
            if type == ("cgroup", "cgroup2")[version - 1] and (version == 2 or "memory" in options.split(",")):
                own = Path(mount[4], os.path.relpath(path, mount[3]))
                for folder in (own, own.parent):
                    control = folder / "cgroup.subtree_control"
                    if version == 1 or (control.exists() and "memory" in control.read_text().split()):
                        yield folder, version


def _enters(memory: Memory) -> bool:
    child = os.fork()
    if child == 0:
        try:
            memory.enter()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
