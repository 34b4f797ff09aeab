"""Apply memory limits to containers, if this system allows a process to create cgroups next to or
below its own cgroup.

    memory = create_memory_cgroup(container, "pod.main")    # None: no limit, or no cgroups
    memory.enter()             # in the container's process, before exec
    memory.close()             # after the exit
    memory.limit_exceeded      # True after an OOM kill

In cgroup version 2, a cgroup that contains processes cannot have children with memory limits.
Therefore a new cgroup is a sibling of the runner's cgroup, below the user's systemd app.slice.
Source: the kernel's admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

import contextlib
import os
import re
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from argolocal.common.linux import CGROUP_EVENTS, CGROUP_LIMIT, count_oom_kills
from argolocal.common.processes import start_time
from argolocal.language.quantity import parse_quantity
from argolocal.pods.filesystem import succeeds_in_child

# a `limits` field in JSON or YAML
LIMITS_TEXT = re.compile(r"\blimits\b[^{}]*\{[^{}]*\}|\blimits:\s*\n(?:\s+\w.*\n?)+")
# start of a cgroup's name; the pid and start time of its creator follow
CGROUP_PREFIX = "argolocal-"
# cgroup file that some kernels lack → content to write ("" stands for the memory limit)
OPTIONAL_FILES = {
    "memory.memsw.limit_in_bytes": "",
    "memory.swap.max": "0",
    "memory.oom.group": "1",
}
# seconds between the attempts to remove the cgroup, while killed processes exit
PAUSES_S = [0.001 * 2**number for number in range(8)]


class MemoryCgroup:
    """A cgroup with a memory limit. `limit_exceeded` is valid after `close`. Raises OSError."""

    def __init__(self, folder: Path, version: int, limit: int) -> None:
        self.folder = folder
        self.version = version
        self.limit_exceeded = False
        folder.mkdir()
        try:
            _write(folder / CGROUP_LIMIT[version], str(limit))
            for file, value in OPTIONAL_FILES.items():
                if (folder / file).exists():
                    _write(folder / file, value or str(limit))
        except OSError:
            folder.rmdir()
            raise

    def enter(self) -> None:
        """Move this process into the cgroup."""
        _write(self.folder / "cgroup.procs", "0")

    def close(self) -> None:
        """Read the OOM counter, kill the remaining processes, and remove the cgroup."""
        for pause in PAUSES_S:
            try:
                events = (self.folder / CGROUP_EVENTS[self.version]).read_text()
                if count_oom_kills(events):
                    self.limit_exceeded = True
                self.folder.rmdir()
            except FileNotFoundError:  # the previous `rmdir` has removed the cgroup
                return
            except OSError:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    for pid in (self.folder / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)

                time.sleep(pause)


def _write(path: Path, text: str) -> None:
    # os.open without O_CREAT does not create a missing file, unlike open()
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def create_memory_cgroup(container: Mapping[str, Any], name: str) -> MemoryCgroup | None:
    """Create a cgroup for a container with a memory limit, or return None. Raises OSError,
    ValueError."""
    limits = (container.get("resources") or {}).get("limits") or {}
    limit = int(parse_quantity(limits.get("memory") or 0))
    if not limit or not (parent := _cgroup_parent()):
        return None
    folder, version = parent
    return MemoryCgroup(folder / f"{_prefix()}-{name[:150]}-{uuid.uuid4().hex[:8]}", version, limit)


def _prefix() -> str:
    return f"{CGROUP_PREFIX}{os.getpid()}-{start_time(os.getpid())}"


def find_limit_names(value: object) -> Iterator[str]:
    """Yield the names of all resource limits in a spec, such as `memory`, including limits in the
    text of patches."""
    if isinstance(value, str):
        yield from re.findall(r"\bmemory\b", "".join(LIMITS_TEXT.findall(value)))
    for key, child in value.items() if isinstance(value, Mapping) else ():
        if key == "limits" and isinstance(child, Mapping):
            yield from child
        yield from find_limit_names(child)
    for child in value if isinstance(value, list) else ():
        yield from find_limit_names(child)


def available() -> bool:
    """Return True if this system can limit memory."""
    return _cgroup_parent() is not None


@cache
def _cgroup_parent() -> tuple[Path, int] | None:
    """Return the folder for new cgroups and the cgroup version, or None. On the first call, child
    processes test whether new cgroups can be created in the folders."""
    for folder, version in _candidate_cgroups():
        _remove_abandoned_cgroups(folder)
        with contextlib.suppress(OSError):
            memory = MemoryCgroup(folder / f"{_prefix()}-{uuid.uuid4().hex}", version, 1 << 30)
            can_enter = succeeds_in_child(memory.enter)
            memory.close()
            if can_enter:
                return folder, version
    return None


def _remove_abandoned_cgroups(folder: Path) -> None:
    """Remove the cgroups that dead runners have left."""
    for cgroup in folder.glob(f"{CGROUP_PREFIX}*-*-*"):
        pid, start = cgroup.name.removeprefix(CGROUP_PREFIX).split("-")[:2]
        if str(start_time(int(pid))) != start:
            with contextlib.suppress(OSError):  # the cgroup is still in use
                cgroup.rmdir()


def _candidate_cgroups() -> Iterator[tuple[Path, int]]:
    """Yield the runner's cgroup and its parent, if memory limits can be set in them."""
    try:
        mounts = [
            line.split(" - ", 1) for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ]
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return

    for _, controllers, path in groups:
        version = 1 if controllers else 2
        if version == 1 and "memory" not in controllers.split(","):
            continue

        for mount, file_system in mounts:
            type, *_, options = file_system.split(" ")
            if type != ("cgroup", "cgroup2")[version - 1] or (
                version == 1 and "memory" not in options.split(",")
            ):
                continue

            root, mount_point = mount.split(" ")[3:5]
            own_folder = Path(mount_point, os.path.relpath(path, root))
            for folder in (own_folder, own_folder.parent):
                control_file = folder / (
                    CGROUP_LIMIT[1] if version == 1 else "cgroup.subtree_control"
                )
                if control_file.exists() and (
                    version == 1 or "memory" in control_file.read_text().split()
                ):
                    yield folder, version
