"""The `train:` section of a config, and the input of a training process."""

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from argolocal.common.json_text import to_json
from rekindle.errors import ConfigError
from rekindle.sections import Section
from rekindle.step import SHA256_OR_EMPTY, StepInputs, create_parser, parse_inputs

# properties of a worker that the bits of a result depend on (numerics.compute_fingerprint)
Fingerprint = dict[str, str | int]
# seconds to wait for all workers before the first group is formed; the time is short, because a
# worker can join later at no cost
JOIN_TIMEOUT_S = 1.0
# settings that a training in one process replaces; the number of workers does not change the
# weights
SINGLE_WORKER_SETTINGS = {"workers": 1, "min_workers": 1, "max_workers": 1}


class TrainConfig(Section):
    """Settings of a training. The trained weights depend on every field except the fields in
    NOT_IN_RESULT."""

    NOT_IN_RESULT: ClassVar[frozenset[str]] = frozenset(
        {"workers", "min_workers", "max_workers", "silence_seconds", "hung_seconds"}
        | {
            "checkpoint_seconds",
            "checkpoint_steps",
            "hot_seconds",
            "keep_checkpoints",
            "keep_hours",
            "fingerprint",
        }
    )

    # settings that select the held-out samples
    HELD_OUT_SETTINGS: ClassVar = ("validation", "seed")

    workers: int = Field(
        2, ge=1, description="number of processes to start; does not change the weights"
    )
    min_workers: int = Field(
        1, ge=1, description="minimum number of live workers; training waits while fewer are alive"
    )
    max_workers: int = Field(
        0,
        ge=0,
        description=(
            "maximum number of training workers; further workers are spares (0: the value of"
            " `workers`)"
        ),
    )
    virtual_workers: int = Field(
        8,
        ge=1,
        le=4096,
        description="number of fixed shares of each step's batch; changes the result",
    )
    threads: int = Field(
        1, ge=1, description="number of CPU threads per worker; changes the bits of the result"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device of the workers; auto: a GPU if the machine has one"
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="seed of the initial weights, data order and dropout"
    )
    batch_size: int = Field(32, ge=1, description="number of samples per virtual worker and step")
    epochs: float = Field(1.0, gt=0, description="number of passes over the training data")
    steps: int = Field(
        0, ge=0, description="number of optimizer updates, instead of `epochs` (0: use `epochs`)"
    )
    learning_rate: float = Field(1e-3, gt=0, description="highest learning rate")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="shape of the learning rate's decay to 0 after the warm-up"
    )
    warmup: float = Field(
        0.1, ge=0, lt=1, description="share of the steps during which the learning rate rises"
    )
    weight_decay: float = Field(
        0.01, ge=0, description="weight decay of matrices; vectors and scalars do not decay"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay rate of the gradient mean")
    beta2: float = Field(
        0.999, ge=0, lt=1, description="AdamW's decay rate of the squared gradients"
    )
    clip: float = Field(1.0, ge=0, description="maximum norm of the gradient (0: no limit)")
    average: float = Field(
        0.0, ge=0, lt=1, description="decay of a running average of the weights to release (0: off)"
    )
    precision: Literal["float32", "bf16"] = Field(
        "float32",
        description=(
            "precision of the computation; with bf16 (torch.autocast), weights and updates stay"
            " float32"
        ),
    )
    validation: float | str = Field(
        0.0,
        description=(
            'held-out share of the training samples, or "workload": split of the workload (0: no'
            " validation)"
        ),
    )
    validation_epochs: float = Field(
        1.0, gt=0, description="number of passes over the training data between two validations"
    )
    validation_steps: int = Field(
        0,
        ge=0,
        description="number of updates between two validations (0: use `validation_epochs`)",
    )
    patience: int = Field(
        0,
        ge=0,
        description="number of validations without a lower loss until training stops (0: never)",
    )
    keep_best: bool = Field(
        False,
        description="release the weights with the lowest validation loss, not the last weights",
    )
    reduction: Literal["exact", "fast"] = Field(
        "exact",
        description=(
            "sum of the gradients; fast: a plain all-reduce, whose bits depend on the number of"
            " workers"
        ),
    )
    silence_seconds: float = Field(
        1.0,
        ge=0.5,
        description=(
            "seconds without a message until a worker is dropped, if its group makes no step"
        ),
    )
    hung_seconds: float = Field(
        600.0, gt=0, description="seconds without a step until a live worker is dropped"
    )
    checkpoint_seconds: float = Field(
        0.0, ge=0, description="seconds between durable checkpoints (0: automatic)"
    )
    hot_seconds: float = Field(
        0.0, ge=0, description="seconds between snapshots in shared memory (0: automatic)"
    )
    checkpoint_steps: int = Field(
        0, ge=0, description="maximum number of steps between durable checkpoints (0: no limit)"
    )
    keep_checkpoints: int = Field(3, ge=2, description="number of durable checkpoints to keep")
    keep_hours: float = Field(
        0.0,
        ge=0,
        description="maximum age of durable checkpoints in hours, except the newest (0: unlimited)",
    )
    fingerprint: dict[Literal["torch", "instruction set", "device", "bfloat16"], str] = Field(
        default_factory=dict,
        description="values that the fingerprint of a worker must have (empty: any)",
    )

    @field_validator("validation", mode="before")
    @classmethod
    def _check_validation(cls, validation_setting: str | float) -> float | str:
        with suppress(TypeError, ValueError):
            if validation_setting == "workload" or 0 <= float(validation_setting) < 1:
                if validation_setting == "workload":
                    return validation_setting
                return float(validation_setting)
        raise ValueError(
            'it must be a share of the training samples, from 0 to below 1, or "workload"'
        )

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        for setting_name in ("patience", "keep_best"):
            if getattr(self, setting_name) and not self.validation:
                raise ValueError(
                    f"train.{setting_name} is {getattr(self, setting_name)}: it needs a validation"
                    " loss. Set train.validation to a share of the training samples, such as 0.1"
                )

        virtual_worker_count = self.virtual_workers
        if self.max_workers == 0:
            object.__setattr__(self, "max_workers", self.workers)

        for setting_name in ("workers", "max_workers"):
            setting_value = getattr(self, setting_name)
            if setting_value > virtual_worker_count:
                raise ValueError(
                    f"train.{setting_name} is {setting_value}: it must be at most"
                    f" train.virtual_workers ({virtual_worker_count}). Lower it, or raise"
                    " train.virtual_workers (this changes the result)"
                )

        if not self.min_workers <= self.workers <= self.max_workers:
            raise ValueError(
                f"train.workers is {self.workers}: it must lie between train.min_workers"
                f" ({self.min_workers}) and train.max_workers ({self.max_workers}). Change one of"
                " these settings; they do not affect the result"
            )

        return self

    def identity(self) -> dict[str, Any]:
        """Return the settings that the weights depend on."""
        return {
            setting_name: getattr(self, setting_name)
            for setting_name in sorted(TrainConfig.model_fields)
            if setting_name not in self.NOT_IN_RESULT
        }

    def find_fingerprint_mismatches(self, fingerprint: Fingerprint) -> list[str]:
        """Describe each entry of a worker's fingerprint that `train.fingerprint` does not allow."""
        return [
            f"{property_name} is {fingerprint.get(property_name)} and not {allowed_value}"
            for property_name, allowed_value in self.fingerprint.items()
            if fingerprint.get(property_name) != allowed_value
        ]

    def total_steps(self, sample_count: int) -> int:
        """Return the number of optimizer updates of a training with `sample_count` training
        samples."""
        return self.steps or self._count_updates(self.epochs, sample_count)

    def count_validation_interval(self, sample_count: int) -> int:
        """Return the number of optimizer updates between two validations."""
        return self.validation_steps or self._count_updates(self.validation_epochs, sample_count)

    def _count_updates(self, epoch_count: float, sample_count: int) -> int:
        return max(1, round(epoch_count * sample_count / (self.batch_size * self.virtual_workers)))

    def compute_learning_rate(
        self, step: int, total_steps: int, highest_learning_rate: float
    ) -> float:
        """Return the learning rate of update `step` of `total_steps`. `highest_learning_rate` is
        the rate after the warm-up."""
        warmup_steps = round(self.warmup * total_steps)
        if step < warmup_steps:
            return highest_learning_rate * (step + 1) / warmup_steps
        remaining_share = 1 - (step - warmup_steps) / max(1, total_steps - warmup_steps)
        factor_by_schedule = {
            "linear": remaining_share,
            "cosine": (1 - math.cos(math.pi * remaining_share)) / 2,
            "constant": 1.0,
        }
        return highest_learning_rate * factor_by_schedule[self.schedule]


def check_supported_settings(train_config: TrainConfig, workload: Any) -> None:
    """Raise ConfigError if the workload does not support the settings of the training."""
    if train_config.validation == "workload" and "validation" not in getattr(
        workload, "splits", ()
    ):
        raise ConfigError(
            f'train.validation is "workload", but {workload.__name__} does not define a validation'
            " split. Set it to a share of the training samples, such as 0.1, or define splits ="
            ' ("train", "validation"), and let dataset(path, "validation") return those samples.'
        )


class TrainingSpec(StepInputs, TrainConfig):
    """The inputs of one training run, which are the same for every worker and the coordinator."""

    workload: str = Field(description="module that defines the data, the model and its loss")
    family: str = Field("", description="family to train, if the workload has several")
    model: dict[str, Any] = Field(
        default_factory=dict, description="the workload's `model` section"
    )
    dataset: str = Field(description="key prefix of the dataset directory in the object store")
    digest: str = Field(
        pattern=SHA256_OR_EMPTY, description="sha256 of the dataset, as returned by `prepare`"
    )
    out: str = Field(description="key prefix for the trained model")
    checkpoints: str = Field(description="key prefix for this run's checkpoints")
    start: str = Field(
        "", description="key prefix of a release with the initial weights (empty: random)"
    )
    run_id: str = Field("", description="MLflow run for the metrics (empty: none)")
    until: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "share of the steps; training pauses at the nearest validation (0 and 1: never)"
        ),
    )
    part: str = Field(
        "", description="prefix of the training's metrics, if the run has several trainings"
    )
    reuse: Literal["", "yes", "no"] = Field(
        "",
        description=(
            "yes: reuse the model of an identical training; yes, no: record this model for later"
            " trainings"
        ),
    )

    @classmethod
    def from_flags(cls, argv: list[str]) -> Self:
        """Parse the command line of the launcher or the coordinator. Raises ConfigError."""
        flag_values = vars(create_parser("steps.train", cls).parse_args(argv))
        return cast(
            Self,
            parse_inputs(
                cls,
                {
                    flag_name: flag_values[flag_name]
                    for flag_name in flag_values
                    if flag_name in cls.model_fields
                },
            ),
        )

    @classmethod
    def for_local_training(
        cls,
        workload: str,
        model_settings: Mapping[str, object],
        train_settings: Mapping[str, object],
        family: str = "",
        dataset_sha256: str = "",
    ) -> Self:
        """Return the inputs of a training that runs in one process and does not use the object
        store."""
        spec_values = {
            **train_settings,
            **SINGLE_WORKER_SETTINGS,
            "dataset": "",
            "out": "",
            "checkpoints": "",
            "workload": workload,
            "model": model_settings,
            "family": family,
            "digest": dataset_sha256,
        }
        return cls.model_validate(spec_values)

    def identity(self) -> dict[str, Any]:
        """Return all inputs that the weights depend on, except the properties of the machine, which
        `numerics.compute_fingerprint` returns."""
        identity_inputs = {
            "workload": self.workload,
            "model": self.model,
            "train": super().identity(),
            "digest": self.digest,
        }
        return identity_inputs | {
            input_name: input_value
            for input_name in ("start", "family")
            if (input_value := getattr(self, input_name))
        }

    def identity_hash(self) -> str:
        """Return the sha256 of `identity()`, which the checkpoints and the model of a run
        record."""
        return hashlib.sha256(to_json(self.identity(), sort_keys=True).encode()).hexdigest()

    @property
    def join_timeout_s(self) -> float:
        return JOIN_TIMEOUT_S

    @property
    def ledger(self) -> str:
        """The key prefix of the run's ledger in the object store."""
        return f"{self.checkpoints}/ledger"

    def compute_pause_step(self, sample_count: int) -> int:
        """Return the number of the step where training pauses, which is the step of a validation
        other than the last validation; 0 if training does not pause."""
        validation_interval_steps = self.count_validation_interval(sample_count)
        total_step_count = self.total_steps(sample_count)
        pause_step_number = (
            max(1, round(self.until * total_step_count / validation_interval_steps))
            * validation_interval_steps
        )
        if self.validation and 0 < self.until < 1 and pause_step_number < total_step_count:
            return pause_step_number
        return 0
