"""The `sweep:` section of a config: search space, sampler and number of trials."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from rekindle import families
from rekindle.errors import did_you_mean
from rekindle.sections import Section, broken_rule
from rekindle.workload import load

if TYPE_CHECKING:
    from rekindle.training.spec import TrainConfig

Settings = dict[str, Any]  # values by dotted path, such as train.learning_rate
LOSS = "loss"
S = TypeVar("S", bound=BaseModel)


class Choice(Section):
    """The possible values of one setting: a list or a range."""

    choices: list[Any] = Field(
        default_factory=list, description="list of values; the config may have a plain list"
    )
    low: float | None = Field(None, description="minimum of a range")
    high: float | None = Field(None, description="maximum of a range, inclusive")
    log: bool = Field(False, description="sample on a logarithmic scale")
    step: float = Field(0.0, ge=0, description="step size of a range (0: continuous; integers: 1)")

    @model_validator(mode="before")
    @classmethod
    def _accept_plain_list(cls, value: object) -> object:
        if isinstance(value, list):
            return {"choices": value}
        return value

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.choices and (self.low, self.high) == (None, None):
            return self
        if self.choices or self.low is None or self.high is None:
            raise ValueError("it must be a list of values, such as [16, 32], or have low and high")
        if not self.low < self.high:
            raise ValueError(
                f"its low is {self.low:g} and its high {self.high:g}: low must be less than high"
            )
        if self.log and (self.low <= 0 or self.step):
            raise ValueError("log needs a low above 0 and cannot be combined with step")
        return self

    def as_integers(self) -> Self:
        """Return the choice for an integer setting: a range without a step gets the step 1, unless
        it is logarithmic."""
        if self.choices or self.log or self.step:
            return self
        return self.model_copy(update={"step": 1.0})

    def value_count(self) -> int:
        """Return the number of possible values; 0 if the range has no step."""
        if self.choices:
            return len(self.choices)
        assert self.low is not None
        assert self.high is not None
        if self.step:
            return int((self.high - self.low) / self.step + 1e-9) + 1
        return 0

    def accepts_sample(self, value: object) -> bool:
        """Return True if a sampler may have chosen `value`. Unlike `allows`, accepts rounding
        errors at the ends of a range, and numbers that do not match the range's step."""
        if self.choices:
            return value in self.choices
        assert self.low is not None
        assert self.high is not None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        tolerance = 1e-9 * max(abs(self.low), abs(self.high))
        return self.low - tolerance <= value <= self.high + tolerance

    def allows(self, value: object) -> bool:
        """Return True if `value` is a possible value."""
        if self.choices:
            return value in self.choices
        assert self.low is not None
        assert self.high is not None
        if not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        if not self.step:
            return True
        nearest = self.low + round((value - self.low) / self.step) * self.step
        return math.isclose(value, nearest, rel_tol=1e-12, abs_tol=1e-9 * self.step)


class Budget(Section):
    """The limit of a sweep, for all of its trials together."""

    hours: float = Field(0.0, ge=0, description="worker-hours of all trials (0: no limit)")
    money: float = Field(
        0.0, ge=0, description="cost of all trials, in the currency of prices.yaml (0: no limit)"
    )


class Sweep(Section):
    """Settings of a sweep."""

    # the section `data` cannot be searched: all trials share the dataset
    space: dict[Literal["train", "model"], dict[str, Choice]] = Field(
        description="section and key → list of values, or {low, high, log, step}"
    )
    trials: int = Field(27, ge=1, description="number of trials to start")
    budget: Budget = Field(
        default_factory=lambda: Budget.model_validate({}), description="limit of all trials"
    )
    parallel: int = Field(
        2,
        ge=1,
        description=(
            "pods that train at the same time, at most `lag`; no effect on the result without a"
            " budget"
        ),
    )
    sampler: Literal["tpe", "random", "grid"] = Field(
        "tpe", description="sampler of Optuna that chooses the settings"
    )
    lag: int = Field(
        0,
        ge=0,
        description=(
            "number of successive decisions that do not know each other's results (0: a third of"
            " the trials)"
        ),
    )
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the sampler")
    metric: str = Field(
        LOSS,
        description=(
            "validation metric to optimize: loss, or one of `measures`; for a training program, a"
            " metric that it reports"
        ),
    )
    better: Literal["lower", "higher"] = Field(
        "lower", description="whether lower or higher values are better"
    )
    rungs: int = Field(
        3,
        ge=1,
        le=8,
        description=(
            "number of comparisons, including the final one (1: no early stop); always 1 for a"
            " training program"
        ),
    )
    reduction: int = Field(
        3,
        ge=2,
        description=(
            "reduction factor η: each rung continues the best 1/η of the trials, for η times the"
            " steps"
        ),
    )

    @model_validator(mode="after")
    def _validate(self) -> Self:
        if not any(self.space.values()):
            raise ValueError(
                "sweep.space is empty: list settings of train or model, with their values"
            )
        if self.metric == LOSS and self.better == "higher":
            raise ValueError(
                "sweep.better is higher, but a lower loss is better. Remove sweep.better"
            )
        return self

    def choices(self) -> Iterator[tuple[str, Choice]]:
        """Yield the dotted path and the values of each setting in the search space."""
        for section, keys in sorted(self.space.items()):
            for key, choice in sorted(keys.items()):
                yield f"{section}.{key}", choice

    @property
    def trial_count(self) -> int:
        """Number of trials to start; for a grid, at most the number of its points."""
        points = math.prod(choice.value_count() for _, choice in self.choices())
        if self.sampler == "grid":
            return min(self.trials, points)
        return self.trials

    @property
    def decision_lag(self) -> int:
        """Number of successive decisions that are made without each other's results."""
        return self.lag or math.ceil(self.trial_count / 3)

    @property
    def pod_count(self) -> int:
        """Number of pods that train trials."""
        return min(self.parallel, self.decision_lag, self.trial_count)

    def step_share(self, rung: int) -> float:
        """Return the fraction of a complete training's steps after which trials reach `rung`."""
        return float(self.reduction) ** (rung + 1 - self.rungs)

    def check(self, train: "TrainConfig", model: BaseModel) -> None:
        """Raise ValueError if the sweep does not fit these sections of the config, for example if a
        setting is unknown or a value is invalid."""
        if not train.validation:
            raise ValueError(
                "a sweep compares trials by a validation metric. Set train.validation to a share of"
                " the training samples, such as 0.1"
            )

        if self.metric != LOSS and train.keep_best:
            raise ValueError(
                f"sweep.metric is {self.metric}, but train.keep_best releases the weights with the"
                " lowest loss. Remove one of them"
            )

        self._check_rungs(train)
        self.check_space(train, model)

    def check_space(self, train: BaseModel, model: BaseModel) -> None:
        """Raise ValueError for an unknown setting or an invalid value in the search space."""
        sections: dict[str, Any] = {"train": train, "model": model}

        for path, choice in self.choices():
            name, _, key = path.partition(".")
            section = sections[name]

            allowed = set(type(section).model_fields) - getattr(section, "NOT_IN_RESULT", set())
            if key not in allowed:
                hint = did_you_mean(key, allowed) or f" Allowed: {', '.join(sorted(allowed))}."
                raise ValueError(
                    f"sweep.space.{path}: {path} is not a setting that changes the result.{hint}"
                )

            if key == "validation":
                raise ValueError(
                    "sweep.space.train.validation: all trials must be compared by the same samples."
                    " Remove it"
                )

            if isinstance(getattr(section, key), bool) and not choice.choices:
                raise ValueError(f"sweep.space.{path}: {path} is a boolean: use a list of values")

            if type(getattr(section, key)) is int and not choice.step.is_integer():
                raise ValueError(
                    f"sweep.space.{path}: its step is {choice.step:g}, but {path} is an integer:"
                    " use 1, 2, …"
                )

            for value in choice.choices or [_as_integer(choice.low), _as_integer(choice.high)]:
                apply_settings(section, name, {path: value})

        for path, choice in self.with_integer_steps(train, model).choices():
            if self.sampler == "grid" and not choice.value_count():
                raise ValueError(
                    f"sweep.space.{path} is continuous: a grid needs a step, or a list of values"
                )

    def with_integer_steps(self, train: BaseModel, model: BaseModel) -> Self:
        """Return the sweep with a step for each range of an integer setting."""
        space: dict[str, dict[str, Choice]] = {
            section: dict(keys) for section, keys in self.space.items()
        }
        for path, is_integer in find_integer_settings(self, train, model).items():
            section, _, key = path.partition(".")
            if is_integer:
                space[section][key] = space[section][key].as_integers()
        return self.model_copy(update={"space": space})

    def _check_rungs(self, train: "TrainConfig") -> None:
        """Raise ValueError if trials reach the first rung before the first validation."""
        unit = "steps" if train.steps else "epochs"
        interval = getattr(train, f"validation_{unit}")
        total = getattr(train, unit)

        first_rung = self.step_share(0) * total
        if (
            (unit == "steps" or not train.validation_steps)
            and interval
            and first_rung < interval * (1 - 1e-9)
        ):
            raise ValueError(
                f"sweep.rungs is {self.rungs}: the first rung is after {first_rung:.3g} {unit},"
                f" before the first validation. Set train.validation_{unit} to at most"
                f" {first_rung:.3g}, or lower sweep.rungs or sweep.reduction"
            )


def apply_settings(section: S, name: str, settings: Mapping[str, object]) -> S:
    """Return the section `name` with the values of `settings` for it. Raises ValueError that names
    the invalid setting."""
    changes = {
        path.partition(".")[2]: value
        for path, value in settings.items()
        if path.startswith(f"{name}.")
    }

    try:
        return type(section).model_validate(section.model_dump() | changes)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, detail["loc"])) or next(iter(changes))
        reason = broken_rule(type(section), detail)
        raise ValueError(
            f"sweep.space.{name}.{key}: {changes.get(key, changes)!r}: {reason}"
        ) from error


def select_default_settings(sweep: Sweep, train: BaseModel, model: BaseModel) -> Settings:
    """Return the values of the config as the settings of a trial; {} if they are outside of the
    search space."""
    values = _config_values(sweep, train, model)
    if all(choice.allows(values[path]) for path, choice in sweep.choices()):
        return values
    return {}


def find_integer_settings(sweep: Sweep, train: BaseModel, model: BaseModel) -> dict[str, bool]:
    """Return for each setting in the search space whether its value in the config is an integer."""
    return {path: type(value) is int for path, value in _config_values(sweep, train, model).items()}


def _config_values(sweep: Sweep, train: BaseModel, model: BaseModel) -> Settings:
    """Return the values in the config of all settings in the search space."""
    sections = {"train": train.model_dump(mode="json"), "model": model.model_dump(mode="json")}
    return {
        path: sections[path.partition(".")[0]][path.partition(".")[2]]
        for path, _ in sweep.choices()
    }


def check_workload(sweep: Sweep, name: str, selected: list[str]) -> str:
    """Return the family to train.

    Raises ValueError for several families, for a family without training steps, and if the metric
    is a measure that the workload does not define.
    """
    family, *other_families = families.select(load(name), selected)
    if other_families or isinstance(families.get_families(load(name))[family], families.Fitted):
        raise ValueError(
            "a sweep trains one family with training steps, not"
            f" {', '.join([family, *other_families])}: set families to one of them, such as"
            " families: [network]"
        )

    if sweep.metric != LOSS and not hasattr(load(name), "measures"):
        raise ValueError(
            f"sweep.metric is {sweep.metric}: {name} does not define measures(model, batch), so"
            " only loss is available"
        )

    return family


def _as_integer(value: float | None) -> float | None:
    if value is not None and float(value).is_integer():
        return int(value)
    return value
