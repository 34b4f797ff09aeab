"""The `train:` section of a config: what defines the result, and where it is computed."""

import hashlib
import json
import math
from contextlib import suppress
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from rekindle.errors import ConfigError
from rekindle.sections import Section
from rekindle.step import StepInputs, parse, parser


class TrainConfig(Section):
    """How a model is trained. The weights are a function of every field except those in NOT_IN_RESULT."""

    NOT_IN_RESULT: ClassVar[frozenset[str]] = frozenset(
        {"workers", "min_workers", "max_workers", "silence_seconds", "hung_seconds"}
        | {"checkpoint_seconds", "checkpoint_steps", "hot_seconds", "keep_checkpoints", "keep_hours", "fingerprint"}
    )

    workers: int = Field(2, ge=1, description="processes to start; any number gives the same weights")
    min_workers: int = Field(1, ge=1, description="training waits while fewer than this are alive")
    max_workers: int = Field(0, ge=0, description="at most this many train; the rest are spares (0: `workers`)")
    virtual_workers: int = Field(8, ge=1, le=4096, description="units the result is defined on, shared by the workers")
    threads: int = Field(1, ge=1, description="CPU threads of each worker: part of what defines the result")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one")
    seed: int = Field(0, ge=0, lt=2**63, description="of the first weights, the data order and dropout")
    batch_size: int = Field(32, ge=1, description="samples of one virtual worker in one step")
    epochs: float = Field(1.0, gt=0, description="passes over the training data")
    steps: int = Field(0, ge=0, description="optimizer updates, instead of `epochs` (0: as `epochs` says)")
    learning_rate: float = Field(1e-3, gt=0, description="highest learning rate")
    schedule: Literal["linear", "cosine", "constant"] = Field("linear", description="decay after the warm-up, to 0")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    weight_decay: float = Field(0.01, ge=0, description="of matrices; vectors and scalars do not decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's memory of the gradient")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's memory of the gradient's square")
    clip: float = Field(1.0, ge=0, description="largest norm of the gradient (0: no limit)")
    average: float = Field(0.0, ge=0, lt=1, description="keep and release a running average of the weights (0: off)")
    precision: Literal["float32", "bf16"] = Field(
        "float32", description="bf16: compute in bfloat16 (torch.autocast); weights and their updates stay float32"
    )
    validation: float | str = Field(
        0.0, description='share of the training samples held out, or "workload": its own split (0: no validation)'
    )
    validation_epochs: float = Field(1.0, gt=0, description="passes over the training data between two validations")
    validation_steps: int = Field(0, ge=0, description="updates between two validations, instead (0: as epochs say)")
    patience: int = Field(0, ge=0, description="stop after this many validations without a lower loss (0: never)")
    keep_best: bool = Field(False, description="release the weights with the lowest validation loss, not the last ones")
    reduction: Literal["exact", "fast"] = Field("exact", description="fast: a plain all-reduce, bits depend on workers")
    silence_seconds: float = Field(1.0, ge=0.5, description="a worker silent for so long, without a step, is dropped")
    hung_seconds: float = Field(600.0, gt=0, description="a live worker without a step for so long is dropped")
    checkpoint_seconds: float = Field(0.0, ge=0, description="time between durable checkpoints (0: automatic)")
    hot_seconds: float = Field(0.0, ge=0, description="time between snapshots in shared memory (0: automatic)")
    checkpoint_steps: int = Field(0, ge=0, description="also checkpoint after this many steps (0: time alone decides)")
    keep_checkpoints: int = Field(3, ge=2, description="durable checkpoints kept")
    keep_hours: float = Field(0.0, ge=0, description="also delete older checkpoints, never the newest (0: never)")
    fingerprint: dict[Literal["torch", "instruction set", "device", "bfloat16"], str] = Field(
        default_factory=dict,
        description="only workers with these train, as a model's fingerprint names them (empty: any)",
    )

    @field_validator("validation", mode="before")
    @classmethod
    def _share(cls, value: Any) -> float | str:
        with suppress(TypeError, ValueError):
            if value == "workload" or 0 <= float(value) < 1:
                return value if value == "workload" else float(value)
        raise ValueError('it must be a share of the training samples, from 0 to below 1, or "workload"')

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        for name in ("patience", "keep_best"):
            if getattr(self, name) and not self.validation:
                raise ValueError(
                    f"train.{name} is {getattr(self, name)}: it needs a validation loss. Set train.validation, such as "
                    "0.1, a share of the training samples"
                )
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
        return {
            name: getattr(self, name) for name in sorted(TrainConfig.model_fields) if name not in self.NOT_IN_RESULT
        }

    def misfits(self, fingerprint: dict[str, Any]) -> list[str]:
        """In what a worker is not of the kind that `fingerprint` names."""
        wanted = self.fingerprint.items()
        return [
            f"{key} is {fingerprint.get(key)} and not {value}" for key, value in wanted if fingerprint.get(key) != value
        ]

    def total_steps(self, samples: int) -> int:
        """Optimizer updates of the whole run over `samples` training samples."""
        return self.steps or self._updates(self.epochs, samples)

    def validation_every(self, samples: int) -> int:
        """Optimizer updates between two validations."""
        return self.validation_steps or self._updates(self.validation_epochs, samples)

    def _updates(self, epochs: float, samples: int) -> int:
        return max(1, round(epochs * samples / (self.batch_size * self.virtual_workers)))

    def rate(self, step: int, total: int, highest: float) -> float:
        """The learning rate of update `step` of `total`, where `highest` is that after the warm-up."""
        rise = round(self.warmup * total)
        if step < rise:
            return highest * (step + 1) / rise
        left = 1 - (step - rise) / max(1, total - rise)
        shapes = {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2, "constant": 1.0}
        return highest * shapes[self.schedule]


def check_training(train: TrainConfig, workload: Any) -> None:
    """Raise ConfigError if the workload lacks what these settings need."""
    if train.validation == "workload" and "validation" not in getattr(workload, "splits", ()):
        raise ConfigError(
            f'train.validation is "workload": {workload.__name__} has no validation split of its own. Set it to a '
            'share of the training samples, such as 0.1, or define splits = ("train", "validation") there, and have '
            'dataset(path, "validation") give those samples.'
        )


class TrainingSpec(StepInputs, TrainConfig):
    """One training run. Every process of the run, and its coordinator, gets the same one."""

    workload: str = Field(description="module that defines the data, the model and its loss")
    model: dict[str, Any] = Field(default_factory=dict, description="the workload's `model` section")
    dataset: str = Field(description="key prefix of the dataset directory in the object store")
    digest: str = Field(description="the dataset's identity, as `prepare` gave it")
    out: str = Field(description="key prefix for the trained model")
    checkpoints: str = Field(description="key prefix for this run's checkpoints")
    start: str = Field("", description="key prefix of a release whose weights the training begins with (empty: none)")
    run_id: str = Field("", description="MLflow run for the metrics (empty: none)")
    until: float = Field(
        0.0, ge=0, le=1, description="pause at the validation nearest to this share of the steps (0 and 1: never)"
    )
    part: str = Field("", description="what the names of its metrics begin with, if the run has several trainings")
    reuse: Literal["", "yes", "no"] = Field(
        "", description="yes: take the model of the same training; yes and no: let later ones find this model"
    )

    @classmethod
    def from_flags(cls, argv: list[str]) -> Self:
        """Parse a command line: for the launcher and coordinator, which get the same flags. Raises ConfigError."""
        flags = vars(parser("steps.train", cls).parse_args(argv))
        return cast(Self, parse(cls, {name: flags[name] for name in flags if name in cls.model_fields}))

    def identity(self) -> dict[str, Any]:
        """What the weights are a function of, apart from the machine: see `fingerprint`."""
        facts = {"workload": self.workload, "model": self.model, "train": super().identity(), "digest": self.digest}
        return facts | ({"start": self.start} if self.start else {})

    def identity_hash(self) -> str:
        """sha256 of the identity: marks a run's checkpoints and model."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    @property
    def ledger(self) -> str:
        """Key prefix of the run's ledger."""
        return f"{self.checkpoints}/ledger"

    def pause(self, samples: int) -> int:
        """The step to pause at: that of a validation before the last; 0: there is none."""
        every, total = self.validation_every(samples), self.total_steps(samples)
        step = max(1, round(self.until * total / every)) * every
        return step if self.validation and 0 < self.until < 1 and step < total else 0
