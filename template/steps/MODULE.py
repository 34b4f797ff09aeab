"""Predict the power consumption of an hour with a small network. The data is a CSV file whose rows
are sorted from the oldest to the newest."""

from pydantic import BaseModel, Field

from rekindle import DataConfig, Metric, Prepared, Section

# the config section `data`; define a subclass to add settings
Data = DataConfig


class Model(Section):
    hidden: int = Field(32, ge=1, description="units of the hidden layer")


class Instance(BaseModel):
    hour: float = Field(ge=0, lt=24)
    temperature: float


def rmse(predictions, truths):
    return ((predictions - truths) ** 2).mean() ** 0.5


metrics = (Metric("rmse", rmse, better="lower", unit="kWh", digits=2),)


def prepare(data, out):
    import numpy as np

    rows = np.genfromtxt(data.source, delimiter=",", skip_header=1, dtype="float32")
    cut = int(0.8 * len(rows))
    np.save(out / "train.npy", rows[:cut])
    np.save(out / "test.npy", rows[cut:])
    return Prepared(rows=len(rows))


class dataset:
    def __init__(self, path, split):
        import numpy as np
        import torch

        self.rows = torch.from_numpy(np.load(path / f"{split}.npy"))

    def __len__(self):
        return len(self.rows)

    def batch(self, indices):
        return self.rows[indices, :-1], self.rows[indices, -1]


def model(section, facts):
    from torch import nn

    layers = (
        nn.BatchNorm1d(2),
        nn.Linear(2, section.hidden),
        nn.ReLU(),
        nn.Linear(section.hidden, 1),
    )
    return nn.Sequential(*layers, nn.Flatten(0))


def loss(model, batch):
    inputs, kwh = batch
    return (model(inputs) - kwh).square().mean()


def examples(path):
    for hour, temperature, kwh in dataset(path, "test").rows.tolist():
        yield {"hour": hour, "temperature": temperature}, kwh


def predict(model, instances, facts):
    import torch

    return model(torch.tensor([[row.hour, row.temperature] for row in instances])).tolist()
