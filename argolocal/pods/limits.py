"""Apply memory limits to containers, if this system allows a process to create cgroups next to or
below its own cgroup.

    cgroup = create_memory_cgroup(container, "pod.main")    # None: no limit, or no cgroups
    cgroup.enter()             # in the container's process, before exec
    cgroup.close()             # after the exit
    cgroup.limit_exceeded      # True if the kernel has killed a process of the container (OOM kill)

In cgroup version 2, a cgroup that contains processes cannot have child cgroups with memory limits.
Because of this rule, a new cgroup of a container is a sibling of the runner's cgroup, below the
user's systemd app.slice. Source: the kernel's admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
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
from argolocal.common.processes import read_start_ticks
from argolocal.language.quantity import parse_quantity
from argolocal.pods.filesystem import succeeds_in_child

# matches a field `limits` with its contents in JSON or YAML
LIMITS_IN_TEXT = re.compile(r"\blimits\b[^{}]*\{[^{}]*\}|\blimits:\s*\n(?:\s+\w.*\n?)+")
# start of a cgroup's name; after it, the name contains the pid and start time of the process that
# created the cgroup
CGROUP_PREFIX = "argolocal-"
# control file that not every kernel has → text to write; "" stands for the memory limit
OPTIONAL_FILES = {
    "memory.memsw.limit_in_bytes": "",
    "memory.swap.max": "0",
    "memory.oom.group": "1",
}
# seconds to wait after each attempt to remove a cgroup whose killed processes have not exited yet
PAUSES_S = [0.001 * 2**number for number in range(8)]


class MemoryCgroup:
    """A cgroup with a memory limit. `limit_exceeded` is True if the kernel has killed a process
    because of the limit; valid after `close`. The constructor creates the cgroup, and raises
    OSError."""

    def __init__(self, cgroup_folder: Path, cgroup_version: int, limit_bytes: int) -> None:
        self.folder = cgroup_folder
        self.version = cgroup_version
        self.limit_exceeded = False
        cgroup_folder.mkdir()
        try:
            _write_control_file(cgroup_folder / CGROUP_LIMIT[cgroup_version], str(limit_bytes))
            for control_file, control_value in OPTIONAL_FILES.items():
                if (cgroup_folder / control_file).exists():
                    _write_control_file(
                        cgroup_folder / control_file, control_value or str(limit_bytes)
                    )
        except OSError:
            cgroup_folder.rmdir()
            raise

    def enter(self) -> None:
        """Move this process into the cgroup."""
        _write_control_file(self.folder / "cgroup.procs", "0")

    def close(self) -> None:
        """Read the OOM counter, kill the remaining processes, and remove the cgroup."""
        for pause_s in PAUSES_S:
            try:
                events_text = (self.folder / CGROUP_EVENTS[self.version]).read_text()
                if count_oom_kills(events_text):
                    self.limit_exceeded = True
                self.folder.rmdir()
            except FileNotFoundError:  # the previous `rmdir` has removed the cgroup
                return
            except OSError:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    for pid in (self.folder / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)

                time.sleep(pause_s)


def _write_control_file(control_file: Path, control_value: str) -> None:
    # os.open without O_CREAT does not create a missing file, unlike open()
    file_descriptor = os.open(control_file, os.O_WRONLY)
    try:
        os.write(file_descriptor, control_value.encode())
    finally:
        os.close(file_descriptor)


def create_memory_cgroup(container: Mapping[str, Any], cgroup_name: str) -> MemoryCgroup | None:
    """Create a cgroup for a container with a memory limit. Return None if the container has no
    memory limit, or if this system cannot limit memory. Raises OSError, and ValueError for a
    malformed quantity."""
    limits = (container.get("resources") or {}).get("limits") or {}
    limit_bytes = int(parse_quantity(limits.get("memory") or 0))
    if not limit_bytes:
        return None

    cgroup_parent = _find_cgroup_parent()
    if not cgroup_parent:
        return None

    parent_folder, cgroup_version = cgroup_parent
    return MemoryCgroup(
        parent_folder / f"{_cgroup_prefix()}-{cgroup_name[:150]}-{uuid.uuid4().hex[:8]}",
        cgroup_version,
        limit_bytes,
    )


def _cgroup_prefix() -> str:
    return f"{CGROUP_PREFIX}{os.getpid()}-{read_start_ticks(os.getpid())}"


def find_limit_names(value: object) -> Iterator[str]:
    """Yield the names of all resource limits in a spec, such as `memory`. In a value that is a
    text, such as a patch of a pod spec, only the limit `memory` is found."""
    if isinstance(value, str):
        yield from re.findall(r"\bmemory\b", "".join(LIMITS_IN_TEXT.findall(value)))
    for key, child_value in value.items() if isinstance(value, Mapping) else ():
        if key == "limits" and isinstance(child_value, Mapping):
            yield from child_value
        yield from find_limit_names(child_value)
    for child_value in value if isinstance(value, list) else ():
        yield from find_limit_names(child_value)


def supports_memory_limits() -> bool:
    """Return True if this system can limit memory."""
    return _find_cgroup_parent() is not None


@cache
def _find_cgroup_parent() -> tuple[Path, int] | None:
    """Return the folder for new cgroups and the cgroup version. Return None if this system cannot
    limit memory. The result is cached, so only the first call creates cgroups and child processes
    for the test."""
    for parent_folder, cgroup_version in _candidate_cgroups():
        _remove_abandoned_cgroups(parent_folder)
        with contextlib.suppress(OSError):
            test_cgroup = MemoryCgroup(
                parent_folder / f"{_cgroup_prefix()}-{uuid.uuid4().hex}", cgroup_version, 1 << 30
            )
            can_enter = succeeds_in_child(test_cgroup.enter)
            test_cgroup.close()
            if can_enter:
                return parent_folder, cgroup_version
    return None


def _remove_abandoned_cgroups(parent_folder: Path) -> None:
    """Remove the cgroups of runners that were killed."""
    for cgroup in parent_folder.glob(f"{CGROUP_PREFIX}*-*-*"):
        pid, start_ticks = cgroup.name.removeprefix(CGROUP_PREFIX).split("-")[:2]
        if str(read_start_ticks(int(pid))) != start_ticks:
            # the cgroup is still in use
            with contextlib.suppress(OSError):
                cgroup.rmdir()


def _candidate_cgroups() -> Iterator[tuple[Path, int]]:
    """Yield the runner's cgroup and its parent, if memory limits can be set in them."""
    try:
        mount_lines = [
            line.split(" - ", 1) for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ]
        cgroup_lines = [
            line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
        ]
    except OSError:
        return

    for _, cgroup_controllers, cgroup_path in cgroup_lines:
        cgroup_version = 1 if cgroup_controllers else 2
        if cgroup_version == 1 and "memory" not in cgroup_controllers.split(","):
            continue

        for mount_text, file_system in mount_lines:
            file_system_type, *_, mount_options = file_system.split(" ")
            if file_system_type != ("cgroup", "cgroup2")[cgroup_version - 1] or (
                cgroup_version == 1 and "memory" not in mount_options.split(",")
            ):
                continue

            cgroup_root, mount_point = mount_text.split(" ")[3:5]
            own_folder = Path(mount_point, os.path.relpath(cgroup_path, cgroup_root))
            for candidate_folder in (own_folder, own_folder.parent):
                control_file = candidate_folder / (
                    CGROUP_LIMIT[1] if cgroup_version == 1 else "cgroup.subtree_control"
                )
                if control_file.exists() and (
                    cgroup_version == 1 or "memory" in control_file.read_text().split()
                ):
                    yield candidate_folder, cgroup_version
