"""Verify the input artifacts of a step before the step reads them."""

from pathlib import Path

from rekindle.content.dataset import FILE_LIST, verify_dataset
from rekindle.content.dataset_record import DATASET
from rekindle.content.verified_release import RELEASE_RECORD, REMEDY, FileHashes, reject_other_files
from rekindle.content.weights import verify_weights
from rekindle.documents import CHECKSUM, MODEL_FILE, InvalidDocument, read_file
from rekindle.errors import DataError

DATASET_INPUT = "dataset"
# field names by which the JSON files of a model, a dataset and a release are recognized
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
    # a release contains the list of its training dataset's files, but not these files
    is_release = name != DATASET_INPUT and _has_names(path / RELEASE_RECORD, RELEASE_NAMES)
    if is_release:
        _verify_release(path)

    has_list = (path / FILE_LIST).is_file() or _has_names(path / DATASET, DATASET_NAMES)
    if promised_digest or (has_list and not is_release):
        verify_dataset(path, promised_digest)
    if _has_names(path / MODEL_FILE, MODEL_NAMES):
        verify_weights(path)


def _verify_release(path: Path) -> None:
    """Raise DataError if a file of a release was changed. The files are compared with release.json.
    release.json itself is not verified, since its hash is part of the key of the release, which is
    unknown here."""
    try:
        record = read_file(FileHashes, path / RELEASE_RECORD, REMEDY)
    except InvalidDocument as error:
        raise DataError(str(error)) from error
    reject_other_files(path, {**record.files, **record.described}, str(path))


def _has_names(file: Path, names: tuple[str, ...]) -> bool:
    """Return True if a file contains all of `names`, or all but one.

    A file of another program with the same file name lacks several of these fields; a damaged file
    may lack one.
    """
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return sum(f'"{name}"'.encode() in content for name in names) >= len(names) - 1


def find_digest_input(inputs: object) -> str:
    """Return the input `digest` of a step, or "" if the step does not have it."""
    value = getattr(inputs, "digest", "")
    if isinstance(value, str):
        return value
    return ""
