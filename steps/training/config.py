"""The `train:` section of a config: what defines the result, and where it is computed."""

import math
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from steps.workload import Section


class TrainConfig(Section):
    """How a model is trained. Every field but those in PLACEMENT is part of what the weights are a function of."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset(
        {"workers", "min_workers", "max_workers", "silence_seconds", "hung_seconds"}
        | {"checkpoint_seconds", "checkpoint_steps", "hot_seconds", "keep_checkpoints", "keep_hours"}
    )

    workers: int = Field(2, ge=1, description="processes to start; any number gives the same weights")
    min_workers: int = Field(1, ge=1, description="training waits while fewer than this are alive")
    max_workers: int = Field(0, ge=0, description="more than this stand by (0: as many as `workers`)")
    virtual_workers: int = Field(8, ge=1, le=4096, description="units the result is defined on, shared by the workers")
    threads: int = Field(1, ge=1, description="CPU threads of each worker: part of what defines the result")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one")
    seed: int = Field(0, ge=0, lt=2**63, description="of the first weights, the data order and dropout")
    batch_size: int = Field(32, ge=1, description="samples of one virtual worker in one step")
    epochs: float = Field(1.0, gt=0, description="passes over the training data")
    steps: int = Field(0, ge=0, description="optimizer updates, instead of `epochs` (0: as epochs says)")
    learning_rate: float = Field(1e-3, gt=0, description="highest learning rate")
    schedule: Literal["linear", "cosine", "constant"] = Field("linear", description="decay after the warm-up, to 0")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    weight_decay: float = Field(0.01, ge=0, description="of matrices; vectors and scalars do not decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's memory of the gradient")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's memory of the gradient's square")
    clip: float = Field(1.0, ge=0, description="largest norm of the gradient (0: no limit)")
    average: float = Field(0.0, ge=0, lt=1, description="keep and release a running average of the weights (0: off)")
    reduction: Literal["exact", "fast"] = Field("exact", description="fast: a plain all-reduce, bits depend on workers")
    silence_seconds: float = Field(1.0, ge=0.5, description="a worker silent for so long, without a step, is dropped")
    hung_seconds: float = Field(600.0, gt=0, description="one that lives, but makes no step for so long, is dropped")
    checkpoint_seconds: float = Field(0.0, ge=0, description="time between durable checkpoints (0: automatic)")
    hot_seconds: float = Field(0.0, ge=0, description="time between snapshots in shared memory (0: automatic)")
    checkpoint_steps: int = Field(0, ge=0, description="and after this many steps (0: time alone decides)")
    keep_checkpoints: int = Field(3, ge=2, description="durable checkpoints kept")
    keep_hours: float = Field(0.0, ge=0, description="older ones go, too, but for the newest (0: by number alone)")

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        virtual = self.virtual_workers
        if self.max_workers == 0:
            object.__setattr__(self, "max_workers", self.workers)
        for name in ("workers", "max_workers"):
            if (value := getattr(self, name)) > virtual:
                raise ValueError(
                    f"train.{name} is {value}: it must be at most train.virtual_workers ({virtual}). "
                    "Lower it, or raise train.virtual_workers (this changes the result)"
                )
        if not self.min_workers <= self.workers <= self.max_workers:
            raise ValueError(
                f"train.workers is {self.workers}: it must lie between train.min_workers ({self.min_workers}) and "
                f"train.max_workers ({self.max_workers}). Change one of the three; none of them changes the result"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """The settings that the weights are a function of."""
        return {name: getattr(self, name) for name in sorted(TrainConfig.model_fields) if name not in self.PLACEMENT}

    def total_steps(self, samples: int) -> int:
        """Optimizer updates of the whole run over `samples` training samples."""
        return self.steps or max(1, round(self.epochs * samples / (self.batch_size * self.virtual_workers)))

    def rate(self, step: int, total: int) -> float:
        """The learning rate of update `step` of `total`."""
        rise = round(self.warmup * total)
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        left = 1 - (step - rise) / max(1, total - rise)
        shapes = {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2, "constant": 1.0}
        return self.learning_rate * shapes[self.schedule]
