"""The runs of a home (a directory of runs) as Workflow objects with resource versions, and their
changes.

    run_catalogue = RunCatalogue(LocalRuns(home), "argo")
    run_catalogue.refresh()                          # reads the changes on disk
    entry = run_catalogue.refresh_run("demo-4k2xp")
    workflow = run_catalogue.workflow(entry)
    changes = run_catalogue.changes_since(version)   # raises ApiError with status 410

A resource version is a number of microseconds since the epoch that grows with each change, so that
a version from before a restart of the server is recognized as old. While no client reads or watches
the runs, a change of a run is noticed at the next request.
"""

import json
import math
import os
import time
import zlib
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from threading import Lock, RLock, Thread

from argolocal.common.checked_names import RunName
from argolocal.common.json_text import to_json
from argolocal.engine.nodes import format_time
from argolocal.errors import DAMAGE_ERRORS
from argolocal.manifest.types import Object
from argolocal.page.sources import LocalRuns, Run
from argolocal.runner import requests
from argolocal.server.api.errors import OUT_OF_RANGE, ApiError
from argolocal.server.api.selectors import Fields
from argolocal.server.api.workflow_object import make_workflow
from argolocal.state.journal import JOURNAL_FILE, MANIFEST_FILE, RunFiles

# number of changes in memory: a watch can start at a version that is at most this many changes old
MAX_CHANGES = 10_000
# maximum size in bytes of the compressed Workflow objects without nodes that stay in memory
MAX_CACHED_BYTES = 32_000_000
# maximum size in bytes of the JSON texts for lists that stay in memory
MAX_TEXT_BYTES = 16_000_000


@dataclass(frozen=True)
class Change:
    """A change of a run. `type` is ADDED, MODIFIED or DELETED. `facts`: the Facts of a deleted run
    before its deletion."""

    resource_version: int
    type: str
    name: str
    facts: "Facts | None" = None


@dataclass
class Entry:
    """A run that has not been deleted. `file_version`: text that changes with the files of the run.
    `summary`: the Workflow object without nodes, as compressed JSON. `facts` and `summary` belong
    to the version `summary_version` of the run's files, and `journal` is the state of the journal
    in that version."""

    name: str
    file_version: str
    resource_version: int
    summary_version: str = ""
    summary: bytes = b""
    facts: "Facts | None" = None
    journal: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Facts:
    """The properties of a run that a list needs. The times are in seconds since the epoch;
    `finished` is 0 if the run has not ended."""

    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    created: float = 0.0
    started: float = 0.0
    finished: float = 0.0


class RunCatalogue:
    """The runs of a home (a directory of runs). All methods of the catalogue may be called from
    several threads."""

    def __init__(self, source: LocalRuns, namespace: str) -> None:
        self.source = source
        self.folder = f"{source.home}/runs"
        self.namespace = namespace
        self.lock = RLock()
        self.refresh_lock = Lock()
        # start of the last refresh, as time.monotonic
        self.refreshed_at = -math.inf
        self.latest_version = time.time_ns() // 1000
        # the changes before this version are no longer in memory
        self.oldest_version = self.latest_version
        self.entries: dict[str, Entry] = {}
        self.changes: deque[Change] = deque()
        self.cached: OrderedDict[str, Entry] = OrderedDict()
        self.cached_bytes = 0
        self.refresh()
        self.changes.clear()
        self.oldest_version = self.latest_version

    def warm_up(self) -> None:
        """Read all runs in the background: the first list of thousands of runs would take seconds
        otherwise."""
        Thread(target=self.list, name="catalogue", daemon=True).start()

    def refresh(self) -> None:
        """Update the catalogue with the runs that were created, changed or deleted before this
        call."""
        called_at = time.monotonic()
        with self.refresh_lock:
            # of many simultaneous requests, only one reads the runs, and the other requests use its
            # result
            if self.refreshed_at < called_at:
                self.refreshed_at = time.monotonic()
                self._refresh()

    def _refresh(self) -> None:
        with self.lock:
            known_entries = dict(self.entries)
        names = self._list_folders()
        # a run that has ended seldom changes, so the files of such runs, of which there may be
        # thousands, are not read here
        changed_names = [
            name
            for name in names
            if name not in known_entries or not self._has_same_journal(known_entries[name])
        ]
        file_versions = {name: self._file_version(name) for name in changed_names}
        new_names = [name for name in changed_names if name not in known_entries]

        with self.lock:
            for name in [*(set(changed_names) - set(new_names)), *self._by_age(new_names)]:
                self._note(name, file_versions[name])
            # another thread may have added runs since the folders were listed
            for name in known_entries.keys() - set(names):
                self._note(name, "")

    def _list_folders(self) -> list[str]:
        """Return the names of all folders that may be runs."""
        try:
            folders = [entry.name for entry in os.scandir(self.folder)]
        except FileNotFoundError:
            return []
        return [name for name in folders if name in self.entries or RunName.parse_or_none(name)]

    def _has_same_journal(self, entry: Entry) -> bool:
        """Return True if a run has ended, and its journal has not changed since then."""
        is_settled = entry.facts and entry.facts.finished and entry.journal
        if not is_settled or entry.summary_version != entry.file_version:
            return False
        return entry.journal == self._read_journal_state(entry.name)

    def _read_journal_state(self, name: str) -> tuple[int, int, int] | None:
        """Return numbers that change with the journal of a run, or None without a journal."""
        try:
            status = os.stat(f"{self.folder}/{name}/{JOURNAL_FILE}")
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _file_version(self, name: str) -> str:
        """Return a text that changes with the files of a run, and with the life of its runner."""
        # LocalRuns leaves out the runner only after it has read that a run has ended
        return self.source.version(name).removesuffix("-0")

    def _by_age(self, names: Iterable[str]) -> list[str]:
        """Return runs in the order of their creation."""
        times: dict[str, int] = {}
        for name in names:
            # runs that were deleted in the meantime come first
            with suppress(OSError):
                times[name] = os.stat(f"{self.folder}/{name}/{MANIFEST_FILE}").st_mtime_ns
        return sorted(names, key=lambda name: times.get(name, 0))

    def refresh_run(self, name: str) -> Entry | None:
        """Update the entry of one run in the catalogue, and return the entry, or None if the run
        does not exist."""
        run_name = RunName.parse_or_none(name)
        if run_name is None:
            return None
        file_version = self._file_version(run_name)
        with self.lock:
            return self._note(run_name, file_version)

    def find_listed(self, name: str) -> Entry | None:
        """Return the entry of a run, or None, without looking at its files."""
        with self.lock:
            return self.entries.get(name)

    def list(self) -> "Sequence[tuple[Entry, Facts]]":
        """Return all runs whose files can be read, with their facts."""
        with self.lock:
            entries = list(self.entries.values())
        pairs = ((entry, self.facts(entry)) for entry in entries)
        return [(entry, facts) for entry, facts in pairs if facts]

    def workflow(self, entry: Entry) -> Object:
        """Return the Workflow object of a run. Raises ConfigError if the files of the run are
        malformed."""
        files = RunFiles(self.source.home, entry.name)
        run = self.source.read(entry.name)
        request = None if run.is_finished else requests.read_pending(files)
        return make_workflow(
            run,
            self.namespace,
            entry.resource_version,
            request,
            interrupted_at=self._find_interruption(run),
        )

    def _find_interruption(self, run: Run) -> str | None:
        """Return the time when a run was interrupted, or None if the run was not interrupted or a
        server continues it."""
        if run.phase != "Interrupted":
            return None
        files = RunFiles(self.source.home, run.name)
        if files.queue_entry.exists():
            return None
        journal = self._read_journal_state(run.name)
        return format_time(journal[2] / 1e9) if journal else None

    def summary(self, entry: Entry) -> Object:
        """Return the Workflow object of a run without its nodes. Raises ConfigError if the files of
        the run are malformed."""
        with self.lock:
            summary = entry.summary
            is_current = entry.summary_version == entry.file_version
        if not (summary and is_current):
            summary = self._summarize(entry)
        workflow: Object = json.loads(zlib.decompress(summary))
        workflow["metadata"]["resourceVersion"] = str(entry.resource_version)
        return workflow

    def facts(self, entry: Entry) -> Facts | None:
        """Return the facts of a run, or None if its files are malformed or were just deleted."""
        facts = entry.facts
        if facts and entry.summary_version == entry.file_version:
            return facts
        try:
            self._summarize(entry)
        except DAMAGE_ERRORS:
            return None
        return entry.facts

    def find_uid(self, uid: str) -> Entry | None:
        """Return the run with a uid, or None."""
        found = (entry for entry, facts in self.list() if facts.uid == uid)
        return next(found, None)

    def changes_since(self, resource_version: int) -> Sequence[Change]:
        """Return the changes after a version, oldest first. Raises ApiError with the status 410 if
        some of these changes are no longer in memory."""
        with self.lock:
            if resource_version < self.oldest_version:
                raise ApiError(
                    OUT_OF_RANGE,
                    f"too old resource version: {resource_version} ({self.oldest_version}):"
                    " list the workflows again, and watch from the version of the list",
                )
            position = bisect_right(
                self.changes, resource_version, key=lambda change: change.resource_version
            )
            return [self.changes[index] for index in range(position, len(self.changes))]

    def _note(self, name: str, file_version: str) -> Entry | None:
        """Record the state of a run's files. Return the entry of the run, or None if the run does
        not exist."""
        entry = self.entries.get(name)
        if entry and not file_version:
            del self.entries[name]
            self._forget_summary(entry)
            self._add_change("DELETED", name, entry.facts)
            return None
        if not file_version:
            return None

        if entry is None:
            entry = self.entries[name] = Entry(name, file_version, 0)
            entry.resource_version = self._add_change("ADDED", name)
        elif entry.file_version != file_version:
            entry.file_version = file_version
            entry.resource_version = self._add_change("MODIFIED", name)
        return entry

    def _add_change(self, type: str, name: str, facts: Facts | None = None) -> int:
        self.latest_version = max(self.latest_version + 1, time.time_ns() // 1000)
        self.changes.append(Change(self.latest_version, type, name, facts))
        if len(self.changes) > MAX_CHANGES:
            self.oldest_version = self.changes.popleft().resource_version
        return self.latest_version

    def _summarize(self, entry: Entry) -> bytes:
        """Read a run, and store its facts and its Workflow object without nodes in the entry."""
        # read the version first, so that a later change leads to another version
        with self.lock:
            file_version = entry.file_version
        journal = self._read_journal_state(entry.name)
        run = self.source.read(entry.name)
        workflow = make_workflow(
            run,
            self.namespace,
            entry.resource_version,
            has_nodes=False,
            interrupted_at=self._find_interruption(run),
        )
        summary = zlib.compress(to_json(workflow).encode(), 1)
        with self.lock:
            entry.facts = _read_facts(run, workflow)
            entry.journal = journal
            entry.summary_version = file_version
            self._keep_summary(entry, summary)
        return summary

    def _keep_summary(self, entry: Entry, summary: bytes) -> None:
        self._forget_summary(entry)
        entry.summary = summary
        self.cached[entry.name] = entry
        self.cached_bytes += len(summary)
        while self.cached_bytes > MAX_CACHED_BYTES:
            self._forget_summary(next(iter(self.cached.values())))

    def _forget_summary(self, entry: Entry) -> None:
        if self.cached.pop(entry.name, None):
            self.cached_bytes -= len(entry.summary)
        entry.summary = b""


class ItemTexts:
    """The JSON texts of runs without their nodes. The texts stay in memory, because clients request
    the same fields of thousands of finished runs again and again. All methods of ItemTexts may be
    called from several threads."""

    def __init__(self, run_catalogue: RunCatalogue) -> None:
        self.run_catalogue = run_catalogue
        self.lock = Lock()
        # name of a run, selected fields → resource version, JSON; least recently used first
        self.texts: OrderedDict[tuple[str, Fields], tuple[int, bytes]] = OrderedDict()
        self.bytes = 0

    def read(self, entry: Entry, fields: Fields) -> bytes:
        """Return the JSON text of a run with only the fields that a client wants. Raises
        ConfigError if the files of the run are malformed."""
        key = (entry.name, fields)
        version = entry.resource_version
        with self.lock:
            cached_version, text = self.texts.get(key, (0, b""))
            if cached_version == version:
                self.texts.move_to_end(key)
                return text

        text = to_json(fields.select_item(self.run_catalogue.summary(entry))).encode()
        with self.lock:
            self._keep(key, version, text)
        return text

    def _keep(self, key: tuple[str, Fields], version: int, text: bytes) -> None:
        _, replaced_text = self.texts.pop(key, (0, b""))
        self.texts[key] = (version, text)
        self.bytes += len(text) - len(replaced_text)
        while self.bytes > MAX_TEXT_BYTES:
            _, (_, removed_text) = self.texts.popitem(last=False)
            self.bytes -= len(removed_text)


def _read_facts(run: Run, workflow: Object) -> Facts:
    metadata = workflow["metadata"]
    return Facts(
        str(metadata.get("uid") or ""),
        {str(key): str(value) for key, value in metadata["labels"].items()},
        _seconds(metadata.get("creationTimestamp")),
        _seconds(run.status.get("startedAt")),
        _seconds(run.status.get("finishedAt") or workflow["status"]["finishedAt"]),
    )


def _seconds(text: str | None) -> float:
    """Convert RFC 3339 to unix seconds; 0 for a missing time."""
    if not text:
        return 0.0
    return datetime.fromisoformat(text).timestamp()
