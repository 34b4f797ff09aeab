"""The memory of this container, as the kernel counts it: whether it killed somebody for want of it."""

from contextlib import suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
EVENTS = {1: "memory.oom_control", 2: "memory.events"}
LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}


class Memory:
    """The memory cgroup of this process, version 2 or 1."""

    def __init__(self) -> None:
        self._folder, self._version = _find()

    def kills(self) -> int:
        """Processes that were killed since the container began because there was no memory left."""
        with suppress(OSError, ValueError):
            events = (self._folder / EVENTS[self._version]).read_text()
            return int(dict(line.split() for line in events.splitlines())["oom_kill"])
        return 0

    def limit(self) -> str:
        """The limit in words."""
        with suppress(OSError, ValueError):
            text = (self._folder / LIMIT[self._version]).read_text()
            if (size := int(text)) < 1 << 60:
                return f"{size / (1 << 30):.3g} GiB"
        return "all that the node has"


def _find() -> tuple[Path, int]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, mount = (1, MOUNT / "memory") if controllers else (2, MOUNT)
        # a container that is told the node's path sees its own group at the mount itself
        for folder in (mount / path.lstrip("/"), mount):
            if (folder / EVENTS[version]).exists():
                return folder, version
    return MOUNT, 2
