"""The queue of a home (a directory of runs) contains the runs that wait until the server of the
home starts them, in the order of their priority.

    queue = Queue(cluster, launch, parallelism=4)
    name = queue.submit(manifest, {"message": "hello"})    # on disk, as a Pending run
    queue.start_next()

For each queued run, a file exists in the folder `queue` of the home (the directory of runs) until
the run has ended. By these files, a restarted server finds all waiting and running runs, and
continues the runs whose process has died.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

from argolocal.common.checked_names import RunName
from argolocal.errors import DAMAGE_ERRORS, ConfigError, describe, write_stderr
from argolocal.interfaces import Cluster
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from argolocal.runner import requests
from argolocal.runner.run import LocalRun
from argolocal.state.journal import MANIFEST_FILE, QUEUE_FOLDER, RunFiles, Status

UNREADABLE_PAUSE_S = 5.0
MAX_RESTART_DELAY_S = 300.0
# seconds between two checks whether waiting runs were stopped; the check of a run takes about 20
# microseconds, and thousands of runs may wait
STOP_CHECK_INTERVAL_S = 1.0


class RunProcess(Protocol):
    """The process of a run."""

    def has_ended(self) -> bool: ...


# function that starts a process for a queued run in a new session
Launch = Callable[[str], RunProcess]


@dataclass(frozen=True)
class FoundProcess:
    """A process that has locked a run, but was started by another program than this server."""

    files: RunFiles
    pid: int

    def has_ended(self) -> bool:
        return self.files.runner() != self.pid


@dataclass(frozen=True)
class WaitingRun:
    """A run that waits until fewer than `parallelism` runs are in progress. `is_interrupted` is
    True if the run's process has died. `submitted`: time in nanoseconds since the epoch."""

    name: str
    is_interrupted: bool
    priority: int
    submitted: int

    @property
    def rank(self) -> tuple[bool, int, int, str]:
        """Return the sort key of a run: runs with a lower rank start first. Interrupted runs come
        first, because they had already started."""
        return not self.is_interrupted, -self.priority, self.submitted, self.name


@dataclass
class Deaths:
    """Counts how often a process of a run has died. The first replacement of a dead process starts
    at once, the second after a second, and each later replacement after about twice the delay of
    the replacement before. `earliest_start`: monotonic time of the next start."""

    count: int = 0
    earliest_start: float = 0.0

    def add(self) -> None:
        """Count a process that has died, and compute the time of the next start."""
        delay = min(2.0**self.count - 1, MAX_RESTART_DELAY_S)
        self.count += 1
        self.earliest_start = time.monotonic() + delay


class Queue:
    """The queued runs of a home (directory of all runs). All methods may be called from several
    threads. Only one process for each home (directory of runs) may call `start_next`."""

    def __init__(self, cluster: Cluster, launch: Launch, parallelism: int | None = None) -> None:
        """`parallelism`: maximum number of runs at the same time (default: the number of CPU
        cores)."""
        self.cluster = cluster
        self.launch = launch
        self.parallelism = parallelism or len(os.sched_getaffinity(0))
        self.folder = cluster.home / QUEUE_FOLDER
        self.lock = RLock()
        self.waiting_runs: dict[str, WaitingRun] = {}
        self.processes: dict[str, RunProcess] = {}
        self.deaths: dict[str, Deaths] = {}
        # name of a run with damaged files → monotonic time of the next attempt to read them
        self.unreadable_runs: dict[str, float] = {}
        # monotonic time of the next check for stopped runs
        self.next_stop_check = 0.0

    def submit(
        self,
        manifest: Mapping[str, Any],
        parameters: Mapping[str, str] | None = None,
        status: Status | None = None,
    ) -> str:
        """Validate a manifest, create its run on disk in the phase Pending, and return its name.
        Raises ConfigError for an invalid manifest, and RunExists for the name of an earlier run.

        `status`: the status with which the run starts, with nodes that have already completed.
        """
        return submit(self.cluster, manifest, parameters, status)

    def retry(self, name: str) -> None:
        """Queue a failed or interrupted run again. Steps of the run that have succeeded are not
        repeated. Raises ConfigError for an unknown or successful run, and Busy for a run in
        progress."""
        files = RunFiles(self.cluster.home, name)
        if files.load()[0].get("phase") == "Succeeded":
            raise ConfigError(f"{name} has succeeded: only a run that did not can be retried.")

        run = LocalRun.load(name, self.cluster)
        try:
            self.folder.mkdir(exist_ok=True)
            files.queue_entry.touch()
        finally:
            run.files.close()

    def waiting(self) -> list[str]:
        """Return the names of the waiting runs, in the order in which they will start."""
        with self.lock:
            self._refresh()
            ordered_runs = sorted(self.waiting_runs.values(), key=lambda run: run.rank)
            return [run.name for run in ordered_runs]

    def active(self) -> list[str]:
        """Return the sorted names of the runs that have a process."""
        with self.lock:
            self._refresh()
            return sorted(self.processes)

    def start_next(self) -> list[str]:
        """Start waiting runs until `parallelism` is reached, and return the names of the started
        runs."""
        started_names: list[str] = []
        with self.lock:
            waiting_names = self.waiting()
            stopped_names = self._find_stopped(waiting_names)
            for name in [*stopped_names, *waiting_names]:
                is_full = len(self.processes) >= self.parallelism
                if name not in self.waiting_runs or (is_full and name not in stopped_names):
                    continue
                if name in self.deaths and self.deaths[name].earliest_start > time.monotonic():
                    continue

                del self.waiting_runs[name]
                # a command such as `resume` may have started the run in the meantime
                if not self._find_process(RunFiles(self.cluster.home, name)):
                    self.processes[name] = self.launch(name)
                    started_names.append(name)
        return started_names

    def _find_stopped(self, names: Iterable[str]) -> list[str]:
        """Return the names of waiting runs that a user has stopped. The stopped runs are started
        even if `parallelism` is reached, so that they end at once. Return [] if the last check was
        less than STOP_CHECK_INTERVAL_S seconds ago."""
        if time.monotonic() < self.next_stop_check:
            return []
        self.next_stop_check = time.monotonic() + STOP_CHECK_INTERVAL_S
        return [name for name in names if self._is_stopped(name)]

    def _is_stopped(self, name: str) -> bool:
        """Return True if a user has stopped a waiting run. Return False for a run with a damaged
        request."""
        try:
            request = requests.read_pending(RunFiles(self.cluster.home, name))
        except DAMAGE_ERRORS as error:
            self._leave_out(name, error)
            return False
        return bool(request and request.shutdown)

    def _leave_out(self, name: str, error: Exception) -> None:
        """Leave out a run whose files are damaged, so that the other runs start. A run that was
        left out is read again after UNREADABLE_PAUSE_S, because a user may repair it."""
        if name not in self.unreadable_runs:
            write_stderr(f"warning: the queued run {name} is left out: {describe(error)}")
        self.unreadable_runs[name] = time.monotonic() + UNREADABLE_PAUSE_S
        self.waiting_runs.pop(name, None)

    def _refresh(self) -> None:
        """Update the waiting and the running runs in memory from the files in the queue folder."""
        for name in [name for name, run in self.processes.items() if run.has_ended()]:
            del self.processes[name]
            self.deaths.setdefault(name, Deaths()).add()

        try:
            entries = set(os.listdir(self.folder))
        except FileNotFoundError:
            entries = set()

        for name in self.waiting_runs.keys() - entries:
            del self.waiting_runs[name]
        now = time.monotonic()
        unreadable_names = {name for name, end in self.unreadable_runs.items() if now < end}
        known_names = self.waiting_runs.keys() | self.processes.keys() | unreadable_names
        for name in entries - known_names:
            run_name = RunName.parse_or_none(name)
            if not run_name:
                continue
            try:
                self._classify(run_name)
                self.unreadable_runs.pop(name, None)
            except DAMAGE_ERRORS as error:
                self._leave_out(name, error)

    def _classify(self, name: RunName) -> None:
        """Record a queued run as running or waiting. If the run has ended, remove its queue
        entry."""
        files = RunFiles(self.cluster.home, name)
        if files.runner():
            self._find_process(files)
            return

        # if the manifest is missing, the submitting process has died before it created the run
        phase = files.load()[0]["phase"] if (files.root / MANIFEST_FILE).exists() else None
        if phase is None or phase in COMPLETED_PHASES:
            files.queue_entry.unlink(missing_ok=True)
            self.deaths.pop(name, None)
            return

        priority = int(files.workflow()["spec"].get("priority") or 0)
        submitted = files.queue_entry.stat().st_mtime_ns
        self.waiting_runs[name] = WaitingRun(name, bool(phase), priority, submitted)

    def _find_process(self, files: RunFiles) -> bool:
        """Record the process that has locked a run, if any. Return True if such a process
        exists."""
        pid = files.runner()
        # do not record this process, whose threads hold the lock while they create a run
        if pid and pid != os.getpid():
            self.processes[files.name] = FoundProcess(files, pid)
        return pid is not None


def submit(
    cluster: Cluster,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str] | None = None,
    status: Status | None = None,
    path: str | None = None,
) -> str:
    """Queue a run for the server process, even if no server runs now. Return the run's name. Raises
    ConfigError for an invalid manifest, and RunExists for the name of an earlier run. See
    `Queue.submit` for `status`.

    `path`: import path of the pods, that is, folders with Python modules (default: the import path
    of the pods of this process).
    """
    queued_path = cluster.path if path is None else path
    run = LocalRun.create(manifest, parameters, cluster, queued_path=queued_path)
    try:
        if status:
            run.files.snapshot(status)
    finally:
        run.files.close()
    return run.name
