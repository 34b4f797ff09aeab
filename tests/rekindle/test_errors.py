"""What a user would lose: a password that stands in an address, to everybody who reads a log."""

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
def test_of_an_address_all_is_shown_but_its_user(text: str, shown: str) -> None:
    assert without_user(text) == shown


Asks = Callable[[str, pytest.MonkeyPatch], None]


def asks_mlflow(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracking.find_run("any", "any")


def asks_the_store(address: str, _: pytest.MonkeyPatch) -> None:
    Store("b", address, "key", "hunter2", short_retries=True).get("x")


@pytest.mark.parametrize("asks", [asks_mlflow, asks_the_store])
@pytest.mark.parametrize(
    "address", ["http://ann:hunter2@127.0.0.1:9", "http://ann:hunter2@127.0.0.1:x", "ann:hunter2@h"]
)
def test_an_address_that_does_not_answer_is_named_without_its_password(
    asks: Asks, address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RekindleError) as error:
        asks(address, monkeypatch)
    told = f"{error.value}{''.join(capfd.readouterr())}"
    assert "hunter2" not in told and ("127.0.0.1" in told) == ("127" in address)
