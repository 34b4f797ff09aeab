"""The histograms of a model's test rows, which its release stores for the comparison with
requests."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from argolocal.common.json_text import to_json
from rekindle.content.verified_release import REFERENCE
from rekindle.release.watch.scores import count_numbers

# metric of a model server with histograms of the features
FEATURE_METRIC = "rekindle_model_feature"


def convert_instances(instances: Iterable[Any]) -> list[Any]:
    """Convert pydantic instances to plain values, which `count_numbers` expects."""
    return [
        instance.model_dump() if isinstance(instance, BaseModel) else instance
        for instance in instances
    ]


def record_reference(
    report_folder: Path, predictions: Sequence[Any], instances: Sequence[Any] = ()
) -> None:
    """Write the histograms of the predictions and instances of the test rows to a report."""
    score_counts = count_numbers(predictions)
    feature_counts = count_numbers(convert_instances(instances))
    reference_record = {
        "rows": len(predictions),
        "scores": score_counts,
        "features": feature_counts,
    }
    report_folder.mkdir(parents=True, exist_ok=True)
    (report_folder / REFERENCE).write_text(to_json(reference_record))
