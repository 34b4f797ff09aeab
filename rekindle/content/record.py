"""The file `dataset.json` of a dataset or a release: facts that models need, and the digest of a release's dataset."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rekindle.content.dataset import read_digest
from rekindle.errors import DataError

DATASET = "dataset.json"


class Record(BaseModel):
    """The content of dataset.json."""

    facts: dict[str, Any]
    digest: str = ""  # of the dataset that the model was trained on, if the file is not in this dataset


def read_record(path: Path) -> Record:
    """Return the content of dataset.json in a folder. Raises DataError."""
    try:
        return Record.model_validate_json((path / DATASET).read_bytes())
    except (OSError, ValueError) as error:
        detail = " ".join(str(error).split())
        raise DataError(f"{path} is not a complete dataset ({DATASET}: {detail}): prepare it again.") from error


def dataset_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a dataset or release directory. Raises DataError."""
    return read_record(path).facts


def digest_of(path: Path) -> str:
    """Return the digest of a dataset, or of a release's training dataset. Raises DataError."""
    return read_record(path).digest or read_digest(path)


def data_until(path: Path) -> str:
    """Return the fact `data_until` of a dataset or release directory, or ""."""
    return dataset_facts(path).get("data_until", "") if (path / DATASET).exists() else ""
