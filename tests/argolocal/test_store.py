"""FolderStore stores objects with all keys that S3 allows, and never writes outside of its
folder."""

from pathlib import Path

import pytest

from argolocal.errors import ConfigError, NotFound, StorageError
from argolocal.store import FolderStore

KEYS = [
    "a",
    "a/b",
    "a/b/c",
    "a//b",
    "a/",
    "a/./b",
    "../up",
    "/root",
    "%",
    "a/%",
    "a/%2F",
    "ä ö/%25",
    "a/b%00",
    "a\0b",
]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    (tmp_path / "store/runs").mkdir(parents=True)
    return FolderStore(tmp_path / "store", "runs")


def upload_text(store: FolderStore, key: str) -> None:
    file = store.root.parent.with_name("file")
    file.write_text(f"text of {key!r}")
    store.upload(file, key)


@pytest.mark.parametrize("keys", [KEYS, KEYS[::-1]], ids=["", "backwards"])
def test_every_key_is_a_separate_object(
    store: FolderStore, keys: list[str], tmp_path: Path
) -> None:
    for key in keys:
        upload_text(store, key)
    assert [entry.key for entry in store.list("")] == sorted(keys, key=str.encode)
    assert [entry.key for entry in store.list("a/b")] == ["a/b", "a/b%00", "a/b/c"]
    for key in keys:
        if not key.endswith("/"):  # in S3, a key that ends with a slash is a folder
            store.download(key, tmp_path / "got")
            assert (tmp_path / "got").read_text() == f"text of {key!r}"
    assert {path.name for path in tmp_path.iterdir()} == {"store", "file", "got"}
    store.delete([*keys, "never"])
    assert [*store.list("")] == []


def test_a_downloaded_folder_equals_the_uploaded_folder_and_may_lack_links(
    store: FolderStore, tmp_path: Path
) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/file").write_text("x")
    (tmp_path / "in/link").symlink_to("deep/file")
    store.upload(tmp_path / "in", "with")
    store.upload(tmp_path / "in", "without", links=False)
    store.download("with", tmp_path / "with")
    store.download("without", tmp_path / "without")
    assert (
        (tmp_path / "with/link").read_text() == (tmp_path / "without/deep/file").read_text() == "x"
    )
    assert not (tmp_path / "without/link").exists()


def test_missing_objects_and_buckets_and_unsafe_keys_are_reported(
    store: FolderStore, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="s3://runs/none does not exist"):
        store.download("none", tmp_path / "got")
    upload_text(store, "a/../../../evil")
    with pytest.raises(StorageError, match="not a safe path"):
        store.download("a", tmp_path / "got")
    with pytest.raises(ConfigError, match='bucket "other" does not exist'):
        list(FolderStore(tmp_path / "store", "other").list(""))
