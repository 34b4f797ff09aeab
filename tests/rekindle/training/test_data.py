import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rekindle.errors import DataError
from rekindle.storage import Store
from rekindle.training.data import local_dataset


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))


def test_workers_of_a_node_share_one_download(s3: Store) -> None:
    s3.put("shared/dataset/dataset.json", json.dumps({"digest": "d"}).encode())
    s3.put("shared/dataset/shards/a.npy", b"numbers")
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: local_dataset(s3, "shared/dataset", "d"), range(4)))
    assert len(set(folders)) == 1 and (folders[0] / "shards/a.npy").read_bytes() == b"numbers"
    s3.delete(["shared/dataset/shards/a.npy"])
    assert (local_dataset(s3, "shared/dataset", "d") / "shards/a.npy").exists()


def test_an_interrupted_download_is_started_again(s3: Store, tmp_path: Path) -> None:
    s3.put("torn/dataset/dataset.json", json.dumps({"digest": "t"}).encode())
    torn = tmp_path / "cache/datasets/t.unfinished"
    torn.mkdir(parents=True)
    (torn / "half").touch()
    assert [file.name for file in local_dataset(s3, "torn/dataset", "t").iterdir()] == ["dataset.json"]


def test_a_dataset_with_another_digest_is_rejected(s3: Store) -> None:
    s3.put("other/dataset/dataset.json", json.dumps({"digest": "other"}).encode())
    with pytest.raises(DataError, match='has the digest "other", but this run expects mine'):
        local_dataset(s3, "other/dataset", "mine")
    with pytest.raises(DataError, match=r"nowhere/ does not exist.* First run the step prepare"):
        local_dataset(s3, "nowhere", "mine")
    s3.put("junk/file", b"")
    with pytest.raises(DataError, match=r"dataset\.json is missing"):
        local_dataset(s3, "junk", "mine")
