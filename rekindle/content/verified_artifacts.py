"""Verification of the artifacts that a step gets, before the step reads them."""

from pathlib import Path
from typing import Any

from rekindle.content.dataset import FILES, verify_dataset
from rekindle.content.dataset_record import DATASET
from rekindle.content.verified_release import RECORD, REMEDY, FileHashes, reject_other_files
from rekindle.content.weights import verify_weights
from rekindle.documents import CHECKSUM, MODEL_FILE, InvalidDocument, read_file
from rekindle.errors import DataError

DATASET_INPUT = "dataset"
# names in the documents
MODEL_NAMES = ("sha256", "workload", CHECKSUM)
DATASET_NAMES = ("rows", "rejected", "facts")
RELEASE_NAMES = ("model_sha256", "workload", "files")


def verify_artifact(name: str, path: Path, digest: str) -> None:
    """Raise DataError if an artifact is a dataset, a trained model or a release whose files were
    changed after they were written.

    `name`: name of the input; `digest`: the input `digest` of the step, which the artifact
    `dataset` must have, or "".
    """
    promised_digest = digest if name == DATASET_INPUT else ""
    # a release has the list of the dataset that it was trained on, but not its files
    is_release = name != DATASET_INPUT and _has_names(path / RECORD, RELEASE_NAMES)
    if is_release:
        _verify_release(path)

    has_list = (path / FILES).is_file() or _has_names(path / DATASET, DATASET_NAMES)
    if promised_digest or (has_list and not is_release):
        verify_dataset(path, promised_digest)
    if _has_names(path / MODEL_FILE, MODEL_NAMES):
        verify_weights(path)


def _verify_release(path: Path) -> None:
    """Raise DataError if a file of a release was changed. The key with its hash is unknown."""
    try:
        record = read_file(FileHashes, path / RECORD, REMEDY)
    except InvalidDocument as error:
        raise DataError(str(error)) from error
    reject_other_files(path, {**record.files, **record.described}, str(path))


def _has_names(file: Path, names: tuple[str, ...]) -> bool:
    """Return True if a file has all names of a document but one; a file of another program may have
    the same name.

    The file may be damaged, so one may be missing.
    """
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return sum(f'"{name}"'.encode() in content for name in names) >= len(names) - 1


def find_digest_input(inputs: Any) -> str:
    """Return the input `digest` of a step, or "" if the step does not have it."""
    value = getattr(inputs, "digest", "")
    if isinstance(value, str):
        return value
    return ""
