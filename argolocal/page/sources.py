"""The source of the runs that a page shows: the home, the directory of runs on this machine.

`rekindle.page` contains another source with the same interface: the runs of a cluster.
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
from argolocal.view.summary import FINISHED_PHASES, Status

# maximum size of the files whose parsed content stays in memory; the parsed content is about six
# times as large
MAX_CACHED_BYTES = 4_000_000
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    """The state of a run at one moment. `version` is different after any change of the run."""

    name: str
    manifest: Mapping[str, Any]
    status: Status
    version: str
    created: str | None = None
    """Time of creation, in the format of RFC 3339."""
    pod_starts: Mapping[str, float] = field(default_factory=dict)
    """Start times of the pods' processes in unix seconds, by node id. A time from before the last
    boot of the machine is wrong."""

    command_flags: str = ""
    """Command-line flags with which commands find the run, such as " --cluster -n models"."""

    @property
    def command_target(self) -> str:
        """The run's name and flags, as arguments of a command."""
        return f"{self.name}{self.command_flags}"

    @property
    def phase(self) -> str:
        return self.status.get("phase") or "Pending"

    @property
    def is_finished(self) -> bool:
        return self.phase in FINISHED_PHASES

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        return self.manifest.get("spec") or {}


class RunSource(Protocol):
    """The runs that a page shows. All methods may be called from several threads."""

    @property
    def location(self) -> str:
        """Location of the runs, for the page's header: "this machine" or "cluster, namespace x"."""
        ...

    def names(self) -> list[str]:
        """Return the names of all runs, newest first."""
        ...

    def version(self, name: str) -> str:
        """Return a text that changes whenever the run changes, or "" if the run does not exist.
        This method is called several times per second."""
        ...

    def read(self, name: str) -> Run:
        """Return a run. Raises ConfigError if the run does not exist or its files are malformed."""
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
    """The runs of a home (a directory of runs). The parsed files of recently read runs stay in
    memory, so that only the lines that were appended in the meantime must be parsed."""

    def __init__(self, home: Path) -> None:
        self.home = home.resolve()
        self.folder = str(self.home / "runs")
        self.location = "this machine"
        self.valid_names: dict[str, RunName] = {}
        self.lock = Lock()
        self.readers: OrderedDict[str, RunReader] = OrderedDict()
        self.readers_size = 0
        # name of a finished run → state of its files
        self.finished: dict[str, str] = {}

    def names(self) -> list[str]:
        times: dict[str, int] = {}
        try:
            folder_names = os.listdir(self.folder)
        except FileNotFoundError:
            return []

        for folder_name in folder_names:
            name = self.valid_names.get(folder_name) or RunName.parse_or_none(folder_name)
            try:
                if name:
                    times[name] = os.stat(f"{self.folder}/{name}/{MANIFEST_FILE}").st_mtime_ns
                    self.valid_names[folder_name] = name
            except OSError:
                # the folder is not a run, or its run is being created or removed
                self.valid_names.pop(folder_name, None)
                continue
        return sorted(times, key=lambda name: times[name], reverse=True)

    def version(self, name: str) -> str:
        # strings are faster than Path objects, and a list asks for the versions of thousands of
        # runs
        root = f"{self.folder}/{name}"
        manifest = _mark(f"{root}/{MANIFEST_FILE}")
        if not manifest:
            self.finished.pop(name, None)
            return ""

        journal = _mark(f"{root}/{JOURNAL_FILE}")
        files = f"{manifest}-{journal}"
        # the version of a finished run does not contain its runner's pid
        if self.finished.get(name) == files:
            return files
        return f"{files}-{RunFiles(self.home, name).runner() or 0}"

    def read(self, name: str) -> Run:
        reader = self._reader(name)
        with reader.lock:
            # read the version before the files, so that a change in between leads to a new version
            version = self.version(name)
            manifest = reader.read_manifest()
            status, _ = reader.journal.read()
            starts = dict(reader.journal.starts)

        status = runs.settle_phase(status, reader.files)
        if status["phase"] in FINISHED_PHASES:
            # if the files change later, `version` returns another text than this version
            version = "-".join(version.split("-")[:2])
            self.finished[name] = version
        self._limit_memory(reader)

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

    def _limit_memory(self, reader: "RunReader") -> None:
        """Add the size of a run that was read to the total size of the runs in memory. If the total
        size is above the limit, remove the least recently read runs from memory, but keep at least
        one run."""
        with self.lock:
            if self.readers.get(reader.files.name) is reader:
                self.readers_size += reader.size - reader.counted_size
                reader.counted_size = reader.size
            while self.readers_size > MAX_CACHED_BYTES and len(self.readers) > 1:
                _, oldest = self.readers.popitem(last=False)
                self.readers_size -= oldest.counted_size


class RunReader:
    """The parsed files of a run. Use a RunReader only while holding its lock."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.lock = Lock()
        # size of this run's files in the total that LocalRuns has computed
        self.counted_size = 0
        self.journal = JournalReader(files.root / JOURNAL_FILE)
        self.manifest: Mapping[str, Any] = {}
        self.manifest_mark = ""

    def read_manifest(self) -> Mapping[str, Any]:
        """Return the run's workflow. Raises ConfigError."""
        mark = _mark(self.files.root / MANIFEST_FILE)
        if not mark or mark != self.manifest_mark:
            self.manifest = self.files.workflow()
            self.manifest_mark = mark
        return self.manifest

    @property
    def size(self) -> int:
        """Total size of the run's files in bytes, as an estimate of the memory that their content
        needs."""
        manifest_size = int(self.manifest_mark.split(".")[1], 16) if self.manifest_mark else 0
        return self.journal.offset + manifest_size


def _mark(path: Path | str) -> str:
    """Return a text that changes whenever the file changes, or "" if the file does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_ino:x}.{status.st_size:x}.{status.st_mtime_ns:x}"
