"""Evaluate the conditions of resource templates, which are Kubernetes label selectors whose keys
are gjson paths.

    selector := requirement ("," requirement)*
    requirement := key | "!" key | key (= | == | !=) value | key (> | <) integer
                 | key (in | notin) "(" value ("," value)* ")"

A key is a path like `status.conditions.1.type` that consists of letters, digits and `._-`. A
success condition is true if all of its requirements are met, and a failure condition if at least
one is met. The failure condition of a template is checked first. If a path does not exist, the
requirements `!=`, `notin` and `!key` are met. Source: k8s.io/apimachinery/pkg/labels, Argo's
executor/resource.go matchConditions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from argolocal.common.environment import WHOLE_NUMBER
from argolocal.language.gofmt import dumps, format_g

SELECTOR_TOKEN = re.compile(r"\s*(!=|==|=|>|<|!|,|\(|\)|[^\s=!<>,()]+)")
KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
MISSING = object()


class SelectorError(ValueError):
    """A condition is not a valid label selector."""


@dataclass(frozen=True)
class Requirement:
    """A requirement of a selector. `operator` is "exists" or the operator in the selector, such as
    "!" or "notin"."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, value: object) -> bool:
        """Return True if the value of the key, or MISSING, satisfies this requirement."""
        if self.operator in ("exists", "!"):
            return (value is not MISSING) == (self.operator == "exists")
        if value is MISSING:
            return self.operator in ("!=", "notin")

        value_text = _format_value(value)
        if self.operator in (">", "<"):
            if not re.fullmatch("[+-]?[0-9]{1,19}", value_text):
                return False
            if self.operator == ">":
                return int(value_text) > int(self.values[0])
            return int(value_text) < int(self.values[0])

        return (value_text in self.values) == (self.operator in ("=", "==", "in"))


def parse(selector_text: str) -> list[Requirement]:
    """Return the requirements of a condition, sorted by key as in Kubernetes. Raises
    SelectorError."""
    tokens = []

    position = 0
    while selector_text[position:].strip():
        match = SELECTOR_TOKEN.match(selector_text, position)
        assert match
        tokens.append(match[1])
        position = match.end()

    requirements: list[Requirement] = []
    while tokens:
        requirements.append(_parse_requirement(tokens))
        if tokens and tokens.pop(0) != ",":
            raise SelectorError("expected ',' or end of the condition after a requirement")

    return sorted(requirements, key=lambda requirement: requirement.key)


def _parse_requirement(tokens: list[str]) -> Requirement:
    """Remove the tokens of one requirement from the start of `tokens`, and return the requirement.
    Raises SelectorError."""
    is_negated = tokens[0] == "!"
    if is_negated:
        tokens.pop(0)

    key = tokens.pop(0) if tokens else ""
    if not KEY.fullmatch(key):
        raise SelectorError(
            f'"{key}" is not a key: only letters, digits, ".", "_" and "-" are allowed'
        )

    if is_negated or not tokens or tokens[0] == ",":
        return Requirement(key, "!" if is_negated else "exists")

    operator = tokens.pop(0)
    if operator in ("in", "notin"):
        return Requirement(key, operator, tuple(_parse_value_list(tokens)))
    if operator not in ("=", "==", "!=", ">", "<"):
        raise SelectorError(f'"{operator}" is not an operator: use =, ==, !=, in, notin, > or <')

    value = tokens.pop(0) if tokens and tokens[0] != "," else ""
    if not VALUE.fullmatch(value) or (operator in "<>" and not re.fullmatch(r"-?\d+", value)):
        raise SelectorError(f'"{value}" is not a value for "{operator}"')

    return Requirement(key, operator, (value,))


def _parse_value_list(tokens: list[str]) -> list[str]:
    """Remove a list of values in parentheses from the start of `tokens`, and return the values.
    Raises SelectorError."""
    if not tokens or tokens.pop(0) != "(":
        raise SelectorError('"in" and "notin" need their values in parentheses')

    values = []
    last_token = ","

    while tokens and (token := tokens.pop(0)) != ")":
        if token != ",":
            values.append(token)
        elif last_token == ",":
            values.append("")

        last_token = token
    else:
        if last_token == "(":
            raise SelectorError("the list of values is not closed")

    return values


def find_value(document: object, path: str) -> Any:
    """Return the value at a gjson path of names and indexes ("#" is a list's length), or
    MISSING."""
    for name in path.split("."):
        if isinstance(document, Mapping) and name in document:
            document = document[name]
        elif (
            isinstance(document, list)
            and WHOLE_NUMBER.fullmatch(name)
            and int(name) < len(document)
        ):
            document = document[int(name)]
        elif isinstance(document, list) and name == "#":
            document = len(document)
        else:
            return MISSING
    return document


def _format_value(value: object) -> str:
    """Return the text of a field's value that is compared with the values of a requirement."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return format_g(value, 1e-6, 1e21)
    return dumps(value)


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    """Return True if `selector` matches these labels, as kubectl's --selector does. Raises
    SelectorError."""
    return all(
        requirement.matches(labels.get(requirement.key, MISSING)) for requirement in parse(selector)
    )


def evaluate_conditions(
    document: object, success_condition: str, failure_condition: str
) -> tuple[bool | None, str]:
    """Return (False, reason) if `failure_condition` is true, (True, "") if `success_condition` is
    true, and (None, "") if both are false. Raises SelectorError."""
    for requirement in parse(failure_condition):
        if requirement.matches(find_value(document, requirement.key)):
            # text of the requirement, formatted as by Go's %s
            requirement_text = (
                f"{{{requirement.key} {requirement.operator} [{' '.join(requirement.values)}]}}"
            )
            return False, f"failure condition '{requirement_text}' evaluated true"

    has_succeeded = all(
        requirement.matches(find_value(document, requirement.key))
        for requirement in parse(success_condition)
    )
    return True if has_succeeded else None, ""
