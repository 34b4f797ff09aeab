"""The test rows of a dataset, with which models are evaluated."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import NDArray
from pydantic import BaseModel

from argolocal.common.json_text import to_json
from rekindle.errors import DataError
from rekindle.gate import Evaluation
from rekindle.project import user_exceptions
from rekindle.release import device
from rekindle.release.compare import INSTANCES_PER_REQUEST
from rekindle.release.predictor import check_json, open_predictor
from rekindle.release.release_files import link, list_serving_files, record_predictions
from rekindle.release.request_validation import parse
from rekindle.release.serve_config import MAX_BATCH
from rekindle.release.watch.reference import record_reference
from rekindle.workload import Example

MAX_REPLAYED_ROWS = 1000  # maximum number of rows that a report contains for `verify`
Column = Sequence[Any] | NDArray[Any]


@dataclass
class Examples:
    """The test rows by column: the workload's `examples` may return this object instead of yielding
    an Example for each row.

    A subclass may override only `score`, e.g. for rows that do not fit into single requests, and
    `report`, to extend the report.
    """

    truths: Column
    instances: Sequence[dict[str, Any]] = ()
    groups: Column | None = None
    baseline: Column | None = None
    parts: Column | None = None
    warnings: list[str] = field(default_factory=list)  # warnings to show with the verdict
    # number of rows per call of `predict`; set by the engine
    max_batch: int = field(default=MAX_BATCH, init=False)
    # device.describe_numerics of the process that scored the rows
    numerics: str = field(default="", init=False)
    _requests: list[Any] = field(default_factory=list, init=False)  # parsed requests, one per row

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in ("groups", "baseline", "parts")}
        for name, column in columns.items():
            if column is not None and len(column) != len(self):
                raise DataError(
                    f"the examples have {len(column)} {name} for {len(self)} truths: give one for"
                    " each."
                )

    def __len__(self) -> int:
        return len(self.truths)

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> "Examples":
        """Convert rows to columns. An optional column without any value becomes None."""
        try:
            examples = [Example(*row) for row in rows]
        except TypeError as error:
            if not user_exceptions.is_raised_by_project(error):
                raise DataError(
                    f"`examples` gives no test rows ({error}): it must yield (instance, truth) or a"
                    " rekindle.Example."
                ) from error

            raise

        columns = {
            name: [getattr(example, name) for example in examples] for name in Example._fields
        }
        group, baseline, part = (
            None if all(value is None for value in columns[name]) else columns[name]
            for name in ("group", "baseline", "part")
        )
        return cls(columns["truth"], columns["instance"], group, baseline, part)

    def score(self, model: Path, dataset: Path) -> Column:
        """Return the predictions that a server of `model` would return for one request per row, in
        batches of fixed size and order.

        `dataset`: directory with dataset.json and state/ of the model's own dataset. Raises
        DataError if the model does not fit the rows.
        """
        with create_serving_folder(model, dataset) as release:
            predictor = open_predictor(release, self.max_batch)
            device.use_one_thread()
            self.numerics = getattr(predictor, "numerics", "")
            self._requests = self._requests or parse_instances(self, predictor.Request)
            parts = split_into_batches(self._requests, self.max_batch)
            answers = (answer for requests in parts for answer in predictor.predict(requests))

            return [
                check_json(prediction, f"test row {row}")
                for row, [prediction] in enumerate(answers)
            ]

    def report(self, out: Path, predictions: dict[str, Any], evaluation: Evaluation) -> Evaluation:
        """Write the report of the evaluation into `out`, and return the evaluation; a subclass may
        add fields.

        The report must contain requests for `verify`, which `record_predictions` writes, and
        histograms of the candidate's predictions and instances for the comparison with its servers,
        which `record_reference` writes.
        """
        rows = sorted(random.Random(0).sample(range(len(self)), min(MAX_REPLAYED_ROWS, len(self))))
        candidate = predictions["candidate"]

        requests = (
            (
                {"instances": [self.instances[row] for row in batch]},
                [candidate[row] for row in batch],
            )
            for batch in split_into_batches(rows)
        )

        record_predictions(out, requests, self.numerics if self.max_batch == 1 else "")
        record_reference(out, candidate, [request.instances[0] for request in self._requests])

        return evaluation


def parse_instances(examples: Examples, kind: type[BaseModel]) -> list[Any]:
    """Parse each test row as a request of the type `kind`. Raises DataError for an invalid row."""
    return [_make_request(kind, row, examples.instances[row]) for row in range(len(examples))]


def _make_request(kind: type[BaseModel], row: int, instance: Any) -> Any:
    try:
        body = to_json({"instances": [instance]}).encode()
    except (TypeError, ValueError) as error:
        raise _invalid_row(row, f"{error}.".replace("instances[0].", "")) from error
    try:
        return parse(kind, body)
    except DataError as error:
        raise _invalid_row(row, " ".join(error.lines).replace("instances[0].", "")) from error


def _invalid_row(row: int, reason: str) -> DataError:
    return DataError(
        f"`examples` gives test row {row}, which is not a valid instance: {reason} It must yield a"
        " valid `Instance` and its truth."
    )


def split_into_batches(
    rows: Sequence[Any], size: int = INSTANCES_PER_REQUEST
) -> Iterator[Sequence[Any]]:
    """Split rows into batches of `size` rows."""
    return (rows[i : i + size] for i in range(0, len(rows), size))


@contextmanager
def create_serving_folder(model: Path, dataset: Path) -> Iterator[Path]:
    """Yield a temporary folder with the files that a server loads: those of `model`, and
    dataset.json and state/ of `dataset`. Raises DataError."""
    with TemporaryDirectory() as folder:
        link(Path(folder), list_serving_files(model, dataset))
        yield Path(folder)
