"""A workload: everything Rekindle must know about one model and its data, in one module.

`steps.fraud` is the reference. Another is any importable module with these names; importing it must be cheap
(no torch at its top), since the pipelines read its `Data` and `Model` sections to check a config.
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
    """What `prepare` made: counts, the dataset's identity, and facts worth showing on the run."""

    digest: str
    rows: int
    rejected: int
    facts: dict[str, Any] = field(default_factory=dict)


class Dataset(Sized, Protocol):
    """Random access by sample index: `batch` is a pure function of its indices.

    Unless the dataset keeps a state of its own (a curriculum, a stream's cursor). Then it also defines
    `state_dict() -> dict` and `load_state_dict(dict)`: small, JSON, and between two steps equal in all workers, though
    each asks for other batches. So the place for a change is a third function, `advance(step)`, called in every worker
    after update number `step` (from 1); whatever else changes is undone when a step is done again. The state travels
    with every snapshot and checkpoint, and to whoever joins.
    """

    facts: dict[str, Any]

    def batch(self, indices: "torch.Tensor") -> tuple["torch.Tensor", ...]:
        """The samples at `indices` (int64 [B]), each tensor with leading dimension B."""
        ...


class Scorer(Protocol):
    """A loaded model that answers requests; keeps nothing between them."""

    def example(self) -> dict[str, Any]:
        """A request that it answers: the server's warm-up, and what a newcomer sends first."""
        ...

    def score(self, request: Any) -> list[dict[str, Any]]:
        """One result a record of the request, in its order. Raises DataError for a request it cannot score."""
        ...


class Workload(Protocol):
    """The names a workload module must define.

    It may also define `replay(dataset, report, count, seed, max_batch, max_history)`, which yields (request, expected
    scores) of about `count` test records: then `verify` compares what is served with what was judged.
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
