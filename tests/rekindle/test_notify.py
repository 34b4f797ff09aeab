"""Whatever the webhook does, the message is words, arrives if it can, and tells nobody the address."""

import socket
import threading

import pytest

from rekindle import notify
from rekindle.notify import Message, NotifyConfig, tell
from tests.rekindle.hook import SECRET, hook
from tests.waiting import until

SLACK, JSON = (NotifyConfig(format=form) for form in ("slack", "json"))
MESSAGE = Message(
    "refusal",
    "demo",
    "demo-x7 released nothing.",
    "auc 0.70 < 0.75 & <!channel> s3://ann:pa55@store/\x1b[2J",
    "demo-x7",
    "http://mlflow:5000/#/experiments/1/runs/ab",
)


def test_a_message_says_what_happened_why_and_where_to_look() -> None:
    with hook() as server:
        assert tell(MESSAGE, SLACK, environ={"NOTIFY_URL": server.url})
        assert tell(MESSAGE, JSON, environ={"NOTIFY_URL": f" {server.url}\n"})
    first, second = server.taken
    assert first == {
        "text": "*demo*: demo-x7 released nothing.\n"
        "auc 0.70 &lt; 0.75 &amp; &lt;!channel&gt; s3://store/\\u001b[2J\n"
        "<http://mlflow:5000/#/experiments/1/runs/ab|MLflow run>"
    }
    assert second == {
        "event": "refusal",
        "name": "demo",
        "text": "demo-x7 released nothing.",
        "reason": "auc 0.70 < 0.75 & <!channel> s3://store/\\u001b[2J",
        "workflow": "demo-x7",
        "link": "http://mlflow:5000/#/experiments/1/runs/ab",
    }


def test_a_webhook_that_is_away_for_a_moment_gets_the_message_once(capsys: pytest.CaptureFixture[str]) -> None:
    with hook(503, 429) as server:
        assert tell(MESSAGE, JSON, environ={"NOTIFY_URL": server.url})
    assert (server.requests, len(server.taken)) == (3, 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("statuses", "said", "requests"),
    [
        ((404,) * 9, "answered 404 (no_team\\u001b)", 1),
        ((302,) * 9, "answered 302", 1),
        ((500,) * 9, "answered 500", 2),
    ],
)
def test_a_webhook_that_refuses_is_named_without_its_address(
    statuses: tuple[int, ...], said: str, requests: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with hook(*statuses) as server:
        assert not tell(MESSAGE, SLACK, 2, environ={"NOTIFY_URL": server.url})
    told = capsys.readouterr().err
    assert f"nobody is told: the webhook at 127.0.0.1 {said}" in told
    assert SECRET not in told and (server.requests, server.taken) == (requests, [])


def test_a_webhook_that_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}{SECRET}"
        assert not tell(MESSAGE, SLACK, 2, environ={"NOTIFY_URL": url})
    told = capsys.readouterr().err
    assert "127.0.0.1 cannot be reached" in told and "timed out" in told and SECRET not in told


def test_a_webhook_that_closes_the_connection_is_asked_again() -> None:
    with hook() as server:
        server.silent.set()
        telling = threading.Thread(target=tell, args=(MESSAGE, SLACK, 6, {"NOTIFY_URL": server.url}))
        telling.start()
        until("a second request", lambda: server.requests >= 2)
        server.silent.clear()
        telling.join(60)
    assert len(server.taken) == 1


@pytest.mark.parametrize(
    "url", [f"hooks.example.com{SECRET}", f"http://[::1{SECRET}", f"ftp://h{SECRET}", f"http://127.0.0.1:1{SECRET}"]
)
def test_an_address_that_is_wrong_is_no_traceback_and_no_leak(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not tell(MESSAGE, SLACK, 1, environ={"NOTIFY_URL": url})
    told = capsys.readouterr().err
    assert "nobody is told" in told and "Correct NOTIFY_URL" in told and "T0S3CR3T" not in told


def test_without_an_address_it_is_said_how_to_give_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert not tell(MESSAGE, SLACK, environ={})
    assert "NOTIFY_URL is not set" in (said := capsys.readouterr().err) and "the Secret rekindle-notify" in said


def test_nobody_is_told_of_what_they_did_not_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    with hook() as server:
        for config in (NotifyConfig(), NotifyConfig(format="slack", events=["failure", "release"])):
            assert not tell(MESSAGE, config, environ={"NOTIFY_URL": server.url})
    assert server.requests == 0 and capsys.readouterr().err == ""
