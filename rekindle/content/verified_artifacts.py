"""Verify the input artifacts of a step before the step reads them."""

from pathlib import Path

from rekindle.content.dataset import FILE_LIST, verify_dataset
from rekindle.content.dataset_record import DATASET
from rekindle.content.verified_release import (
    RELEASE_RECORD,
    REMEDY,
    FileHashes,
    verify_release_files,
)
from rekindle.content.weights import verify_weights
from rekindle.documents import CHECKSUM, MODEL_FILE, InvalidDocument, read_file
from rekindle.errors import DataError

DATASET_INPUT = "dataset"
# field names by which the JSON files of a model, a dataset and a release are recognized
MODEL_FIELDS = ("sha256", "workload", CHECKSUM)
DATASET_FIELDS = ("rows", "rejected", "facts")
RELEASE_FIELDS = ("model_sha256", "workload", "files")


def verify_artifact(artifact_name: str, path: Path, expected_digest: str) -> None:
    """Raise DataError if an artifact is a dataset, a trained model or a release whose files were
    changed after they were written.

    `artifact_name`: name of the input. `expected_digest`: value of the step's input `digest`, which
    must be the digest of the artifact `dataset`; "" if the step does not have this input."""
    dataset_digest = expected_digest if artifact_name == DATASET_INPUT else ""
    # a release contains the list of its training dataset's files, but not the listed files
    is_release = artifact_name != DATASET_INPUT and _has_fields(
        path / RELEASE_RECORD, RELEASE_FIELDS
    )
    if is_release:
        _verify_release(path)

    is_dataset = (path / FILE_LIST).is_file() or _has_fields(path / DATASET, DATASET_FIELDS)
    if dataset_digest or (is_dataset and not is_release):
        verify_dataset(path, dataset_digest)
    if _has_fields(path / MODEL_FILE, MODEL_FIELDS):
        verify_weights(path)


def _verify_release(path: Path) -> None:
    """Raise DataError if a file of a release was changed. The files are compared with release.json.
    release.json itself is not verified, since its hash is part of the key of the release, which is
    unknown here."""
    try:
        release_record = read_file(FileHashes, path / RELEASE_RECORD, REMEDY)
    except InvalidDocument as error:
        raise DataError(str(error)) from error
    verify_release_files(path, {**release_record.described, **release_record.files}, str(path))


def _has_fields(file: Path, expected_fields: tuple[str, ...]) -> bool:
    """Return True if a file contains all field names in `expected_fields`, or all but one.

    A file of another program with the same file name lacks several of the field names; a damaged
    file may lack one field name.
    """
    try:
        file_content = file.read_bytes()
    except OSError:
        return False
    return (
        sum(f'"{name}"'.encode() in file_content for name in expected_fields)
        >= len(expected_fields) - 1
    )


def read_digest_input(step_inputs: object) -> str:
    """Return the value of a step's input `digest`; "" if the step does not have this input."""
    digest_value = getattr(step_inputs, "digest", "")
    if isinstance(digest_value, str):
        return digest_value
    return ""
