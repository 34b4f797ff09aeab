"""Reads the memory cgroup of this container: the memory limit, and the number of OOM-killed
processes."""

from contextlib import suppress
from pathlib import Path

from argolocal.common.linux import CGROUP_EVENTS, CGROUP_LIMIT, count_oom_kills

CGROUP_MOUNT = Path("/sys/fs/cgroup")


class MemoryCgroup:
    """The memory cgroup of this process, of cgroup version 2 or 1."""

    def __init__(self) -> None:
        self._folder, self._version = _find_memory_cgroup()

    def count_oom_kills(self) -> int:
        """Return the number of processes OOM-killed since the container started."""
        with suppress(OSError, ValueError):
            return count_oom_kills((self._folder / CGROUP_EVENTS[self._version]).read_text())
        return 0

    def format_limit(self) -> str:
        """Return the memory limit of the cgroup as text."""
        with suppress(OSError, ValueError):
            limit_text = (self._folder / CGROUP_LIMIT[self._version]).read_text()
            limit_bytes = int(limit_text)
            if limit_bytes < 1 << 60:
                return f"{limit_bytes / (1 << 30):.3g} GiB"
        return "all of the node's memory"


def _find_memory_cgroup() -> tuple[Path, int]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, cgroup_path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        cgroup_version, mount_folder = (
            (1, CGROUP_MOUNT / "memory") if controllers else (2, CGROUP_MOUNT)
        )
        # /proc may show the cgroup's path on the node, which does not exist in the container; the
        # mount point is then the container's cgroup
        for cgroup_folder in (mount_folder / cgroup_path.lstrip("/"), mount_folder):
            if (cgroup_folder / CGROUP_EVENTS[cgroup_version]).exists():
                return cgroup_folder, cgroup_version
    return CGROUP_MOUNT, 2
