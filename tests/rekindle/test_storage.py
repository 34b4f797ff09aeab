"""Tests of the object store: conditional writes, whole artifacts, and clear error messages."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from argolocal.errors import InvalidDocument
from rekindle.errors import ConfigError, Conflict, StorageError
from rekindle.storage import NotFound, Store, StoredObject, retry_until_stopped


def test_only_one_of_many_racing_writers_creates_an_object(s3: Store) -> None:
    def write(n: int) -> bool:
        try:
            s3.put("race/new", str(n).encode(), if_absent=True)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(write, range(8)))
    assert results.count(True) == 1
    assert s3.get("race/new") == str(results.index(True)).encode()


def test_a_stale_writer_cannot_overwrite_a_newer_value(s3: Store) -> None:
    first_etag = s3.put("pointer", b"1")
    second_etag = s3.put("pointer", b"2", if_match=first_etag)
    with pytest.raises(Conflict):
        s3.put("pointer", b"3", if_match=first_etag)
    assert s3.get_with_etag("pointer") == (b"2", second_etag)


def test_a_downloaded_directory_equals_the_uploaded_directory(s3: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "a.txt").write_bytes(b"a")
    (source / "deep" / "er" / "b c.bin").write_bytes(b"b" * 100_000)
    s3.upload(source, "dir/tree/")
    s3.download("dir/tree", tmp_path / "target")
    assert (tmp_path / "target" / "a.txt").read_bytes() == b"a"
    assert (tmp_path / "target" / "deep" / "er" / "b c.bin").read_bytes() == b"b" * 100_000
    assert [e.key for e in s3.list("dir/")] == ["dir/tree/a.txt", "dir/tree/deep/er/b c.bin"]
    s3.delete([e.key for e in s3.list("dir/")])
    assert not list(s3.list("dir/"))


@pytest.mark.parametrize("name", ["b\0c", "../x", "a/../../x", ".", "/etc/x"])
def test_a_key_that_cannot_be_a_path_is_one_error_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store("b", "http://127.0.0.1:1", "key", "secret")
    stored_object = StoredObject(f"r/a/{name}", 1, "etag", 0.0)
    monkeypatch.setattr(store, "list", lambda prefix: iter([stored_object]))
    monkeypatch.setattr(store, "head", lambda key: None)
    with pytest.raises(StorageError, match="its key is not a safe path"):
        store.download("r/a", tmp_path / "target")
    assert not list(tmp_path.iterdir())


def test_the_error_of_a_missing_object_has_its_uri(s3: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"s3://bucket-.*/no/such"):
        s3.get("no/such")
    with pytest.raises(NotFound, match=r"s3://bucket-.*/no/such"):
        s3.download("no/such", tmp_path / "x")
    assert s3.head("no/such") is None


def test_the_error_of_an_unreachable_endpoint_has_the_remedy() -> None:
    store = Store("rekindle", "http://127.0.0.1:9", "a", "b", short_retries=True)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:9.*S3_ENDPOINT_URL"):
        store.get("x")


def test_the_error_without_a_bucket_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("S3_BUCKET", raising=False)
    with pytest.raises(ConfigError, match="S3_BUCKET is not set"):  # not retried
        retry_until_stopped(Store.from_env, threading.Event(), "to begin")


def test_rejected_credentials_are_a_config_error_and_not_retried(s3: Store) -> None:
    stranger = Store(s3.bucket, s3.endpoint, "nobody", "x")
    message = rf"refuses our keys \((InvalidAccessKeyId|403)\).*AWS_ACCESS_KEY_ID.*\"{s3.bucket}\""
    for call in (
        lambda: stranger.get("x"),
        lambda: stranger.head("x"),
        lambda: stranger.put("x", b""),
        lambda: list(stranger.list("")),
    ):
        with pytest.raises(ConfigError, match=message):
            retry_until_stopped(call, threading.Event(), "to begin")
    with pytest.raises(ConfigError, match=str(s3.endpoint)):
        stranger.get("x")


def test_keys_that_xml_cannot_have_are_deleted(s3: Store) -> None:
    keys = [f"odd/{name}" for name in ("a", "\x01", "\x1b[31m", "\ufffe", "\x00b", "z&<>")]
    for key in keys:
        s3.put(key, b"x")
    s3.delete([*keys, "odd/missing\x02"])
    assert list(s3.list("odd/")) == []


def test_a_document_of_unlimited_size_is_one_error_before_it_is_read(s3: Store) -> None:
    s3.put("large", bytes(101))
    assert s3.get("large", max_bytes=101) == bytes(101)
    with pytest.raises(InvalidDocument, match=f"{s3.uri('large')} has 101 bytes, and at most 100"):
        s3.get("large", max_bytes=100)


def test_an_object_that_is_too_large_is_not_read_again_without_end(s3: Store) -> None:
    s3.put("large", bytes(101))
    with pytest.raises(InvalidDocument):
        retry_until_stopped(lambda: s3.get("large", max_bytes=100), threading.Event(), "to read it")


def test_an_object_that_is_larger_than_one_request_may_be_is_written_in_parts(s3: Store) -> None:
    # each part of the upload has the smallest size that S3 accepts
    part = 5 << 20
    data = bytes(range(256)) * (2 * part // 256) + b"end"
    s3.put_large("weights", data, part_bytes=part)
    stored_object = s3.head("weights")
    assert stored_object is not None
    assert stored_object.etag.endswith('-3"')
    assert s3.get("weights") == data
