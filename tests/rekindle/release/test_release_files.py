"""Only complete and unchanged releases can be downloaded for serving."""

import gzip
import json
import random
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rekindle.cache import code
from rekindle.content.verified_artifacts import verify_artifact
from rekindle.content.verified_release import (
    compute_content_hash,
    read_described_file,
    read_verified_files,
    reject_wrong_hash,
    require_release_key,
)
from rekindle.errors import DataError, NotFound, StorageError
from rekindle.release import pyfunc, release_files
from rekindle.release.release_files import (
    PREDICTIONS_FILE,
    commit_release,
    download,
    download_champion,
    read_prediction_lines,
    upload,
)
from rekindle.storage import Store, file_sha256
from tests.proxy import Proxy, Write
from tests.rekindle.serving.running import prefix_of, write_release


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"model.safetensors": b"other"},
            DataError,
            r"model\.safetensors changed since the release",
        ),
        ({"state/words.txt": None}, DataError, r"words\.txt"),
        ({"state/more.txt": b""}, DataError, r"state/more\.txt was added since the release"),
        ({"state/new/": b""}, DataError, "state/new was added since the release"),
        ({"code.py": b""}, DataError, r"code\.py was added since the release"),
        ({"release.json": None}, DataError, "is not a complete release"),
        ({"release.json": b"{"}, DataError, "is not a complete release"),
        ({"release.json": b"[]"}, DataError, "is not a complete release"),
        ({"release.json": b'{"name": "echo"}'}, DataError, "is not a complete release"),
        ({"model.json": b"[]"}, DataError, "is not a complete release"),
        (
            dict.fromkeys(
                (
                    "release.json",
                    "model.safetensors",
                    "model.json",
                    "state/words.txt",
                    "dataset.json",
                )
            ),
            StorageError,
            "not exist",
        ),
    ],
)
def test_an_incomplete_release_is_rejected(
    s3: Store, tmp_path: Path, change: dict[str, bytes | None], error: type[Exception], message: str
) -> None:
    prefix = prefix_of(f"broken-{tmp_path.name}")
    write_release(s3, prefix)
    for key, data in change.items():
        s3.delete([prefix + key]) if data is None else s3.put(prefix + key, data)
    with pytest.raises(error, match=message):
        download(s3, prefix, tmp_path / "release")


@pytest.fixture
def stored(s3: Store, tmp_path: Path) -> str:
    """Store a release with the files of MLflow, and return the key prefix of the release."""
    folder = tmp_path / "made"
    write_release(s3, f"made-{tmp_path.name}/")
    s3.download(f"made-{tmp_path.name}/", folder)
    (folder / "verdict.json").write_text("{}")
    card = json.loads((folder / "model.json").read_text()) | {
        "workload": "tests.rekindle.serving.echo"
    }
    (folder / "model.json").write_text(json.dumps(card))

    record = json.loads((folder / "release.json").read_text())
    hashes = {name: file_sha256(folder / name) for name in record["files"]} | pyfunc.write_mlmodel(
        folder
    )
    (folder / "release.json").write_text(json.dumps(record | {"files": hashes}))

    return upload(s3, f"m-{tmp_path.name}".replace("_", "-"), folder, hashes)


def change_record(store: Store, prefix: str, **files: Any) -> None:
    """Change the hashes in release.json; the value None removes an entry."""
    record = json.loads(store.get(f"{prefix}release.json"))
    hashes = {name: value for name, value in (record["files"] | files).items() if value}
    store.put(f"{prefix}release.json", json.dumps(record | {"files": hashes}).encode())


def test_an_unchanged_release_can_be_served_and_loaded(
    s3: Store, tmp_path: Path, stored: str
) -> None:
    record = download(s3, stored, tmp_path / "release")
    assert {"MLmodel", "input_example.json", "serving_input_example.json"} < record.files.keys()
    # MLflow writes this file after the download
    (tmp_path / "release/registered_model_meta").touch()
    assert pyfunc._load_pyfunc(str(tmp_path / "release")).predictor.example()
    assert download_champion(s3, stored, tmp_path / "champion")


@pytest.mark.parametrize(
    "name", ["MLmodel", "input_example.json", "workload.json", "model.safetensors"]
)
def test_a_changed_file_is_found_also_if_its_hash_was_changed(
    s3: Store, tmp_path: Path, stored: str, name: str
) -> None:
    s3.put(stored + name, b"x: 1")
    for folder, load in (("a", download), ("b", download_champion)):
        with pytest.raises(DataError, match=f"{name} (changed|was added) since the release"):
            load(s3, stored, tmp_path / folder)
    with pytest.raises(DataError, match=f"{name} (changed|was added) since the release"):
        pyfunc._load_pyfunc(str(tmp_path / "a"))

    change_record(s3, stored, **{name: sha256(b"x: 1").hexdigest()})
    for folder, load in (("c", download), ("d", download_champion)):
        with pytest.raises(DataError, match=r"release\.json was changed since the release"):
            load(s3, stored, tmp_path / folder)


def test_a_loader_outside_of_the_hash_is_not_loaded(s3: Store, tmp_path: Path, stored: str) -> None:
    change_record(s3, stored, MLmodel=None)
    with pytest.raises(DataError, match=r"release\.json was changed since the release"):
        download(s3, stored, tmp_path / "release")
    with pytest.raises(DataError, match="whose hash does not cover the file MLmodel"):
        pyfunc._load_pyfunc(str(tmp_path / "release"))


def test_a_champion_without_its_record_is_not_compared(
    s3: Store, tmp_path: Path, stored: str
) -> None:
    s3.delete([f"{stored}release.json"])
    with pytest.raises(
        NotFound, match=r"release\.json does not exist.*remove the alias `champion`"
    ):
        download_champion(s3, stored, tmp_path / "champion")


@pytest.mark.parametrize(
    "folder",
    [
        "raw/forged",
        "../releases/x",
        "releases/../raw/forged",
        "releases",
        "",
        "releases/echo/latest",
    ],
)
def test_a_release_outside_of_the_folder_of_the_releases_is_rejected(
    s3: Store, tmp_path: Path, folder: str
) -> None:
    if folder in ("raw/forged", "releases/echo/latest"):
        write_release(s3, f"{folder}/")
    for read in (download, download_champion):
        with pytest.raises(DataError, match="is not a release: its key must be releases/NAME/HASH"):
            read(s3, f"{folder}/", tmp_path / "release")


def test_other_files_with_the_same_first_digits_of_the_hash_are_not_the_release() -> None:
    hashes = {"model.safetensors": "0" * 64}
    actual = compute_content_hash(hashes)
    changed = actual[:-1] + ("0" if actual[-1] != "0" else "1")
    with pytest.raises(DataError, match=f"the hash of its files is {actual}"):
        reject_wrong_hash(f"releases/echo/{changed}", hashes, "address")


def test_a_release_of_an_earlier_version_has_12_digits_of_the_hash_in_its_key() -> None:
    hashes = {"model.safetensors": "0" * 64}
    earlier_key = f"releases/echo/{compute_content_hash(hashes)[:12]}"
    require_release_key(earlier_key, "address")
    reject_wrong_hash(earlier_key, hashes, "address")
    with pytest.raises(DataError, match="was changed since the release"):
        reject_wrong_hash(earlier_key, {"model.safetensors": "1" * 64}, "address")


DESCRIBED_FILES = {"reference.json": b'{"rows": 1}', "origin.json": b"{}", "curve.json": b"[]"}


@pytest.fixture
def described(s3: Store, stored: str, tmp_path: Path) -> str:
    """Add the files that the hash of a release does not cover, and return the key prefix of the
    release."""
    commit_described(s3, stored, tmp_path / "described", DESCRIBED_FILES)
    return stored


def commit_described(s3: Store, prefix: str, folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)

    hashes = {name: sha256(data).hexdigest() for name, data in files.items()}
    record = json.loads(s3.get(f"{prefix}release.json"))
    commit_release(s3, prefix, folder, record | {"described": hashes})


def test_a_release_describes_the_files_of_the_process_that_committed_last(
    s3: Store, described: str, tmp_path: Path
) -> None:
    with Proxy(s3.endpoint or "") as proxy:

        def commit_another(write: Write) -> None:
            if write.path.endswith(f"{described}release.json") and not (tmp_path / "b").exists():
                commit_described(s3, described, tmp_path / "b", {"origin.json": b'{"b": 1}'})

        proxy.before = commit_another
        slow = Store(s3.bucket, proxy.url)
        commit_described(slow, described, tmp_path / "a", {"origin.json": b'{"a": 1}'})

    assert (tmp_path / "b").exists()
    assert read_described_file(s3, described.rstrip("/"), "origin.json") == b'{"a": 1}'


@pytest.mark.parametrize("name", DESCRIBED_FILES)
def test_a_file_outside_of_the_hash_is_verified(
    s3: Store, tmp_path: Path, described: str, name: str
) -> None:
    key = described.rstrip("/")
    assert read_described_file(s3, key, name) == DESCRIBED_FILES[name]

    s3.put(described + name, DESCRIBED_FILES[name] + b" ")
    with pytest.raises(DataError, match=f"{name} changed since the release"):
        read_described_file(s3, key, name)
    download(s3, described, tmp_path / "served")
    with pytest.raises(DataError, match=f"{name} changed since the release"):
        verify_artifact("champion", tmp_path / "served", "")


def test_a_hash_that_the_key_does_not_cover_replaces_none_that_it_covers(
    s3: Store, tmp_path: Path, described: str
) -> None:
    model_file = b'{"model": "another"}'
    record = json.loads(s3.get(f"{described}release.json"))
    del record["checksum"]
    record["described"]["model.json"] = sha256(model_file).hexdigest()
    s3.put(f"{described}release.json", json.dumps(record).encode())
    s3.put(f"{described}model.json", model_file)
    with pytest.raises(DataError, match=r"model\.json changed since the release"):
        read_verified_files(s3, described.rstrip("/"), ["model.json"])
    s3.download(described, tmp_path / "artifact")
    with pytest.raises(DataError, match=r"model\.json changed since the release"):
        verify_artifact("champion", tmp_path / "artifact", "")


def test_a_changed_field_of_the_record_is_found(s3: Store, tmp_path: Path, described: str) -> None:
    record = json.loads(s3.get(f"{described}release.json"))
    changed = record | {"provenance": {"git_sha": "0" * 40}}
    s3.put(f"{described}release.json", json.dumps(changed).encode())
    with pytest.raises(DataError, match=r"the sha256 of its fields is .*: it was changed"):
        download(s3, described, tmp_path / "a")


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"{}\n"),
        gzip.compress(b'{"request": [], "predictions": []}\n'),
        gzip.compress(b'{"request": {}, "predictions": null}\n'),
        gzip.compress(b'{"request": {}, "predictions": [], "numerics": 1}\n'),
        gzip.compress(b"[" * 100_000),
        gzip.compress(b"\xff\n"),
        gzip.compress(b"{}\n" * 100)[:-20],
        gzip.compress(random.Random(0).randbytes(1000))[:10] + b"\xff" * 100,
    ],
    # name the tests explicitly, because gzip stores the time, and all processes of a test run must
    # find the same tests
    ids=[
        "no-gzip",
        "no-fields",
        "request-is-a-list",
        "predictions-are-null",
        "numerics-is-a-number",
        "nested",
        "no-utf-8",
        "cut",
        "damaged",
    ],
)
def test_malformed_predictions_are_one_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / PREDICTIONS_FILE).write_bytes(content)
    with pytest.raises(DataError, match="does not contain predictions") as error:
        list(read_prediction_lines(tmp_path))
    assert len(error.value.lines) == 1


def test_an_endless_line_of_predictions_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_files, "MAX_BYTES", 1000)
    (tmp_path / PREDICTIONS_FILE).write_bytes(gzip.compress(b" " * 1001))
    with pytest.raises(DataError, match="a line has more than 1,000 bytes"):
        list(read_prediction_lines(tmp_path))


def test_a_change_of_code_that_the_workload_imports_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "serving_own.py": "import serving_post",
        "serving_post.py": "BIAS = 0",
        "serving_pack/__init__.py": "",
        "serving_pack/words.txt": "a",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))

    def digests() -> list[str]:
        for function in (code._hash_file, code._list_imports):
            # each run has its own process
            function.cache_clear()
        names = ("serving_own", "serving_pack")
        files = (tmp_path / "serving_own.py", tmp_path / "serving_pack/__init__.py")
        modules = [ModuleType(name) for name in names]
        for module, file in zip(modules, files, strict=True):
            module.__file__ = str(file)
        return [release_files.compute_code_digest(module) for module in modules]

    own_digest, pack_digest = digests()
    (tmp_path / "serving_post.py").write_text("BIAS = 1")
    (tmp_path / "serving_pack/words.txt").write_text("b")
    changed_own, changed_pack = digests()
    assert own_digest != changed_own
    assert pack_digest != changed_pack
    assert digests() == [changed_own, changed_pack]
