"""The runs that a page shows: those in the home of this machine.

`rekindle.page` adds the runs of a cluster, with the same interface.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from argolocal.common.checked_names import RunName
from argolocal.errors import describe
from argolocal.page.log_files import LogFile, local_logs
from argolocal.state.journal import JOURNAL_FILE, MANIFEST_FILE, RunFiles
from argolocal.state.journal_reader import JournalReader
from argolocal.view import runs
from argolocal.view.summary import FINISHED, Status

# size of the files of runs whose content stays in memory, which needs about six times as much
MAX_CACHED_BYTES = 4_000_000
# exceptions that a manifest or a status with an unexpected form causes; their checks are those of a
# runner, which needs less of them than a page
FORM_ERRORS = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    """One run at one moment. `version` differs if anything of the run has changed."""

    name: str
    manifest: Mapping[str, Any]
    status: Status
    version: str
    created: str | None = None
    """Time of creation, in the format of RFC 3339."""
    pod_starts: Mapping[str, float] = field(default_factory=dict)
    """Times in unix seconds when the processes of pods started, by the id of the node. The time of
    a pod that was started before the last boot of the machine is wrong."""

    command_flags: str = ""
    """Flags that a command needs to find the run, such as " --cluster -n models"."""

    @property
    def command_target(self) -> str:
        """The run as an argument of a command."""
        return f"{self.name}{self.command_flags}"

    @property
    def phase(self) -> str:
        return self.status.get("phase") or "Pending"

    @property
    def is_finished(self) -> bool:
        return self.phase in FINISHED

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        return self.manifest.get("spec") or {}


class RunSource(Protocol):
    """The runs that a page shows. All methods may be called from several threads."""

    @property
    def location(self) -> str:
        """Text for the head of the page: "this machine" or "cluster, namespace x"."""
        ...

    def names(self) -> list[str]:
        """Return the names of all runs, newest first."""
        ...

    def version(self, name: str) -> str:
        """Return a text that changes with the run, or "" if the run does not exist. It is called
        several times in a second."""
        ...

    def read(self, name: str) -> Run:
        """Return a run. Raises ConfigError if it does not exist or its files are malformed."""
        ...

    def logs(self, name: str) -> Mapping[str, LogFile]:
        """Return the log of each pod of a run, by the name of the pod."""
        ...


def describe_malformed(name: str, error: Exception) -> str:
    """Return a sentence about a run whose records have an unexpected form."""
    return (
        f"The manifest or the status of {name} has an unexpected form ({describe(error)}):"
        " another program may have changed it."
    )


class LocalRuns:
    """The runs of a home. The parsed files of the runs that were read last stay in memory, so that
    a change of a run costs only the lines that its runner has added."""

    def __init__(self, home: Path) -> None:
        self.home = home.resolve()
        self.location = "this machine"
        self.lock = Lock()
        self.readers: OrderedDict[str, RunReader] = OrderedDict()
        # name of a finished run → state of its files
        self.finished: dict[str, str] = {}

    def names(self) -> list[str]:
        times: dict[str, int] = {}
        try:
            entries = list(os.scandir(self.home / "runs"))
        except FileNotFoundError:
            return []

        for entry in entries:
            name = RunName.or_none(entry.name)
            try:
                if name:
                    times[name] = os.stat(f"{entry.path}/{MANIFEST_FILE}").st_mtime_ns
            except OSError:
                # not a run, or a run that is just created or removed
                continue
        return sorted(times, key=lambda name: times[name], reverse=True)

    def version(self, name: str) -> str:
        root = self.home / "runs" / name
        manifest = _mark(root / MANIFEST_FILE)
        if not manifest:
            self.finished.pop(name, None)
            return ""

        files = f"{manifest}-{_mark(root / JOURNAL_FILE)}"
        # a finished run does not depend on its runner
        if self.finished.get(name) == files:
            return files
        return f"{files}-{RunFiles(self.home, name).runner() or 0}"

    def read(self, name: str) -> Run:
        reader = self._reader(name)
        with reader.lock:
            # the version is read first: a later change leads to another version
            version = self.version(name)
            manifest = reader.read_manifest()
            status, _ = reader.journal.read()
            starts = dict(reader.journal.starts)

        status = runs.settle_phase(status, reader.files)
        if status["phase"] in FINISHED:
            # if the files have changed since then, their state differs from this one
            version = "-".join(version.split("-")[:2])
            self.finished[name] = version
        self._limit_memory()

        boot_time = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        pod_starts = {id: boot_time + ticks / CLOCK_TICKS for id, ticks in starts.items()}
        return Run(name, manifest, status, version, status.get("startedAt"), pod_starts)

    def logs(self, name: str) -> Mapping[str, LogFile]:
        return local_logs(self.home / "runs" / name / "logs")

    def _reader(self, name: str) -> "RunReader":
        with self.lock:
            reader = self.readers.get(name)
            if reader is None:
                reader = self.readers[name] = RunReader(RunFiles(self.home, name))
            self.readers.move_to_end(name)
            return reader

    def _limit_memory(self) -> None:
        """Forget the runs that were not read for the longest time. The last run always stays."""
        with self.lock:
            size = sum(reader.size for reader in self.readers.values())
            while size > MAX_CACHED_BYTES and len(self.readers) > 1:
                _, reader = self.readers.popitem(last=False)
                size -= reader.size


class RunReader:
    """The parsed files of a run. Use it only while holding its lock."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.lock = Lock()
        self.journal = JournalReader(files.root / JOURNAL_FILE)
        self.manifest: Mapping[str, Any] = {}
        self.manifest_mark = ""

    def read_manifest(self) -> Mapping[str, Any]:
        """Return the workflow. Raises ConfigError."""
        mark = _mark(self.files.root / MANIFEST_FILE)
        if not mark or mark != self.manifest_mark:
            self.manifest = self.files.workflow()
            self.manifest_mark = mark
        return self.manifest

    @property
    def size(self) -> int:
        """Number of bytes of the files, which is a measure of the memory they need."""
        manifest_size = int(self.manifest_mark.split(".")[1], 16) if self.manifest_mark else 0
        return self.journal.offset + manifest_size


def _mark(path: Path) -> str:
    """Return a text that changes with a file, or "" if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino:x}.{status.st_size:x}.{status.st_mtime_ns:x}"
