"""The interface of the actions of a page, such as stopping a run.

A user confirms each action: a GET request shows its plan and the equivalent command, and a POST
request performs it. The plan and the confirmation of an action work without JavaScript.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from argolocal.common import program
from argolocal.errors import ConfigError
from argolocal.page.sources import Run

MAX_VALUE_LENGTH = 10_000


@dataclass(frozen=True)
class Field:
    """An input field of an action's form. `choices`: the permitted values, or [] if all values are
    permitted."""

    name: str
    label: str
    value: str = ""
    choices: list[str] = field(default_factory=list)
    is_required: bool = False
    kind: str = "text"
    """"text" or "number"."""
    hint: str = ""


@dataclass(frozen=True)
class Plan:
    """The description of an action that is possible now.

    `effect`: a sentence about what the action does. `command`: the command line with the same
    effect as the action. `address` is the URL path of the action. `back` is the URL path of the
    page to return to. `ends_something` is True if the action ends processes or replaces a version.
    """

    name: str
    title: str
    effect: str
    command: str
    address: str
    back: str
    ends_something: bool = False
    fields: list[Field] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """The result of an action: a message, and the URL path of the page that shows the result."""

    message: str
    address: str


class Action(Protocol):
    """An action on a run."""

    name: str

    def plan(self, run: Run) -> Plan | None:
        """Return the plan of the action, or None if the action is not possible for the run now."""
        ...

    def perform(self, run: Run, values: Mapping[str, str]) -> Outcome:
        """Perform the action. `values`: one value for each field of the plan. Raises
        ConfigError."""
        ...


class PageAction(Protocol):
    """An action on an object other than a run. `path`: the URL path of the action, with parameters
    in braces. `section`: name of the section that the navigation marks."""

    path: str
    section: str

    def plan(self, parameters: Mapping[str, str]) -> Plan | None:
        """Return the plan of the action for the `parameters` in its URL path, or None if the action
        is not possible."""
        ...

    def perform(self, parameters: Mapping[str, str], values: Mapping[str, str]) -> Outcome:
        """Perform the action. Raises ConfigError."""
        ...


def address_of(run: str, action: str) -> str:
    """Return the URL path of an action on a run."""
    return f"/runs/{run}/actions/{action}"


def command_line(*arguments: str) -> str:
    """Return a shell command line that calls this program with `arguments`."""
    return shlex.join([program.name, *arguments])


def parameter_flags(values: Mapping[str, str]) -> list[str]:
    """Return the options `-p NAME=VALUE` of a command."""
    return [flag for name, value in values.items() for flag in ("-p", f"{name}={value}")]


def select_values(fields: Iterable[Field], form: Mapping[str, str]) -> dict[str, str]:
    """Return the values that a form contains for `fields`. Raises ConfigError for an unknown field,
    a missing value or a forbidden value."""
    values = {}
    fields_by_name = {form_field.name: form_field for form_field in fields}
    unknown_names = form.keys() - fields_by_name.keys()
    if unknown_names:
        choices = ", ".join(fields_by_name) or "none"
        raise ConfigError(
            f"the action does not have a field {sorted(unknown_names)[0]!r}: its fields are"
            f" {choices}."
        )

    for name, form_field in fields_by_name.items():
        label = form_field.label
        value = form.get(name, form_field.value)
        if len(value) > MAX_VALUE_LENGTH:
            raise ConfigError(
                f"{label} has {len(value):,} characters: at most {MAX_VALUE_LENGTH:,} are possible."
            )
        if form_field.is_required and not value:
            raise ConfigError(f"{label} is missing: give a value.")
        if form_field.choices and value not in form_field.choices:
            raise ConfigError(
                f"{label} is {value!r}: it must be one of {', '.join(form_field.choices)}."
            )
        values[name] = value

    return values
