"""The server, as a real process with real signals."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rekindle.errors import DataError, StorageError
from rekindle.serving.server import load_model
from rekindle.storage import Store
from tests.steps.serving import Running, release

PREFIX = "releases/echo/0123456789ab/"
ROW = {"transaction_id": "a"}


@pytest.fixture(scope="module")
def store(s3_environment: dict[str, str]) -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment.items():
            patch.setenv(name, value)
        yield Store.from_env()


@pytest.fixture(scope="module")
def sha256(store: Store) -> str:
    return release(store, PREFIX)


LIMITS = ("--max-bytes=20000", "--max-batch=10", "--max-history=20", "--max-waiting=3", "--body-seconds=1")


@pytest.fixture(scope="module")
def server(sha256: str) -> Iterator[Running]:
    with Running(f"--model={PREFIX}", *LIMITS) as running:
        running.until_ready()
        yield running


def test_it_answers_with_the_weights_and_version_that_scored(server: Running, sha256: str) -> None:
    answer = server.score({"transaction_id": 3}, ROW)
    assert answer.status_code == 200
    body = answer.json()
    assert (body["model_sha256"], body["version"]) == (sha256, "7")
    assert [(s["transaction_id"], s["score"]) for s in body["scores"]] == [(3, 0.5), ("a", 0.5)]


def test_a_newcomer_gets_a_request_that_works(server: Running) -> None:
    example = server.client.get("/v1/example").json()
    assert server.client.post("/v1/score", json=example).status_code == 200


def test_an_answer_does_not_wait_for_delayed_acknowledgements(server: Running) -> None:
    took = []
    for _ in range(15):
        began = time.perf_counter()
        server.score(ROW)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.03  # with Nagle's algorithm on it is 0.04


def test_a_server_loads_no_library_that_its_workload_does_not_need(server: Running) -> None:
    assert server.score(ROW).json()["scores"][0]["loaded"] == []


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 422, "not JSON"),
        (b"\xff\xfe", 422, "not JSON"),
        (b"[" * 10_000, 422, "not JSON"),
        (b"[1]", 422, "is a list: it must be an object"),
        (b'{"history": []}', 422, "transactions is missing or empty"),
        (b'{"transactions": 5}', 422, "transactions is a int: it must be a list"),
        (b'{"transactions": [{}], "histroy": []}', 422, 'Did you mean "history"?'),
        (b'{"transactions": [{"bad": 4}]}', 422, "transactions[0].bad is 4"),
        (b'{"transactions": [{"transaction_id": 1, "bug": 1}]}', 500, "the model failed"),
        (json.dumps({"transactions": [ROW] * 11}).encode(), 413, "transactions has 11 rows: at most 10"),
        (json.dumps({"transactions": [ROW], "history": [1] * 21}).encode(), 413, "history has 21 rows: at most 20"),
        (b" " * 20_001, 413, "larger than 20,000 bytes"),
        (b" " * 3_000_000, 413, "larger than 20,000 bytes"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_harms_nobody_else(
    server: Running, body: bytes, status: int, says: str
) -> None:
    try:
        answer = server.client.post("/v1/score", content=body)
    except httpx.WriteError:  # far too large: the connection may close before all is sent
        assert len(body) > 80_000
    else:
        assert answer.status_code == status, answer.text
        assert says in answer.json()["error"]
    assert server.score(ROW).status_code == 200


def test_a_body_without_a_length_is_limited_too(server: Running) -> None:
    answer = server.client.post("/v1/score", content=iter([b" " * 1000] * 30))
    assert (answer.status_code, "larger" in answer.json()["error"]) == (413, True)


def test_a_client_that_never_finishes_its_request_is_let_go(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")


def test_overload_is_refused_at_once_while_probes_are_answered(server: Running) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(server.score, {**ROW, "sleep": 0.4}) for _ in range(6)]
        time.sleep(0.2)
        began = time.monotonic()
        assert server.client.get("/health/live").status_code == 200
        assert server.client.get("/health/ready").status_code == 200
        assert time.monotonic() - began < 0.2
        results = [a.result() for a in answers]
    assert sorted(r.status_code for r in results) == [200] * 3 + [503] * 3
    assert all(r.headers["retry-after"] == "1" for r in results if r.status_code == 503)


def test_what_happened_can_be_read_from_the_metrics(server: Running, sha256: str) -> None:
    server.score(ROW, ROW)
    text = server.client.get("/metrics").text
    for line in (f'sha256="{sha256}"', 'rekindle_requests_total{status="200"}', "rekindle_request_seconds_bucket"):
        assert line in text
    assert "rekindle_requests_in_flight 0.0" in text
    assert 'rekindle_batch_size_bucket{le="2.0"}' in text


def test_it_is_alive_while_it_loads_and_ready_only_after_the_warm_up(sha256: str) -> None:
    with Running(f"--model={PREFIX}", ECHO_WARM_UP="1") as server:
        assert server.client.get("/health/live").status_code == 200
        answer = server.client.get("/health/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        assert server.score(ROW).status_code == 503
        assert server.until_ready() == {"status": "ready", "model_sha256": sha256, "version": "7"}


def test_sigterm_answers_what_is_in_flight_and_what_still_comes(sha256: str) -> None:
    with Running(f"--model={PREFIX}", "--drain-seconds=0.6") as server, ThreadPoolExecutor(1) as pool:
        server.until_ready()
        in_flight = pool.submit(server.score, {**ROW, "sleep": 1.2})
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        refused = server.client.get("/health/ready")
        assert (refused.status_code, refused.json()["status"]) == (503, "draining")
        late = server.score(ROW)
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        assert in_flight.result().status_code == 200
        code, log = server.end()
        assert (code, log.count("\n")) == (0, 1), log  # nothing but the line that says what serves
        assert log.startswith(f"serving version 7 (sha256 {sha256[:12]})")


@pytest.mark.parametrize("signals", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]])
def test_a_second_signal_or_ctrl_c_does_not_wait_for_the_routes(sha256: str, signals: list[signal.Signals]) -> None:
    with Running(f"--model={PREFIX}", "--drain-seconds=60") as server:
        server.until_ready()
        for number in signals:
            server.process.send_signal(number)
            time.sleep(0.1)
        assert server.end(5)[0] == 0


def test_a_pods_server_is_reached_by_port_forward_which_comes_from_within(sha256: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(("192.0.2.1", 9))  # nothing is sent: it only chooses the address that the others know us by
        address = sender.getsockname()[0]
    with Running(f"--model={PREFIX}", f"--host={address}") as server:
        within = server.url.replace(address, "127.0.0.1")
        assert server.until_ready()["model_sha256"] == httpx.get(f"{within}/health/ready").json()["model_sha256"]


def test_an_address_in_use_is_named(server: Running) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "rekindle", "step", "steps.serve", f"--model={PREFIX}", f"--port={port}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 78
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model.safetensors": b"other"}, DataError, r"model\.safetensors changed since the release"),
        ({"state/words.txt": None}, DataError, r"words\.txt"),
        ({"release.json": None}, DataError, "is not a whole release"),
        ({"release.json": b"{"}, DataError, "is not a whole release"),
        ({"release.json": None, "model.safetensors": None, "state/words.txt": None}, StorageError, "does not exist"),
    ],
)
def test_a_release_that_is_not_whole_is_never_served(
    store: Store, tmp_path: Path, change: dict[str, bytes | None], error: type[Exception], says: str
) -> None:
    prefix = "releases/echo/broken/"
    release(store, prefix)
    for key, data in change.items():
        store.delete([prefix + key]) if data is None else store.put(prefix + key, data)
    with pytest.raises(error, match=says):
        load_model(prefix, tmp_path)


def test_a_server_without_its_model_ends_and_says_why(store: Store) -> None:
    with Running("--model=releases/echo/nothing/") as server:
        code, log = server.end()
    assert code == 1
    assert log.startswith(f"error: {store.uri('releases/echo/nothing/')} does not exist")
    assert log.count("\n") == 1
