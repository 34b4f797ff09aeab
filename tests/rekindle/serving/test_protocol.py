"""Tests of the server's HTTP with unusual, invalid and hostile clients: every request gets its own
answer, and costs little."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from rekindle.storage import Store
from tests.rekindle.serving.running import PREDICT, RunningServer, connect, prefix_of, write_release

PREFIX = prefix_of("protocol")
BODY = b'{"instances": [{"id": "a"}]}'
GET = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
# status, headers and body of each answer
Answers = list[tuple[int, dict[str, str], bytes]]


@pytest.fixture(scope="module")
def server(s3_environment: dict[str, str]) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment.items():
            patch.setenv(name, value)
        write_release(Store.from_env(), PREFIX)
        with RunningServer(f"--model={PREFIX}", "--body-seconds=60") as running:
            running.until_ready()
            yield running


def make_post_request(*headers: str, body: bytes = BODY, path: str = PREDICT) -> bytes:
    """Return a POST request; without `headers`, it has a header with the length of the body."""
    lines = [f"POST {path} HTTP/1.1", "host: x", *(headers or [f"content-length: {len(body)}"])]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def receive(client: socket.socket, count: int = 1 << 20) -> Answers:
    """Return the next `count` answers, or all answers until the server closes the connection."""
    answers: Answers = []
    with client.makefile("rb") as stream:
        while len(answers) < count and (line := stream.readline()):
            headers = dict[str, str]()
            while (header := stream.readline().strip()) and b":" in header:
                name, _, value = header.decode().lower().partition(": ")
                headers[name] = value
            status = int(line.split()[1])
            if status != 100:
                answers.append((status, headers, stream.read(int(headers["content-length"]))))
    return answers


LENGTH = f"content-length: {len(BODY)}"


# the client closes its end of the connection before the answer begins
SLOW_REQUEST = make_post_request(body=b'{"instances": [{"id": "a", "sleep": 0.5}]}')


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "text",
    [
        SLOW_REQUEST,
        SLOW_REQUEST + make_post_request() * 2,
        SLOW_REQUEST + GET,
        SLOW_REQUEST + GET + b"GE",
    ],
)
def test_a_client_that_ends_its_side_of_the_connection_gets_all_answers(
    server: RunningServer, text: bytes
) -> None:
    with connect(server) as client:
        client.sendall(text)
        client.shutdown(socket.SHUT_WR)
        answers = receive(client)
    assert [status for status, _, _ in answers] == [200] * text.count(b"HTTP/1.1")
    assert ["connection" in headers for _, headers, _ in answers] == [False] * (
        len(answers) - 1
    ) + [True]


def test_a_client_that_ends_its_side_within_a_body_is_disconnected(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(make_post_request()[:-1])
        client.shutdown(socket.SHUT_WR)
        assert receive(client) == []


@pytest.mark.parametrize("size", [1 << 20, 1])
def test_a_request_that_offers_http_2_is_answered(server: RunningServer, size: int) -> None:
    """By default, the client of Java offers HTTP/2 in its first request."""
    offer = (
        "connection: Upgrade, HTTP2-Settings",
        "upgrade: h2c",
        "http2-settings: AAMAAABkAARAAAAA",
    )

    text = make_post_request(LENGTH, *offer) + make_post_request(
        "transfer-encoding: chunked", *offer, body=b"1c\r\n" + BODY + b"\r\n0\r\n\r\n"
    )

    with connect(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(text), size):
            client.sendall(text[start : start + size])

        client.sendall(GET)
        answers = receive(client, 3)

    assert [status for status, _, _ in answers] == [200] * 3
    assert [body[:5] for _, _, body in answers][:2] == [b'{"pre'] * 2


def test_an_answer_instead_of_100_continue_closes_the_connection(server: RunningServer) -> None:
    """If the connection stayed open, the server would take the client's next request for the body
    of the rejected one."""
    with connect(server) as client:
        for _ in range(2):  # an accepted body keeps the connection open
            client.sendall(make_post_request(LENGTH, "expect: 100-continue", body=b""))
            assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(BODY)
            [(status, headers, _)] = receive(client, 1)
            assert status == 200
            assert headers.get("connection") is None
        client.sendall(make_post_request(LENGTH, "expect: 100-continue", body=b"", path="/nowhere"))
        [(status, headers, _)] = receive(client)
        assert status == 404
        assert headers["connection"] == "close"


CHUNKED = make_post_request("transfer-encoding: chunked", body=b"")


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n", b"a: b\r\n", id="lines"),
        pytest.param(b"GET /", b"a", id="path"),
        pytest.param(b"GET / HTTP/1.1\r\na: ", b"b", id="line"),
        pytest.param(CHUNKED + b"1\r\n \r\n0\r\n", b"a: b\r\n", id="trailers"),
        pytest.param(CHUNKED + b"1\r\n \r\n0\r\na: ", b"b", id="trailer"),
        pytest.param(CHUNKED + b"1;", b"a", id="extension of a chunk"),
    ],
)
def test_an_endless_head_is_rejected(server: RunningServer, start: bytes, piece: bytes) -> None:
    with connect(server) as client:
        client.sendall(start)
        # the server may have closed the connection
        with suppress(ConnectionError):
            for _ in range(12):
                client.sendall(piece * (2048 // len(piece)))
        # a connection that is closed before the last piece was read is reset after the answer
        [(status, headers, body)] = receive(client, 1)
    assert status == 431
    assert headers["connection"] == "close"
    assert "larger than 16,384" in json.loads(body)["error"]


def test_a_large_head_and_many_small_chunks_are_accepted(server: RunningServer) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY.ljust(20_000)) + b"0\r\n\r\n"
    with connect(server) as client:
        client.sendall(make_post_request(LENGTH, f"x: {'a' * 15_000}") * 2 + CHUNKED + chunks)
        assert [status for status, _, _ in receive(client, 3)] == [200] * 3


def test_too_many_requests_at_once_are_answered_in_part(server: RunningServer) -> None:
    """Each waiting request needs a hundred times as much memory as its text."""
    with connect(server) as client:
        client.sendall(GET * 90)
        assert [status for status, _, _ in receive(client, 90)] == [200] * 90
        client.sendall(GET * 5_000)
        answers = receive(client)
    assert {status for status, _, _ in answers} == {200}
    assert 100 <= len(answers) < 300
    assert ["connection" in headers for _, headers, _ in answers] == [False] * (
        len(answers) - 1
    ) + [True]


@pytest.mark.parametrize(
    "headers",
    [
        (LENGTH, "transfer-encoding: chunked"),
        (LENGTH, LENGTH),
        (LENGTH, "content-length: 3"),
        ("content-length: -3",),
        ("content-length: +28",),
        ("content-length: 28, 28",),
        ("content-length: 0x1c",),
        ("content-length: 99999999999999999999",),
        ("transfer-encoding: identity",),
        ("transfer-encoding: chunked, identity",),
        ("transfer-encoding: chunked", "transfer-encoding: identity"),
        ("transfer-encoding : chunked",),
        ("x: a\r\n b",),
        ("x: a\0b",),
    ],
    ids=repr,
)
def test_a_request_whose_length_is_ambiguous_is_rejected(
    server: RunningServer, headers: tuple[str, ...]
) -> None:
    """With an ambiguous length, a proxy and the server could disagree about the end of the
    request."""
    with connect(server) as client:
        client.sendall(make_post_request(*headers) + GET)
        [(status, _, body)] = receive(client)
    assert status == 400
    assert "is not valid HTTP/1.1" in json.loads(body)["error"]


def test_an_invalid_request_does_not_replace_the_answer_to_the_request_before(
    server: RunningServer,
) -> None:
    with connect(server) as client:
        client.sendall(make_post_request() + b"\0" + GET)
        [(status, headers, _)] = receive(client)
    assert status == 200
    assert headers["connection"] == "close"


@pytest.mark.parametrize("target", ["x:80", "http://x"])
def test_the_error_of_an_invalid_url_names_it(server: RunningServer, target: str) -> None:
    with connect(server) as client:
        client.sendall(
            f"{'CONNECT' if target == 'x:80' else 'GET'} {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        )
        [(status, _, body)] = receive(client)
    assert status == 400
    assert json.loads(body)["error"] == "the request is not valid HTTP/1.1: invalid URL."


def test_a_trailer_is_not_a_header(server: RunningServer) -> None:
    trailers = b"1c\r\n" + BODY + b"\r\n0\r\nrekindle-replay: 1\r\n\r\n"
    with connect(server) as client:
        client.sendall(CHUNKED + trailers)
        assert receive(client, 1)[0][0] == 200
    replayed = [
        line
        for line in server.client.get("/metrics").text.splitlines()
        if "replayed_instances_total{" in line
    ]
    assert [line.split()[1] for line in replayed] == ["0.0"]
