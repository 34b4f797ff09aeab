"""The histograms of a model's test rows, recorded with its release: what its servers see is compared with them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rekindle.release.watch.scores import counted

REFERENCE = "reference.json"  # of a report and of a release
FEATURES = "rekindle_model_feature"  # metric of a server


def features(instances: Iterable[Any]) -> list[Any]:
    """What is counted of parsed instances: a server and an evaluation must see the same."""
    return [instance.model_dump() if isinstance(instance, BaseModel) else instance for instance in instances]


def record_reference(report: Path, predictions: Sequence[Any], instances: Sequence[Any] = ()) -> None:
    """Write the histograms of the predictions for test rows, and of their instances, into a report."""
    record = {"rows": len(predictions), "scores": counted(predictions), "features": counted(features(instances))}
    report.mkdir(parents=True, exist_ok=True)
    (report / REFERENCE).write_text(json.dumps(record))
