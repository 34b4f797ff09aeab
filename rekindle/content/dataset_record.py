"""The file `dataset.json` of a dataset or release: the facts that models need and, in a release,
the digest of the dataset."""

from pathlib import Path
from typing import Any

from rekindle.content.dataset import read_digest
from rekindle.documents import DatasetFile, InvalidDocument, read_file
from rekindle.errors import DataError

DATASET = "dataset.json"


def read_dataset_record(path: Path) -> DatasetFile:
    """Return the content of dataset.json in a folder. Raises DataError."""
    try:
        return read_file(DatasetFile, path / DATASET)
    except InvalidDocument as error:
        raise DataError(f"{path} is not a complete dataset: {error} Prepare it again.") from error


def read_dataset_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a dataset or release directory. Raises DataError."""
    return dict(read_dataset_record(path).facts)


def read_dataset_digest(path: Path) -> str:
    """Return the digest of a dataset or, for a release, of the dataset that it was trained on.
    Raises DataError."""
    return read_dataset_record(path).digest or read_digest(path)


def read_data_until(path: Path) -> str:
    """Return the fact `data_until` of a dataset or release directory, or ""."""
    if (path / DATASET).exists():
        return str(read_dataset_facts(path).get("data_until", ""))
    return ""
