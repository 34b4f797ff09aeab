"""The `sweep:` section of a config: search space, sampler and number of trials."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from rekindle import families
from rekindle.errors import suggest_similar
from rekindle.sections import Section, describe_broken_rule
from rekindle.workload import load

if TYPE_CHECKING:
    from rekindle.training.spec import TrainConfig

# values by dotted path, such as train.learning_rate
Settings = dict[str, Any]
LOSS_METRIC = "loss"
AnySection = TypeVar("AnySection", bound=BaseModel)


class SettingChoice(Section):
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
    def _accept_plain_list(cls, choice_value: object) -> object:
        if isinstance(choice_value, list):
            return {"choices": choice_value}
        return choice_value

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

    def make_integer_choice(self) -> Self:
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

    def accepts_sample(self, sampled_value: object) -> bool:
        """Return True if a sampler may have chosen `sampled_value`. Unlike `allows`,
        `accepts_sample` accepts rounding errors at the ends of a range, and numbers that do not
        match the range's step."""
        if self.choices:
            return sampled_value in self.choices
        assert self.low is not None
        assert self.high is not None
        if isinstance(sampled_value, bool) or not isinstance(sampled_value, int | float):
            return False
        tolerance = 1e-9 * max(abs(self.low), abs(self.high))
        return self.low - tolerance <= sampled_value <= self.high + tolerance

    def allows(self, setting_value: object) -> bool:
        """Return True if `setting_value` is a possible value of the setting."""
        if self.choices:
            return setting_value in self.choices
        assert self.low is not None
        assert self.high is not None
        if not isinstance(setting_value, int | float) or not self.low <= setting_value <= self.high:
            return False
        if not self.step:
            return True
        nearest_value = self.low + round((setting_value - self.low) / self.step) * self.step
        return math.isclose(setting_value, nearest_value, rel_tol=1e-12, abs_tol=1e-9 * self.step)


class SweepBudget(Section):
    """The budget of a sweep, for all of its trials together."""

    hours: float = Field(0.0, ge=0, description="worker-hours of all trials (0: no limit)")
    money: float = Field(
        0.0, ge=0, description="cost of all trials, in the currency of prices.yaml (0: no limit)"
    )


class Sweep(Section):
    """Settings of a sweep."""

    # the section `data` cannot be searched, because all trials share the dataset
    space: dict[Literal["train", "model"], dict[str, SettingChoice]] = Field(
        description="section and key → list of values, or {low, high, log, step}"
    )
    trials: int = Field(27, ge=1, description="number of trials to start")
    budget: SweepBudget = Field(
        default_factory=lambda: SweepBudget.model_validate({}), description="limit of all trials"
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
        LOSS_METRIC,
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
        if self.metric == LOSS_METRIC and self.better == "higher":
            raise ValueError(
                "sweep.better is higher, but a lower loss is better. Remove sweep.better"
            )
        return self

    def choices(self) -> Iterator[tuple[str, SettingChoice]]:
        """Yield the dotted path and the values of each setting in the search space."""
        for section_name, choice_by_key in sorted(self.space.items()):
            for key, setting_choice in sorted(choice_by_key.items()):
                yield f"{section_name}.{key}", setting_choice

    @property
    def trial_count(self) -> int:
        """Number of trials to start; for a grid, at most the number of its points."""
        grid_point_count = math.prod(
            setting_choice.value_count() for _, setting_choice in self.choices()
        )
        if self.sampler == "grid":
            return min(self.trials, grid_point_count)
        return self.trials

    @property
    def decision_lag(self) -> int:
        """Number of successive decisions that are made without each other's results."""
        return self.lag or math.ceil(self.trial_count / 3)

    @property
    def pod_count(self) -> int:
        """Number of pods that train trials."""
        return min(self.parallel, self.decision_lag, self.trial_count)

    def compute_step_share(self, rung_index: int) -> float:
        """Return the fraction of a complete training's steps after which trials reach
        `rung_index`."""
        return float(self.reduction) ** (rung_index + 1 - self.rungs)

    def check(self, train_config: "TrainConfig", model_config: BaseModel) -> None:
        """Raise ValueError if the sweep does not fit the other sections of the config, for example
        if a setting is unknown or a value is invalid."""
        if not train_config.validation:
            raise ValueError(
                "a sweep compares trials by a validation metric. Set train.validation to a share of"
                " the training samples, such as 0.1"
            )

        if self.metric != LOSS_METRIC and train_config.keep_best:
            raise ValueError(
                f"sweep.metric is {self.metric}, but train.keep_best releases the weights with the"
                " lowest loss. Remove one of them"
            )

        self._check_rungs(train_config)
        self.check_space(train_config, model_config)

    def check_space(self, train_config: BaseModel, model_config: BaseModel) -> None:
        """Raise ValueError for an unknown setting or an invalid value in the search space."""
        section_by_name: dict[str, Any] = {"train": train_config, "model": model_config}

        for setting_path, setting_choice in self.choices():
            section_name, _, setting_name = setting_path.partition(".")
            config_section = section_by_name[section_name]

            allowed_names = set(type(config_section).model_fields) - getattr(
                config_section, "NOT_IN_RESULT", set()
            )
            if setting_name not in allowed_names:
                hint = (
                    suggest_similar(setting_name, allowed_names)
                    or f" Allowed: {', '.join(sorted(allowed_names))}."
                )
                raise ValueError(
                    f"sweep.space.{setting_path}: {setting_path} is not a setting that changes the"
                    f" result.{hint}"
                )

            if setting_name == "validation":
                raise ValueError(
                    "sweep.space.train.validation: all trials must be compared by the same samples."
                    " Remove it"
                )

            if (
                isinstance(getattr(config_section, setting_name), bool)
                and not setting_choice.choices
            ):
                raise ValueError(
                    f"sweep.space.{setting_path}: {setting_path} is a boolean: use a list of values"
                )

            if (
                type(getattr(config_section, setting_name)) is int
                and not setting_choice.step.is_integer()
            ):
                raise ValueError(
                    f"sweep.space.{setting_path}: its step is {setting_choice.step:g}, but"
                    f" {setting_path} is an integer: use 1, 2, …"
                )

            for choice_value in setting_choice.choices or [
                _convert_to_integer(setting_choice.low),
                _convert_to_integer(setting_choice.high),
            ]:
                apply_settings(config_section, section_name, {setting_path: choice_value})

        for setting_path, setting_choice in self.add_integer_steps(
            train_config, model_config
        ).choices():
            if self.sampler == "grid" and not setting_choice.value_count():
                raise ValueError(
                    f"sweep.space.{setting_path} is continuous: a grid needs a step, or a list of"
                    " values"
                )

    def add_integer_steps(self, train_config: BaseModel, model_config: BaseModel) -> Self:
        """Return the sweep with a step for each range of an integer setting."""
        search_space: dict[str, dict[str, SettingChoice]] = {
            section_name: dict(choice_by_key) for section_name, choice_by_key in self.space.items()
        }
        for setting_path, is_integer in find_integer_settings(
            self, train_config, model_config
        ).items():
            section_name, _, setting_name = setting_path.partition(".")
            if is_integer:
                search_space[section_name][setting_name] = search_space[section_name][
                    setting_name
                ].make_integer_choice()
        return self.model_copy(update={"space": search_space})

    def _check_rungs(self, train_config: "TrainConfig") -> None:
        """Raise ValueError if trials reach the first rung before the first validation."""
        duration_unit = "steps" if train_config.steps else "epochs"
        validation_interval = getattr(train_config, f"validation_{duration_unit}")
        total_duration = getattr(train_config, duration_unit)

        first_rung_duration = self.compute_step_share(0) * total_duration
        if (
            (duration_unit == "steps" or not train_config.validation_steps)
            and validation_interval
            and first_rung_duration < validation_interval * (1 - 1e-9)
        ):
            raise ValueError(
                f"sweep.rungs is {self.rungs}: the first rung is after {first_rung_duration:.3g}"
                f" {duration_unit}, before the first validation. Set"
                f" train.validation_{duration_unit} to at most {first_rung_duration:.3g}, or lower"
                " sweep.rungs or sweep.reduction"
            )


def apply_settings(
    config_section: AnySection, section_name: str, trial_settings: Mapping[str, object]
) -> AnySection:
    """Return the section `section_name` with the values of `trial_settings` for it. Raises
    ValueError that names the invalid setting."""
    changed_values = {
        setting_path.partition(".")[2]: setting_value
        for setting_path, setting_value in trial_settings.items()
        if setting_path.startswith(f"{section_name}.")
    }

    try:
        return type(config_section).model_validate(config_section.model_dump() | changed_values)
    except ValidationError as error:
        error_detail = error.errors()[0]
        setting_name = ".".join(map(str, error_detail["loc"])) or next(iter(changed_values))
        reason = describe_broken_rule(type(config_section), error_detail)
        raise ValueError(
            f"sweep.space.{section_name}.{setting_name}:"
            f" {changed_values.get(setting_name, changed_values)!r}: {reason}"
        ) from error


def select_default_settings(
    sweep: Sweep, train_config: BaseModel, model_config: BaseModel
) -> Settings:
    """Return the values of the config as the settings of a trial; {} if they are outside of the
    search space."""
    config_values = _list_config_values(sweep, train_config, model_config)
    if all(
        setting_choice.allows(config_values[setting_path])
        for setting_path, setting_choice in sweep.choices()
    ):
        return config_values
    return {}


def find_integer_settings(
    sweep: Sweep, train_config: BaseModel, model_config: BaseModel
) -> dict[str, bool]:
    """Return for each setting in the search space whether its value in the config is an integer."""
    return {
        setting_path: type(config_value) is int
        for setting_path, config_value in _list_config_values(
            sweep, train_config, model_config
        ).items()
    }


def _list_config_values(sweep: Sweep, train_config: BaseModel, model_config: BaseModel) -> Settings:
    """Return the values in the config of all settings in the search space."""
    values_by_section = {
        "train": train_config.model_dump(mode="json"),
        "model": model_config.model_dump(mode="json"),
    }
    return {
        setting_path: values_by_section[setting_path.partition(".")[0]][
            setting_path.partition(".")[2]
        ]
        for setting_path, _ in sweep.choices()
    }


def select_sweep_family(sweep: Sweep, workload_module: str, selected_families: list[str]) -> str:
    """Return the family to train.

    Raises ValueError for several families, for a family without training steps, and if the metric
    is a measure that the workload does not define.
    """
    family, *other_families = families.select_families(load(workload_module), selected_families)
    if other_families or isinstance(
        families.get_families(load(workload_module))[family], families.Fitted
    ):
        raise ValueError(
            "a sweep trains one family with training steps, not"
            f" {', '.join([family, *other_families])}: set families to one of them, such as"
            " families: [network]"
        )

    if sweep.metric != LOSS_METRIC and not hasattr(load(workload_module), "measures"):
        raise ValueError(
            f"sweep.metric is {sweep.metric}: {workload_module} does not define measures(model,"
            " batch), so only loss is available"
        )

    return family


def _convert_to_integer(range_end: float | None) -> float | None:
    if range_end is not None and float(range_end).is_integer():
        return int(range_end)
    return range_end
