"""What every section of a config file is; the model of each lies beside what it configures."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rekindle.errors import ConfigError, rule


class Section(BaseModel):
    """One part of a config file. Unknown keys are errors; every field carries its own documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def checked(section: type[S], values: Any, name: str) -> S:
    """`values` as the config's section `name`. Raises ConfigError that names each wrong key."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        keys = [(".".join(map(str, [name, *e["loc"]])), e) for e in error.errors()]
        raise ConfigError("\n".join(f"{key} is {e['input']!r}: {rule(e['msg'])}" for key, e in keys)) from error
