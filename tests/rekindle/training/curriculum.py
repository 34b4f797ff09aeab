"""The toy workload with a data loader that keeps a state of its own: what a batch holds depends on all steps before."""

from pathlib import Path
from typing import Any

from tests.rekindle.training import toy
from tests.rekindle.training.toy import Data, Model, examples, loss, metrics, model, predictor, prepare

__all__ = ["Data", "Model", "examples", "loss", "metrics", "model", "predictor", "prepare"]


class Numbers(toy.Numbers):
    shift, asked = 1, 0

    def batch(self, indices: Any) -> tuple[Any, ...]:
        self.asked += 1  # as long as the step is not agreed on
        rows, wanted = super().batch(indices)
        return rows * (1 + self.shift / 1000), wanted

    def advance(self, step: int) -> None:
        self.shift, self.asked = (31 * self.shift + step) % 997, 0

    def state_dict(self) -> dict[str, int]:
        assert self.asked == 0
        return {"shift": self.shift}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shift, self.asked = state["shift"], 0


def dataset(path: Path, split: str) -> Numbers:
    return Numbers(path)
