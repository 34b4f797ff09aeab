"""The toy workload with a stateful data loader: a batch depends on all previous steps."""

from pathlib import Path
from typing import Any

from tests.rekindle.training import toy
from tests.rekindle.training.toy import (
    Data,
    Model,
    examples,
    loss,
    metrics,
    model,
    predictor,
    prepare,
)

__all__ = ["Data", "Model", "examples", "loss", "metrics", "model", "predictor", "prepare"]


class Numbers(toy.Numbers):
    shift = 1
    requests = 0

    def batch(self, indices: Any) -> tuple[Any, ...]:
        # these requests belong to a step that is not finished
        self.requests += 1
        rows, targets = super().batch(indices)
        return rows * (1 + self.shift / 1000), targets

    def advance(self, step: int) -> None:
        self.shift = (31 * self.shift + step) % 997
        self.requests = 0

    def state_dict(self) -> dict[str, int]:
        assert self.requests == 0
        return {"shift": self.shift}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shift = state["shift"]
        self.requests = 0


def dataset(path: Path, split: str) -> Numbers:
    return Numbers(path)
