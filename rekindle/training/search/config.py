"""The `sweep:` section of a config: what is searched, by whom, and how many trials go on."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from rekindle.errors import did_you_mean, rule
from rekindle.sections import Section
from rekindle.workload import load

Settings = dict[str, Any]  # by dotted path, such as train.learning_rate
LOSS = "loss"


class Choice(Section):
    """The values of one setting: a list, or a range."""

    choices: list[Any] = Field(default_factory=list, description="the values, instead of a range; a plain list will do")
    low: float | None = Field(None, description="least value of a range")
    high: float | None = Field(None, description="greatest value, itself included")
    log: bool = Field(False, description="equally likely by factors instead of differences")
    step: float = Field(0.0, ge=0, description="distance of the values of a range (0: any; of whole numbers 1)")

    @model_validator(mode="before")
    @classmethod
    def _plain_list(cls, value: Any) -> Any:
        return {"choices": value} if isinstance(value, list) else value

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.choices and (self.low, self.high) == (None, None):
            return self
        if self.choices or self.low is None or self.high is None:
            raise ValueError("it must be a list of values, such as [16, 32], or have low and high")
        if not self.low < self.high:
            raise ValueError(f"its low is {self.low:g} and its high {self.high:g}: that range is empty")
        if self.log and (self.low <= 0 or self.step):
            raise ValueError("log needs a low above 0, and no step")
        return self

    def ends(self) -> list[Any]:
        """The values that are checked against the section."""
        return self.choices or [_whole(self.low), _whole(self.high)]

    def points(self) -> int:
        """How many values there are; 0: any number."""
        if self.choices:
            return len(self.choices)
        assert self.low is not None and self.high is not None
        return int((self.high - self.low) / self.step + 1e-9) + 1 if self.step else 0

    def holds(self, value: Any) -> bool:
        """Whether `value` is one of them."""
        if self.choices:
            return value in self.choices
        assert self.low is not None and self.high is not None
        inside = isinstance(value, int | float) and self.low <= value <= self.high
        return inside and (not self.step or math.isclose((value - self.low) % self.step, 0, abs_tol=1e-9))


class Sweep(Section):
    """Which trainings a search tries, and which of them go on."""

    # the data is not searched: trials share it
    space: dict[Literal["train", "model"], dict[str, Choice]] = Field(
        description="by section and key: a list of values, or {low, high, log, step}"
    )
    trials: int = Field(27, ge=1, description="trainings that begin")
    parallel: int = Field(2, ge=1, description="pods that train at a time; any number gives the same result")
    sampler: Literal["tpe", "random", "grid"] = Field("tpe", description="who chooses the settings: one of Optuna's")
    batch: int = Field(0, ge=0, description="trials chosen at once (0: with tpe a third of them, else all)")
    seed: int = Field(0, ge=0, lt=2**32, description="of the choices")
    metric: str = Field(LOSS, description="figure of the held-out samples to search by: loss, or one of `measures`")
    better: Literal["lower", "higher"] = Field("lower", description="which values of the metric are better")
    rungs: int = Field(3, ge=1, le=8, description="times that trials are compared, the end included (1: all train on)")
    reduction: int = Field(3, ge=2, description="one in so many goes on after a rung, to so many times the steps")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if not any(self.space.values()):
            raise ValueError("sweep.space is empty: give settings of train or model to search, with their values")
        if self.sampler == "grid":
            for path, choice in self.choices():
                if not choice.points():
                    raise ValueError(f"sweep.space.{path} is a range of any numbers: a grid needs its step, or a list")
        if self.metric == LOSS and self.better == "higher":
            raise ValueError("sweep.better is higher, and of the loss the lower one is better. Leave it out")
        return self

    def choices(self) -> Iterator[tuple[str, Choice]]:
        """By dotted path, what is searched."""
        for section, keys in sorted(self.space.items()):
            for key, choice in sorted(keys.items()):
                yield f"{section}.{key}", choice

    @property
    def count(self) -> int:
        """Trials that begin: of a grid at most its points."""
        points = math.prod(choice.points() for _, choice in self.choices())
        return min(self.trials, points) if self.sampler == "grid" else self.trials

    def share(self, rung: int) -> float:
        """The share of a training's steps at which `rung` compares."""
        return float(self.reduction) ** (rung + 1 - self.rungs)

    def check(self, train: Any, model: BaseModel) -> None:
        """Raise ValueError for a setting that is unknown, or a value that its section refuses."""
        if not train.validation:
            raise ValueError(
                "a sweep compares trials by samples that are held out. Set train.validation, such as 0.1, a share of "
                "the training samples"
            )
        if self.metric != LOSS and train.keep_best:
            raise ValueError(
                f"sweep.metric is {self.metric}, and train.keep_best releases the weights with the lowest loss. Leave "
                "one of them out"
            )
        self._check_rungs(train)
        sections: dict[str, Any] = {"train": train, "model": model}
        for path, choice in self.choices():
            name, _, key = path.partition(".")
            section = sections[name]
            known = set(type(section).model_fields) - getattr(section, "NOT_IN_RESULT", set())
            if key not in known:
                hint = did_you_mean(key, known) or f" Known: {', '.join(sorted(known))}."
                raise ValueError(f"sweep.space.{path}: there is no setting {path} that changes a result.{hint}")
            if key == "validation":
                raise ValueError(
                    "sweep.space.train.validation: all trials are compared by the same samples. Leave it out"
                )
            if isinstance(getattr(section, key), bool) and not choice.choices:
                raise ValueError(f"sweep.space.{path}: {path} is true or false: give a list of values")
            for value in choice.ends():
                with_settings(section, name, {path: value})

    def _check_rungs(self, train: Any) -> None:
        """Raise ValueError if the first rung is before the first validation."""
        unit = "steps" if train.steps else "epochs"
        every, total = getattr(train, f"validation_{unit}"), getattr(train, unit)
        first = self.share(0) * total
        if (unit == "steps" or not train.validation_steps) and every and first < every * (1 - 1e-9):
            raise ValueError(
                f"sweep.rungs is {self.rungs}: the first of them is after {first:.3g} {unit}, before the first "
                f"validation. Set train.validation_{unit} to at most that, or lower sweep.rungs or sweep.reduction"
            )


def with_settings(section: Any, name: str, settings: Mapping[str, Any]) -> Any:
    """`section` with those of the settings that are its own. Raises ValueError that names the wrong one."""
    own = {path.partition(".")[2]: value for path, value in settings.items() if path.startswith(f"{name}.")}
    try:
        return type(section).model_validate(section.model_dump() | own)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or next(iter(own))
        raise ValueError(f"sweep.space.{name}.{key}: {own.get(key, own)!r}: {rule(first['msg'])}") from error


def default(sweep: Sweep, train: Any, model: Any) -> Settings:
    """The config's own values of what is searched, if all are among the choices; else nothing."""
    own = _own(sweep, train, model)
    return own if all(choice.holds(own[path]) for path, choice in sweep.choices()) else {}


def whole_numbers(sweep: Sweep, train: Any, model: Any) -> dict[str, bool]:
    """By dotted path, whether it is a whole number, as the config's own value says."""
    return {path: type(value) is int for path, value in _own(sweep, train, model).items()}


def _own(sweep: Sweep, train: Any, model: Any) -> Settings:
    """The config's own values of what is searched."""
    sections = {"train": train.model_dump(mode="json"), "model": model.model_dump(mode="json")}
    return {path: sections[path.partition(".")[0]][path.partition(".")[2]] for path, _ in sweep.choices()}


def check_workload(sweep: Sweep, name: str) -> None:
    """Raise ValueError if the workload has no measures, and the metric is one."""
    if sweep.metric != LOSS and not hasattr(load(name), "measures"):
        raise ValueError(
            f"sweep.metric is {sweep.metric}: {name} defines no measures(model, batch), so there is only the loss"
        )


def _whole(value: float | None) -> Any:
    return int(value) if value is not None and float(value).is_integer() else value
