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
from rekindle.release.predictor import check_json_serializable, open_predictor
from rekindle.release.release_files import link_files, list_serving_files, record_predictions
from rekindle.release.request_validation import parse_body
from rekindle.release.serve_config import DEFAULT_MAX_BATCH
from rekindle.release.watch.reference import record_reference
from rekindle.workload import Example

# maximum number of rows that a report contains for `verify`
MAX_REPLAYED_ROWS = 1000
ExampleColumn = Sequence[Any] | NDArray[Any]


@dataclass
class Examples:
    """The test rows by column: the workload's `examples` may return this object instead of yielding
    an Example for each row.

    A subclass may override only `score`, e.g. for rows that do not fit into single requests, and
    `report`, to extend the report.
    """

    truths: ExampleColumn
    instances: Sequence[dict[str, Any]] = ()
    groups: ExampleColumn | None = None
    baseline: ExampleColumn | None = None
    parts: ExampleColumn | None = None
    # warnings that are shown with the verdict of the gate
    warnings: list[str] = field(default_factory=list)
    # number of rows per call of `predict`; set by the engine
    max_batch: int = field(default=DEFAULT_MAX_BATCH, init=False)
    # device.describe_numerics of the process that scored the rows
    numerics: str = field(default="", init=False)
    # parsed requests, one per row
    _requests: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        columns = {
            column_name: getattr(self, column_name)
            for column_name in ("groups", "baseline", "parts")
        }
        for column_name, column in columns.items():
            if column is not None and len(column) != len(self):
                raise DataError(
                    f"the examples have {len(column)} {column_name} for {len(self)} truths: give"
                    " one for each."
                )

    def __len__(self) -> int:
        return len(self.truths)

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> "Examples":
        """Convert test rows to columns. An optional column without any value becomes None."""
        try:
            examples = [Example(*example_row) for example_row in rows]
        except TypeError as error:
            if not user_exceptions.is_raised_by_project(error):
                raise DataError(
                    f"`examples` gives no test rows ({error}): it must yield (instance, truth) or a"
                    " rekindle.Example."
                ) from error

            raise

        columns = {
            column_name: [getattr(example, column_name) for example in examples]
            for column_name in Example._fields
        }
        group_column, baseline_column, part_column = (
            None
            if all(column_value is None for column_value in columns[column_name])
            else columns[column_name]
            for column_name in ("group", "baseline", "part")
        )
        return cls(
            columns["truth"], columns["instance"], group_column, baseline_column, part_column
        )

    def score(self, model: Path, dataset: Path) -> ExampleColumn:
        """Return the predictions that a server of `model` would return for one request per row, in
        batches of fixed size and order.

        `dataset`: directory with dataset.json and state/ of the model's own dataset. Raises
        DataError if the model does not fit the rows.
        """
        with create_serving_folder(model, dataset) as release_folder:
            predictor = open_predictor(release_folder, self.max_batch)
            device.use_one_thread()
            self.numerics = getattr(predictor, "numerics", "")
            self._requests = self._requests or parse_instances(self, predictor.Request)
            request_batches = split_into_batches(self._requests, self.max_batch)
            answers = (
                answer
                for request_batch in request_batches
                for answer in predictor.predict(request_batch)
            )

            return [
                check_json_serializable(prediction, f"test row {row_number}")
                for row_number, [prediction] in enumerate(answers)
            ]

    def report(self, out: Path, predictions: dict[str, Any], evaluation: Evaluation) -> Evaluation:
        """Write the report of the evaluation into `out`, and return the evaluation, to which a
        subclass may add fields.

        The report must contain requests for `verify`, which `record_predictions` writes, and
        histograms of the candidate's predictions and instances for the comparison with its servers,
        which `record_reference` writes.
        """
        sampled_rows = sorted(
            random.Random(0).sample(range(len(self)), min(MAX_REPLAYED_ROWS, len(self)))
        )
        candidate_predictions = predictions["candidate"]

        requests = (
            (
                {"instances": [self.instances[row_number] for row_number in row_batch]},
                [candidate_predictions[row_number] for row_number in row_batch],
            )
            for row_batch in split_into_batches(sampled_rows)
        )

        record_predictions(out, requests, self.numerics if self.max_batch == 1 else "")
        record_reference(
            out, candidate_predictions, [request.instances[0] for request in self._requests]
        )

        return evaluation


def parse_instances(examples: Examples, request_type: type[BaseModel]) -> list[Any]:
    """Parse each test row as a request of the type `request_type`. Raises DataError for an invalid
    row."""
    return [
        _parse_row_request(request_type, row_number, examples.instances[row_number])
        for row_number in range(len(examples))
    ]


def _parse_row_request(request_type: type[BaseModel], row_number: int, instance: Any) -> Any:
    try:
        body = to_json({"instances": [instance]}).encode()
    except (TypeError, ValueError) as error:
        raise _make_row_error(row_number, f"{error}.".replace("instances[0].", "")) from error
    try:
        return parse_body(request_type, body)
    except DataError as error:
        raise _make_row_error(
            row_number, " ".join(error.lines).replace("instances[0].", "")
        ) from error


def _make_row_error(row_number: int, reason: str) -> DataError:
    return DataError(
        f"`examples` gives test row {row_number}, which is not a valid instance: {reason} It must"
        " yield a valid `Instance` and its truth."
    )


def split_into_batches(
    rows: Sequence[Any], batch_size: int = INSTANCES_PER_REQUEST
) -> Iterator[Sequence[Any]]:
    """Split the test rows into batches of `batch_size` rows."""
    return (
        rows[start_index : start_index + batch_size]
        for start_index in range(0, len(rows), batch_size)
    )


@contextmanager
def create_serving_folder(model_folder: Path, dataset_folder: Path) -> Iterator[Path]:
    """Yield a temporary folder with the files that a server loads: the files in `model_folder`, and
    dataset.json and state/ of `dataset_folder`. Raises DataError."""
    with TemporaryDirectory() as serving_folder:
        link_files(Path(serving_folder), list_serving_files(model_folder, dataset_folder))
        yield Path(serving_folder)
