"""The description of the difference between two results names the changed file, package, image,
input or data, with both values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.cache import code, difference, entries
from rekindle.cache.difference import MISSING_VALUE, Difference, list_differences
from rekindle.cache.entries import Entry
from rekindle.cache.key import Facts
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import Services
from rekindle.operations import cached_results
from rekindle.storage import Store

MODULE = "steps.prepare"


def make_facts(**changes: Any) -> Facts:
    own_facts: Facts = {
        "step": MODULE,
        "code": code.code_identity([MODULE]),
        "inputs": {"n": "1", "train": '{"epochs": 2}'},
    }
    return own_facts | {"artifacts": {"data": "ab"}, "data_read": {"file.csv": "cd"}} | changes


def record_code_before(s3: Store, identity: str, **changes: Any) -> None:
    """Write the list of files of the step's code before a change."""
    s3.put(
        f"{difference.CODE_FOLDER}{identity}",
        json.dumps(code.identity_facts([MODULE]) | changes).encode(),
    )


def test_the_changed_file_and_package_are_named_with_both_hashes(s3: Store) -> None:
    difference.record_code(s3, make_facts())
    # the second result has the same code
    difference.record_code(s3, make_facts())
    assert json.loads(
        s3.get(f"{difference.CODE_FOLDER}{make_facts()['code']}")
    ) == code.identity_facts([MODULE])
    files = code.identity_facts([MODULE])["files"]
    packages = code.list_packages()
    record_code_before(
        s3, "old", files=files | {MODULE: "ff", "gone": "aa"}, packages=["numpy-0.1", *packages]
    )
    differences = list_differences(s3, make_facts(code="old"), make_facts())
    assert differences[:2] == [
        Difference("code", MODULE, "ff", files[MODULE]),
        Difference("code", "gone", "aa", MISSING_VALUE),
    ]
    record_code_before(s3, "older", python="3.0")
    (python,) = list_differences(s3, make_facts(code="older"), make_facts())
    assert python.name == "Python"
    assert python.before == "3.0"


def test_code_whose_files_were_not_recorded_differs_as_a_whole(s3: Store) -> None:
    assert list_differences(s3, make_facts(code="unknown"), make_facts())[0].name == "all files"


def test_a_pinned_image_is_compared_by_its_digest(s3: Store) -> None:
    digests = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
    differences = list_differences(s3, make_facts(code=digests[0]), make_facts(code=digests[1]))
    assert differences == [Difference("image", "digest", *digests)]
    pinned = make_facts(code=digests[0])
    # nothing is recorded, because the image contains the code
    difference.record_code(s3, pinned)
    assert not list(s3.list(f"{difference.CODE_FOLDER}sha256"))


def test_settings_and_data_are_compared_one_by_one(s3: Store) -> None:
    earlier_facts = make_facts(
        inputs={"n": "1", "train": '{"epochs": 1, "old": 3}'}, artifacts={"data": "00"}
    )
    assert list_differences(s3, earlier_facts, make_facts()) == [
        Difference("input", "train.epochs", "1", "2"),
        Difference("input", "train.old", "3", MISSING_VALUE),
        Difference("data", "data", "00", "ab"),
    ]
    partial = {
        name: value
        for name, value in make_facts().items()
        if name not in ("artifacts", "data_read")
    }
    assert {difference.kind for difference in list_differences(s3, earlier_facts, partial)} == {
        "input"
    }
    assert list_differences(s3, make_facts(), make_facts()) == []


def test_pruning_removes_the_files_of_code_without_entries(s3: Store) -> None:
    entry = Entry("k1", "w/prepare", {}, {}, make_facts(), 1.0)
    entries.record_entry(s3, entry)
    # the record has the form of an earlier version of Rekindle
    entries.record_entry(s3, replace(entry, key="k2", facts={"step": "steps.x"}))
    difference.record_code(s3, make_facts())
    record_code_before(s3, "0" * 64)
    s3.put(f"{difference.CODE_FOLDER}mine.txt", b"1")
    difference.remove_unused_code(s3)
    keys = {item.key for item in s3.list(difference.CODE_FOLDER)}
    assert f"{difference.CODE_FOLDER}{make_facts()['code']}" in keys
    assert f"{difference.CODE_FOLDER}{'0' * 64}" not in keys
    assert f"{difference.CODE_FOLDER}mine.txt" in keys, "another program has written it"
    entries.remove_entries(s3, [entry, replace(entry, key="k2")])


def test_cache_prune_removes_the_files_of_code_without_entries_also_if_no_entry_is_stale(
    tmp_path: Path,
) -> None:
    try:
        store = LocalCluster(tmp_path).store()
        record_code_before(store, "1" * 64)
        assert (
            cached_results.prune_cache(
                tmp_path, keep_count=10_000, keep_days=90, should_delete=False
            )
            == []
        )
        assert store.head(f"{difference.CODE_FOLDER}{'1' * 64}")
        assert (
            cached_results.prune_cache(
                tmp_path, keep_count=10_000, keep_days=90, should_delete=True
            )
            == []
        )
        assert not store.head(f"{difference.CODE_FOLDER}{'1' * 64}")
    finally:
        Services(tmp_path, {}).down()


@pytest.mark.parametrize(
    "stored_bytes", [b"[" * 100_000, b"[]", b'{"files": 5, "python": "", "packages": []}', b"{"]
)
def test_a_list_of_files_that_is_none_names_no_file(s3: Store, stored_bytes: bytes) -> None:
    s3.put(f"{difference.CODE_FOLDER}damaged", stored_bytes)
    differences = list_differences(s3, make_facts(code="damaged"), make_facts())
    assert [(each.kind, each.name) for each in differences] == [("code", "all files")]


def test_an_input_that_is_nested_deep_is_compared_as_a_text(s3: Store) -> None:
    deep = '{"a":' * 100_000
    earlier_facts = make_facts(inputs={"n": deep})
    assert [
        each.before for each in list_differences(s3, earlier_facts, make_facts(inputs={"n": "1"}))
    ] == [deep]
