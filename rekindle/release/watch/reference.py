"""The histograms of a model's test rows, which its release stores for the comparison with
requests."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from argolocal.common.json_text import to_json
from rekindle.content.verified_release import REFERENCE
from rekindle.release.watch.scores import count_numbers

FEATURE_METRIC = "rekindle_model_feature"  # metric of a server: histograms of the features


def convert_instances(instances: Iterable[Any]) -> list[Any]:
    """Convert pydantic instances to plain values, which `count_numbers` expects."""
    return [
        instance.model_dump() if isinstance(instance, BaseModel) else instance
        for instance in instances
    ]


def record_reference(
    report: Path, predictions: Sequence[Any], instances: Sequence[Any] = ()
) -> None:
    """Write the histograms of the predictions and instances of the test rows to a report."""
    scores = count_numbers(predictions)
    counts = count_numbers(convert_instances(instances))
    record = {"rows": len(predictions), "scores": scores, "features": counts}
    report.mkdir(parents=True, exist_ok=True)
    (report / REFERENCE).write_text(to_json(record))
