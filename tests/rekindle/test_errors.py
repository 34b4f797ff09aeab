"""Passwords in addresses must not appear in messages and logs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle import mlflow_api, tracking
from rekindle.errors import ConfigError, RekindleError, TrackingError, without_secrets
from rekindle.local.services.services import check_reachable
from rekindle.names import split_address
from rekindle.storage import Store


@pytest.mark.parametrize(
    "text, shown",
    [
        ("http://ann:hunter2@h:9000/a is away", "http://h:9000/a is away"),
        ("https://ann@h", "https://h"),
        ("http://ann:hunter@2@h, http://bob:hunter2@i", "http://h, http://i"),
        ("http://ann:hunter/2@h", "http://h"),
        ("ann:hunter2@h", "h"),
        ("http://h:9000/models/a", "http://h:9000/models/a"),
        ("//ann:hunter2@h", "//h"),
        ("HTTP://ann:hunter2@h", "HTTP://h"),
        ("http://ann:hun@ter@2@h is away", "http://h is away"),
        ("http://ann:hunter 2@h is away", "http://h is away"),
        ("http://ann:hunter?2@h, http://bob:hunter#2@i", "http://h, http://i"),
        ("http://ann:123/hunter2@h", "http://…@h"),
        ("h?sig=hunter2, again", "h?sig=…, again"),
        ("/a?x=1&access_token=hunter2", "/a?x=1&access_token=…"),
        ("http://h/a#token=hunter2: no", "http://h/a#…: no"),
        ("http://h/#/a?token=hunter2", "http://h/#/a?token=…"),
        ("http://h/a;token=hunter2/b", "http://h/a;…"),
        ("http://h?sig=hunter'2 is away", "http://h?… is away"),
        ('{"url": "http://h?a=1", "b": 2}', '{"url": "http://h?…", "b": 2}'),
        ("http://h/a/#title-of-a-paragraph.", "http://h/a/#title-of-a-paragraph."),
        ("http://h:9000, mail a@b", "http://h:9000, mail a@b"),
        ("registry:5000/a@sha256:12 is missing", "registry:5000/a@sha256:12 is missing"),
        ("models:/demo@champion", "models:/demo@champion"),
        ("http://h/#/experiments/1/runs/a?b=c", "http://h/#/experiments/1/runs/a?b=c"),
        ("https://h/a?X-Amz-Signature=hunter2&b=1 is away?", "https://h/a?… is away?"),
        ("--set a=https://h/a?b=1: a is wrong.", "--set a=https://h/a?…: a is wrong."),
        ("'http://h?token=hunter2', again", "'http://h?…', again"),
        (
            "s3://bucket/a@b and registry.example.com/a@sha256:12",
            "s3://bucket/a@b and registry.example.com/a@sha256:12",
        ),
    ],
)
def test_only_secrets_are_removed_from_an_address(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def ask_mlflow(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracking.find_run("any", "any")


def ask_the_store(address: str, _: pytest.MonkeyPatch) -> None:
    Store("b", address, "key", "hunter2", short_retries=True).get("x")


@pytest.mark.parametrize(
    "ask, variable, message",
    [
        (ask_mlflow, "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_TOKEN must be one line"),
        (ask_the_store, "AWS_SESSION_TOKEN", "header value is not allowed"),
    ],
)
def test_the_error_of_a_token_that_no_header_can_have_hides_it(
    ask: Callable[[str, pytest.MonkeyPatch], None],
    variable: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv(variable, "hunter2\nhunter2")
    with pytest.raises(RekindleError, match=message) as error:
        if ask is ask_mlflow:
            ask("http://127.0.0.1:9", monkeypatch)
        else:
            Store("b", "http://127.0.0.1:9", short_retries=True).get("x")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "9" * 5000, "99"])
def test_an_invalid_number_of_retries_is_one_error(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", text)
    with pytest.raises(TrackingError, match=r"MAX_RETRIES is .*whole number from 0 to 10"):
        tracking.find_run("any", "any")


@pytest.mark.parametrize(
    "variable, value",
    [
        ("MLFLOW_TRACKING_TOKEN", "hunter2\u0142"),
        ("MLFLOW_TRACKING_USERNAME", "\u0142"),
        ("MLFLOW_TRACKING_PASSWORD", "hunter2\u0142"),
    ],
)
def test_credentials_of_other_characters_than_latin_are_no_bug(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv(variable, value)
    mlflow_api._create_session.cache_clear()
    with pytest.raises(TrackingError) as error:
        ask_mlflow("http://127.0.0.1:9", monkeypatch)
    mlflow_api._create_session.cache_clear()
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "variable, value",
    [
        ("AWS_PROFILE", "missing"),
        ("AWS_CONFIG_FILE", "{broken}"),
        ("AWS_REGION", "a b"),
        ("AWS_DEFAULTS_MODE", "fast"),
        ("AWS_REQUEST_MIN_COMPRESSION_SIZE_BYTES", "abc"),
        ("AWS_ACCOUNT_ID_ENDPOINT_MODE", "often"),
        ("AWS_METADATA_SERVICE_TIMEOUT", "abc"),
        ("AWS_SECRET_ACCESS_KEY", ""),
    ],
)
def test_an_invalid_setting_of_aws_is_one_error(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").write_text("[default")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv(variable, value.format(broken=tmp_path / "broken"))
    with pytest.raises(ConfigError, match=r"a setting of the object store is invalid .*AWS_"):
        Store("b", "http://127.0.0.1:9", short_retries=True)


@pytest.mark.parametrize("address", ["http://[", "http://ann:hunter2@[x", "http://ann:hunter2/x@h"])
def test_an_address_with_an_invalid_host_is_one_error(address: str) -> None:
    with pytest.raises(
        RekindleError, match=r"S3_ENDPOINT_URL is http://.*nothing answers"
    ) as error:
        check_reachable("s3", address)
    assert "hunter2" not in str(error.value)


def test_the_address_of_no_host_is_not_split() -> None:
    assert split_address("http://ann:hunter2@[x").scheme == ""


@pytest.mark.parametrize("ask", [ask_mlflow, ask_the_store])
@pytest.mark.parametrize(
    "address",
    [
        "http://ann:hunter2@127.0.0.1:9",
        "http://ann:hunter2@127.0.0.1:x",
        "http://ann:1/hunter2@h",
        "http://ann:hunter2/1@h",
        "http://ann:a hunter2@h",
        "http://127.0.0.1:9?sig=hunter2",
        "http://127.0.0.1:9/a#token=hunter2",
        "http://127.0.0.1:9/a;token=hunter2",
        "ann:hunter2@h",
        "h?sig=hunter2",
        "//ann:hunter2@h",
    ],
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
    assert "hunter2" not in text
    assert ("127.0.0.1" in text) == ("127" in address)
