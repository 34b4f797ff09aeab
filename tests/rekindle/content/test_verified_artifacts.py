"""A step fails before it reads a dataset or a model whose files were changed, also if the step
belongs to a user's own project."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rekindle import Prepared, project, record_dataset
from rekindle.content.dataset import FILE_LIST, verify_dataset
from rekindle.content.verified_artifacts import verify_artifact
from rekindle.content.verified_release import compute_content_hash
from rekindle.content.weights import verify_weights, weights_sha256
from rekindle.documents import encode_model_description
from rekindle.errors import DataError
from rekindle.step import main
from rekindle.storage import Store, file_sha256
from rekindle.training.training_state import load_weights
from tests.rekindle.serving.running import prefix_of, write_release

READER = '''
"""Reads."""
from rekindle import Artifact, StepInputs, StepOutputs

class Inputs(StepInputs):
    dataset: Artifact
    model: Artifact
    digest: str = ""

class Outputs(StepOutputs):
    pass

def run(inputs):
    print("the step has started")
    return Outputs()
'''


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "data set"
    (folder / "shards").mkdir(parents=True)
    (folder / "shards/ä.bin").write_bytes(b"numbers")
    (folder / "empty").touch()
    record_dataset(folder, Prepared(rows=3))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()

    tensors = {
        "a": torch.ones(2, 3),
        "scale": torch.tensor(3.0),
        "half": torch.ones(4, dtype=torch.bfloat16),
    }

    save_file(tensors, folder / "model.safetensors")

    description = {
        "sha256": weights_sha256(tensors),
        "workload": "w",
        "model": {"heads": 4, "rate": 1e-3},
    }

    (folder / "model.json").write_bytes(encode_model_description(description))

    return folder


def flip_bit(path: Path, index: int) -> None:
    """Change one bit of a file, but not its size."""
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


def write_one_digit(path: Path, text: bytes) -> None:
    """Change the last digit of a text in a file."""
    assert text in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(text, text[:-1] + b"2"))


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    r"shards/ä\.bin has the sha256 \w{64}, and \w{64} in": lambda dataset, model: flip_bit(
        dataset / "shards/ä.bin", 0
    ),
    r"dataset\.json has the sha256 \w{64}, and \w{64} in": lambda dataset, model: flip_bit(
        dataset / "dataset.json", -4
    ),
    "shards/more is not in": lambda dataset, model: (dataset / "shards/more").touch(),
    "empty of .* is missing": lambda dataset, model: (dataset / "empty").unlink(),
    "has 1 bytes, and 0 in": lambda dataset, model: (dataset / "empty").write_text("x"),
    "linked is not a file": lambda dataset, model: (dataset / "linked").symlink_to(model),
    "broken is not a file": lambda dataset, model: (dataset / "broken").symlink_to("nowhere"),
    "pipe is not a file": lambda dataset, model: os.mkfifo(dataset / "pipe"),
    "new is not a file": lambda dataset, model: (dataset / "shards/new").mkdir(),
    "new/deep is not a file": lambda dataset, model: (dataset / "new/deep").mkdir(parents=True),
    "hashes of its files is missing": lambda dataset, model: (dataset / FILE_LIST).unlink(),
    "is not a list of files": lambda dataset, model: (dataset / FILE_LIST).write_text("[]"),
    "the sha256 of its fields is": lambda dataset, model: write_one_digit(
        model / "model.json", b'"heads": 4'
    ),
    r"model\.safetensors is missing": lambda dataset, model: (model / "model.safetensors").unlink(),
    "model.json is malformed": lambda dataset, model: flip_bit(model / "model.json", 0),
    r"model\.safetensors have the sha256 \w{64}, but model\.json has": lambda dataset, model: (
        flip_bit(model / "model.safetensors", -1)
    ),
}


@pytest.fixture
def run_reader(
    tmp_path: Path, dataset: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    name = f"reader_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(READER)
    monkeypatch.setenv(project.PATH_VARIABLE, str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *flags: main([name, f"--dataset={dataset}", f"--model={model}", *flags])


@pytest.mark.parametrize("message", CHANGES)
def test_a_step_of_ones_own_does_not_get_changed_files(
    message: str,
    dataset: Path,
    model: Path,
    run_reader: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_reader() == 0
    assert "the step has started" in capfd.readouterr().out
    CHANGES[message](dataset, model)
    assert run_reader() == DataError.exit_code
    said = capfd.readouterr()
    [line] = said.err.splitlines()
    with pytest.raises(DataError, match=f"error: .*{message}.* --no-cache"):
        raise DataError(line)
    assert "started" not in said.out


def test_the_digest_that_a_step_gets_is_compared_with_the_files(
    dataset: Path, run_reader: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    digest = record_dataset(dataset, Prepared(rows=3))
    assert run_reader(f"--digest={digest}") == 0
    assert record_dataset(dataset, Prepared(rows=4)) != digest, "the digest covers the facts"
    assert run_reader(f"--digest={digest}") == DataError.exit_code
    (dataset / FILE_LIST).unlink()
    assert run_reader(f"--digest={digest}") == DataError.exit_code
    errors = capfd.readouterr().err.splitlines()
    assert f"but the digest of the dataset is {digest}" in errors[0]
    assert f"{FILE_LIST} with the hashes of its files is missing" in errors[1]


def test_equal_files_have_the_same_digest_in_another_folder(dataset: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dataset, tmp_path / "copy")
    assert record_dataset(copy, Prepared(rows=3)) == record_dataset(dataset, Prepared(rows=3))
    (copy / "empty").rename(copy / "other")
    assert record_dataset(copy, Prepared(rows=3)) != record_dataset(dataset, Prepared(rows=3))


def test_an_empty_folder_of_a_step_is_not_part_of_its_dataset(dataset: Path) -> None:
    digest = record_dataset(dataset, Prepared(rows=3))
    (dataset / "rejected/2026").mkdir(parents=True)
    (dataset / "shards/none").mkdir()
    assert record_dataset(dataset, Prepared(rows=3)) == digest
    verify_dataset(dataset, digest)
    assert sorted(path.name for path in dataset.iterdir() if path.is_dir()) == ["shards"]


def test_a_file_that_changes_after_its_verification_is_verified_again(dataset: Path) -> None:
    verify_dataset(dataset)
    flip_bit(dataset / "shards/ä.bin", 0)
    with pytest.raises(DataError):
        verify_dataset(dataset)
    flip_bit(dataset / "shards/ä.bin", 0)
    verify_dataset(dataset)


def test_the_sha256_of_a_model_may_be_that_of_its_file(model: Path) -> None:
    """Programs of another framework need not know how tensors are hashed, and may write weights
    that are not tensors."""
    for content in ((model / "model.safetensors").read_bytes(), b"trees"):
        (model / "model.safetensors").write_bytes(content)
        sha256 = file_sha256(model / "model.safetensors")
        (model / "model.json").write_text(json.dumps({"sha256": sha256, "workload": "w"}))
        verify_weights(model)
        flip_bit(model / "model.safetensors", -1)
        with pytest.raises(DataError, match=f"but model.json has {sha256}"):
            verify_weights(model)


def test_files_of_other_programs_are_not_taken_for_a_model(
    model: Path, run_reader: Callable[..., int]
) -> None:
    for text in ("{}", "not JSON", '{"layers": 3}'):
        (model / "model.json").write_text(text)
        assert run_reader() == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model.safetensors",
            r"model\.safetensors have the sha256 \w{64}, but model\.json has \S{64}",
        ),
        ("model.json", r"model\.json is malformed|but model\.json has \S{64}"),
    ],
)
def test_a_training_does_not_start_from_changed_weights(
    s3: Store, model: Path, name: str, message: str
) -> None:
    s3.upload(model, f"start-{name}")
    network = torch.nn.Module()
    network.a = torch.nn.Parameter(torch.zeros(2, 3))
    load_weights(network, s3, f"start-{name}/")
    assert network.a.sum() == 6

    flip_bit(model / name, 15 if name == "model.json" else -1)
    s3.upload(model, f"start-{name}")
    with pytest.raises(DataError, match=message):
        load_weights(network, s3, f"start-{name}")


def test_a_training_does_not_start_from_a_release_without_the_hash_of_its_key(
    s3: Store, model: Path
) -> None:
    def upload() -> dict[str, str]:
        hashes = {name: file_sha256(model / name) for name in ("model.json", "model.safetensors")}
        (model / "release.json").write_text(json.dumps({"files": hashes}))
        return hashes

    key = f"releases/start-{model.parent.name}/{compute_content_hash(upload())}"
    s3.upload(model, key)
    network = torch.nn.Module()
    network.a = torch.nn.Parameter(torch.zeros(2, 3))
    load_weights(network, s3, f"{key}/")
    assert network.a.sum() == 6

    tensors = {"a": torch.zeros(2, 3)}
    save_file(tensors, model / "model.safetensors")
    (model / "model.json").write_bytes(
        encode_model_description({"sha256": weights_sha256(tensors), "workload": "w"})
    )
    s3.upload(model, key)

    with pytest.raises(DataError, match=r"model\.json changed since the release"):
        load_weights(network, s3, key)

    upload()
    s3.upload(model, key)
    with pytest.raises(DataError, match="was changed since the release: the hash of its files is"):
        load_weights(network, s3, key)


def test_a_dataset_is_verified_although_it_has_a_record_of_a_release(
    dataset: Path, run_reader: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    (dataset / "release.json").write_text("{}")
    assert run_reader() == DataError.exit_code
    assert "release.json is not in" in capfd.readouterr().err


def test_a_dataset_with_a_link_to_a_folder_is_not_recorded(dataset: Path, tmp_path: Path) -> None:
    (dataset / "linked").symlink_to(tmp_path)
    with pytest.raises(DataError, match="linked is not a file: a dataset has only files"):
        record_dataset(dataset, Prepared(rows=3))


RELEASE_CHANGES: dict[str, Callable[[Path], object]] = {
    r"state/words\.txt changed since the release": lambda folder: (
        folder / "state/words.txt"
    ).write_text("other"),
    r"state/more\.txt was added": lambda folder: (folder / "state/more.txt").touch(),
    "linked was added": lambda folder: (folder / "linked").symlink_to(folder / "state"),
    r"dataset\.json is missing": lambda folder: (folder / "dataset.json").unlink(),
    r"release\.json is malformed": lambda folder: flip_bit(folder / "release.json", 0),
}


@pytest.mark.parametrize("message", RELEASE_CHANGES)
def test_a_step_of_ones_own_does_not_get_a_changed_release(
    s3: Store, tmp_path: Path, message: str
) -> None:
    folder = tmp_path / "release"
    prefix = prefix_of(tmp_path.name)
    write_release(s3, prefix)
    s3.download(prefix, folder)
    verify_artifact("champion", folder, "")

    RELEASE_CHANGES[message](folder)
    with pytest.raises(DataError, match=message):
        verify_artifact("champion", folder, "")
