"""A workload: the module that defines one model and its data.

`steps.fraud` is the reference. Any importable module with these names is a workload. Importing it must be cheap (no
torch at its top), because every command reads its `Data` and `Model` sections to check a config.
"""

from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from pydantic import Field

from rekindle import project
from rekindle.sections import Section

if TYPE_CHECKING:
    import torch

    from rekindle.gate import Evaluation, Gate


class DataConfig(Section):
    """What every workload's `data:` section has; a workload adds its own fields."""

    source: str = Field(description="where the raw data is: a file, a folder, an s3:// URI, or simulate://SEED")
    tolerated_rejects: float = Field(
        default=0.001, ge=0, le=1, description="share of bad rows above which the run stops"
    )


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`: counts, the dataset's identity, and facts to record on the MLflow run."""

    digest: str
    rows: int
    rejected: int
    facts: dict[str, Any] = field(default_factory=dict)


class Dataset(Sized, Protocol):
    """Random access by sample index: `batch` is a pure function of its indices.

    A dataset with state of its own (a curriculum, the cursor of a stream) also defines
    `state_dict() -> dict` and `load_state_dict(dict)`: small, JSON, and
    equal in all workers between two steps, though each reads different batches. So it changes only in a third function,
    `advance(step)`, which every worker calls after update number `step` (from 1); any other change is lost when a step
    is repeated. The state is part of every snapshot and checkpoint, and is sent to joining workers.
    """

    facts: dict[str, Any]

    def batch(self, indices: "torch.Tensor") -> tuple["torch.Tensor", ...]:
        """The samples at `indices` (int64 [B]), each tensor with leading dimension B."""
        ...


class Scorer(Protocol):
    """A loaded model that answers requests and keeps no state between them."""

    def example(self) -> dict[str, Any]:
        """A valid request, for the server's warm-up and as documentation."""
        ...

    def score(self, request: Any) -> list[dict[str, Any]]:
        """One result per record, in the order of the request. Raises DataError for an invalid request."""
        ...


class Workload(Protocol):
    """The names a workload module must define.

    It may also define `replay(dataset, report, count, seed, max_batch, max_history)`, which yields (request, expected
    scores) of about `count` test records: then `verify` compares served with offline scores.
    """

    Data: type[DataConfig]
    Model: type[Section]

    def prepare(self, data: Any, out: Path) -> Prepared:
        """Raw data → a dataset directory at `out`. Raises DataError."""
        ...

    def dataset(self, path: Path, split: str) -> Dataset:
        """The samples of `split` ("train") of a dataset directory."""
        ...

    def model(self, section: Any, facts: dict[str, Any]) -> "torch.nn.Module":
        """A freshly initialised model (the caller has seeded torch)."""
        ...

    def loss(self, model: "torch.nn.Module", batch: tuple["torch.Tensor", ...]) -> "torch.Tensor":
        """Scalar mean loss of one micro-batch."""
        ...

    def evaluate(
        self, candidate: Path, champion: Path | None, dataset: Path, report: Path, gate: "Gate"
    ) -> "Evaluation":
        """Judge trained models on the dataset's test rows, and leave pictures in `report`. Raises DataError."""
        ...

    def scorer(self, release: Path) -> Scorer:
        """The server's half of the model, from a release directory."""
        ...


REQUIRED = ("Data", "Model", "prepare", "dataset", "model", "loss", "evaluate", "scorer")


def load(name: str) -> Workload:
    """The workload module called `name`. Raises ConfigError if it cannot be imported or lacks a name."""
    return cast(Workload, project.load(name, "workload", REQUIRED))
