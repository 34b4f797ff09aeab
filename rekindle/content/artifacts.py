"""Verification of the artifacts that a step gets, before the step reads them."""

from pathlib import Path
from typing import Any

from rekindle.content.dataset import FILES, verify_dataset
from rekindle.content.release_files import RECORD
from rekindle.content.weights import WEIGHTS, verify_weights
from rekindle.documents import CHECKSUM, MODEL_FILE

DATASET_INPUT = "dataset"


def verify_artifact(name: str, path: Path, digest: str) -> None:
    """Raise DataError if an artifact is a dataset or a trained model whose files were changed after
    they were written.

    `name`: name of the input; `digest`: the input `digest` of the step, which the artifact
    `dataset` must have, or "".
    """
    promised_digest = digest if name == DATASET_INPUT else ""
    # a release has the list of the dataset that it was trained on, but not its files
    is_release = name != DATASET_INPUT and (path / RECORD).exists()

    is_dataset = (path / FILES).is_file() and not is_release
    if promised_digest or is_dataset:
        verify_dataset(path, promised_digest)
    if (path / WEIGHTS).is_file() and _is_described(path):
        verify_weights(path)


def _is_described(path: Path) -> bool:
    """Return True if a folder has the model.json of a trained model; files of other programs may
    have this name.

    The file may be damaged: two of three names suffice.
    """
    try:
        content = (path / MODEL_FILE).read_bytes()
    except OSError:
        return False
    return sum(f'"{name}"'.encode() in content for name in ("sha256", "workload", CHECKSUM)) > 1


def find_digest_input(inputs: Any) -> str:
    """Return the input `digest` of a step, or "" if the step does not have it."""
    value = getattr(inputs, "digest", "")
    if isinstance(value, str):
        return value
    return ""
