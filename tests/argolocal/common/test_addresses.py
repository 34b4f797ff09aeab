"""A message shows the host of an address, but not the secrets in the address."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from argolocal.common.addresses import (
    MAX_LINE_CHARS,
    MAX_TEXT_CHARS,
    format_address,
    remove_address_secrets,
)

SECRETS = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), max_size=9).map(
    lambda text: f"hunter2{text}hunter2"
)


@pytest.mark.parametrize(
    "address, shown",
    [
        ("http://h:9000/a/b", "http://h:9000/a/b"),
        ("https://[::1]:9000", "https://[::1]:9000"),
        ("h.example:9000", "h.example:9000"),
        ("HTTP://ann:hunter2@h", "HTTP://h"),
        ("//ann:hunter2@h/a", "//h/a"),
        ("ann:hunter2@h", "h"),
        ("http://127.0.0.1:x", "http://127.0.0.1:x"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("", ""),
        ("h?hunter2", "h…"),
        ("http://h/a?sig=hunter2", "http://h/a…"),
        ("http://h/a#token=hunter2", "http://h/a…"),
        ("http://h/a;token=hunter2", "http://h/a…"),
        ("http://h?sig=hunter2@hunter2", "http://…"),
        ("http://ann:123/hunter2@h", "http://…"),
        ("http://ann:a hunter2@h", "http://…"),
        ("http://ann:hunter2%40h", "http://…"),
        ("http://ann:hunt@er2@h", "http://…"),
        ("ann:hunter2/hunter2@h", "…"),
    ],
)
def test_an_address_is_shown_without_its_secrets(address: str, shown: str) -> None:
    assert format_address(address) == shown


@given(SECRETS, st.sampled_from(["http://ann:{}@h", "//ann:{}@h/a", "http://h?sig={}", "h;a={}@h"]))
def test_no_secret_of_an_address_is_shown_whatever_its_characters_are(
    secret: str, form: str
) -> None:
    assert "hunter2" not in format_address(form.format(secret))


# the text before the first @ looks like a user name
@example("hunter2@/hunter2")
# an address with a query, or a password with @ and ?
@example("hunter2h@1?hunter2")
@given(SECRETS.filter(lambda secret: "://" not in secret))
def test_no_password_in_a_message_is_shown_whatever_its_characters_are(secret: str) -> None:
    assert remove_address_secrets(f"http://ann:{secret}@h is away") == "http://h is away"


@pytest.mark.parametrize(
    "text", ["(//a:", "(//a:\n", "://", "`a:", "(//a:1/", "?token=", "'//a:b "]
)
def test_a_long_message_does_not_stop_the_command(text: str) -> None:
    shown = remove_address_secrets(1_000_000 * text)
    assert len(shown) <= MAX_TEXT_CHARS + len("...")
    assert shown.endswith("...")


@pytest.mark.parametrize(
    "address",
    [
        "http://ann:secret@h",
        "http://ann:secret secret@h",
        "ann:secret@h",
        "//secret@h",
        "http://h?token=secret",
        "http://h/a;token=secret",
    ],
)
@pytest.mark.parametrize("limit", [MAX_LINE_CHARS, MAX_TEXT_CHARS])
def test_a_long_message_is_not_cut_within_a_secret(address: str, limit: int) -> None:
    lines = (limit // MAX_LINE_CHARS - 1) * (MAX_LINE_CHARS * "x" + "\n")
    for number in range(limit - 60, limit):
        start = lines + (number - len(lines)) * "x"
        assert "se" not in remove_address_secrets(f"{start} {address} is away{limit * 'x'}")
