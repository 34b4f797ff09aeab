"""The test rows of a dataset, on which a candidate and the champion are judged."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import NDArray

from rekindle.errors import CodeError, DataError
from rekindle.gate import Evaluation
from rekindle.release.compare import TOGETHER
from rekindle.release.files import link, record_predictions, serving_files
from rekindle.release.predictor import open_predictor
from rekindle.release.validation import parse
from rekindle.release.watch.reference import record_reference
from rekindle.workload import Example

REPLAYED = 1000  # rows that `verify` can replay, at most
Column = Sequence[Any] | NDArray[Any]


@dataclass
class Examples:
    """The test rows by column: all that `examples` gives, in place of one Example after the other.

    A subclass says how rows are scored that no single request holds (`score`), and what else the report shows
    (`report`); these two may be replaced, and nothing else.
    """

    truths: Column
    instances: Sequence[dict[str, Any]] = ()
    groups: Column | None = None
    baseline: Column | None = None
    parts: Column | None = None
    warnings: list[str] = field(default_factory=list)  # shown with the verdict
    _requests: list[Any] = field(default_factory=list, init=False)  # parsed, one for each row

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in ("groups", "baseline", "parts")}
        for name, column in columns.items():
            if column is not None and len(column) != len(self):
                raise DataError(f"the examples have {len(column)} {name} for {len(self)} truths: give one each.")

    def __len__(self) -> int:
        return len(self.truths)

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> "Examples":
        """The columns of `rows`; None for one that says nothing."""
        examples = [Example(*row) for row in rows]
        columns = {name: [getattr(example, name) for example in examples] for name in Example._fields}
        group, baseline, part = (
            None if all(value is None for value in columns[name]) else columns[name]
            for name in ("group", "baseline", "part")
        )
        return cls(columns["truth"], columns["instance"], group, baseline, part)

    def score(self, model: Path, origin: Path) -> Column:
        """What a server of `model` answers for each row, one request each; `origin` has its dataset.json and state/.

        Raises DataError if the model does not fit.
        """
        import torch

        torch.set_num_threads(1)  # as a server does by default: small layers on several threads of a busy machine crawl
        with servable(model, origin) as release:
            predictor = open_predictor(release)
            self._requests = self._requests or [self._request(predictor.Request, row) for row in range(len(self))]
            parts = (predictor.predict(requests) for requests in batches(self._requests))
            return [check_json(prediction) for part in parts for [prediction] in part]

    def report(self, out: Path, predictions: dict[str, Any], evaluation: Evaluation) -> Evaluation:
        """Write what the evaluation leaves into `out`; gives the evaluation, to which more may be added.

        The least: requests that `verify` replays (`record_predictions`), and histograms of the candidate's predictions
        and of its instances, with which its servers are compared (`record_reference`).
        """
        rows = sorted(random.Random(0).sample(range(len(self)), min(REPLAYED, len(self))))
        candidate = predictions["candidate"]
        parts = batches(rows)
        requests = (
            ({"instances": [self.instances[row] for row in part]}, [candidate[row] for row in part]) for part in parts
        )
        record_predictions(out, requests)
        record_reference(out, candidate, [request.instances[0] for request in self._requests])
        return evaluation

    def _request(self, kind: Any, row: int) -> Any:
        try:
            return parse(kind, json.dumps({"instances": [self.instances[row]]}).encode())
        except (DataError, TypeError) as error:
            fault = str(error).replace("instances[0].", "")
            raise DataError(
                f"`examples` gives a test row {row} that no client could send: {fault} It must yield what `Instance` "
                "accepts, and the truth beside it."
            ) from error


def batches(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The rows, as many at a time as a request has when servers are verified."""
    return (rows[at : at + TOGETHER] for at in range(0, len(rows), TOGETHER))


@contextmanager
def servable(model: Path, origin: Path) -> Iterator[Path]:
    """A folder with what a server loads: the model, and the dataset.json and state/ of `origin`. Raises DataError."""
    with TemporaryDirectory() as folder:
        link(Path(folder), serving_files(model, origin))
        yield Path(folder)


def check_json(prediction: Any) -> Any:
    """The prediction. Raises CodeError that names the type of one that is not JSON."""
    try:
        json.dumps(prediction)
    except (TypeError, ValueError) as error:
        raise CodeError(
            f"`predict` gave a prediction that is not JSON ({error}): it must give numbers, text, lists and objects; "
            "`.tolist()` and `.item()` make them of a tensor."
        ) from error
    return prediction
