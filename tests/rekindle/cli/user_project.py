"""A project as `rekindle init shop` creates it, with some additions."""

from pathlib import Path

import yaml

from rekindle.project.template import create

# the training waits until the file GO exists, so that tests can act on it
PACED_WORKLOAD_CODE = '''
"""The project's workload on a moving window of its data."""

import time
from pathlib import Path

from rekindle import DataConfig
from steps import shop
from steps.shop import *


class Data(DataConfig):
    window: str = ""
    until: str = ""

    @property
    def moves(self):
        return bool(self.window)

    def at(self, time):
        return self.model_copy(update={"until": time.isoformat()}) if self.window else self

    def first_rows(self, rows, folder):
        return None  # a loss that waits cannot be tried before the run


def prepare(data, out):
    print("data until", data.until)
    return shop.prepare(data, out)


def loss(model, batch):
    while not Path("GO").exists():
        time.sleep(0.05)
    return shop.loss(model, batch)
'''
# the pods of this step do not import torch
ASKING_STEP_CODE = '''
"""A person approves before a card is written."""

from hera.workflows import Suspend, Task

from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        approval = Task(name="approval", template=Suspend(name="wait-for-approval"))
        approval.next(blocks.step("steps.card", metrics={"rmse": 1.5}, verdict="release"))
    return workflow
'''
SHOP = {
    "workload": "steps.paced",
    "data": {"source": "data/power.csv", "window": "90d"},
    "train": {
        "workers": 1,
        "max_workers": 2,
        "virtual_workers": 4,
        "epochs": 1,
        "learning_rate": 0.02,
    },
    "gate": {"maximum": {"rmse": 500}},
    "serve": {"min_replicas": 1},
    "schedule": {"cron": "0 3 * * 1"},
}
SWEEP = {
    "train": {"virtual_workers": 4, "epochs": 6, "validation": 0.1, "learning_rate": 0.02},
    "sweep": {
        **{"trials": 5, "lag": 3, "rungs": 2, "reduction": 3, "parallel": 2},
        "space": {
            "train": {"learning_rate": {"low": 0.001, "high": 0.1, "log": True}},
            "model": {"hidden": [8, 32]},
        },
    },
}
CONFIGS = {
    "shop": SHOP | {"pipeline": "pipelines.nightly"},
    "asking": SHOP | {"pipeline": "pipelines.asking"},
    "sweep": SHOP | {"pipeline": "pipelines.sweep"} | SWEEP,
}


def run_make(folder: Path, go: Path = Path("/")) -> None:
    """Write the project into `folder`, which is named shop; the project's training waits for the
    file `go`."""
    create(folder)
    files = {
        "steps/paced.py": PACED_WORKLOAD_CODE.replace("GO", str(go)),
        "pipelines/asking.py": ASKING_STEP_CODE,
    }
    files.update(
        {
            f"configs/{name}.yaml": yaml.safe_dump({"name": name} | config)
            for name, config in CONFIGS.items()
        }
    )
    for name, text in files.items():
        (folder / name).write_text(text)
