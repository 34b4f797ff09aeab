"""Parse and validate the facts of a dataset that its readers need."""

from pathlib import Path

from argolocal.common.json_text import to_json
from rekindle.documents import Document, validate
from rekindle.errors import DataError
from rekindle.workload import dataset_facts


class Facts(Document):
    """The facts in dataset.json; times are in microseconds since the epoch."""

    features: list[str]
    first_time: int
    shards: list[int]
    train_start: int
    train_end: int
    label_delay_days: int
    test_weeks: list[tuple[int, int]]


def read_facts(path: Path) -> Facts:
    """Return the facts of the dataset in a folder. Raises DataError."""
    try:
        return validate(Facts, to_json(dataset_facts(path)))
    except ValueError as error:
        raise DataError(
            f"{path} is not a complete dataset ({error}). Run the step prepare again."
        ) from error
