"""Read the journal of a run. The first read reads the whole file, and later reads only the appended
lines.

Later reads do not change the objects that earlier reads have returned.
"""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from argolocal.common.files import open_regular
from argolocal.errors import ConfigError
from argolocal.manifest.allowed_values import FULFILLED

Status = dict[str, Any]
# the process of a pod: its pid, and its start time in clock ticks since the boot
ProcessRecord = list[int]

MAX_FILE_BYTES = 4 << 30  # maximum size in bytes of a file of a run; larger files are rejected
# number of last read bytes to compare with the file, because a new file can have the inode of a
# deleted file
TAIL_BYTES = 256
# exceptions that occur when data have an unexpected structure
STRUCTURE_ERRORS = (KeyError, TypeError, AttributeError)
STATUS_TEXT_FIELDS = ("startedAt", "finishedAt", "message")
NODE_TEXT_FIELDS = (
    "id",
    "name",
    "displayName",
    "type",
    "phase",
    "templateName",
    "boundaryID",
    "startedAt",
    "message",
)
NODE_OBJECT_FIELDS = ("inputs", "outputs", "nodeFlag", "memoizationStatus")
PHASES = {"Pending", "Running", *FULFILLED}


class JournalReader:
    """Reads the journal at `path` repeatedly. Only one thread at a time may use a reader."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.status: Status = {"phase": "", "nodes": {}}
        self.pods: dict[str, ProcessRecord | None] = {}
        self.starts: dict[str, int] = {}

        # number of bytes and lines read so far, and the last bytes read
        self.offset = 0
        self.line_count = 0
        self.tail = b""
        self.file_id: tuple[int, int] | None = None

        # ids of nodes that have changed since the last valid status
        self.unchecked: dict[str, None] = {}

    def read(self) -> tuple[Status, dict[str, ProcessRecord]]:
        """Return the run's status, and the pods that may still run. Raises ConfigError for a
        corrupt journal."""
        try:
            self._apply(self._read_new_lines())
        except BaseException:
            # let the next read start from the beginning; it finds the same error again if the file
            # is unchanged
            self._reset()
            raise

        try:
            _check_status(self.status, self.unchecked)
            _check_pods(self.pods)
        except (ValueError, *STRUCTURE_ERRORS) as error:
            raise corrupt(self.path, error) from error
        self.unchecked.clear()

        status = {**self.status, "nodes": dict(self.status["nodes"])}
        return status, {id: record for id, record in self.pods.items() if record}

    def _read_new_lines(self) -> list[bytes]:
        """Return the complete lines that have not been read yet. If the file was replaced, return
        all lines of the new file."""
        try:
            file = open_regular(self.path, MAX_FILE_BYTES)
        except FileNotFoundError:
            self._reset()
            return []
        except OSError as error:
            raise unreadable(self.path, error) from None

        with file:
            status = os.fstat(file.fileno())
            file_id = (status.st_dev, status.st_ino)
            file.seek(max(0, self.offset - TAIL_BYTES))
            is_same_file = file_id == self.file_id and file.read(len(self.tail)) == self.tail
            if not is_same_file:
                self._reset()
                self.file_id = file_id
                file.seek(0)

            data = file.read(MAX_FILE_BYTES)

        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        self.tail = (self.tail + complete)[-TAIL_BYTES:]
        return complete.splitlines(keepends=True)

    def _apply(self, lines: Iterable[bytes]) -> None:
        nodes = self.status["nodes"]
        # ids of nodes whose objects were not returned by an earlier `read`, so they may be changed
        new_nodes: dict[str, None] = {}

        for line in lines:
            self.line_count += 1
            try:
                entry = json.loads(line)
                if "status" in entry:
                    self.status = {**entry["status"], "nodes": nodes}

                changed_nodes = entry.get("nodes", {})
                nodes.update(changed_nodes)
                new_nodes.update(dict.fromkeys(changed_nodes))

                for id, new_children in entry.get("children", {}).items():
                    if id not in new_nodes:
                        nodes[id] = {**nodes[id], "children": [*nodes[id].get("children", [])]}
                        new_nodes[id] = None
                    nodes[id].setdefault("children", []).extend(new_children)

                for id, record in entry.get("pods", {}).items():
                    self.pods[id] = record
                    if isinstance(record, list) and len(record) == 2:
                        self.starts[id] = record[1]
            except (ValueError, RecursionError, *STRUCTURE_ERRORS) as error:
                raise corrupt(f"{self.path}, line {self.line_count}", error) from None

        self.unchecked.update(new_nodes)


def unreadable(path: Path, error: OSError) -> Exception:
    """Return the error for a file that cannot be read: a ConfigError for a pipe or device, whose
    content may be infinite."""
    if error.errno == errno.EINVAL:
        return corrupt(path, error)
    return error


def corrupt(where: Path | str, error: Exception) -> ConfigError:
    """Return the error to raise for a run's file that another program has changed. `where`: path of
    the file, possibly with a line number."""
    if isinstance(error, KeyError):
        shape_problem = f"{error} is missing"
    else:
        shape_problem = "a value has the wrong type"
    reason = shape_problem if isinstance(error, STRUCTURE_ERRORS) else error
    root = Path(str(where)).parent
    return ConfigError(
        f"{where} was changed ({reason}): only the runner may change it. Restore the file, or"
        f" remove {root} and start the run again."
    )


def _check_status(status: Status, ids: Iterable[str]) -> None:
    """Raise ValueError or an exception of STRUCTURE_ERRORS for a status that cannot be resumed.
    `ids`: the nodes to check."""
    nodes = status["nodes"]
    if not all(isinstance(status.get(name) or "", str) for name in ("phase", *STATUS_TEXT_FIELDS)):
        raise TypeError("a text")

    for id in ids:
        node = nodes[id]
        _check_types(node)
        if (
            node["id"] != id
            or node["phase"] not in PHASES
            or not (node["name"] and node["type"] and node["startedAt"])
        ):
            raise ValueError(f"the name, type or phase of node {id} is missing or unknown")

        if node.get("boundaryID", id) not in nodes:
            raise ValueError(f"the boundaryID {node['boundaryID']} of node {id} does not exist")

    if status["phase"] not in PHASES | {""}:
        raise ValueError(f"{status['phase']!r} is not a phase")


def _check_types(node: dict[str, Any]) -> None:
    """Raise an exception of STRUCTURE_ERRORS if a value of a node has the wrong type."""
    is_valid = all(isinstance(node.get(name) or "", str) for name in NODE_TEXT_FIELDS)
    is_valid = is_valid and all(
        isinstance(node.get(name) or {}, dict) for name in NODE_OBJECT_FIELDS
    )
    is_valid = is_valid and isinstance(node.get("children") or [], list)
    if not is_valid or not all(isinstance(id, str) for id in node.get("children") or []):
        raise TypeError("a field of a node")
    for name in ("inputs", "outputs"):
        for parameter in (node.get(name) or {}).get("parameters") or []:
            if not isinstance(parameter["name"], str):
                raise TypeError("the name of a parameter")


def _check_pods(pods: Mapping[str, ProcessRecord | None]) -> None:
    """Raise an exception of STRUCTURE_ERRORS if a record of a process does not consist of
    numbers."""
    for record in pods.values():
        if record and not all(isinstance(number, int) for number in record):
            raise TypeError("the record of a process")
