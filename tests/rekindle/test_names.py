"""Tests of names from outside: names of models, versions, tasks, keys of objects, ids and
digests."""

import pytest

from rekindle.names import (
    ArtifactKey,
    Digest,
    InvalidName,
    ModelName,
    ObjectId,
    TaskName,
    TaskReference,
    Version,
    parse_s3_address,
)

VALID_NAMES = [
    (ModelName, ["fraud", "o'brien", 'say "hi"', "50%_off", "a\\b", "modèle 日本", "..a"]),
    (Version, ["1", "42", "9" * 18]),
    (TaskName, ["prepare", "train-2", "cached_models", "Train"]),
    (
        ArtifactKey,
        ["releases/fraud/0123456789ab", "a", "a b/c.d", "...", "a/.hidden", "ä/日本", "x" * 1024],
    ),
    (TaskReference, ["fraud-x7k2p/prepare", "a.b/Train_2"]),
    (ObjectId, ["0", "4f1c2a7e", "a-b_c"]),
    (Digest, ["0123456789abcdef" * 4]),
]
INVALID_NAMES = [
    (
        ModelName,
        ["", "a/b", "a:b", ".", "..", "a\x00", "a\n", "a\x7f", "a\u202eb", "x" * 257, None, 3],
    ),
    (
        Version,
        ["", "0", "01", "-1", "+1", "1.0", "1e3", " 1", "1\n", "١", "²", "9" * 19, 1, None, True],
    ),
    (TaskName, ["", "a/b", "..", "-a", "a b", "a.b", "a\n", "x" * 129, None]),
    (
        ArtifactKey,
        [
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "../a",
            "a/..",
            "a/../b",
            "a/./b",
            "a\x00b",
            "a\n",
            "x" * 1025,
            None,
        ],
    ),
    (
        TaskReference,
        ["", "a", "a/", "/a", "a/b/c", "../b", "a/..", "A/b", "/a/b", "a/b\n", None, 5],
    ),
    (ObjectId, ["", "../x", "a/b", "a'b", "a b", "x" * 65, None, 7]),
    (Digest, ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", None]),
]


@pytest.mark.parametrize(
    ("kind", "value"), [(kind, value) for kind, values in VALID_NAMES for value in values]
)
def test_a_valid_name_is_a_text(kind: type, value: str):
    assert kind(value) == value
    assert kind.parse_or_none(value) == value


@pytest.mark.parametrize(
    ("kind", "value"), [(kind, value) for kind, values in INVALID_NAMES for value in values]
)
def test_no_other_value_becomes_a_name(kind: type, value: object):
    assert kind.parse_or_none(value) is None
    with pytest.raises(InvalidName, match="it must"):
        kind(value)


def test_a_reference_to_a_task_has_a_run_and_a_task():
    reference = TaskReference("fraud-x7k2p/prepare")
    assert reference.run == "fraud-x7k2p"
    assert reference.task == "prepare"
    assert reference.prefix == "fraud-x7k2p/prepare/"


def test_the_key_of_an_address_is_whole():
    assert parse_s3_address("s3://raw/a#b?c=d%20") == ("raw", "a#b?c=d%20")
    assert parse_s3_address("S3://raw//a/") == ("raw", "a/")
    assert parse_s3_address("s3://raw") == ("raw", "")
    assert parse_s3_address("s3:/raw/a") is parse_s3_address("/s3/a") is None


def test_versions_are_ordered_by_number():
    assert sorted(["10", "9", "2"], key=lambda text: Version(text).number) == ["2", "9", "10"]
