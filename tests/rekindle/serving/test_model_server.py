"""Tests of the model server, with real processes and signals."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import httpx
import psutil
import pytest

from rekindle.errors import RekindleError
from rekindle.release.model_client import REPLAY_HEADER, SHA256_HEADER, ModelClient
from rekindle.storage import Store
from tests.http_server import Answer, HttpServer
from tests.rekindle.serving.running import (
    MODEL,
    PREDICT,
    SERVER_PREFIX,
    Gate,
    RunningServer,
    prefix_of,
    refuses_connections,
    write_release,
)
from tests.waiting import until

ECHO = str(Path(__file__).with_name("echo.py"))
INSTANCE = {"id": "a"}


LIMITS = ("--max-bytes=20000", "--max-instances=10", "--max-waiting=6", "--body-seconds=1")


@pytest.fixture(scope="module")
def server(sha256: str) -> Iterator[RunningServer]:
    with RunningServer(f"--model={SERVER_PREFIX}", *LIMITS) as running:
        running.until_ready()
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as gate:
        yield gate


def test_the_answer_has_the_version_and_sha256_of_the_model(
    server: RunningServer, sha256: str
) -> None:
    answer = server.predict({"id": 3}, INSTANCE)
    assert answer.status_code == 200
    assert answer.headers["model-sha256"] == sha256
    assert answer.headers["model-version"] == "7"
    # the data cut-off
    assert answer.headers["model-data-until"] == "2024-03-01T00:00:00+00:00"
    assert [prediction["id"] for prediction in answer.json()["predictions"]] == [3, "a"]


def test_the_status_has_the_fields_of_kserve_and_tensorflow_serving(
    server: RunningServer, sha256: str
) -> None:
    status = server.client.get(MODEL).json()
    assert status["name"] == "echo"
    assert status["ready"] is True
    assert status["version"] == "7"
    assert status["sha256"] == sha256
    assert [(v["version"], v["state"]) for v in status["model_version_status"]] == [
        ("7", "AVAILABLE")
    ]
    assert server.client.get("/v1/models").json() == {"models": ["echo"]}


def test_the_server_publishes_an_example_request_and_its_schema(server: RunningServer) -> None:
    example = server.client.get(f"{MODEL}/example").json()
    assert server.client.post(PREDICT, json=example).status_code == 200
    document = server.client.get("/openapi.json").json()
    assert {PREDICT, MODEL, f"{MODEL}/example"} <= document["paths"].keys()
    assert document["components"]["schemas"]["Instance"]["properties"]["sleep"]["minimum"] == 0
    page = (Path(__file__).parents[3] / "docs/serving.md").read_text()
    statuses = document["paths"][PREDICT]["post"]["responses"].keys()

    assert (
        statuses - {"200"}
        == set(re.findall(r"^\| (\d{3}) \|", page, re.MULTILINE))
        >= {"400", "405", "408", "431"}
    )

    assert "<title>" in server.client.get("/").text


def test_a_process_imports_only_the_libraries_of_its_workload(server: RunningServer) -> None:
    assert set(server.predict(INSTANCE).json()["predictions"][0]["loaded"]) <= {"boto3"}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "not JSON"),
        (b"\xff\xfe", 422, "not JSON"),
        (b"[" * 10_000, 422, "recursion limit"),
        (b"[1]", 422, "the request is [1]: input should be an object"),
        (b'{"instances": []}', 422, "instances is empty"),
        (b'{"instances": [{"id": 1}], "instanecs": []}', 422, 'Did you mean "instances"?'),
        (b'{"instances": [{"id": 1}, {"id": 1, "sleep": -5}]}', 422, "instances[1].sleep is -5: "),
        (
            b'{"instances": [{"id": 1, "sleep": NaN}]}',
            422,
            "instances[0].sleep is nan: it must be a finite number",
        ),
        (
            b'{"instances": [{"id": 1, "sleep": 1%s}]}' % (b"0" * 400),
            422,
            "it must fit into 64 bits",
        ),
        (b'{"instances": [{"id": 1, "bad": 4}]}', 422, "instances[0].bad is 4"),
        (b'{"instances": [{"id": 1, "bug": true}]}', 500, "the model failed on this request"),
        (
            b'{"instances": [{"id": 1}, {"id": 2, "answer": 0}]}',
            500,
            "the prediction for instances[1] is not JSON",
        ),
        (
            json.dumps({"instances": [INSTANCE] * 11}).encode(),
            413,
            "instances has 11 items: at most 10",
        ),
        (b" " * 20_001, 413, "larger than 20,000 bytes"),
        (b" " * 3_000_000, 413, "larger than 20,000 bytes"),
    ],
)
def test_an_invalid_request_gets_an_error_and_does_not_affect_others(
    server: RunningServer, body: bytes, status: int, message: str
) -> None:
    try:
        answer = server.client.post(PREDICT, content=body)
    except httpx.WriteError:
        # the body is far too large, so the connection may close before the whole body is sent
        assert len(body) > 80_000
    else:
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]
    assert server.predict(INSTANCE).status_code == 200


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_the_error_for_another_method_names_post(server: RunningServer, method: str) -> None:
    answer = server.client.request(method, PREDICT)
    assert answer.status_code == 405
    assert "requires POST" in answer.json()["error"]


@pytest.mark.parametrize(
    "path", ["/v1/score", "/v1/example", "/v1/models/other:predict", "/v1/models/other"]
)
def test_the_error_for_a_wrong_path_has_the_right_path(server: RunningServer, path: str) -> None:
    if "score" in path or "predict" in path:
        answer = server.client.post(path, json={})
    else:
        answer = server.client.get(path)
    assert answer.status_code == 404
    assert "echo" in answer.json()["error"]


@pytest.mark.parametrize("bug", [None, 1])
def test_waiting_requests_are_batched_and_a_failure_does_not_affect_others(
    server: RunningServer, pool: ThreadPoolExecutor, gate: Gate, bug: int | None
) -> None:
    first_answer = gate.hold(server, pool)
    answers = [pool.submit(server.predict, INSTANCE | {"id": n, "bug": n == bug}) for n in range(4)]
    server.until_waiting(1 + 4)
    gate.open()
    assert first_answer.result().status_code == 200
    assert [answer.result().status_code for answer in answers] == [
        500 if n == bug else 200 for n in range(4)
    ]

    if bug is None:
        predictions = [answer.result().json()["predictions"][0] for answer in answers]
        assert [(each["id"], each["together"]) for each in predictions] == [
            (n, 4) for n in range(4)
        ]


def test_a_body_without_a_content_length_is_limited(server: RunningServer) -> None:
    answer = server.client.post(PREDICT, content=iter([b" " * 1000] * 30))
    assert answer.status_code == 413
    assert "larger" in answer.json()["error"]


def start_request(server: RunningServer) -> socket.socket:
    """Connect a client that sends only the start of a request."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(f"POST {PREDICT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
    return client


def test_slow_clients_do_not_block_others_and_time_out(server: RunningServer) -> None:
    slow = [start_request(server) for _ in range(40)]  # with --max-waiting=6
    assert [server.predict(INSTANCE).status_code for _ in range(20)] == [200] * 20
    for client in slow:
        assert client.recv(1000).startswith(b"HTTP/1.1 408")
        client.close()


def find_answered(clients: list[socket.socket]) -> list[socket.socket]:
    """Return the clients that have received an answer."""
    return select.select(clients, [], [], 0)[0]


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_clients_that_never_finish_large_bodies_do_not_block_others(
    sha256: str, address: str
) -> None:
    """Other requests, also large ones, are answered, both from another address and from the same
    address."""
    with RunningServer(
        f"--model={SERVER_PREFIX}", "--max-bytes=1000000", "--body-seconds=300"
    ) as server:
        server.until_ready()
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST {PREDICT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n".encode()

        slow = [socket.create_connection((host, int(port)), timeout=20) for _ in range(40)]
        for client in slow:
            client.sendall(head + b" " * 999_999)

        # the budget has room for 16 of 40 clients; which clients are dropped depends on the order
        # in which their bytes arrive
        until("24 slow clients are dropped", lambda: len(find_answered(slow)) >= 24)
        assert {client.recv(1000).partition(b"\r\n")[0] for client in find_answered(slow)} == {
            b"HTTP/1.1 503 Service Unavailable"
        }

        small = json.dumps({"instances": [INSTANCE]})

        with httpx.Client(
            transport=httpx.HTTPTransport(local_address=address), timeout=20
        ) as honest:
            answers = [
                honest.post(server.url + PREDICT, content=small + " " * n)
                for n in (0, 100_000, 999_000) * 5
            ]

        assert [answer.status_code for answer in answers] == [200] * 15, answers[0].text
        for client in slow:
            client.close()


def test_clients_that_never_finish_their_headers_are_disconnected(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/mod")
        client.settimeout(5)
        assert client.recv(1000) == b""


def test_overload_is_rejected_immediately_while_probes_are_answered(
    server: RunningServer, pool: ThreadPoolExecutor, gate: Gate
) -> None:
    first_answer = gate.hold(server, pool)
    answers = [pool.submit(server.predict, INSTANCE) for _ in range(8)]
    rejected = [answer.result() for answer in islice(as_completed(answers), 3)]
    assert [(answer.status_code, answer.headers["retry-after"]) for answer in rejected] == [
        (503, "1")
    ] * 3
    probes = {
        path: server.client.get(path) for path in ("/health/live", "/health/ready", "/metrics")
    }
    assert [probe.status_code for probe in probes.values()] == [200, 503, 200]
    assert probes["/health/ready"].json()["status"] == "overloaded"
    # the probes were answered before the gate opens, so they did not wait for the model
    assert not first_answer.done()
    gate.open()
    assert sorted(answer.result().status_code for answer in answers) == [200] * 5 + [503] * 3
    assert first_answer.result().status_code == 200
    assert server.client.get("/health/ready").status_code == 200


def test_metrics_show_requests_scores_and_the_age_of_the_data(
    server: RunningServer, sha256: str
) -> None:
    server.predict(INSTANCE, INSTANCE)
    start = datetime.now(UTC)
    text = server.client.get("/metrics").text
    end = datetime.now(UTC)
    label = 'version="7"'
    assert f'sha256="{sha256}"' in text
    assert f'rekindle_requests_total{{status="200",{label}}}' in text
    assert f'rekindle_request_seconds_bucket{{le="0.002",{label}}}' in text
    assert f'rekindle_model_score_bucket{{le="+Inf",output="together",{label}}}' in text
    assert "rekindle_requests_waiting 0.0" in text

    age = float(
        next(
            line for line in text.splitlines() if line.startswith("rekindle_data_age_seconds")
        ).split()[1]
    )

    assert start <= datetime(2024, 3, 1, tzinfo=UTC) + timedelta(seconds=age) <= end
    assert 'rekindle_instances_bucket{le="2.0"}' in text


def test_replayed_instances_are_counted_apart_from_instances_of_clients(
    server: RunningServer,
) -> None:
    def counts() -> dict[str, float]:
        text = server.client.get("/metrics").text
        names = r'rekindle_(?:replayed_)?instances_(?:sum|total)|rekindle_model_(?:score|feature)_bucket{.*le="\+Inf"'
        return {
            name: float(value)
            for name, value in re.findall(rf"^((?:{names})\S*) (.*)", text, re.MULTILINE)
        }

    def send(replay: bool) -> httpx.Response:
        headers = {REPLAY_HEADER: "1"} if replay else {}
        return server.client.post(
            PREDICT, json={"instances": [INSTANCE, INSTANCE]}, headers=headers
        )

    assert send(False).status_code == 200
    earlier_counts = counts()
    assert send(True).json() == send(False).json()
    increase = {
        name.partition("{")[0]: value - earlier_counts[name] for name, value in counts().items()
    }
    assert set(increase.values()) == {2.0}
    assert len(increase) == 4


def test_the_warning_of_a_predictor_is_in_its_answer_and_counted(server: RunningServer) -> None:
    def count() -> float:
        [line] = re.findall(
            r'rekindle_warned_requests_total{version="7"} (.*)', server.client.get("/metrics").text
        )
        return float(line)

    earlier_count = count()
    answer = server.predict(INSTANCE, INSTANCE | {"warning": "the past is missing"}).json()
    assert answer["warning"] == "the past is missing"
    assert len(answer["predictions"]) == 2
    assert "warning" not in server.predict(INSTANCE).json()
    assert (
        server.predict({"id": 1, "bad": 4, "warning": "an error is no prediction"}).status_code
        == 422
    )
    assert count() == earlier_count + 1
    properties = server.client.get("/openapi.json").json()["components"]["schemas"]["Predictions"][
        "properties"
    ]
    assert properties.keys() == {"predictions", "warning"}


def test_processes_work_in_parallel_and_warm_up_before_the_server_is_ready(
    sha256: str, pool: ThreadPoolExecutor, gate: Gate
) -> None:
    with RunningServer(
        f"--model={SERVER_PREFIX}", "--processes=2", ECHO_GATE=str(gate.path)
    ) as server:
        gate.until_reached(processes=2)
        assert server.client.get("/health/live").status_code == 200
        answer = server.client.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json() == {"status": "loading"}
        assert server.predict(INSTANCE).status_code == 503
        gate.open()

        assert server.until_ready() == {
            "status": "ready",
            "name": "echo",
            "version": "7",
            "sha256": sha256,
        }

        with Gate(gate.path.parent) as first_gate, Gate(gate.path.parent) as second_gate:
            # the second gate is reached while the first request waits
            held_answers = [each.hold(server, pool) for each in (first_gate, second_gate)]

        assert (
            len({answer.result().json()["predictions"][0]["pid"] for answer in held_answers}) == 2
        )


def test_a_crash_of_the_model_ends_the_server_after_answering_all_requests(
    sha256: str, pool: ThreadPoolExecutor, gate: Gate
) -> None:
    with (
        RunningServer(f"--model={SERVER_PREFIX}", "--processes=2") as server,
        Gate(gate.path.parent) as other_gate,
    ):
        server.until_ready()
        held = other_gate.hold(server, pool)
        doomed = gate.hold(server, pool, killed=True)
        queued = pool.submit(server.predict, INSTANCE)
        server.until_waiting(3)
        gate.open()
        answer = doomed.result()
        assert answer.status_code == 503
        assert "ended with code -9" in answer.json()["error"]
        other_gate.open()
        assert [queued.result().status_code, held.result().status_code] == [503, 503]
        code, log = server.end()
        assert code == 1
        assert "ended with code -9 (killed: out of memory?)" in log


@pytest.mark.slow
def test_a_batch_in_the_pipe_of_a_crashed_process_is_answered(
    sha256: str, pool: ThreadPoolExecutor, gate: Gate
) -> None:
    with RunningServer(f"--model={SERVER_PREFIX}", "--max-batch=2") as server:
        server.until_ready()
        first_answer = gate.hold(server, pool)
        fatal = pool.submit(server.predict, INSTANCE | {"killed": True})
        server.until_waiting(2)
        waiting_answers = [fatal, *(pool.submit(server.predict, INSTANCE) for _ in range(4))]
        server.until_waiting(6)
        gate.open()
        assert first_answer.result().status_code == 200
        assert [answer.result().status_code for answer in waiting_answers] == [503] * 5
        assert server.end()[0] == 1


@pytest.mark.slow
def test_a_killed_server_leaves_no_process(sha256: str) -> None:
    with RunningServer(f"--model={SERVER_PREFIX}") as server:
        server.until_ready()
        model = psutil.Process(server.predict(INSTANCE).json()["predictions"][0]["pid"])
        os.kill(server.process.pid, signal.SIGKILL)
        model.wait(10)


def test_after_sigterm_requests_in_flight_and_new_requests_are_answered(
    sha256: str, pool: ThreadPoolExecutor, gate: Gate
) -> None:
    with RunningServer(
        f"--model={SERVER_PREFIX}", "--processes=2", "--drain-seconds=600"
    ) as server:
        server.until_ready()
        in_flight = gate.hold(server, pool)
        server.process.send_signal(signal.SIGTERM)
        server.until_ready("draining")
        assert server.client.get("/health/ready").status_code == 503
        assert server.client.get(MODEL).json()["ready"] is False
        late_response = server.predict(INSTANCE)
        assert late_response.status_code == 200
        assert late_response.headers["connection"] == "close"
        server.process.send_signal(signal.SIGTERM)
        until("it to refuse connections", lambda: refuses_connections(server))
        gate.open()
        assert in_flight.result().status_code == 200
        code, log = server.end()
        assert code == 0, log
        # the log starts with the line about the served model
        assert log.count("\n") == 1, log
        assert log.startswith(f"serving echo version 7 (sha256 {sha256[:12]})")


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]])
def test_a_second_signal_or_ctrl_c_stops_the_drain(
    sha256: str, signals: list[signal.Signals]
) -> None:
    with RunningServer(f"--model={SERVER_PREFIX}", "--drain-seconds=600") as server:
        server.until_ready()
        *first_signals, last_signal = signals
        for number in first_signals:
            server.process.send_signal(number)
            server.until_ready("draining")
        server.process.send_signal(last_signal)
        assert server.end()[0] == 0


@pytest.mark.slow
def test_a_server_on_a_pod_address_also_listens_on_loopback(sha256: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        # a UDP socket sends nothing when it connects; it only selects this machine's external
        # address
        sender.connect(("192.0.2.1", 9))
        address = sender.getsockname()[0]
    with RunningServer(f"--model={SERVER_PREFIX}", f"--host={address}") as server:
        loopback = server.url.replace(address, "127.0.0.1")
        assert server.until_ready() == httpx.get(f"{loopback}/health/ready").json()


def test_the_error_of_an_address_in_use_names_it(server: RunningServer) -> None:
    port = server.url.rpartition(":")[2]
    command = [
        sys.executable,
        "-m",
        "rekindle",
        "step",
        "steps.serve",
        f"--model={SERVER_PREFIX}",
        f"--port={port}",
    ]

    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 78
    assert f"cannot listen on 127.0.0.1:{port}" in process.stderr


@pytest.mark.slow
def test_a_server_without_its_release_fails_with_an_error(store: Store) -> None:
    with RunningServer("--model=releases/nothing/0123456789ab/") as server:
        code, log = server.end()
    assert code == 1
    assert log.startswith(f"error: {store.uri('releases/nothing/0123456789ab/')} does not exist")
    assert log.count("\n") == 1


@pytest.mark.slow
def test_a_server_whose_model_cannot_be_loaded_fails_with_an_error(store: Store) -> None:
    prefix = prefix_of("unknown", "no.such.workload")
    write_release(store, prefix, workload="no.such.workload")
    with RunningServer(f"--model={prefix}") as server:
        code, log = server.end()
    assert code == 78
    assert "no.such.workload" in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_the_error_of_a_model_that_fails_on_its_example_has_the_line(sha256: str) -> None:
    with RunningServer(f"--model={SERVER_PREFIX}", ECHO_BUG="1") as server:
        code, log = server.end()
    assert code == 70
    last_line = log.splitlines()[-1]
    assert re.fullmatch(
        rf"error: the model fails on its own example: {re.escape(ECHO)}:\d+: KeyError: 'a bug"
        r" in .*",
        last_line,
    ), log


@pytest.mark.parametrize(
    "answer", ["[]", "[" * 5000, '{"a": 1, "a": 2}', '{"ready": ', '"\\ud800"', "{}", "NaN"]
)
def test_a_server_with_another_answer_is_one_error(answer: str, sha256: str) -> None:
    with HttpServer(lambda _: Answer(200, answer, {SHA256_HEADER: sha256})) as server:
        client = ModelClient(server.url, "echo", sha256, deadline_seconds=0)
        for request in (client.wait, partial(client.predict, {"instances": []})):
            with pytest.raises(RekindleError) as error:
                request()
            assert len(error.value.lines) == 1
