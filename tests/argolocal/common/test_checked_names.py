"""Names from untrusted sources. The tests check which values are valid names of runs, and how a
message shows an invalid value."""

import json
import pickle

import pytest

from argolocal.common.checked_names import InvalidName, ObjectName, RunName, format_untrusted

VALID_NAMES = ["a", "demo-x7k2p", "payments", "a.b-c.d", "1", "x" * 253]
INVALID_NAMES = [
    "",
    ".",
    "..",
    "../../project",
    "/home/me/precious",
    "/",
    "raw/customers",
    "a..b",
    "a.",
    ".a",
    "-a",
    "a-",
    "A",
    "a b",
    "a\n",
    "a\x00",
    "a\u202e",
    "ä",
    "a_b",
    "%2e%2e",
    "a?b",
    "x" * 254,
    "\ud800",
    None,
    5,
    True,
    b"a",
    [],
    {},
    ["a"],
]


@pytest.mark.parametrize("value", VALID_NAMES)
def test_a_valid_name_is_a_text(value: str):
    name = RunName(value)
    assert name == value
    assert RunName.parse_or_none(value) == value
    assert json.loads(json.dumps({name: name})) == {value: value}
    assert pickle.loads(pickle.dumps(name)) == value
    assert type(pickle.loads(pickle.dumps(name))) is RunName


@pytest.mark.parametrize("value", INVALID_NAMES)
def test_no_other_value_becomes_a_name(value: object):
    assert RunName.parse_or_none(value) is None
    for kind in (RunName, ObjectName):
        with pytest.raises(InvalidName):
            kind(value)


def test_the_message_has_the_value_its_source_and_the_rule():
    with pytest.raises(InvalidName) as caught:
        RunName("../\x1b[31mred\u202e", "the tag rekindle.workflow of MLflow")
    text = str(caught.value)
    assert "the name of a run (the tag rekindle.workflow of MLflow): it must" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "red\\u202e" in text


def test_a_long_value_is_shown_in_part():
    assert format_untrusted("a" * 1_000_000) == f'"{"a" * 100}"... (999,900 characters more)'
    assert format_untrusted("a\r\nb\x85") == '"a\\u000d\\u000ab\\u0085"'
    assert format_untrusted(None) == "None"
