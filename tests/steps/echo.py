"""A workload whose scorer does what the request says, for tests of the server."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from rekindle.errors import DataError
from rekindle.gate import Metric
from rekindle.sections import Section
from rekindle.workload import DataConfig

Data, Model, metrics = DataConfig, Section, (Metric("loss"),)
prepare = dataset = model = loss = evaluate = None


class Scorer:
    def __init__(self, release: Path) -> None:
        self.words = (release / "state" / "words.txt").read_text()

    def example(self) -> dict[str, Any]:
        return {"transactions": [{"transaction_id": 0, "sleep": float(os.environ.get("ECHO_WARM_UP", 0))}]}

    def score(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        for row in request["transactions"]:
            time.sleep(row.get("sleep", 0))
            if "bad" in row:
                raise DataError(f"transactions[0].bad is {row['bad']}: it must not be there.")
            if "bug" in row:
                raise KeyError("a bug in the workload")
        loaded = sorted({"torch", "mlflow", "polars"} & sys.modules.keys())
        return [
            {"transaction_id": row["transaction_id"], "score": 0.5, "loaded": loaded} for row in request["transactions"]
        ]


def scorer(release: Path) -> Scorer:
    return Scorer(release)
