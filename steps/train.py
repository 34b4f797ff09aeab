"""Train the model on virtual workers: any number of processes, the same weights; it goes on where it was.

    python -m steps train --workload=steps.fraud --dataset=runs/a/dataset --digest=... --out=runs/a/model \\
        --checkpoints=runs/a/checkpoints

One process, or every process of a group: under a coordinator (MASTER_ADDR and MASTER_PORT say where), or under
torchrun. Leaves `<out>/model.safetensors` and `<out>/model.json`. Exit code 143 after a SIGTERM: not finished, start
it again.
"""

import hashlib
import json
import os
from typing import Any, Self, cast

from pydantic import Field

from steps.step import StepInputs, StepOutputs, load, parse, parser
from steps.training.config import TrainConfig


class Inputs(StepInputs, TrainConfig):
    """One training run; every process of the run, and its coordinator, is given the same."""

    workload: str = Field("steps.fraud", description="module that defines the data, the model and its loss")
    model: dict[str, Any] = Field(default_factory=dict, description="the workload's `model` section")
    dataset: str = Field(description="key prefix of the dataset directory in the object store")
    digest: str = Field(description="the dataset's identity, as `prepare` gave it")
    out: str = Field(description="key prefix for the trained model")
    checkpoints: str = Field(description="key prefix for this run's checkpoints")
    run_id: str = Field("", description="MLflow run for the metrics (empty: none)")

    @classmethod
    def from_flags(cls, argv: list[str]) -> Self:
        """The inputs of a command line, for who is not the step but given its flags. Raises ConfigError."""
        flags = vars(parser("train", load("train")).parse_args(argv))
        return cast(Self, parse(cls, {name: flags[name] for name in flags if name in cls.model_fields}))

    def identity(self) -> dict[str, Any]:
        """All that the weights are a function of, apart from the machine: see `fingerprint`."""
        return {"workload": self.workload, "model": self.model, "train": super().identity(), "digest": self.digest}

    def identity_hash(self) -> str:
        """sha256 of the identity: what marks a run's checkpoints and model."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    @property
    def ledger(self) -> str:
        """Key prefix of the run's ledger."""
        return f"{self.checkpoints}/ledger"


class Outputs(StepOutputs):
    """Nothing: the weights are in the object store, because the step may be one of many processes."""


def run(inputs: Inputs) -> Outputs:
    """Train until the model is in the object store. Raises ConfigError, DataError; exits 143 after a SIGTERM."""
    # cuBLAS reads it when it starts; without it a GPU's matrix products are not reproducible
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from steps.training.signals import heed_sigterm

    leaving = heed_sigterm()  # before the import of torch: it takes seconds, and PID 1 would not hear the signal
    from steps.training.loop import train

    train(inputs, leaving)
    return Outputs()
