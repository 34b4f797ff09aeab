"""Read the journal of a run. The first call of `read` reads the whole file, and later calls only
the lines that were appended in the meantime.

A later call of `read` does not change the objects that earlier calls have returned.
"""

import errno
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from argolocal.common.checked_names import format_untrusted
from argolocal.common.files import open_regular_file
from argolocal.common.json_text import loads_finite
from argolocal.errors import ConfigError
from argolocal.manifest.allowed_values import FULFILLED_PHASES
from argolocal.manifest.schema import check_types

Status = dict[str, Any]
# the process of a pod: its pid, and its start time in clock ticks since the boot
ProcessRecord = list[int]

# maximum size in bytes of a file of a run; larger files are rejected
MAX_FILE_BYTES = 4 << 30
# number of bytes to read again and to compare, because a new file can have the inode of a deleted
# file
TAIL_BYTES = 256
# exceptions that the use of JSON data raises if the data have an unexpected structure
STRUCTURE_ERRORS = (KeyError, TypeError, AttributeError)
STATUS_TEXT_FIELDS = ("message", "progress")
TIME_FIELDS = ("startedAt", "finishedAt")
NODE_TEXT_FIELDS = (
    "id",
    "name",
    "displayName",
    "type",
    "phase",
    "templateName",
    "templateScope",
    "boundaryID",
    "message",
    "hostNodeName",
    "podIP",
    "progress",
)
NODE_OBJECT_FIELDS = (
    "inputs",
    "outputs",
    "nodeFlag",
    "memoizationStatus",
    "synchronizationStatus",
    "templateRef",
)
NODE_LIST_FIELDS = ("children", "outboundNodes")
PHASES = {"Pending", "Running", *FULFILLED_PHASES}


class JournalReader:
    """Reads the journal at `path` repeatedly. Only one thread at a time may use a reader."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.status: Status = {"phase": "", "nodes": {}}
        self.pods: dict[str, ProcessRecord | None] = {}
        # id of a pod's node → start time of its last process in clock ticks since the boot
        self.starts: dict[str, int] = {}

        # number of bytes and lines read so far, and the last bytes read
        self.offset = 0
        self.line_count = 0
        self.tail = b""
        self.file_id: tuple[int, int] | None = None

        # ids of nodes that have changed since the last check of the status
        self.unchecked: dict[str, None] = {}

    def read(self) -> tuple[Status, dict[str, ProcessRecord]]:
        """Return the run's status, and the pods that may still run. Raises ConfigError for a
        corrupt journal."""
        try:
            self._apply(self._read_new_lines())
        except BaseException:
            # let the next call of `read` start from the beginning of the file, so that it raises
            # the same error if the file is unchanged
            self._reset()
            raise

        try:
            _check_status(self.status, self.unchecked)
            _check_pods(self.pods)
        except (ValueError, *STRUCTURE_ERRORS) as error:
            raise make_corrupt_error(self.path, error) from error
        self.unchecked.clear()

        workflow_status = {**self.status, "nodes": dict(self.status["nodes"])}
        return workflow_status, {
            node_id: process_record
            for node_id, process_record in self.pods.items()
            if process_record
        }

    def _read_new_lines(self) -> list[bytes]:
        """Return the complete lines that have not been read yet. If the file was replaced, return
        all lines of the new file."""
        try:
            journal_file = open_regular_file(self.path, MAX_FILE_BYTES)
        except FileNotFoundError:
            self._reset()
            return []
        except OSError as error:
            raise make_unreadable_error(self.path, error) from None

        with journal_file:
            file_status = os.fstat(journal_file.fileno())
            file_id = (file_status.st_dev, file_status.st_ino)
            journal_file.seek(max(0, self.offset - TAIL_BYTES))
            is_same_file = (
                file_id == self.file_id and journal_file.read(len(self.tail)) == self.tail
            )
            if not is_same_file:
                self._reset()
                self.file_id = file_id
                journal_file.seek(0)

            new_bytes = journal_file.read(MAX_FILE_BYTES)

        complete_lines = new_bytes[: new_bytes.rfind(b"\n") + 1]
        self.offset += len(complete_lines)
        self.tail = (self.tail + complete_lines)[-TAIL_BYTES:]
        return complete_lines.splitlines(keepends=True)

    def _apply(self, lines: Iterable[bytes]) -> None:
        """Apply the changes in journal lines to `status`, `pods` and `starts`. Raises ConfigError
        for a malformed line of the journal."""
        nodes = self.status["nodes"]
        # ids of nodes whose objects were not returned by an earlier `read`, so these objects may be
        # changed
        new_nodes: dict[str, None] = {}

        for line in lines:
            self.line_count += 1
            try:
                journal_entry = loads_finite(line)
                if "status" in journal_entry:
                    self.status = {**journal_entry["status"], "nodes": nodes}

                changed_nodes = journal_entry.get("nodes", {})
                nodes.update(changed_nodes)
                new_nodes.update(dict.fromkeys(changed_nodes))

                for node_id, new_children in journal_entry.get("children", {}).items():
                    if node_id not in new_nodes:
                        nodes[node_id] = {
                            **nodes[node_id],
                            "children": [*nodes[node_id].get("children", [])],
                        }
                        new_nodes[node_id] = None
                    nodes[node_id].setdefault("children", []).extend(new_children)

                for node_id, process_record in journal_entry.get("pods", {}).items():
                    self.pods[node_id] = process_record
                    if isinstance(process_record, list) and len(process_record) == 2:
                        self.starts[node_id] = process_record[1]
            except (ValueError, RecursionError, *STRUCTURE_ERRORS) as error:
                raise make_corrupt_error(f"{self.path}, line {self.line_count}", error) from None

        self.unchecked.update(new_nodes)


def make_unreadable_error(path: Path, error: OSError) -> Exception:
    """Return the error to raise for a file that cannot be read: a ConfigError if it is not a
    regular file or is too large (EINVAL), otherwise `error` itself."""
    if error.errno == errno.EINVAL:
        return make_corrupt_error(path, error)
    return error


def make_corrupt_error(location: Path | str, error: Exception) -> ConfigError:
    """Return the error to raise for a run's file that another program has changed. `location`: path
    of the file, which may have a line number."""
    if isinstance(error, KeyError):
        shape_problem = f"{error} is missing"
    else:
        shape_problem = "a value has the wrong type"
    reason = shape_problem if isinstance(error, STRUCTURE_ERRORS) else error
    run_folder = Path(str(location)).parent
    return ConfigError(
        f"{location} was changed ({reason}): only the runner may change it. Restore the file, or"
        f" remove {run_folder} and start the run again."
    )


def _check_status(workflow_status: Status, node_ids: Iterable[str]) -> None:
    """Raise ValueError or an exception of STRUCTURE_ERRORS for a status that cannot be resumed.
    `node_ids`: the nodes to check."""
    nodes = workflow_status["nodes"]
    if not all(
        isinstance(workflow_status.get(field_name) or "", str)
        for field_name in ("phase", *STATUS_TEXT_FIELDS)
    ):
        raise TypeError("a text of the status")
    for field_name in TIME_FIELDS:
        check_time(workflow_status.get(field_name), field_name)
    _check_values(workflow_status.get("outputs") or {}, "outputs")
    for claim in workflow_status.get("persistentVolumeClaims") or []:
        if not isinstance(claim["persistentVolumeClaim"]["claimName"], str):
            raise TypeError("the name of a claim")
    check_types(workflow_status.get("storedTemplates") or {}, "{Template}", "storedTemplates")

    for node_id in node_ids:
        node = nodes[node_id]
        _check_node_types(node)
        if (
            node["id"] != node_id
            or node["phase"] not in PHASES
            or not (node["name"] and node["type"] and node["startedAt"])
        ):
            raise ValueError(f"the name, type or phase of node {node_id} is missing or unknown")

        if node.get("boundaryID", node_id) not in nodes:
            raise ValueError(
                f"the boundaryID {node['boundaryID']} of node {node_id} does not exist"
            )

    if workflow_status["phase"] not in PHASES | {""}:
        raise ValueError(f"{workflow_status['phase']!r} is not a phase")


def check_time(value: object, path: str) -> None:
    """Raise ValueError unless a value is a time of RFC 3339, or missing."""
    if not value:
        return
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        time = None
    # a page also shows times shortly before and after this time
    if time is None or time.tzinfo is None or not 1970 <= time.year < 9999:
        raise ValueError(
            f"{path} is {format_untrusted(value)}: it must be like 2026-01-31T00:00:00Z"
        )


def _check_node_types(node: dict[str, Any]) -> None:
    """Raise ValueError or an exception of STRUCTURE_ERRORS if a value of a node has the wrong
    type."""
    is_valid = all(isinstance(node.get(field_name) or "", str) for field_name in NODE_TEXT_FIELDS)
    is_valid = is_valid and all(
        isinstance(node.get(field_name) or {}, dict) for field_name in NODE_OBJECT_FIELDS
    )
    is_valid = is_valid and all(
        isinstance(node.get(field_name) or [], list) for field_name in NODE_LIST_FIELDS
    )
    if not is_valid or not all(
        isinstance(node_id, str)
        for field_name in NODE_LIST_FIELDS
        for node_id in node.get(field_name) or []
    ):
        raise TypeError("a field of a node")

    if node.get("templateRef"):
        check_types(node["templateRef"], "Reference", f"templateRef of node {node['id']}")
    if not all(isinstance(flag, bool) for flag in (node.get("nodeFlag") or {}).values()):
        raise TypeError("a flag of a node")
    for field_name in TIME_FIELDS:
        check_time(node.get(field_name), f"{field_name} of node {node['id']}")
    for field_name in ("inputs", "outputs"):
        _check_values(node.get(field_name) or {}, f"{field_name} of node {node['id']}")


def _check_values(values: Mapping[str, Any], path: str) -> None:
    """Raise ValueError or an exception of STRUCTURE_ERRORS if a value of `inputs` or `outputs` has
    the wrong type."""
    for parameter in values.get("parameters") or []:
        is_valid = isinstance(parameter["name"], str)
        is_valid = is_valid and isinstance(parameter.get("valueFrom") or {}, dict)
        if not is_valid or isinstance(parameter.get("value"), dict | list):
            raise TypeError("a parameter")
    if values.get("artifacts"):
        check_types(values["artifacts"], "[OutputArtifact]", f"{path}.artifacts")
    if not isinstance(values.get("result") or "", str):
        raise TypeError("the result")


def _check_pods(process_records: Mapping[str, ProcessRecord | None]) -> None:
    """Raise an exception of STRUCTURE_ERRORS if a record of a process does not consist of
    numbers."""
    for process_record in process_records.values():
        if process_record and not all(isinstance(number, int) for number in process_record):
            raise TypeError("the record of a process")
