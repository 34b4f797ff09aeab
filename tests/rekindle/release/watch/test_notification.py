"""Tests of notifications: messages are readable, failed requests are retried, and the address of
the webhook is never shown."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from rekindle.release.watch import notification as notify
from rekindle.release.watch import scrape
from rekindle.release.watch.notification import NotificationMessage, NotifyConfig, send_notification
from tests.rekindle.hook import SECRET, Hook
from tests.waiting import until

SLACK, JSON = (NotifyConfig(format=form) for form in ("slack", "json"))
MESSAGE = NotificationMessage(
    "refusal",
    "demo",
    "demo-x7 released nothing.",
    "auc 0.70 < 0.75 & <!channel> s3://ann:pa55@store/\x1b[2J",
    "demo-x7",
    "http://mlflow:5000/#/experiments/1/runs/ab",
)


def test_a_message_has_the_event_its_reason_and_a_link() -> None:
    with Hook() as server:
        assert send_notification(MESSAGE, SLACK, environment={"NOTIFY_URL": server.url})
        assert send_notification(MESSAGE, JSON, environment={"NOTIFY_URL": f" {server.url}\n"})

    first_notification, second_notification = server.received
    assert first_notification == {
        "text": "*demo*: demo-x7 released nothing.\n"
        "auc 0.70 &lt; 0.75 &amp; &lt;!channel&gt; s3://store/\\u001b[2J\n"
        "<http://mlflow:5000/#/experiments/1/runs/ab|MLflow run>"
    }

    assert second_notification == {
        "event": "refusal",
        "name": "demo",
        "text": "demo-x7 released nothing.",
        "reason": "auc 0.70 < 0.75 & <!channel> s3://store/\\u001b[2J",
        "workflow": "demo-x7",
        "link": "http://mlflow:5000/#/experiments/1/runs/ab",
    }


def test_a_message_is_retried_and_delivered_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Hook(503, 429) as server:
        assert send_notification(MESSAGE, JSON, environment={"NOTIFY_URL": server.url})
    assert len(server.requests) == 3
    assert len(server.received) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("statuses", "problem", "requests"),
    [
        ((404,) * 9, "answered 404 (no_team\\u001b)", 1),
        ((405,) * 9, "answered 405 (Cannot POST ...: ", 1),
        ((302,) * 9, "answered 302", 1),
        ((500,) * 9, "answered 500", 2),
    ],
)
def test_the_log_of_a_refusal_names_the_host_and_hides_the_address(
    statuses: tuple[int, ...], problem: str, requests: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with Hook(*statuses) as server:
        assert not send_notification(MESSAGE, SLACK, 2, environment={"NOTIFY_URL": server.url})
    stderr = capsys.readouterr().err
    assert f"notification not sent: the webhook at 127.0.0.1 {problem}" in stderr
    assert "T0S3CR3T" not in stderr
    assert len(server.requests) == requests
    assert server.received == []


def test_a_webhook_that_never_answers_times_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}{SECRET}"
        assert not send_notification(MESSAGE, SLACK, 2, environment={"NOTIFY_URL": url})
    stderr = capsys.readouterr().err
    assert "127.0.0.1 cannot be reached" in stderr
    assert "timed out" in stderr
    assert SECRET not in stderr


@pytest.mark.slow
@contextmanager
def slow_server(sent: threading.Event) -> Iterator[str]:
    """Answer a request byte by byte, without an end, until `sent` is set, and yield the address of
    the server."""

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nA: ")
            while not sent.wait(0.05):
                connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            sent.set()
            thread.join()


def test_a_server_that_answers_byte_by_byte_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "TOTAL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(scrape, "TOTAL_TIMEOUT_S", 0.5)
    with slow_server(threading.Event()) as url:
        assert not send_notification(
            MESSAGE, SLACK, 1, environment={"NOTIFY_URL": f"{url}{SECRET}"}
        )
    stderr = capsys.readouterr().err
    assert "127.0.0.1 answers too slowly (it took more than 0.5 s)" in stderr
    assert SECRET not in stderr

    with slow_server(threading.Event()) as url:
        monkeypatch.setenv("MODEL_SERVICE_ENDPOINTS", url.removeprefix("http://").partition(":")[0])
        (answer,) = scrape.read_servers(f"http://model:{url.rpartition(':')[2]}").values()
    assert isinstance(answer, str)
    assert "it took more than 0.5 s" in answer


def test_a_closed_connection_is_retried() -> None:
    with Hook() as server:
        server.silent.set()
        sender = threading.Thread(
            target=send_notification, args=(MESSAGE, SLACK, 6, {"NOTIFY_URL": server.url})
        )
        sender.start()
        until("a second request", lambda: len(server.requests) >= 2)
        server.silent.clear()
        sender.join(60)
    assert len(server.received) == 1


@pytest.mark.parametrize(
    "url",
    [
        f"hooks.example.com{SECRET}",
        f"http://[::1{SECRET}",
        f"ftp://h{SECRET}",
        f"http://127.0.0.1:1{SECRET}",
    ],
)
def test_a_wrong_address_causes_no_traceback_and_no_leak(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not send_notification(MESSAGE, SLACK, 1, environment={"NOTIFY_URL": url})
    stderr = capsys.readouterr().err
    assert "notification not sent" in stderr
    assert "Correct NOTIFY_URL" in stderr
    assert "T0S3CR3T" not in stderr


def test_a_missing_address_is_logged_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert not send_notification(MESSAGE, SLACK, environment={})
    stderr = capsys.readouterr().err
    assert "NOTIFY_URL is not set" in stderr
    assert "the Secret rekindle-notify" in stderr


def test_only_selected_events_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with Hook() as server:
        for config in (NotifyConfig(), NotifyConfig(format="slack", events=["failure", "release"])):
            assert not send_notification(MESSAGE, config, environment={"NOTIFY_URL": server.url})
    assert len(server.requests) == 0
    assert capsys.readouterr().err == ""
