"""Read the ledgers of the trainings of a run, and its artifacts, from the object store.

Reading starts no service: the embedded object store is read from its files.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from argolocal.common.json_text import to_json
from argolocal.manifest.types import Manifest
from argolocal.page.sources import Run
from rekindle.blocks.manifest import workflow_origin
from rekindle.cache import lookup
from rekindle.errors import ConfigError, NotFound, RekindleError
from rekindle.keys import CACHED_PARAMETER, LEDGER_KEY, key
from rekindle.names import TaskReference
from rekindle.operations.cached_results import open_readable_store
from rekindle.training.cost import jobs, tariff
from rekindle.view.explain import LEDGER_KEY_PATTERN

if TYPE_CHECKING:
    from rekindle.storage import Store
    from rekindle.training.ledger.ledger_summary import LedgerSummary

MAX_CACHED_RUNS = 64
MAX_CACHED_SUMMARIES = 16
# minimum pause between two reads of a ledger
MIN_CHECK_INTERVAL_S = 1.0
# maximum fraction of the time that may be spent on reading a ledger
READ_TIME_SHARE = 0.1
T = TypeVar("T")


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that its manifest determines. `trainings`: tasks with a ledger. `has_jobs`
    is True if the run applies jobs of other frameworks."""

    trainings: tuple[str, ...]
    has_jobs: bool
    config: Mapping[str, Any]
    parameters: Mapping[str, str]

    @property
    def pipeline(self) -> str:
        return str(self.config.get("name") or "")


@dataclass
class _Ledger:
    """A cached ledger: its version, the time of the last check, and the duration of the last read
    in seconds."""

    version: str = ""
    summary: "LedgerSummary | None" = None
    checked: float = 0.0
    reading_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Records:
    """The ledgers and artifacts of runs. All methods of Records may be called from several
    threads."""

    def __init__(self, open_store: Callable[[], "Store"]) -> None:
        self._open_store = open_store
        self._facts: OrderedDict[tuple[str, str], RunFacts] = OrderedDict()
        self._ledgers: OrderedDict[str, _Ledger] = OrderedDict()
        # prefix of a folder → time of the last check, and the version found
        self._folders: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    @cached_property
    def store(self) -> "Store":
        """The object store. Raises ConfigError if the object store cannot be opened."""
        return self._open_store()

    def facts(self, run: Run) -> RunFacts:
        """Return the facts of a run, which are cached."""
        metadata = run.manifest.get("metadata") or {}
        cache_key = run.name, str(metadata.get("uid") or "")
        return _get_or_make(
            self._facts, self._lock, cache_key, MAX_CACHED_RUNS, lambda: read_facts(run.manifest)
        )

    def ledger_version(self, run: Run) -> str:
        """Return a text that changes when the ledgers of a run change; "" for a run that has
        ended."""
        if run.is_finished:
            return ""
        return "/".join(self._check(run.name, task).version for task in self.facts(run).trainings)

    def summary(self, run_name: str, task: str) -> "LedgerSummary":
        """Return the summary of a training's ledger. Raises StorageError."""
        summary = self._check(run_name, task).summary
        assert summary
        return summary

    def _check(self, run_name: str, task: str) -> _Ledger:
        """Return the cached ledger of a training. The ledger is read again if it has changed since
        the last check."""
        from rekindle.training.ledger.accounting import summarize_events
        from rekindle.training.ledger.events import read_events

        prefix = key(task, LEDGER_KEY, run_name)
        ledger = _get_or_make(self._ledgers, self._lock, prefix, MAX_CACHED_SUMMARIES, _Ledger)
        with ledger.lock:
            interval = max(MIN_CHECK_INTERVAL_S, ledger.reading_s / READ_TIME_SHARE)
            if ledger.summary and time.monotonic() - ledger.checked < interval:
                return ledger

            start = time.monotonic()
            entries = self.store.list(f"{prefix}/")
            version = "-".join(f"{entry.key.rpartition('/')[2]}.{entry.etag}" for entry in entries)
            if ledger.summary is None or version != ledger.version:
                ledger.summary = summarize_events(read_events(self.store, prefix))
                ledger.version = version

            ledger.checked = time.monotonic()
            ledger.reading_s = ledger.checked - start
            return ledger

    def folder_version(self, prefix: str) -> str:
        """Return a text that changes when the objects below a prefix change. Raises
        StorageError."""
        with self._lock:
            checked, version = self._folders.get(prefix, (0.0, ""))
        if checked and time.monotonic() - checked < MIN_CHECK_INTERVAL_S:
            return version

        entries = list(self.store.list(prefix))
        newest = max((entry.modified for entry in entries), default=0.0)
        version = f"{len(entries)}.{newest:.3f}"
        with self._lock:
            self._folders[prefix] = time.monotonic(), version
        return version

    def reused(self, run: Run) -> dict[str, str]:
        """Map each task that reused cached outputs to the RUN/TASK that produced them. Raises
        StorageError."""
        rows = lookup.parse_cached(self.facts(run).parameters.get(CACHED_PARAMETER) or "{}")
        sources: dict[str, str] = {}
        for row in rows.values():
            if not isinstance(row, dict):
                continue
            task = row["task"]
            # if a task looked up the cache only at its start, the object store records the RUN/TASK
            # that the task found
            content = row["at"] or self.read(key(task, "cached", run.name)) or b""
            text = content.decode(errors="replace") if isinstance(content, bytes) else content
            source = TaskReference.parse_or_none(text.strip())
            if source:
                sources[task] = source
        return sources

    def read(self, object_key: str) -> bytes | None:
        """Return the content of an object in the object store; None if the object does not exist.
        Raises StorageError."""
        try:
            return self.store.get(object_key)
        except NotFound:
            return None


def open_records(home: Path) -> Records:
    """Return access to the ledgers and artifacts of the runs in REKINDLE_HOME."""

    def open_store() -> "Store":
        store = open_readable_store(home)
        if not store:
            raise ConfigError("the object store is unknown: set S3_BUCKET.")
        return store

    return Records(open_store)


def read_facts(manifest: Manifest) -> RunFacts:
    """Return the facts of a run from its manifest."""
    arguments = (manifest.get("spec") or {}).get("arguments") or {}
    parameters = {
        parameter["name"]: str(parameter.get("value") or "")
        for parameter in arguments.get("parameters") or []
    }
    try:
        has_jobs = bool(jobs.list_planned_jobs({}, tariff.read_recorded_manifest(manifest)))
    except (RekindleError, KeyError, TypeError):
        # the facts are unknown, because another program rendered the manifest
        has_jobs = False

    return RunFacts(
        tuple(sorted(set(LEDGER_KEY_PATTERN.findall(to_json(manifest))))),
        has_jobs,
        workflow_origin.read_config_or_empty(manifest) if manifest.get("spec") else {},
        parameters,
    )


def _get_or_make(
    cache: "OrderedDict[Any, T]",
    lock: threading.Lock,
    cache_key: Any,
    max_entries: int,
    make_value: Callable[[], T],
) -> T:
    """Return the cached value of a key. If the key is missing, add the result of `make_value` to
    the cache, and drop the values that were used least recently, so that at most `max_entries`
    values are left."""
    with lock:
        if cache_key in cache:
            cache.move_to_end(cache_key)
            return cache[cache_key]

    cached_value = make_value()
    with lock:
        cached_value = cache.setdefault(cache_key, cached_value)
        while len(cache) > max_entries:
            cache.popitem(last=False)
    return cached_value


class LedgerTab:
    """Base class of the tabs about the trainings and jobs of a run."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def is_shown(self, run: Run) -> bool:
        facts = self.records.facts(run)
        return bool(facts.trainings) or facts.has_jobs

    def version(self, run: Run) -> str:
        """Return a text that changes with the ledgers of the run."""
        try:
            return self.records.ledger_version(run)
        except RekindleError:
            return ""
