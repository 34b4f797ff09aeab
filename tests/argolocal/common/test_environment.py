"""Numbers and tokens in environment variables are checked when they are read. Processes that outlive
a command do not get the user's secrets."""

import math

import pytest

from argolocal.common.environment import (
    read_integer,
    read_seconds,
    remove_secrets,
    require_header_text,
)
from argolocal.errors import ConfigError


@pytest.mark.parametrize("text, number", [("", 7), (" ", 7), ("0", 0), (" 12\n", 12), ("012", 12)])
def test_a_variable_with_a_whole_number(
    text: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIZE", text)
    assert read_integer("SIZE", 7, 0, 12) == number


@pytest.mark.parametrize("text", ["abc", "-1", "13", "1.5", "1e3", "0x1", "\u0663", "9" * 5000])
def test_a_variable_with_another_text_is_one_error(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIZE", text)
    with pytest.raises(ConfigError, match=r"SIZE is .*: it must be a whole number from 0 to 12"):
        read_integer("SIZE", 7, 0, 12)


def test_a_variable_with_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_seconds("LIMIT", math.inf, "Correct it.") == math.inf
    monkeypatch.setenv("LIMIT", "2.5")
    assert read_seconds("LIMIT", math.inf, "Correct it.") == 2.5
    for text in ("soon", "0", "-1", "nan", "inf", "9" * 5000):
        monkeypatch.setenv("LIMIT", text)
        with pytest.raises(ConfigError, match=r"LIMIT is .*: .* number of seconds. Correct it."):
            read_seconds("LIMIT", math.inf, "Correct it.")


@pytest.mark.parametrize("token", ["hunter2\nx", "hunter2\x1b", "hunter2\u0142", "hunter2\xe4"])
def test_a_token_that_no_header_can_have_is_not_shown(token: str) -> None:
    assert require_header_text("hunter2 2", "THE_TOKEN") == "hunter2 2"
    with pytest.raises(ConfigError, match="THE_TOKEN must be one line of text") as error:
        require_header_text(token, "THE_TOKEN")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "github_token", "DB_PASSWORD", "OPENAI_API_KEY", "NOTIFY_URL"]
)
def test_secrets_are_removed(name: str) -> None:
    assert remove_secrets({name: "x", "PATH": "/bin", "KEYBOARD": "de"}) == {
        "PATH": "/bin",
        "KEYBOARD": "de",
    }


def test_keys_of_services_are_kept_only_where_they_are_needed() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "x", "MLFLOW_TRACKING_PASSWORD": "y", "AWS_REGION": "z"}
    assert remove_secrets(environ) == environ
    assert remove_secrets(environ, needs_services=False) == {"AWS_REGION": "z"}
