"""Tests of the hints for wrong keys, for any pydantic model of a section or request."""

import re
from datetime import date
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from rekindle.errors import ConfigError
from rekindle.sections import Section, Setting, describe_settings, list_valid_keys, parse_section


class Tree(BaseModel):
    name: str
    child: "Tree | None" = None
    children: list["Tree"] = []


class Socket:
    """A type without a JSON schema."""


class WithSocket(Section):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    rate: float = 1.0
    socket: Socket = Socket()


def test_known_keys_of_a_recursive_model_are_recognized_at_every_depth() -> None:
    for path in ((), ("child",), ("children", 3), ("children", 0, "child", "child")):
        assert list_valid_keys(Tree, path) == {"name", "child", "children"}
    assert list_valid_keys(Tree, ("name",)) == set()


def test_a_type_that_json_cannot_describe_hides_no_other_key() -> None:
    assert list_valid_keys(WithSocket, ()) == {"rate", "socket"}
    assert [(setting.key, setting.values) for setting in describe_settings(WithSocket)] == [
        ("rate", "number"),
        ("socket", "any value"),
    ]


class Limits(Section):
    """A section with bounds of a run."""

    steps: int = Field(3, ge=1, lt=9, description="number of steps")
    mode: Literal["", "fast"] = Field("", description="speed")
    deadline: date | None = Field(None, description="last day")


class Whole(Section):
    name: str = Field(description="name of the run")
    limits: Limits = Field(default_factory=lambda: Limits.model_validate({}))
    pods: dict[str, Limits] = Field(default_factory=dict, description="limits by pod")
    tags: list[str] = Field(default_factory=list, description="tags")


def test_each_key_is_described_by_its_values_default_and_meaning() -> None:
    assert describe_settings(Whole, "limits.steps") == [
        Setting("limits.steps", "integer >= 1, < 9", 3, "number of steps")
    ]
    assert [tuple(setting)[:3] for setting in describe_settings(Whole)] == [
        ("name", "text", None),
        ("limits.steps", "integer >= 1, < 9", 3),
        ("limits.mode", '"" | fast', ""),
        ("limits.deadline", "date | null", None),
        ("pods.NAME.steps", "integer >= 1, < 9", 3),
        ("pods.NAME.mode", '"" | fast', ""),
        ("pods.NAME.deadline", "date | null", None),
        ("tags", "list of text", None),
    ]

    assert describe_settings(Whole, "pods.train.mode") == [
        Setting("pods.train.mode", '"" | fast', "", "speed")
    ]


def test_a_model_that_holds_itself_is_described_once() -> None:
    assert [setting.key for setting in describe_settings(Tree)] == ["name", "child", "children"]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("limit", 'Did you mean "limits"?'),
        ("limits.step", '"steps"'),
        ("xyz", "Known: limits, name"),
        ("name.x", "no keys"),
    ],
)
def test_a_mistyped_key_to_explain_is_refused_with_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        describe_settings(Whole, key)


class Patterns(Section):
    week: str = Field(pattern="^[0-9]{4}-W[0-9]{2}$", description="week, such as 2026-W48")
    place: str = Field("", pattern="^[a-z]*$")


def test_an_error_about_a_pattern_has_the_description_instead_of_the_regular_expression() -> None:
    with pytest.raises(ConfigError) as error:
        parse_section(Patterns, {"week": "48", "place": "Rome"}, "data")
    assert str(error.value).splitlines() == [
        "data.week is '48': it has the wrong form for: week, such as 2026-W48.",
        "data.place is 'Rome': it has the wrong form.",
    ]
