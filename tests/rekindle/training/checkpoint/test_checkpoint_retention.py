"""Old checkpoints are deleted, unless they are still needed or are being read."""

import json
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import StorageError
from rekindle.storage import Store, StoredObject
from rekindle.training.checkpoint import checkpoint_retention
from rekindle.training.checkpoint.checkpoint_retention import CheckpointRetention
from tests.rekindle.training.saving import (
    OpenCheckpoints,
    list_keys,
    restore_alone,
    train_and_upload,
)


def test_old_checkpoints_are_deleted_and_the_others_stay_complete(
    open_checkpoints: OpenCheckpoints,
) -> None:
    first_checkpoints = open_checkpoints(keep_checkpoints=2)
    for step in range(1, 6):
        train_and_upload(first_checkpoints, step)
    store = first_checkpoints.remote.store
    manifests = list_keys(first_checkpoints, "manifests/")
    assert [json.loads(store.get(key))["step"] for key in manifests] == [4, 5]
    needed = {chunk for key in manifests for chunk in json.loads(store.get(key))["chunks"]}
    assert {key.rsplit("/", 1)[1] for key in list_keys(first_checkpoints, "chunks/")} == needed


def test_no_checkpoint_is_deleted_while_another_process_reads_one(
    open_checkpoints: OpenCheckpoints, s3: Store
) -> None:
    first_checkpoints = open_checkpoints(keep_checkpoints=2)
    lease = f"{first_checkpoints.remote.prefix}/readers/other"
    s3.put(lease, b"")
    for step in range(1, 5):
        train_and_upload(first_checkpoints, step)
    assert len(list_keys(first_checkpoints, "manifests/")) == 4
    s3.delete([lease])
    train_and_upload(first_checkpoints, 5)
    assert len(list_keys(first_checkpoints, "manifests/")) == 2
    assert restore_alone(open_checkpoints()) == 5
    assert not list_keys(first_checkpoints, "readers/")


NOW = 10**6


@given(
    ages=st.dictionaries(st.integers(1, 30), st.integers(0, 20000), min_size=1),
    keep_count=st.integers(2, 5),
    hours=st.sampled_from([0, 0.5, 2]),
    data=st.data(),
)
def test_retention_keeps_latest_and_its_newest_predecessors(
    ages: dict[int, int], keep_count: int, hours: float, data: st.DataObject
) -> None:
    manifests = [
        StoredObject(f"{step:04d}", 1, "", NOW - age) for step, age in sorted(ages.items())
    ]
    latest = data.draw(st.sampled_from(manifests)).key
    retention = CheckpointRetention(None, "", keep_count, hours)  # type: ignore[arg-type]
    expired_entries = retention._find_expired_manifests(latest, manifests, NOW)
    kept_entries = [entry for entry in manifests if entry.key not in expired_entries]
    previous = [entry for entry in manifests if entry.key < latest][-(keep_count - 1) :]
    young_keys = [
        entry.key for entry in previous if not hours or entry.modified >= NOW - 3600 * hours
    ]
    assert [entry.key for entry in kept_entries if entry.key <= latest] == [*young_keys, latest]
    assert all(entry.modified >= NOW - 3600 for entry in kept_entries if entry.key > latest)


def test_chunks_of_a_damaged_manifest_are_deleted_with_it(
    open_checkpoints: OpenCheckpoints, s3: Store
) -> None:
    first_checkpoints = open_checkpoints(keep_checkpoints=2)
    train_and_upload(first_checkpoints, 1)
    (key,) = list_keys(first_checkpoints, "manifests/")
    s3.put(key, b"damaged")
    fresh = CheckpointRetention(s3, first_checkpoints.remote.prefix, 2, 0)
    assert (
        fresh._read_chunk_names(key)
        == []
        == fresh._read_chunk_names(f"{first_checkpoints.remote.prefix}/manifests/gone")
    )
    chunks = set(list_keys(first_checkpoints, "chunks/"))
    for step in (2, 3):
        train_and_upload(first_checkpoints, step)
    assert key not in list_keys(first_checkpoints, "manifests/")
    assert not chunks <= set(list_keys(first_checkpoints, "chunks/"))


class RecordingStore:
    """A store with objects of given ages, which records deletions."""

    def __init__(self, **ages: dict[str, float]) -> None:
        self.ages = ages
        self.deleted_keys = list[str]()

    def delete(self, keys: Iterable[str]) -> None:
        self.deleted_keys += keys

    def list(self, prefix: str) -> Iterable[StoredObject]:
        kind = prefix.split("/")[1]
        return [
            StoredObject(f"p/{kind}/{name}", 1, "", NOW - age)
            for name, age in sorted(self.ages[kind].items())
        ]


def delete_expired(
    contents: dict[str, list[str]], latest: str, /, **ages: dict[str, float]
) -> list[str]:
    """Return the keys that are deleted after the manifest `latest` was written. `contents`: the
    chunks of each manifest. `ages`: kind of objects → ages of the objects in seconds."""
    store = RecordingStore(**{"readers": {}, "chunks": {}} | ages)
    chunks = {f"p/manifests/{name}": names for name, names in contents.items()}
    rule = CheckpointRetention(store, "p", 2, 0, chunks)  # type: ignore[arg-type]
    rule.delete_expired(f"p/manifests/{latest}", contents[latest])
    return store.deleted_keys


def test_a_reader_prevents_deletion_for_a_quarter_of_an_hour() -> None:
    chunks = {"1": ["a"], "2": ["b"], "3": ["c"]}
    manifests = {"1": 20.0, "2": 10.0, "3": 0.0}
    files = {"a": 20.0, "b": 10.0, "c": 0.0}
    gone = ["p/manifests/1", "p/chunks/a"]
    assert delete_expired(chunks, "3", manifests=manifests, chunks=files) == gone
    assert (
        delete_expired(chunks, "3", manifests=manifests, chunks=files, readers={"r": 900.0}) == []
    )
    assert delete_expired(chunks, "3", manifests=manifests, chunks=files, readers={"r": 901.0}) == [
        *gone,
        "p/readers/r",
    ]
    readers = {"dead": 901.0, "lives": 899.0}
    assert delete_expired(chunks, "3", manifests=manifests, chunks=files, readers=readers) == [
        "p/readers/dead"
    ]


def test_chunks_of_an_unfinished_checkpoint_stay_for_an_hour() -> None:
    chunks = {"1": ["a"], "2": ["a", "b"]}
    manifests = {"1": 10.0, "2": 0.0}
    files = {"a": 9000.0, "b": 0.0, "young": 3600.0, "orphan": 3601.0}
    assert delete_expired(chunks, "2", manifests=manifests, chunks=files) == ["p/chunks/orphan"]


def test_a_chunk_that_a_kept_checkpoint_shares_with_an_expired_one_stays() -> None:
    chunks = {"1": ["a", "x"], "2": ["b"], "3": ["a"]}
    manifests = {"1": 20.0, "2": 10.0, "3": 0.0}
    files = {"a": 20.0, "x": 20.0, "b": 10.0}
    assert delete_expired(chunks, "3", manifests=manifests, chunks=files) == [
        "p/manifests/1",
        "p/chunks/x",
    ]


def test_an_old_listing_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = {"1": ["a"], "2": ["b"], "3": ["c"]}
    manifests = {"1": 9.0, "2": 8.0, "3": 0.0}
    files = {"a": 9.0}
    for seconds, gone in ((59.0, ["p/manifests/1", "p/chunks/a"]), (60.0, [])):
        clock = iter([0.0, seconds, seconds])
        monkeypatch.setattr(
            checkpoint_retention, "time", SimpleNamespace(monotonic=lambda clock=clock: next(clock))
        )
        assert delete_expired(chunks, "3", manifests=manifests, chunks=files) == gone


def test_an_unavailable_store_does_not_lose_the_list_of_chunks() -> None:
    class UnavailableStore(RecordingStore):
        def list(self, prefix: str) -> Iterable[StoredObject]:
            raise StorageError("s3 is unavailable")

    rule = CheckpointRetention(UnavailableStore(), "p", 2, 0)  # type: ignore[arg-type]
    rule.delete_expired("p/manifests/1", ["a"])
    assert rule._chunk_names == {"p/manifests/1": ["a"]}, "the next call deletes them"


def test_keep_hours_is_exact_to_the_second() -> None:
    manifests = [
        StoredObject(f"{step}", 1, "", NOW - age) for step, age in ((1, 7201), (2, 7200), (3, 0))
    ]
    assert CheckpointRetention(None, "", 9, 2)._find_expired_manifests("3", manifests, NOW) == {"1"}  # type: ignore[arg-type]
    assert CheckpointRetention(None, "", 9, 0)._find_expired_manifests("3", manifests, NOW) == set()  # type: ignore[arg-type]
