"""The reference workload: a transformer and boosted trees detect card fraud. rekindle/workload.py
describes the functions of a workload.

Heavy modules are imported only when a function needs them. A submodule must not have the same name
as a function in this module, because importing the submodule would replace the function.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.families import Fitted
from rekindle.gate import Metric
from rekindle.workload import Dataset, Predictor, Prepared, Refreshed
from steps.fraud.fraud_config import Data, Model

if TYPE_CHECKING:
    import torch

    from rekindle.release.examples import Examples

__all__ = [
    "Data",
    "Model",
    "dataset",
    "examples",
    "families",
    "loss",
    "metrics",
    "predictor",
    "prepare",
    "refresh",
]


def ap(scores: Any, truths: Any) -> float:
    """Return the average precision. `truths`: array with the columns label, card and day."""
    from steps.fraud.ranking import average_precision

    return average_precision(scores, truths[:, 0])


def weighted_ap(scores: Any, truths: Any, card: Any, draws: Any) -> Any:
    """Return the average precision for each bootstrap resample. Whole cards are resampled, because
    the transactions of a card are not independent."""
    from steps.fraud.ranking import weighted_ap

    return weighted_ap(scores, truths[:, 0], card, draws)


def auc(scores: Any, truths: Any) -> float:
    """Return the area under the ROC curve."""
    from steps.fraud.ranking import roc_auc

    return roc_auc(scores, truths[:, 0])


def cp100(scores: Any, truths: Any) -> float:
    """Return the card precision@100: the fraction of compromised cards among the 100 cards that are
    checked each day."""
    from steps.fraud.ranking import card_precision

    return card_precision(scores, *truths.T)


# each metric is the mean of its values for the test weeks
metrics = (
    Metric(
        "ap",
        ap,
        weighted=weighted_ap,
        description="average precision: area under the curve of precision over recall",
    ),
    Metric("auc", auc, description="area under the ROC curve"),
    Metric(
        "cp100",
        cp100,
        description="share of compromised cards among the 100 most suspicious cards of a day",
    ),
)


def prepare(data: Data, out: Path) -> Prepared:
    """Write the dataset of the raw transactions to `out`. Raises DataError."""
    from steps.fraud.data.shards import write_dataset

    return write_dataset(data, out)


def dataset(path: Path, split: str) -> Dataset:
    """Open the samples of `split` of a dataset directory."""
    from steps.fraud.data.sequences import open_dataset

    return open_dataset(path, split)


def trees(section: Model, facts: dict[str, Any]) -> "torch.nn.Module":
    """Build the model of the boosted trees, which `prepare` has fitted."""
    from steps.fraud.models import build

    return build("trees", section, facts)


def transformer(section: Model, facts: dict[str, Any]) -> "torch.nn.Module":
    """Build an untrained transformer."""
    from steps.fraud.models import build

    return build("transformer", section, facts)


families = {"trees": Fitted(trees, lambda model, samples: None), "transformer": transformer}


def loss(model: "torch.nn.Module", batch: tuple["torch.Tensor", ...]) -> "torch.Tensor":
    """Return the mean loss over the positions of one micro-batch."""
    from steps.fraud.models import loss

    return loss(model, batch)


def examples(path: Path, champion: dict[str, Any] | None) -> "Examples":
    """Open the test weeks. If a champion exists, open only the weeks that it was not trained on.
    Raises DataError."""
    from steps.fraud.handbook_protocol import open_examples

    return open_examples(path, champion)


def predictor(release: Path) -> Predictor:
    """Load a release for scoring requests."""
    from steps.fraud.scoring import FraudPredictor

    return FraudPredictor(release)


def refresh(release: Path, data: Data, out: Path) -> Refreshed | None:
    """Update the serving state of a released model with newer transactions. Raises DataError."""
    from steps.fraud.renewal import refresh

    return refresh(release, data, out)
