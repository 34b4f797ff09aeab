"""A run on disk: .argolocal/runs/NAME/{manifest.yaml, journal.jsonl, lock, stop, asked, creates/,
logs/, pods/POD/}. For a queued run, the file .argolocal/queue/NAME exists until the run has ended.

manifest.yaml contains the resolved workflow as JSON. Each line of the journal is a JSON object with
changes of the workflow's status (`status`, `nodes` by id, and new `children` of otherwise unchanged
nodes) and of the pods' processes (`pods`: id → [pid, start time], null after the exit). A line of
the journal is written before its change takes effect, and readers ignore an incomplete last line.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from argolocal.common import homes, program
from argolocal.common.checked_names import RunName
from argolocal.common.files import read_regular_file, write_atomically
from argolocal.common.json_text import to_json
from argolocal.errors import ArgolocalError, ConfigError, suggest_similar
from argolocal.manifest.volume_claims import list_claims
from argolocal.state.journal_reader import (
    MAX_FILE_BYTES,
    STRUCTURE_ERRORS,
    JournalReader,
    Status,
    make_corrupt_error,
    make_unreadable_error,
)
from argolocal.state.run_manifest import parse_manifest

LOCK_FILE = "lock"
MANIFEST_FILE = "manifest.yaml"
JOURNAL_FILE = "journal.jsonl"
QUEUE_FOLDER = "queue"
PATH_FILE = "module-path"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_FOUND = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
MIN_FREE_BYTES = 1 << 20
# maximum number of seconds until the lock of a dead runner is released
LOCK_RELEASE_TIMEOUT_S = 2.0
# maximum number of seconds for which a call of `RunFiles.runner` in another process holds the lock
PROBE_TIMEOUT_S = 0.1


class StateError(ArgolocalError):
    """The state of a run cannot be written. A run is interrupted by a StateError, because no event
    can be recorded."""


class DiskFull(StateError):
    """The disk is too full for the state of a run."""


class Busy(ArgolocalError):
    """Another process executes this run."""


class NotQueued(ArgolocalError):
    """The run is no longer in the queue of the home's server, because it has ended."""


class RunExists(ConfigError):
    """A run with this name exists already."""


class RunFiles:
    """The directory of one run. Only the process that has locked the run writes into its
    directory."""

    def __init__(self, home: Path, run_name: str) -> None:
        """Set the paths of the run `run_name`, without reading or writing files. Raises
        InvalidName."""
        self.home = home.resolve()
        self.name = RunName(run_name)
        self.root = self.home / "runs" / run_name
        self.logs = self.root / "logs"
        self.pods = self.root / "pods"
        # path of the file that names the suspended nodes to resume, with values for their outputs
        self.resume_request = self.root / "asked"
        self.queue_entry = self.home / QUEUE_FOLDER / run_name
        # file descriptors of the journal and the lock; -1 means closed
        self.journal = -1
        self.lock_descriptor = -1

    @classmethod
    def all(cls, home: Path) -> Iterator[Self]:
        """Yield the runs of a home (directory of all runs). Folders with invalid names are
        skipped."""
        for manifest_path in (home / "runs").glob(f"*/{MANIFEST_FILE}"):
            run_name = RunName.parse_or_none(manifest_path.parent.name)
            if run_name:
                yield cls(home, run_name)

    def create(self, workflow: dict[str, Any], queued_path: str | None = None) -> None:
        """Create the directory of a run and lock the run. Raises RunExists if the run exists, and
        StateError if its files cannot be written.

        `queued_path`: for a run that the server starts, the import path of its pods (folders with
        Python modules); None for other runs.
        """
        self._require_new_name()
        try:
            homes.create_home(self.home)
            self.root.mkdir(parents=True, exist_ok=True)
            self.lock()
        except OSError as error:
            raise make_write_error(error, self.root) from error

        try:
            # another process may have created the run while this process waited for the lock
            self._require_new_name()
            self._remove_leftovers()
            self.logs.mkdir()
            if queued_path is not None:
                write_atomically(self.root / PATH_FILE, queued_path)
                # create the queue entry before the manifest: the server ignores an entry without a
                # manifest
                self.queue_entry.parent.mkdir(exist_ok=True)
                self.queue_entry.touch()
            else:
                # remove the queue entry of a deleted run with the same name
                self.queue_entry.unlink(missing_ok=True)
            write_atomically(self.root / MANIFEST_FILE, to_json(workflow, indent=1))
            self._open()
        except RunExists:
            self.close()
            raise
        except OSError as error:
            shutil.rmtree(self.root, ignore_errors=True)
            self.close()
            raise make_write_error(error, self.root) from error

    def _require_new_name(self) -> None:
        """Raise RunExists if a run with this name exists."""
        if (self.root / MANIFEST_FILE).exists():
            raise RunExists(
                f'the run "{self.name}" exists already: names are unique. Continue it with'
                f" `{program.name} resume {self.name}`, remove {self.root}, or use"
                " metadata.generateName."
            )

    def _remove_leftovers(self) -> None:
        """Remove the files of an earlier run with this name whose removal was interrupted. The
        caller must have locked the run."""
        for path in self.root.iterdir():
            if path.name == LOCK_FILE:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def open(self) -> tuple[dict[str, Any], Status, dict[str, list[int]]]:
        """Lock an existing run. Return the run's workflow, its status, and the process records of
        pods that may still run. Raises Busy if another process holds the lock, and ConfigError if
        the run does not exist or is malformed."""
        workflow = self.workflow()
        self.lock()
        try:
            return workflow, *self.load()
        except BaseException:
            self.close()
            raise

    def snapshot(self, workflow_status: Status) -> None:
        """Replace the journal by one line that contains the entire `workflow_status` and no
        pods. Raises StateError."""
        status_fields = {key: value for key, value in workflow_status.items() if key != "nodes"}
        journal_entry = {"status": status_fields, "nodes": workflow_status["nodes"]}
        try:
            write_atomically(self.root / JOURNAL_FILE, _encode_line(journal_entry))
        except OSError as error:
            raise make_write_error(error, self.root) from error
        self._open()

    def workflow(self) -> dict[str, Any]:
        """Return the workflow of this run. Raises ConfigError if the run does not exist, or if its
        manifest is malformed."""
        manifest_path = self.root / MANIFEST_FILE

        try:
            return parse_manifest(read_regular_file(manifest_path, MAX_FILE_BYTES))
        except (ValueError, RecursionError, *STRUCTURE_ERRORS) as error:
            raise make_corrupt_error(manifest_path, error) from None
        except OSError as error:
            if error.errno not in NOT_FOUND:
                raise make_unreadable_error(manifest_path, error) from None

            runs_folder = self.home / "runs"
            if runs_folder.is_dir():
                run_names = {folder.name for folder in runs_folder.iterdir()}
            else:
                run_names = set()

            hint = (
                f"{suggest_similar(self.name, run_names)} `{program.name} status` lists all runs."
            )
            raise ConfigError(
                f'the run "{self.name[:100]}" does not exist in {runs_folder}.{hint}'
            ) from None

    def is_own_folder(self) -> bool:
        """Return True if the folder belongs to the run: the folder is not a link, and its manifest
        has the name of the run."""
        is_in_home = self.root.resolve() == (self.home / "runs").resolve() / self.name
        if not is_in_home or not (self.root / MANIFEST_FILE).is_file():
            return False
        try:
            return self.workflow()["metadata"]["name"] == self.name
        except ConfigError:
            return False

    def read_path(self) -> str:
        """Return the import path of the pods of a queued run, or "" if none was set or if the run
        was not queued."""
        try:
            return (self.root / PATH_FILE).read_text()
        except FileNotFoundError:
            return ""

    def remove(self) -> None:
        """Remove an ended run with its logs. Raises Busy for a run in progress, and ConfigError for
        a folder that does not belong to the run."""
        if not self.is_own_folder():
            # raises the error of a malformed manifest
            self.workflow()
            raise ConfigError(
                f"{self.root} is a link, or its manifest has another name: remove it by hand."
            )
        self.lock()
        try:
            # remove the manifest first: if the removal is interrupted, a folder without a manifest
            # does not count as a run
            (self.root / MANIFEST_FILE).unlink(missing_ok=True)
            self.queue_entry.unlink(missing_ok=True)
            shutil.rmtree(self.root, ignore_errors=True)
        finally:
            self.close()

    def load(self) -> tuple[Status, dict[str, list[int]]]:
        """Return the run's status, and the process records of pods that may still run. Raises
        ConfigError for a corrupt journal."""
        return JournalReader(self.root / JOURNAL_FILE).read()

    def lock(self) -> None:
        """Lock the run until this process exits. Raises Busy if another process holds the lock."""
        descriptor = -1
        while descriptor < 0:
            descriptor = self._open_lock()
        self.lock_descriptor = descriptor

    def _open_lock(self) -> int:
        """Return the descriptor of the locked lock file; -1 if another process has removed the run
        in the meantime. Raises Busy if another process holds the lock."""
        descriptor = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._wait_for_lock(descriptor)
            if self._is_lock_file(descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise

        os.close(descriptor)
        return -1

    def _wait_for_lock(self, descriptor: int) -> None:
        """Lock the open lock file. Raises Busy if another process holds the lock."""
        lock_start = time.monotonic()

        while not _try_lock(descriptor, fcntl.LOCK_EX):
            pid = os.pread(descriptor, 32, 0).decode().strip()
            waited_seconds = time.monotonic() - lock_start
            # if a runner was killed while it started a process, this child process holds the lock
            # until it calls exec
            is_dead = pid.isdigit() and not Path(f"/proc/{pid}").exists()
            if waited_seconds < (LOCK_RELEASE_TIMEOUT_S if is_dead else PROBE_TIMEOUT_S):
                time.sleep(0.01)
                continue

            raise Busy(
                f'run "{self.name}" is being run by process {pid}: only one process may run it.'
                f" Follow it with `{program.name} logs -f {self.name}`, or stop it with"
                f" `{program.name} stop {self.name}`."
            )

    def _is_lock_file(self, descriptor: int) -> bool:
        """Return True if an open file is the run's lock file, and this lock file has not been
        deleted."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.root / LOCK_FILE))
        except FileNotFoundError:
            return False

    def runner(self) -> int | None:
        """Return the pid of the process that holds the lock of the run, or None."""
        try:
            probe_descriptor = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            # use a shared lock, so that simultaneous probes do not detect each other
            if _try_lock(probe_descriptor, fcntl.LOCK_SH):
                return None
            return int(os.read(probe_descriptor, 32) or 0) or None
        finally:
            os.close(probe_descriptor)

    def append(self, journal_entry: dict[str, Any]) -> None:
        """Append one line to the journal. Raises StateError if the line cannot be written; the
        journal is then unchanged."""
        line_bytes = _encode_line(journal_entry).encode()
        journal_bytes = os.fstat(self.journal).st_size
        try:
            written_bytes = os.write(self.journal, line_bytes)
            if written_bytes < len(line_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self.journal, journal_bytes)
            raise make_write_error(error, self.root) from error

    def check_space(self) -> None:
        """Raise DiskFull if the disk is almost full. Call `check_space` after another failure,
        because a full disk may be the cause of the failure."""
        disk_status = os.statvfs(self.root)
        # only root may use the reserved blocks
        free_blocks = disk_status.f_bavail if os.geteuid() else disk_status.f_bfree
        free_bytes = free_blocks * disk_status.f_frsize
        if free_bytes < MIN_FREE_BYTES or (disk_status.f_files and not disk_status.f_ffree):
            if free_bytes < MIN_FREE_BYTES:
                reason = f"{free_bytes // 1000} kB are free"
            else:
                reason = "no more files can be created"
            raise make_write_error(OSError(errno.ENOSPC, reason), self.root)

    def close(self) -> None:
        """Close the journal and release the lock of the run."""
        for file_descriptor in (self.journal, self.lock_descriptor):
            if file_descriptor >= 0:
                os.close(file_descriptor)
        self.journal = -1
        self.lock_descriptor = -1

    def _open(self) -> None:
        open_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.journal = os.open(self.root / JOURNAL_FILE, open_flags, 0o644)


def list_run_claims(run_files: RunFiles) -> list[str]:
    """Return the names of the claims that a run creates from its volumeClaimTemplates, or [] if the
    run does not exist."""
    if not (run_files.root / MANIFEST_FILE).exists():
        return []
    return [
        volume["persistentVolumeClaim"]["claimName"] for volume in list_claims(run_files.workflow())
    ]


def _try_lock(file_descriptor: int, lock_operation: int) -> bool:
    """Lock a file with flock. Return False if another process holds the lock of the file."""
    try:
        fcntl.flock(file_descriptor, lock_operation | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _encode_line(journal_entry: dict[str, Any]) -> str:
    return to_json(journal_entry, separators=(",", ":")) + "\n"


def make_write_error(error: OSError, run_folder: Path) -> StateError:
    """Return the error to raise if the state of a run cannot be written to `run_folder`, with the
    reason and the remedy in its message."""
    if error.errno in DISK_FULL:
        if (run_folder / MANIFEST_FILE).exists():
            remedy = (
                f"then `{program.name} resume {run_folder.name}`, which deletes the files of"
                " failed steps in pods/ if needed"
            )
        else:
            remedy = "then start the run again"

        return DiskFull(
            f"no space is left for the state of the run in {run_folder} ({error.strerror}): the"
            f" run is interrupted. Free some space, {remedy}."
        )

    return StateError(
        f"{run_folder} cannot be written ({error.strerror}): a run keeps its state in this"
        " directory. Make it writable."
    )


def reset_interrupted(workflow_status: Status, now: str) -> Status:
    """Change the status of a run whose runner has died, so that the run can continue. Running nodes
    become pending and get the start time `now` (RFC 3339). Return the changed status.

    The group that contains a daemon is set to Running again, so that dependent steps wait until the
    daemon has restarted.
    """
    nodes: dict[str, dict[str, Any]] = workflow_status["nodes"]

    for node_id, node in nodes.items():
        if node["phase"] in ("Pending", "Running") and node.pop("daemoned", None):
            node.pop("podIP", None)
            for parent_node in nodes.values():
                is_group = parent_node["type"] in ("StepGroup", "TaskGroup")
                if is_group and node_id in parent_node.get("children", []):
                    parent_node["phase"] = "Running"
                    parent_node["finishedAt"] = None

        is_restarted = node["type"] in ("Pod", "HTTP") and node["phase"] in ("Pending", "Running")
        if is_restarted and "synchronizationStatus" not in node:
            node["phase"] = "Pending"
            node["startedAt"] = now
            node.pop("progress", None)

    return workflow_status
