"""Parse and validate the facts of a dataset that the readers of the dataset need."""

from pathlib import Path

from argolocal.common.json_text import to_json
from rekindle.documents import Document, parse_and_validate
from rekindle.errors import DataError
from rekindle.workload import read_dataset_facts


class Facts(Document):
    """The facts in dataset.json; times are in microseconds since the epoch."""

    features: list[str]
    first_time: int
    shards: list[int]
    train_start: int
    train_end: int
    label_delay_days: int
    test_weeks: list[tuple[int, int]]


def read_facts(dataset_folder: Path) -> Facts:
    """Return the facts of the dataset in a folder. Raises DataError."""
    try:
        return parse_and_validate(Facts, to_json(read_dataset_facts(dataset_folder)))
    except ValueError as error:
        raise DataError(
            f"{dataset_folder} is not a complete dataset ({error}). Run the step prepare again."
        ) from error
