"""Histograms of a model's test rows, stored with its release for the comparison with requests."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from argolocal.common.json_text import to_json
from rekindle.content.verified_release import REFERENCE
from rekindle.release.watch.scores import count_numbers

FEATURE_METRIC = "rekindle_model_feature"  # metric of a server: histograms of the features


def features(instances: Iterable[Any]) -> list[Any]:
    """Convert parsed instances to the values that servers and evaluations count."""
    return [
        instance.model_dump() if isinstance(instance, BaseModel) else instance
        for instance in instances
    ]


def record_reference(
    report: Path, predictions: Sequence[Any], instances: Sequence[Any] = ()
) -> None:
    """Write the histograms of the test rows' predictions and instances into a report."""
    scores = count_numbers(predictions)
    counts = count_numbers(features(instances))
    record = {"rows": len(predictions), "scores": scores, "features": counts}
    report.mkdir(parents=True, exist_ok=True)
    (report / REFERENCE).write_text(to_json(record))
