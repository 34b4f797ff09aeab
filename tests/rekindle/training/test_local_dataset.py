"""Workers get the local copy of a dataset only if its bytes match the digest."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rekindle.content.dataset import FILE_LIST, record_files
from rekindle.errors import ConfigError, DataError
from rekindle.storage import Store
from rekindle.training.local_dataset import fetch_dataset


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))


def upload_dataset(store: Store, folder: Path, prefix: str, **files: bytes) -> str:
    """Store a dataset with the shards `files`, and return its digest."""
    (folder / "shards").mkdir(parents=True)
    (folder / "dataset.json").write_text(json.dumps({"facts": {}}))
    for name, data in files.items():
        (folder / "shards" / name).write_bytes(data)
    digest = record_files(folder)
    store.upload(folder, prefix)
    return digest


def test_workers_of_a_node_share_one_download(s3: Store, tmp_path: Path) -> None:
    digest = upload_dataset(s3, tmp_path / "d", "shared/dataset", a=b"numbers")
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: fetch_dataset(s3, "shared/dataset", digest), range(4)))
    assert len(set(folders)) == 1
    assert (folders[0] / "shards/a").read_bytes() == b"numbers"
    s3.delete(["shared/dataset/shards/a"])
    assert (fetch_dataset(s3, "shared/dataset", digest) / "shards/a").exists()


def test_an_interrupted_download_is_started_again(s3: Store, tmp_path: Path) -> None:
    digest = upload_dataset(s3, tmp_path / "d", "torn/dataset")
    torn = tmp_path / f"cache/datasets/{digest}.unfinished"
    torn.mkdir(parents=True)
    (torn / "half").touch()
    names = {file.name for file in fetch_dataset(s3, "torn/dataset", digest).iterdir()}
    assert names == {"dataset.json", FILE_LIST}


def test_a_dataset_with_another_digest_is_rejected(s3: Store, tmp_path: Path) -> None:
    digest = upload_dataset(s3, tmp_path / "d", "other/dataset")
    own_digest = "ab" * 32
    with pytest.raises(
        DataError, match=f"has the sha256 {digest}, but the digest of the dataset is {own_digest}"
    ):
        fetch_dataset(s3, "other/dataset", own_digest)

    with pytest.raises(DataError, match=r"nowhere/ does not exist.* First run the step prepare"):
        fetch_dataset(s3, "nowhere", own_digest)

    s3.put("junk/file", b"")
    with pytest.raises(DataError, match=r"dataset\.json is missing"):
        fetch_dataset(s3, "junk", own_digest)

    with pytest.raises(ConfigError, match='--digest is "": it must be the digest'):
        fetch_dataset(s3, "other/dataset", "")


@pytest.mark.parametrize(
    ("key", "data", "message"),
    [
        (
            "shards/a",
            b"numberz",
            r"s3://.*/shards/a has the sha256 \w{64}, and \w{64} in dataset\.files\.json",
        ),
        ("shards/a", b"number", "has 6 bytes, and 7 in"),
        ("shards/a", None, r"shards/a of dataset\.files\.json is missing"),
        ("shards/b", b"", r"shards/b is not in dataset\.files\.json"),
        ("shards/new/", b"", "shards/new is not a file"),
        ("dataset.json", b'{"facts": {"a": 1}}', r"dataset\.json has 19 bytes"),
        (FILE_LIST, None, "hashes of its files is missing"),
        (
            FILE_LIST,
            b"{}",
            r"dataset\.files\.json has the sha256 .* but the digest of the dataset is",
        ),
    ],
)
def test_a_changed_dataset_in_the_store_is_not_trained_on(
    s3: Store, tmp_path: Path, key: str, data: bytes | None, message: str
) -> None:
    prefix = f"changed-{tmp_path.name}"
    digest = upload_dataset(s3, tmp_path / "d", prefix, a=b"numbers")
    s3.delete([f"{prefix}/{key}"]) if data is None else s3.put(f"{prefix}/{key}", data)
    for _ in range(2):
        with pytest.raises(DataError, match=f"{message}.*--no-cache"):
            fetch_dataset(s3, prefix, digest)


def test_a_damaged_local_copy_is_downloaded_again(
    s3: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = upload_dataset(s3, tmp_path / "d", "local/dataset", a=b"numbers")
    file = fetch_dataset(s3, "local/dataset", digest) / "shards/a"
    with file.open("rb") as opened:
        file.chmod(0o600)
        inode = file.stat().st_ino
        file.write_bytes(b"numberz")
        assert fetch_dataset(s3, "local/dataset", digest) / "shards/a" == file
        assert file.read_bytes() == b"numbers"
        assert file.stat().st_ino != inode
        assert opened.read() == b"numberz", "a process that has the file open keeps it"
    assert "the local copy of the dataset is downloaded again" in capsys.readouterr().err
    (file.parent / "added").touch()
    assert not (fetch_dataset(s3, "local/dataset", digest) / "shards/added").exists()


def test_a_node_that_shares_the_copy_of_another_node_verifies_it(
    s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = upload_dataset(s3, tmp_path / "d", "volume/dataset", a=b"numbers")
    nodes = [tmp_path / "node-1", tmp_path / "node-2"]
    notes = []
    for node in nodes:
        node.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(node))
        fetch_dataset(s3, "volume/dataset", digest)
        notes += [path for path in node.rglob(digest) if path.parent.name == "verified"]
    assert len(notes) == 2
