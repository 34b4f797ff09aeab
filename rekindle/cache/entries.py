"""Cache entries: one object per key in the object store, below `cache/`.

A cache entry refers to the artifacts of the task that computed the result; the artifacts are not
copied. A cache entry is valid only while all its artifacts exist with the recorded sizes, because
an entry may be written before its artifacts are uploaded, and `rekindle prune` may delete the
artifacts.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, RootModel, field_serializer

from argolocal.common.json_text import to_json
from argolocal.language.quantity import parse_quantity
from rekindle.cache import claims
from rekindle.documents import Document, name_field, parse_and_validate
from rekindle.errors import NotFound, StorageError
from rekindle.keys import REUSED_MODELS
from rekindle.names import Digest, TaskName, TaskReference
from rekindle.step import Step, check_output_text, check_output_texts, is_artifact

if TYPE_CHECKING:
    from rekindle.storage import Store

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

CACHE_FOLDER = "cache/"
# object with copies of the entries that the last bulk lookup or `trim_cache` has read
INDEX_KEY = "cache-book.json"
# for at least this number of tasks, one listing of the cache is cheaper than single requests
MIN_BULK_TASKS = 20
VALID_DAYS = 90
# a cache entry is invalid if its step took more than this number of seconds
MAX_SECONDS = 1e9
# outputs that a cache entry never contains, because each run has its own MLflow run and its own
# trainings
NOT_REUSED = ("run_id", REUSED_MODELS)
DAY_S = 86400


@dataclass(frozen=True)
class Entry:
    """A cache entry: the outputs of one run of a step. `outputs`: the output parameters as text;
    `artifacts`: sha256, number of files and bytes of each artifact."""

    key: str
    # WORKFLOW/TASK of the run that computed the outputs; prefix of its artifacts' keys
    at: str
    outputs: dict[str, str]
    artifacts: dict[str, dict[str, Any]]
    # the facts whose hash is the cache key
    facts: dict[str, Any]
    # duration of the step in seconds
    seconds: float
    # Unix time in seconds when the cache entry was created
    made: float = field(default_factory=time.time)

    @property
    def workflow(self) -> str:
        return self.at.partition("/")[0]

    @property
    def task(self) -> str:
        return self.at.partition("/")[2]


def _reject_future(time_made: float) -> float:
    """Raise ValueError if the time of a cache entry is in the future, because such an entry would
    never expire."""
    if time_made > time.time() + DAY_S:
        raise ValueError("it is more than a day in the future")
    return time_made


class ArtifactFacts(Document):
    """The size and sha256 of an artifact; the sha256 of a training's model is ""."""

    sha256: Annotated[str, name_field(Digest, is_optional=True)]
    # at least 1, because an artifact without files does not exist in an object store
    files: int = Field(ge=1)
    bytes: int = Field(ge=0)


class FactsFile(Document):
    """The facts of a cache entry that are compared with the facts of a later run."""

    model_config = ConfigDict(extra="allow")

    step: str = ""
    code: str = ""
    inputs: dict[str, str] = Field(default_factory=dict)
    artifacts: dict[str, str] = Field(default_factory=dict)
    data_read: dict[str, str] = Field(default_factory=dict)


class EntryFile(Document):
    """A cache entry as it is stored in the object store."""

    model_config = ConfigDict(extra="forbid")

    key: str
    at: Annotated[str, name_field(TaskReference)]
    outputs: dict[
        Annotated[str, name_field(TaskName)], Annotated[str, AfterValidator(check_output_text)]
    ]
    artifacts: dict[Annotated[str, name_field(TaskName)], ArtifactFacts]
    facts: FactsFile
    seconds: float = Field(ge=0, le=MAX_SECONDS)
    made: Annotated[float, AfterValidator(_reject_future)] = Field(ge=0)

    @field_serializer("facts")
    def _dump_recorded(self, facts: FactsFile) -> dict[str, Any]:
        return facts.model_dump(exclude_unset=True)


class IndexFile(RootModel[dict[str, tuple[str, EntryFile | None]]]):
    """Copies of the cache entries by key, each with its ETag. A cache entry that another program
    wrote is null."""

    model_config = ConfigDict(strict=True)


def find_valid_entry(store: "Store", key: str, max_age_days: float = VALID_DAYS) -> Entry | None:
    """Return the valid entry of `key`, or None. Raises StorageError."""
    cache_entry = read_entry(store, key)
    if cache_entry and not reason_invalid(
        cache_entry, partial(_count_files_and_bytes, store), max_age_days
    ):
        return cache_entry
    return None


def reason_unusable(cache_entry: Entry, step_module: Step) -> str:
    """Return the reason why a cache entry cannot be used as the result of a step; "" if the entry
    can be used.

    A cache entry is not trusted, because everybody who may write to the object store can write an
    entry.
    """
    output_model = step_module.Outputs
    output_names = output_model.model_fields.keys() - set(NOT_REUSED)
    needed_artifacts = (output_names - cache_entry.outputs.keys()) | set(step_module.REUSE.stored)
    missing_artifacts = sorted(needed_artifacts - cache_entry.artifacts.keys())
    if missing_artifacts:
        return f"it lacks the output {missing_artifacts[0]}"

    parameter_names = {
        name for name in output_names if not is_artifact(output_model.model_fields[name])
    }
    if parameter_names & cache_entry.artifacts.keys():
        return "a parameter is recorded as an artifact"

    try:
        check_output_texts(output_model, cache_entry.outputs)
    except ValueError as error:
        return str(error)
    return ""


def record_entry(store: "Store", cache_entry: Entry) -> None:
    """Write a cache entry; replace an earlier entry with the same key, because the artifacts of the
    earlier entry may be damaged. Raises StorageError."""
    store.put(_object_key(cache_entry.key), to_json(asdict(cache_entry)).encode())


def read_entries(store: "Store") -> list[Entry]:
    """Return all cache entries, including invalid entries. Raises StorageError."""
    return Index(store).read()


def find_and_claim(store: "Store", key: str) -> Entry | None:
    """Claim the valid cache entry of `key` for this run and return the entry; None if no valid
    entry exists. Raises StorageError."""
    cache_lookup = Lookup(store, 1)
    cache_entry = cache_lookup.find(key)
    if cache_lookup.close():
        return cache_entry
    return None


def list_stale_entries(
    store: "Store", max_entries: int, max_age_days: float
) -> list[tuple[Entry, str]]:
    """Return the entries that `rekindle cache prune` removes, and the reason for each."""
    stale_entries = []
    for entry_number, cache_entry in enumerate(
        sorted(read_entries(store), key=lambda cache_entry: -cache_entry.made)
    ):
        if entry_number >= max_entries:
            stale_reason = f"more than {max_entries}"
        else:
            stale_reason = reason_invalid(
                cache_entry, partial(_count_files_and_bytes, store), max_age_days
            )
        if stale_reason:
            stale_entries.append((cache_entry, stale_reason))
    return stale_entries


def remove_entries(store: "Store", removed_entries: Iterable[Entry]) -> None:
    """Delete the entries `removed_entries`, but not the artifacts that they refer to."""
    store.delete([_object_key(removed_entry.key) for removed_entry in removed_entries])


def _object_key(key: str) -> str:
    return f"{CACHE_FOLDER}{key}"


def read_entry(store: "Store", key: str) -> Entry | None:
    """Return the entry of `key`, valid or not. Raises StorageError."""
    try:
        return _parse_entry(key, store.get(_object_key(key)))
    except NotFound:
        return None


def _parse_entry(key: str, entry_json: bytes | str) -> Entry | None:
    """Return the cache entry of `key`, or None if another program or version of Rekindle wrote the
    entry."""
    try:
        parsed_entry = Entry(**parse_and_validate(EntryFile, entry_json).model_dump())
    except ValueError:
        return None
    if parsed_entry.key == key:
        return parsed_entry
    return None


def reason_invalid(
    cache_entry: Entry,
    measure_artifact: Callable[[str], tuple[int, int]],
    max_age_days: float = VALID_DAYS,
) -> str:
    """Return the reason why a cache entry is invalid; "" if the entry is valid. `measure_artifact`:
    function that returns the number of files and the number of bytes of an artifact."""
    if time.time() - cache_entry.made > max_age_days * DAY_S:
        return f"older than {max_age_days:g} days"
    for artifact_name, recorded_facts in cache_entry.artifacts.items():
        artifact_key = f"{cache_entry.at}/{artifact_name}"
        if measure_artifact(artifact_key) != (recorded_facts["files"], recorded_facts["bytes"]):
            return f"{artifact_key} is missing or incomplete"
    return ""


def _list_etags(store: "Store") -> dict[str, str]:
    return {
        cache_object.key.removeprefix(CACHE_FOLDER): cache_object.etag
        for cache_object in store.list(CACHE_FOLDER)
    }


def _count_files_and_bytes(store: "Store", artifact_key: str) -> tuple[int, int]:
    artifact_objects = [
        artifact_object
        for artifact_object in store.list(artifact_key)
        if artifact_object.key == artifact_key or artifact_object.key.startswith(f"{artifact_key}/")
    ]
    return len(artifact_objects), sum(artifact_object.size for artifact_object in artifact_objects)


def result_or_none(
    function: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **keyword_arguments: Arguments.kwargs,
) -> Result | None:
    """Return the result of `function`; None if `function` raises StorageError, so that the step
    runs without the cache."""
    try:
        return function(*arguments, **keyword_arguments)
    except StorageError:
        return None


def trim_cache(store: "Store", max_days: float, max_entries: int, max_size: str) -> list[Entry]:
    """Delete the oldest cache entries that exceed a limit, but not their artifacts; return the
    deleted entries. Raises StorageError.

    `max_size`: total size of the artifacts of the remaining entries, such as 100Gi.
    """
    index = Index(store)
    newest_first = sorted(index.read(), key=lambda cache_entry: -cache_entry.made)
    removed_entries: list[Entry] = []
    total_bytes = 0
    max_bytes = parse_quantity(max_size)
    oldest_time = time.time() - max_days * DAY_S

    for entry_position, cache_entry in enumerate(newest_first):
        total_bytes += sum(
            artifact_facts["bytes"] for artifact_facts in cache_entry.artifacts.values()
        )
        if (
            entry_position >= max_entries
            or total_bytes > max_bytes
            or cache_entry.made < oldest_time
        ):
            removed_entries = newest_first[entry_position:]
            break

    if removed_entries:
        remove_entries(store, removed_entries)

    index.write({cache_entry.key for cache_entry in removed_entries})
    return removed_entries


class Index:
    """All entries of the cache, read with few requests: the object INDEX_KEY contains copies of the
    entries. Only cache entries whose ETag has changed since the copy are read one by one, in
    parallel.

    Methods raise StorageError. `copies` maps a key to the ETag and the cache entry (None for an
    entry that another version of Rekindle wrote).
    """

    def __init__(self, store: "Store") -> None:
        self.store = store
        self.etags = _list_etags(store)
        self.copies = self._read_copies()
        self.unread = [
            key for key, etag in self.etags.items() if self.copies.get(key, ("", None))[0] != etag
        ]
        self.is_outdated = bool(self.unread) or self.copies.keys() != self.etags.keys()

    def read(self) -> list[Entry]:
        """Return all cache entries, except entries that another version of Rekindle wrote."""
        if self.unread:
            with ThreadPoolExecutor(claims.THREADS) as thread_pool:
                for key, cache_entry in zip(
                    self.unread,
                    thread_pool.map(partial(read_entry, self.store), self.unread),
                    strict=True,
                ):
                    self.copies[key] = self.etags[key], cache_entry
            self.unread = []
        return [cache_entry for key in self.etags if (cache_entry := self.copies[key][1])]

    def find(self, key: str) -> Entry | None:
        """Return the cache entry of `key`, valid or not; None if no entry exists."""
        if key not in self.etags:
            return None
        self.read()
        return self.copies[key][1]

    def write(self, excluded_keys: Collection[str] = ()) -> None:
        """Store the copies of the cache entries in the object INDEX_KEY, without the entries of
        `excluded_keys`. Nothing is written if the object is up to date and `excluded_keys` is
        empty."""
        if self.is_outdated or excluded_keys:
            written_keys = [
                key for key in self.etags if key in self.copies and key not in excluded_keys
            ]
            entry_copies = {
                key: (etag, cache_entry and asdict(cache_entry))
                for key in written_keys
                for etag, cache_entry in [self.copies[key]]
            }
            self.store.put(INDEX_KEY, to_json(entry_copies).encode())
            self.is_outdated = False

    def _read_copies(self) -> dict[str, tuple[str, Entry | None]]:
        try:
            stored_copies = parse_and_validate(IndexFile, self.store.get(INDEX_KEY)).root
        # start with an empty index, because the object is missing or another version of Rekindle
        # wrote it
        except (StorageError, ValueError):
            return {}
        return {
            key: (
                etag,
                Entry(**entry_copy.model_dump()) if entry_copy and entry_copy.key == key else None,
            )
            for key, (etag, entry_copy) in stored_copies.items()
        }


class Lookup:
    """A lookup of the cache entries of `task_count` tasks. For at least MIN_BULK_TASKS tasks, the
    lookup uses the index of the cache.

    If `read_only` is True, nothing is written, and no entries are claimed. The methods of Lookup
    raise StorageError.
    """

    def __init__(self, store: "Store", task_count: int, read_only: bool = False) -> None:
        self.store = store
        self.index = Index(store) if task_count >= MIN_BULK_TASKS else None
        self.read_only = read_only
        self.found_entries: dict[str, Entry] = {}
        # number of files and of bytes of each RUN/TASK/ARTIFACT, by run
        self.sizes: dict[str, dict[str, tuple[int, int]]] = {}

    def find(self, key: str) -> Entry | None:
        """Return the valid entry of `key`, or None."""
        if self.index:
            cache_entry = self.index.find(key)
            if cache_entry and reason_invalid(cache_entry, self._measure_artifact):
                cache_entry = None
        else:
            cache_entry = find_valid_entry(self.store, key)

        if cache_entry:
            self.found_entries[key] = cache_entry
        return cache_entry

    def close(self) -> bool:
        """Claim the cache entries that were found, and write the index if it has changed.

        Return False if retention has removed a found entry in the meantime; the caller must then
        repeat the lookup.
        """
        if self.read_only or not self.found_entries:
            return True

        claims.claim_tasks(
            self.store, [cache_entry.at for cache_entry in self.found_entries.values()]
        )
        if not self.index:
            return all(
                read_entry(self.store, key) == cache_entry
                for key, cache_entry in self.found_entries.items()
            )

        self.index.write()
        current_etags = _list_etags(self.store)
        return all(current_etags.get(key) == self.index.etags[key] for key in self.found_entries)

    def _measure_artifact(self, artifact_key: str) -> tuple[int, int]:
        """Return the number of files and of bytes of an artifact, from one listing per run."""
        run_name = artifact_key.partition("/")[0]
        if run_name not in self.sizes:
            artifact_sizes: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
            for run_object in self.store.list(f"{run_name}/"):
                object_name = "/".join(run_object.key.split("/")[:3])
                file_count, total_bytes = artifact_sizes[object_name]
                artifact_sizes[object_name] = file_count + 1, total_bytes + run_object.size
            self.sizes[run_name] = artifact_sizes
        return self.sizes[run_name].get(artifact_key, (0, 0))
