"""Passwords in addresses must not appear in messages and logs."""

from collections.abc import Callable

import pytest

from rekindle import tracking
from rekindle.errors import RekindleError, without_user
from rekindle.storage import Store


@pytest.mark.parametrize(
    "text, shown",
    [
        ("http://ann:hunter2@h:9000/a is away", "http://h:9000/a is away"),
        ("https://ann@h", "https://h"),
        ("http://ann:hunter@2@h, http://bob:hunter2@i", "http://h, http://i"),
        ("http://ann:hunter/2@h", "http://h"),
        ("ann:hunter2@h", "h"),
        ("http://h:9000/models@champion", "http://h:9000/models@champion"),
        (
            "s3://bucket/a@b and registry.example.com/a@sha256:12",
            "s3://bucket/a@b and registry.example.com/a@sha256:12",
        ),
    ],
)
def test_only_user_and_password_are_removed_from_an_address(text: str, shown: str) -> None:
    assert without_user(text) == shown


def ask_mlflow(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracking.find_run("any", "any")


def ask_the_store(address: str, _: pytest.MonkeyPatch) -> None:
    Store("b", address, "key", "hunter2", short_retries=True).get("x")


@pytest.mark.parametrize("ask", [ask_mlflow, ask_the_store])
@pytest.mark.parametrize(
    "address", ["http://ann:hunter2@127.0.0.1:9", "http://ann:hunter2@127.0.0.1:x", "ann:hunter2@h"]
)
def test_the_error_of_an_unreachable_address_hides_its_password(
    ask: Callable[[str, pytest.MonkeyPatch], None],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RekindleError) as error:
        ask(address, monkeypatch)
    text = f"{error.value}{''.join(capfd.readouterr())}"
    assert "hunter2" not in text and ("127.0.0.1" in text) == ("127" in address)
