"""Tests of the server's connections under load and during shutdown, with real processes, sockets
and signals."""

import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest

from rekindle.storage import Store
from tests.rekindle.serving.running import (
    MODEL,
    PREDICT,
    Gate,
    RunningServer,
    connect,
    prefix_of,
    refuses_connections,
    write_release,
)
from tests.waiting import until

PREFIX = prefix_of("connections")
INSTANCE = {"id": "a"}
BODY = b'{"instances": [{"id": "a"}]}'
HEAD = f"POST {PREDICT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()
GET = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module", autouse=True)
def stored(s3_environment: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment.items():
            patch.setenv(name, value)
        write_release(Store.from_env(), PREFIX)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(f"--model={PREFIX}", "--body-seconds=0.3") as running:
        running.until_ready()
        yield running


def receive(client: socket.socket) -> tuple[int, str]:
    """Receive the next answer of a connection, and return its status and head. Raises
    ConnectionError if the connection was closed."""
    head = b""
    while b"\r\n\r\n" not in head:
        data = client.recv(1)
        if not data:
            raise ConnectionError(f"closed after {head!r}")

        head += data

    text = head.decode().lower()
    length = int(text.partition("content-length: ")[2].partition("\r")[0])
    while length:
        length -= len(client.recv(length))

    return int(text.split()[1]), text


def send_request(client: socket.socket, text: bytes = HEAD + BODY) -> tuple[int, str]:
    client.sendall(text)
    return receive(client)


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([], id="nothing"),
        pytest.param([b"POST /v1/mod"], id="half a head"),
        pytest.param([GET, b"POST /v1/mod"], id="half a second head"),
        pytest.param([GET + GET, b"G"], id="half a head after two pipelined requests"),
        pytest.param([GET, b"\r\nG"], id="half a head after an empty line"),
        pytest.param(
            [b"POST /no HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n", b"half"],
            id="rest of a body",
        ),
        pytest.param([HEAD + BODY, HEAD + BODY[:9]], id="half a second body"),
        pytest.param([HEAD.replace(b"1.1", b"1.0") + BODY[:9]], id="half a body of HTTP 1.0"),
    ],
)
def test_a_request_that_never_ends_is_disconnected(
    server: RunningServer, requests: list[bytes]
) -> None:
    with connect(server) as client:
        for text in requests:
            client.sendall(text)
            for _ in range(text.count(b"\r\n\r\n")):
                if not text.endswith(BODY[:9]):
                    receive(client)
        remaining_bytes = b"".join(iter(lambda: client.recv(1000), b""))
        assert remaining_bytes.startswith(b"HTTP/1.1 408") == any(
            text.endswith(BODY[:9]) for text in requests
        )
    assert server.predict(INSTANCE).status_code == 200


@pytest.mark.parametrize("text", [GET + HEAD[:-4] + b"\r\nx: ", GET + HEAD], ids=["head", "body"])
def test_occasional_bytes_do_not_keep_a_request_alive(server: RunningServer, text: bytes) -> None:
    with connect(server) as client:
        assert send_request(client, text)[0] == 200
        client.settimeout(0.1)

        def is_closed() -> bool:
            try:
                client.sendall(b" ")
                return not client.recv(1000)
            except TimeoutError:
                return False
            except ConnectionError:  # the byte was sent after the end of the connection
                return True

        until("the end of the connection", is_closed, pause=0)


@pytest.mark.slow
def test_head_and_body_have_one_deadline_together() -> None:
    """With separate deadlines, a last request of a shutdown could take twice the time that the
    shutdown allows for."""
    with RunningServer(f"--model={PREFIX}", "--body-seconds=4") as server:
        server.until_ready()
        with connect(server) as slow_head, connect(server) as later:
            slow_head.sendall(HEAD[:9])
            wait_for_nothing(slow_head)
            later.sendall(HEAD + BODY[:9])
            wait_for_nothing(later)
            slow_head.sendall(HEAD[9:] + BODY[:9])
            first, _, _ = select.select([slow_head, later], [], [])
            assert first == [slow_head]
            assert receive(slow_head)[0] == receive(later)[0] == 408


def wait_for_nothing(client: socket.socket) -> None:
    """Wait for a second, and check that the server does not answer in this time."""
    assert not select.select([client], [], [], 1)[0]


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    with RunningServer(f"--model={PREFIX}", "--body-seconds=60", descriptors=256) as running:
        running.until_ready()
        yield running


@pytest.mark.parametrize("count", [400, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "start", [b"", b"POST /v1/mod", GET, HEAD + BODY[:9]], ids=["silent", "head", "idle", "body"]
)
def test_thousands_of_connections_do_not_block_other_clients(
    small: RunningServer, start: bytes, count: int
) -> None:
    clients: list[socket.socket] = []

    def connect_all() -> None:
        for _ in range(count):
            clients.append(connect(small))
            clients[-1].sendall(start)

    thread = Thread(target=connect_all)
    thread.start()
    answers = list[int]()

    try:
        while thread.is_alive() or len(answers) < 100:
            for text in (HEAD + BODY, GET):
                with connect(small) as honest:
                    answers.append(send_request(honest, text)[0])
    finally:
        thread.join()

    assert set(answers) == {200}
    states = [get_connection_state(client) for client in clients]
    assert states.count("reset") == 0
    assert states.count("open") < 256
    rejected = count - states.count("open")
    # a client that was answered may be closed without a 503
    assert states.count("503") == rejected or (
        start == GET and states.count("503") + states.count("closed") == rejected
    )


def test_slow_requests_make_room_for_a_client_that_has_just_connected(small: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(small)).sendall(HEAD + BODY[:9])
        new = stack.enter_context(connect(small))
        for _ in range(3):
            slow = stack.enter_context(connect(small))
            slow.sendall(HEAD + BODY[:9])
            with connect(small) as probe:
                assert send_request(probe, GET)[0] == 200
        assert send_request(new)[0] == 200


def get_connection_state(client: socket.socket) -> str:
    """Return the state of a connection: open, 503, closed or reset."""
    client.setblocking(False)
    received = b""

    try:
        while data := client.recv(1000):
            received += data
    except BlockingIOError:
        return "open"
    except ConnectionError:
        return "reset"
    finally:
        client.close()

    if b"503 Service" in received and b"retry-after: 1" in received:
        return "503"

    return "closed"


@pytest.mark.slow
def test_requests_beyond_the_connection_limit_are_rejected(tmp_path: Path) -> None:
    flags = ("--body-seconds=60", "--max-waiting=1000")
    with (
        RunningServer(f"--model={PREFIX}", *flags, descriptors=256) as server,
        Gate(tmp_path) as gate,
    ):
        server.until_ready()
        slow = BODY.replace(b'"a"', f'"a","gate":"{gate.path}"'.encode())

        clients = [connect(server) for _ in range(400)]
        for client in clients:
            client.sendall(HEAD.replace(str(len(BODY)).encode(), str(len(slow)).encode()) + slow)

        gate.until_reached()
        assert httpx.get(server.url + "/health/live").status_code == 200
        gate.open()
        answers = [receive(client) for client in clients]
        assert {status for status, _ in answers} == {200, 503}
        assert all("retry-after" in head for status, head in answers if status == 503)


@pytest.mark.slow
def test_a_server_without_descriptors_fails_with_an_error() -> None:
    with RunningServer(f"--model={PREFIX}", descriptors=70, listens=False) as server:
        code, log = server.end()
    assert code == 78
    assert "the limit of open files is 70" in log
    assert log.count("\n") == 1


@pytest.fixture
def draining(request: pytest.FixtureRequest) -> Iterator[tuple[RunningServer, list[socket.socket]]]:
    """Start a server and drain it, with clients that keep their connections; the parameter of the
    fixture is the grace period in seconds."""
    grace = getattr(request, "param", 5)
    with RunningServer(
        f"--model={PREFIX}", "--drain-seconds=0.2", f"--grace-seconds={grace}"
    ) as server:
        server.until_ready()
        server.client.close()
        kept_connections = [connect(server) for _ in range(20)]
        assert {send_request(client)[0] for client in kept_connections} == {200}
        server.process.send_signal(signal.SIGTERM)
        until("it to refuse connections", lambda: refuses_connections(server))
        yield server, kept_connections


def test_an_open_connection_is_answered_after_the_drain_and_closed(
    draining: tuple[RunningServer, list[socket.socket]],
) -> None:
    server, kept_connections = draining
    for client in kept_connections:
        status, head = send_request(client)
        assert status == 200
        assert "connection: close" in head
        assert client.recv(1) == b""
    assert server.end()[0] == 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("draining", [0.5], indirect=True)
@pytest.mark.parametrize("sent_bytes", [9, len(HEAD) + 9], ids=["head", "body"])
def test_a_request_that_begins_in_the_grace_period_is_answered_after_it(
    draining: tuple[RunningServer, list[socket.socket]], sent_bytes: int
) -> None:
    server, kept_connections = draining
    slow_client, *idle_clients = kept_connections
    slow_client.sendall((HEAD + BODY)[:sent_bytes])
    # the grace period has ended
    assert {client.recv(1) for client in idle_clients} == {b""}
    slow_client.sendall((HEAD + BODY)[sent_bytes:])
    status, head = receive(slow_client)
    assert status == 200
    assert "connection: close" in head
    assert server.end()[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("draining", [0.5], indirect=True)
def test_an_idle_connection_is_closed_after_the_grace_period(
    draining: tuple[RunningServer, list[socket.socket]],
) -> None:
    server, kept_connections = draining
    assert {client.recv(1) for client in kept_connections} == {b""}
    code, log = server.end()
    assert code == 0, log
    # the log contains only the line about the served model
    assert log.count("\n") == 1, log


@pytest.mark.slow
def test_pipelined_requests_are_all_answered_after_the_drain(
    draining: tuple[RunningServer, list[socket.socket]],
) -> None:
    _, kept_connections = draining
    kept_connections[0].sendall((HEAD + BODY) * 3 + GET)
    heads = [receive(kept_connections[0])[1] for _ in range(4)]
    assert ["connection: close" in head for head in heads] == [False, False, False, True]
    assert kept_connections[0].recv(1) == b""


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_idle_connections() -> None:
    with RunningServer(f"--model={PREFIX}", "--grace-seconds=600") as server:
        server.until_ready()
        client = connect(server)
        assert send_request(client)[0] == 200
        server.process.send_signal(signal.SIGTERM)
        until("it to refuse connections", lambda: refuses_connections(server))
        server.process.send_signal(signal.SIGTERM)
        assert client.recv(1) == b""
        assert server.end()[0] == 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_no_request_is_lost_at_the_moment_of_sigterm(version: str) -> None:
    text = (HEAD + BODY).replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    with RunningServer(f"--model={PREFIX}", "--drain-seconds=600") as server:
        server.until_ready()
        answered = list[int]()
        failed = list[Exception]()
        over = Event()

        def send_requests() -> None:
            """Send requests one after the other; after an answer with `Connection: close`, use a
            new connection."""
            try:
                while not over.is_set():
                    closes = False
                    with connect(server) as client:
                        while not closes and not over.is_set():
                            status, head = send_request(client, text)
                            answered.append(status)
                            closes = "connection: close" in head
            except (OSError, ValueError) as error:
                failed.append(error)

        threads = [Thread(target=send_requests) for _ in range(8)]
        for thread in threads:
            thread.start()

        until("more answers", lambda: len(answered) > 200)
        server.process.send_signal(signal.SIGTERM)
        count = len(answered)
        until("more answers", lambda: len(answered) > count + 200)
        over.set()

        for thread in threads:
            thread.join()

        assert failed == []
        assert set(answered) == {200}
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0


@pytest.mark.slow
def test_a_draining_server_answers_connection_close_at_all_paths() -> None:
    with RunningServer(f"--model={PREFIX}", "--drain-seconds=60") as server:
        server.until_ready()
        server.process.send_signal(signal.SIGTERM)
        server.until_ready("draining")
        for path in ("/health/live", "/metrics", MODEL, "/", "/nowhere"):
            assert server.client.get(path).headers["connection"] == "close"
