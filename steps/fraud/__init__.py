"""The reference workload: a transformer that finds card fraud. What a workload must define: rekindle/workload.py.

Importing this is cheap; every part is imported when it is used. No submodule may be called like a function below:
importing it would replace the function.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.gate import Evaluation, Gate, Metric
from rekindle.workload import Dataset, Predictor, Prepared, Refreshed
from steps.fraud.config import Data, Model

if TYPE_CHECKING:
    import torch

__all__ = [
    "Data",
    "Model",
    "dataset",
    "evaluate",
    "loss",
    "metrics",
    "model",
    "predictor",
    "prepare",
    "refresh",
    "replay",
]

metrics = (Metric("ap"), Metric("auc"), Metric("cp100"))  # means over the test weeks, see steps/fraud/measures.py


def prepare(data: Data, out: Path) -> Prepared:
    """Raw transactions → the files of a dataset in `out`. Raises DataError."""
    from steps.fraud.data.shards import write_dataset

    return write_dataset(data, out)


def dataset(path: Path, split: str) -> Dataset:
    """The samples of `split` of a dataset directory."""
    from steps.fraud.data.sequences import open_dataset

    return open_dataset(path, split)


def model(section: Model, facts: dict[str, Any]) -> "torch.nn.Module":
    """A freshly initialised transformer."""
    from steps.fraud.transformer import build

    return build(section, facts)


def loss(model: "torch.nn.Module", batch: tuple["torch.Tensor", ...]) -> "torch.Tensor":
    """Mean loss over the positions of one micro-batch."""
    from steps.fraud.transformer import loss

    return loss(model, batch)


def evaluate(candidate: Path, champion: Path | None, dataset: Path, report: Path, gate: Gate) -> Evaluation:
    """Scores, metrics and pictures of trained models on the test weeks. Raises DataError."""
    from steps.fraud.protocol import evaluate

    return evaluate(candidate, champion, dataset, report, gate)


def predictor(release: Path) -> Predictor:
    """The server's half of the model."""
    from steps.fraud.scoring import FraudPredictor

    return FraudPredictor(release)


def refresh(release: Path, data: Data, out: Path) -> Refreshed | None:
    """The state of a released model, brought up to newer transactions. Raises DataError."""
    from steps.fraud.renewal import refresh

    return refresh(release, data, out)


def replay(dataset: Path, report: Path, count: int, seed: int) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """Requests for a sample of the test transactions, and the offline scores to expect."""
    from steps.fraud.replays import replay

    return replay(dataset, report, count, seed)
