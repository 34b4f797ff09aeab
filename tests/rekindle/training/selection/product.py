"""A workload with two families: the product of two numbers, predicted by a fitted line or by a
network."""

from typing import Any

from pydantic import BaseModel

from rekindle import DataConfig as Data
from rekindle import Example, Fitted, Metric, Prepared, Section

__all__ = ["Data"]


class Model(Section):
    hidden: int = 16


class Instance(BaseModel):
    x: float
    y: float


def rmse(predictions: Any, truths: Any) -> float:
    return ((predictions - truths) ** 2).mean() ** 0.5


metrics = (Metric("rmse", rmse, better="lower"),)


def prepare(data: Any, out: Any) -> Prepared:
    import numpy as np

    generator = np.random.default_rng(3)
    numbers = generator.normal(size=(600, 2))
    rows = np.column_stack([numbers, numbers.prod(1) + 0.1 * generator.normal(size=600)]).astype(
        "float32"
    )
    np.save(out / "train.npy", rows[:500])
    np.save(out / "test.npy", rows[500:])
    return Prepared(rows=len(rows))


class dataset:
    def __init__(self, path: Any, split: str) -> None:
        import numpy as np
        import torch

        self.rows = torch.from_numpy(np.load(path / f"{split}.npy"))

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Any) -> Any:
        return self.rows[indices, :-1], self.rows[indices, -1]


def network(section: Model, facts: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(2, section.hidden), nn.ReLU(), nn.Linear(section.hidden, 1), nn.Flatten(0)
    )


def line(section: Model, facts: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))


def fit_line(model: Any, samples: Any) -> None:
    import torch

    inputs, targets = samples.batch(torch.arange(len(samples)))
    # the columns are independent
    centred = inputs - inputs.mean(0)
    model[0].weight.copy_((centred * targets[:, None]).sum(0) / centred.square().sum(0))
    model[0].bias.copy_(targets.mean() - (model[0].weight[0] * inputs.mean(0)).sum())


families = {"line": Fitted(line, fit_line), "network": network}


def loss(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean()


def examples(path: Any) -> Any:
    for x, y, product in dataset(path, "test").rows.tolist():
        yield Example({"x": x, "y": y}, product, baseline=0.0)


def predict(model: Any, instances: Any, facts: Any) -> Any:
    import torch

    return model(torch.tensor([[row.x, row.y] for row in instances])).tolist()
