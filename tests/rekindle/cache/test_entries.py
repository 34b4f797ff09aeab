"""The last cache entry of a key is used; an entry that is too old, or whose artifacts are
incomplete, is invalid."""

import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import Field

from rekindle import Artifact, StepOutputs
from rekindle.cache import entries
from rekindle.cache.entries import Entry, Lookup
from rekindle.errors import StorageError
from rekindle.step import Reuse, Step
from rekindle.storage import Store


def make_entry(at: str, size_bytes: int = 3) -> Entry:
    artifacts = {"dataset": {"sha256": "a" * 64, "files": 1, "bytes": size_bytes}}
    return Entry(uuid.uuid4().hex, at, {"digest": "abc"}, artifacts, {"step": "steps.prepare"}, 1.0)


def test_an_entry_is_valid_while_its_artifacts_are_complete(s3: Store) -> None:
    recorded = make_entry("w-1/prepare")
    # the entry is not valid yet, because a step records it before Argo uploads the artifact
    entries.record_entry(s3, recorded)
    assert entries.find_valid_entry(s3, recorded.key) is None
    s3.put("w-1/prepare/dataset/part", b"12")  # incomplete
    assert entries.find_valid_entry(s3, recorded.key) is None
    s3.put("w-1/prepare/dataset/part", b"123")
    s3.put("w-1/prepare/dataset-of-another/part", b"123")
    assert entries.find_valid_entry(s3, recorded.key) == recorded
    assert entries.find_valid_entry(s3, recorded.key, max_age_days=-1) is None
    # delete the artifact as `rekindle prune` does
    s3.delete(["w-1/prepare/dataset/part"])
    assert entries.find_valid_entry(s3, recorded.key) is None


def test_one_of_several_concurrent_entries_remains_and_a_later_entry_replaces_it(s3: Store) -> None:
    recorded = make_entry("w-2/prepare")
    concurrent_entries = [replace(recorded, at=f"w-2/prepare-{number}") for number in range(8)]
    for other in concurrent_entries:
        s3.put(f"{other.at}/dataset/part", b"123")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(entries.record_entry, s3), concurrent_entries))
    winner = entries.find_valid_entry(s3, recorded.key)
    assert winner in concurrent_entries
    later = next(other for other in concurrent_entries if other != winner)
    entries.record_entry(s3, later)
    assert entries.find_valid_entry(s3, recorded.key) == later


def test_prune_removes_old_surplus_and_invalid_entries(s3: Store) -> None:
    entries.remove_entries(s3, entries.read_entries(s3))
    now = datetime.now(UTC).timestamp()

    old_entry, missing_entry, kept_entry, more_entry = (
        replace(make_entry(f"w-3/{n}"), made=now - n) for n in (9_000_000, 30, 10, 20)
    )
    for item in (old_entry, kept_entry, more_entry):
        s3.put(f"{item.at}/dataset/part", b"123")

    for item in (old_entry, missing_entry, kept_entry, more_entry):
        entries.record_entry(s3, item)

    stale = {item.key: reason for item, reason in entries.list_stale_entries(s3, 2, 90)}
    assert stale[missing_entry.key] == "more than 2"
    assert "older" in entries.list_stale_entries(s3, 9, 90)[-1][1]
    assert {item.key for item, _ in entries.list_stale_entries(s3, 9, 90)} == {
        old_entry.key,
        missing_entry.key,
    }
    entries.remove_entries(s3, [item for item, _ in entries.list_stale_entries(s3, 9, 90)])
    assert {item.key for item in entries.read_entries(s3)} == {kept_entry.key, more_entry.key}


def test_a_bulk_lookup_never_returns_an_outdated_entry_of_its_index(s3: Store) -> None:
    written = [make_entry(f"w-5/t{number}") for number in range(25)]
    for item in written:
        s3.put(f"{item.at}/dataset/part", b"123")
        entries.record_entry(s3, item)

    lookup = Lookup(s3, len(written))
    for is_second_lookup in (False, True):  # the second lookup reads the index
        lookup = Lookup(s3, len(written)) if is_second_lookup else lookup
        assert [lookup.find(item.key) for item in written] == written
        lookup.close()

    assert lookup.index
    assert not lookup.index.unread
    assert lookup.find("unknown") is None
    s3.delete([f"{written[0].at}/dataset/part"])
    moved = replace(written[0], at="w-6/t0")
    s3.put("w-6/t0/dataset/part", b"123")
    entries.record_entry(s3, moved)
    entries.remove_entries(s3, [written[1]])
    s3.put("w-5/t2/dataset/part", b"torn")
    later = Lookup(s3, len(written))
    assert [later.find(item.key) for item in written[:4]] == [moved, None, None, written[3]]


@pytest.mark.parametrize(
    ("days", "entry_count", "max_size", "kept_count"),
    [(90, 9, "1k", 4), (90, 2, "1k", 2), (90, 9, "7", 2), (0.002, 9, "1k", 2), (90, 0, "0", 0)],
)
def test_the_oldest_entries_are_removed_and_no_artifact(
    s3: Store, days: float, entry_count: int, max_size: str, kept_count: int
) -> None:
    entries.remove_entries(s3, entries.read_entries(s3))
    s3.put("w-11/t/dataset/part", b"123")
    written = [
        replace(make_entry("w-11/t"), made=time.time() - 100 * position) for position in range(4)
    ]
    for item in written[::-1]:
        entries.record_entry(s3, item)
    assert entries.trim_cache(s3, days, entry_count, max_size) == written[kept_count:]
    assert {item.key for item in entries.read_entries(s3)} == {
        item.key for item in written[:kept_count]
    }
    assert s3.get("w-11/t/dataset/part") == b"123"
    index = entries.Index(s3)
    assert index.unread == []
    assert index.read() == sorted(written[:kept_count], key=lambda item: item.key)
    assert entries.trim_cache(s3, days, entry_count, max_size) == []
    entries.remove_entries(s3, written)


def test_an_entry_names_the_run_and_task_of_its_outputs() -> None:
    began = time.time()
    recorded = make_entry("w-7/prepare")
    assert recorded.workflow == "w-7"
    assert recorded.task == "prepare"
    assert began <= recorded.made <= time.time()


def test_an_entry_is_valid_for_ninety_days(s3: Store) -> None:
    for age, is_valid in ((90 * 86400 - 60, True), (90 * 86400 + 60, False)):
        recorded = replace(make_entry("w-8/prepare"), made=time.time() - age)
        s3.put("w-8/prepare/dataset/part", b"123")
        entries.record_entry(s3, recorded)
        assert (entries.find_valid_entry(s3, recorded.key) is not None) == is_valid
        later = replace(recorded, made=time.time())
        entries.record_entry(s3, later)
        assert entries.read_entry(s3, recorded.key) == later

    text = entries.reason_invalid(replace(recorded, made=0), lambda artifact: (1, 3))
    assert text == "older than 90 days"
    assert (
        entries.reason_invalid(later, lambda artifact: (0, 0))
        == "w-8/prepare/dataset is missing or incomplete"
    )
    assert entries.reason_invalid(later, lambda artifact: (1, 3)) == ""


def test_entries_that_other_versions_of_rekindle_wrote_are_ignored(s3: Store) -> None:
    for number, data in enumerate((b"{", b"[]", b'{"key": "k"}')):
        s3.put(f"cache/other-{number}", data)
        assert entries.read_entry(s3, f"other-{number}") is None
        assert entries.find_valid_entry(s3, f"other-{number}") is None
    recorded = make_entry("w-9/prepare")
    entries.record_entry(s3, recorded)
    assert recorded.key in {item.key for item in entries.read_entries(s3)}
    s3.delete([f"cache/other-{number}" for number in range(3)])


@pytest.mark.parametrize(
    "change",
    [
        {"key": "another"},
        {"at": "../w/prepare"},
        {"at": "w-9/prepare' == ''"},
        {"outputs": {"digest": "{{workflow.uid}}"}},
        {"outputs": {"{{workflow.uid}}": "digest"}},
        {"outputs": {"digest": 5}},
        {"outputs": ["digest"]},
        {"artifacts": 5},
        {"artifacts": {"dataset": {"sha256": "abc", "files": 1, "bytes": 3}}},
        {"artifacts": {"../dataset": {"sha256": "", "files": 1, "bytes": 3}}},
        {"artifacts": {"dataset": {"sha256": "", "files": "1", "bytes": 3}}},
        {"facts": None},
        {"seconds": None},
    ],
)
def test_an_entry_with_an_invalid_field_is_ignored(change: dict[str, Any], s3: Store) -> None:
    valid = asdict(make_entry("w-12/prepare"))
    key = valid["key"]
    s3.put(f"cache/{key}", json.dumps(valid).encode())
    assert entries.read_entry(s3, key)
    s3.put(f"cache/{key}", json.dumps(valid | change).encode())
    assert entries.read_entry(s3, key) is None
    assert key not in {item.key for item in entries.read_entries(s3)}
    s3.delete([f"cache/{key}"])


def test_prune_keeps_the_newest_valid_entries(s3: Store) -> None:
    entries.remove_entries(s3, entries.read_entries(s3))
    s3.put("w-10/t/dataset/part", b"123")
    written = [
        replace(make_entry("w-10/t"), made=time.time() - 100 * number) for number in range(4)
    ]
    for item in written:
        entries.record_entry(s3, item)
    assert [item for item, _ in entries.list_stale_entries(s3, 2, 90)] == written[2:]
    assert entries.list_stale_entries(s3, 4, 90) == []
    entries.remove_entries(s3, written)


def test_an_unavailable_store_raises_no_error() -> None:
    def fail(number: int) -> int:
        raise StorageError(f"{number} is unavailable")

    assert entries.result_or_none(fail, 1) is None
    assert entries.result_or_none(lambda number: number + 1, 1) == 2


class Outputs(StepOutputs):
    dataset: Artifact
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    rows: int
    run_id: str


OUTPUTS = {"digest": "b" * 64, "rows": "5"}
ARTIFACTS: dict[str, dict[str, Any]] = {"dataset": {"sha256": "a" * 64, "files": 1, "bytes": 3}}


@pytest.mark.parametrize(
    "outputs, artifacts, reason",
    [
        (OUTPUTS, ARTIFACTS, ""),
        ({"rows": "5"}, ARTIFACTS, "it lacks the output digest"),
        (OUTPUTS, {}, "it lacks the output dataset"),
        ({**OUTPUTS, "task": "x"}, ARTIFACTS, '"task" is not an output of the step'),
        ({**OUTPUTS, "dataset": "x"}, ARTIFACTS, '"dataset" is not an output of the step'),
        ({"digest": "b" * 64}, {**ARTIFACTS, "rows": ARTIFACTS["dataset"]}, "a parameter is"),
        ({**OUTPUTS, "digest": "../x"}, ARTIFACTS, 'the output digest is "../x": it has the wrong'),
        ({**OUTPUTS, "rows": "many"}, ARTIFACTS, 'the output rows is "many"'),
    ],
)
def test_an_entry_that_cannot_be_the_result_of_the_step_is_named(
    outputs: dict[str, str], artifacts: dict[str, Any], reason: str
) -> None:
    recorded = replace(make_entry("w-6/prepare"), outputs=outputs, artifacts=artifacts)
    step = cast(Step, SimpleNamespace(Outputs=Outputs, REUSE=Reuse()))
    found = entries.reason_unusable(recorded, step)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    "field, value",
    [
        ("made", 1e300),
        ("made", 4e9),
        ("made", -1.0),
        ("seconds", 1e300),
        ("seconds", -1.0),
        ("outputs", {"digest": "a\0b"}),
        ("outputs", {"digest": "{{workflow.name}}"}),
        ("artifacts", {"dataset": {"sha256": "", "files": 0, "bytes": 0}}),
    ],
)
def test_an_entry_with_an_impossible_value_is_not_read(s3: Store, field: str, value: Any) -> None:
    recorded = make_entry("w-7/prepare")
    s3.put("w-7/prepare/dataset/part", b"123")
    entries.record_entry(s3, recorded)
    assert entries.find_valid_entry(s3, recorded.key) == recorded
    entries.record_entry(s3, replace(recorded, **{field: value}))
    assert entries.find_valid_entry(s3, recorded.key) is None
