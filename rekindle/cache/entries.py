"""Cache entries: one object per key in the object store, below `cache/`.

An entry refers to the artifacts of the task that computed it; the artifacts are not copied. An
entry is valid only while all its artifacts exist with the recorded sizes, because an entry may be
written before its artifacts are uploaded, and `rekindle prune` may delete them.
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
from rekindle.documents import Document, name_field, validate
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
BULK_TASKS = 20  # for at least this number of tasks, one listing is cheaper than single requests
VALID_DAYS = 90
MAX_SECONDS = 1e9  # an entry with a longer duration of its step, in seconds, is invalid
# outputs that an entry never contains: each run has its own MLflow run and its own trainings
NOT_REUSED = ("run_id", REUSED_MODELS)
DAY_S = 86400


@dataclass(frozen=True)
class Entry:
    """The outputs of one run of a step. `outputs`: the parameters as text; `artifacts`: sha256,
    number of files and bytes of each artifact."""

    key: str
    at: str  # WORKFLOW/TASK, the prefix of the task's artifacts
    outputs: dict[str, str]
    artifacts: dict[str, dict[str, Any]]
    facts: dict[str, Any]  # the values whose hash is the cache key
    seconds: float  # duration of the step in seconds
    # Unix time in seconds when the entry was created
    made: float = field(default_factory=time.time)

    @property
    def workflow(self) -> str:
        return self.at.partition("/")[0]

    @property
    def task(self) -> str:
        return self.at.partition("/")[2]


def _reject_future(time_made: float) -> float:
    """Raise ValueError if the entry's time is in the future, because such an entry would never
    expire."""
    if time_made > time.time() + DAY_S:
        raise ValueError("it is more than a day in the future")
    return time_made


class ArtifactFacts(Document):
    """The size and sha256 of an artifact; the sha256 of a training's model is ""."""

    sha256: Annotated[str, name_field(Digest, optional=True)]
    # at least 1, because an artifact without files does not exist in an object store
    files: int = Field(ge=1)
    bytes: int = Field(ge=0)


class FactsFile(Document):
    """The facts of an entry that are compared with the facts of a later run."""

    model_config = ConfigDict(extra="allow")

    step: str = ""
    code: str = ""
    inputs: dict[str, str] = Field(default_factory=dict)
    artifacts: dict[str, str] = Field(default_factory=dict)
    data_read: dict[str, str] = Field(default_factory=dict)


class EntryFile(Document):
    """An entry in the object store."""

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
    def _as_recorded(self, facts: FactsFile) -> dict[str, Any]:
        return facts.model_dump(exclude_unset=True)


class IndexFile(RootModel[dict[str, tuple[str, EntryFile | None]]]):
    """Copies of the cache entries by key, each with its ETag. An entry that another program wrote
    is null."""

    model_config = ConfigDict(strict=True)


def find_valid(store: "Store", key: str, days: float = VALID_DAYS) -> Entry | None:
    """Return the valid entry of `key`, or None. Raises StorageError."""
    entry = read_entry(store, key)
    if entry and not reason_invalid(entry, partial(_count_files_and_bytes, store), days):
        return entry
    return None


def reason_unfit(entry: Entry, step: Step) -> str:
    """Return the reason why an entry cannot be used as the result of a step; "" if it can be used.

    An entry is untrusted: everybody who may write to the object store can write one.
    """
    outputs = step.Outputs
    names = outputs.model_fields.keys() - set(NOT_REUSED)
    needed_artifacts = (names - entry.outputs.keys()) | set(step.REUSE.stored)
    missing = sorted(needed_artifacts - entry.artifacts.keys())
    if missing:
        return f"it lacks the output {missing[0]}"

    parameters = {name for name in names if not is_artifact(outputs.model_fields[name])}
    if parameters & entry.artifacts.keys():
        return "a parameter is recorded as an artifact"

    try:
        check_output_texts(outputs, entry.outputs)
    except ValueError as error:
        return str(error)
    return ""


def record_entry(store: "Store", entry: Entry) -> None:
    """Write an entry; replace an earlier entry with the same key, because the artifacts of the
    earlier entry may be damaged. Raises StorageError."""
    store.put(_object_key(entry.key), to_json(asdict(entry)).encode())


def read_entries(store: "Store") -> list[Entry]:
    """Return all entries, including invalid ones. Raises StorageError."""
    return Index(store).read()


def find_and_claim(store: "Store", key: str) -> Entry | None:
    """Claim the valid entry of `key` for this run and return it; None if no valid entry exists.
    Raises StorageError."""
    lookup = Lookup(store, 1)
    entry = lookup.find(key)
    if lookup.close():
        return entry
    return None


def list_stale(store: "Store", keep: int, days: float) -> list[tuple[Entry, str]]:
    """Return the entries that `rekindle cache prune` removes, and the reason for each."""
    rows = []
    for number, entry in enumerate(sorted(read_entries(store), key=lambda entry: -entry.made)):
        if number >= keep:
            reason = f"more than {keep}"
        else:
            reason = reason_invalid(entry, partial(_count_files_and_bytes, store), days)
        rows += [(entry, reason)] if reason else []
    return rows


def remove_entries(store: "Store", removed_entries: Iterable[Entry]) -> None:
    """Delete entries, but not the artifacts that they refer to."""
    store.delete([_object_key(entry.key) for entry in removed_entries])


def _object_key(key: str) -> str:
    return f"{CACHE_FOLDER}{key}"


def read_entry(store: "Store", key: str) -> Entry | None:
    """Return the entry of `key`, valid or not. Raises StorageError."""
    try:
        return _entry_of(key, store.get(_object_key(key)))
    except NotFound:
        return None


def _entry_of(key: str, data: bytes | str) -> Entry | None:
    """Return the entry of `key`, or None if another program or version of Rekindle wrote it."""
    try:
        entry = Entry(**validate(EntryFile, data).model_dump())
    except ValueError:
        return None
    if entry.key == key:
        return entry
    return None


def reason_invalid(
    entry: Entry, size: Callable[[str], tuple[int, int]], days: float = VALID_DAYS
) -> str:
    """Return the reason why an entry is invalid; "" if it is valid. `size`: function that returns
    the number of files and the number of bytes of an artifact."""
    if time.time() - entry.made > days * DAY_S:
        return f"older than {days:g} days"
    for name, recorded_size in entry.artifacts.items():
        artifact = f"{entry.at}/{name}"
        if size(artifact) != (recorded_size["files"], recorded_size["bytes"]):
            return f"{artifact} is missing or incomplete"
    return ""


def _etags(store: "Store") -> dict[str, str]:
    return {item.key.removeprefix(CACHE_FOLDER): item.etag for item in store.list(CACHE_FOLDER)}


def _count_files_and_bytes(store: "Store", artifact: str) -> tuple[int, int]:
    items = [
        item
        for item in store.list(artifact)
        if item.key == artifact or item.key.startswith(f"{artifact}/")
    ]
    return len(items), sum(item.size for item in items)


def result_or_none(
    call: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Result | None:
    """Return the result of `call`. Return None if the object store is unavailable, so that the step
    runs without the cache."""
    try:
        return call(*arguments, **options)
    except StorageError:
        return None


def trim_cache(store: "Store", max_days: float, max_entries: int, max_size: str) -> list[Entry]:
    """Delete the oldest entries that exceed a limit, but not their artifacts; return the deleted
    entries. Raises StorageError.

    `max_size`: total size of the artifacts of the remaining entries, such as 100Gi.
    """
    index = Index(store)
    newest_first = sorted(index.read(), key=lambda entry: -entry.made)
    removed: list[Entry] = []
    total_size = 0
    max_bytes = parse_quantity(max_size)
    oldest_time = time.time() - max_days * DAY_S

    for position, entry in enumerate(newest_first):
        total_size += sum(artifact["bytes"] for artifact in entry.artifacts.values())
        if position >= max_entries or total_size > max_bytes or entry.made < oldest_time:
            removed = newest_first[position:]
            break

    if removed:
        remove_entries(store, removed)

    index.write({entry.key for entry in removed})
    return removed


class Index:
    """All entries. The object INDEX_KEY has copies of the entries: an entry with an unchanged ETag
    is read from this object, the other entries in parallel requests.

    Methods raise StorageError.
    """

    def __init__(self, store: "Store") -> None:
        self.store = store
        self.etags = _etags(store)
        self.copies = self._read_copies()
        self.unread = [
            key for key, etag in self.etags.items() if self.copies.get(key, ("", None))[0] != etag
        ]
        self.is_outdated = bool(self.unread) or self.copies.keys() != self.etags.keys()

    def read(self) -> list[Entry]:
        """Return all entries, except entries that another version of Rekindle wrote."""
        if self.unread:
            with ThreadPoolExecutor(claims.THREADS) as pool:
                for key, entry in zip(
                    self.unread, pool.map(partial(read_entry, self.store), self.unread), strict=True
                ):
                    self.copies[key] = self.etags[key], entry
            self.unread = []
        return [entry for key in self.etags if (entry := self.copies[key][1])]

    def find(self, key: str) -> Entry | None:
        """Return the entry of `key`, valid or not, or None."""
        if key not in self.etags:
            return None
        self.read()
        return self.copies[key][1]

    def write(self, except_keys: Collection[str] = ()) -> None:
        """Store the copies of the cache entries in the object INDEX_KEY, without the entries of
        `except_keys`. Nothing is written if the object is up to date and `except_keys` is empty."""
        if self.is_outdated or except_keys:
            keys = [key for key in self.etags if key in self.copies and key not in except_keys]
            copies = {
                key: (etag, entry and asdict(entry))
                for key in keys
                for etag, entry in [self.copies[key]]
            }
            self.store.put(INDEX_KEY, to_json(copies).encode())
            self.is_outdated = False

    def _read_copies(self) -> dict[str, tuple[str, Entry | None]]:
        try:
            copies = validate(IndexFile, self.store.get(INDEX_KEY)).root
        # start with an empty index, because the object is missing or another version of Rekindle
        # wrote it
        except (StorageError, ValueError):
            return {}
        return {
            key: (etag, Entry(**entry.model_dump()) if entry and entry.key == key else None)
            for key, (etag, entry) in copies.items()
        }


class Lookup:
    """A lookup of the cache entries of `task_count` tasks; if there are many tasks, it uses the
    index.

    If `read_only` is True, nothing is written, and no entries are claimed. Methods raise
    StorageError.
    """

    def __init__(self, store: "Store", task_count: int, read_only: bool = False) -> None:
        self.store = store
        self.index = Index(store) if task_count >= BULK_TASKS else None
        self.read_only = read_only
        self.found_entries: dict[str, Entry] = {}
        # number of files and of bytes of each RUN/TASK/ARTIFACT, by run
        self.sizes: dict[str, dict[str, tuple[int, int]]] = {}

    def find(self, key: str) -> Entry | None:
        """Return the valid entry of `key`, or None."""
        if not self.index:
            entry = find_valid(self.store, key)
        elif (entry := self.index.find(key)) and reason_invalid(entry, self._size):
            return None
        self.found_entries.update({key: entry} if entry else {})
        return entry

    def close(self) -> bool:
        """Claim the entries that were found, and write the index if it has changed.

        Return False if retention has removed one of these entries in the meantime; the caller must
        then repeat the lookup.
        """
        if self.read_only or not self.found_entries:
            return True

        claims.claim_tasks(self.store, [entry.at for entry in self.found_entries.values()])
        if not self.index:
            return all(
                read_entry(self.store, key) == entry for key, entry in self.found_entries.items()
            )

        self.index.write()
        etags = _etags(self.store)
        return all(etags.get(key) == self.index.etags[key] for key in self.found_entries)

    def _size(self, artifact: str) -> tuple[int, int]:
        run = artifact.partition("/")[0]
        if run not in self.sizes:
            sizes: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
            for item in self.store.list(f"{run}/"):
                name = "/".join(item.key.split("/")[:3])
                files, size = sizes[name]
                sizes[name] = files + 1, size + item.size
            self.sizes[run] = sizes
        return self.sizes[run].get(artifact, (0, 0))
