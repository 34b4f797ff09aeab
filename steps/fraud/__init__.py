"""The reference workload: a transformer that finds card fraud. What a workload must define: rekindle/workload.py.

Importing this is cheap; every part is imported when it is used. No submodule may be called like a function below:
importing it would replace the function.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.gate import Metric
from rekindle.workload import Dataset, Predictor, Prepared, Refreshed
from steps.fraud.config import Data, Model

if TYPE_CHECKING:
    import torch

    from rekindle.release.examples import Examples

__all__ = [
    "Data",
    "Model",
    "dataset",
    "examples",
    "loss",
    "metrics",
    "model",
    "predictor",
    "prepare",
    "refresh",
]


def ap(scores: Any, truths: Any) -> float:
    """Average precision; a truth is (label, card, day)."""
    from steps.fraud.measures import average_precision

    return average_precision(scores, truths[:, 0])


def weighted_ap(scores: Any, truths: Any, card: Any, draws: Any) -> Any:
    """The same of many draws of the cards: one fraudster makes many transactions."""
    from steps.fraud.measures import weighted_ap

    return weighted_ap(scores, truths[:, 0], card, draws)


def auc(scores: Any, truths: Any) -> float:
    """Area under the ROC curve."""
    from steps.fraud.measures import roc_auc

    return roc_auc(scores, truths[:, 0])


def cp100(scores: Any, truths: Any) -> float:
    """Share of frauds among the 100 cards that an investigator would call each day."""
    from steps.fraud.measures import card_precision

    return card_precision(scores, *truths.T)


metrics = (Metric("ap", ap, weighted=weighted_ap), Metric("auc", auc), Metric("cp100", cp100))  # means over test weeks


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


def examples(path: Path, champion: dict[str, Any] | None) -> "Examples":
    """The test weeks; those that a champion has not seen. Raises DataError."""
    from steps.fraud.protocol import open_examples

    return open_examples(path, champion)


def predictor(release: Path) -> Predictor:
    """The server's half of the model."""
    from steps.fraud.scoring import FraudPredictor

    return FraudPredictor(release)


def refresh(release: Path, data: Data, out: Path) -> Refreshed | None:
    """The state of a released model, brought up to newer transactions. Raises DataError."""
    from steps.fraud.renewal import refresh

    return refresh(release, data, out)
