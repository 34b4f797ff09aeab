"""Tests of the access control of the embedded S3 endpoint: signatures with the secret key, their
scope and their validity."""

import contextlib
import hashlib
import os
import re
import resource
import select
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from botocore.exceptions import ClientError

from rekindle.local.services.s3.signatures import EMPTY_SHA256, Signature, compute_signing_key
from rekindle.local.services.threaded_server import THREAD_COUNT
from tests.rekindle.local.services.endpoint import KEY, SECRET, Endpoint
from tests.waiting import until


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    server = Endpoint(tmp_path_factory.mktemp("s3"))
    server.client.put_object(Bucket="data", Key="a", Body=b"secret")
    yield server
    server.kill()


def parse_error(status: int, body: bytes) -> tuple[int, str]:
    return status, (re.findall(r"<Code>(\w+)</Code>", body.decode()) or [""])[0]


@pytest.mark.parametrize(
    ("keys", "refusal"),
    [(("other", SECRET), "InvalidAccessKeyId"), ((KEY, "other"), "SignatureDoesNotMatch")],
)
def test_a_signature_with_a_wrong_access_or_secret_key_is_refused(
    endpoint: Endpoint, keys: tuple[str, str], refusal: str
) -> None:
    for version in ("s3v4", "s3"):
        client = endpoint.connect(*keys, signature_version=version)
        url = client.generate_presigned_url("get_object", {"Bucket": "data", "Key": "a"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url)
        assert parse_error(caught.value.code, caught.value.read()) == (403, refusal)
    with pytest.raises(ClientError, match=refusal):
        endpoint.connect(*keys).get_object(Bucket="data", Key="a")
    with pytest.raises(ClientError, match=refusal):
        endpoint.connect(*keys).put_object(Bucket="data", Key="a", Body=b"x" * 3_000_000)
    assert endpoint.client.get_object(Bucket="data", Key="a")["Body"].read() == b"secret"


def test_an_unsigned_request_is_refused(endpoint: Endpoint) -> None:
    claim = {
        "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"
    }
    for headers in ({}, claim, {"Authorization": f"AWS {KEY}:x"}):
        for method, path in (
            ("GET", "/data?list-type=2"),
            ("PUT", "/data/b"),
            ("DELETE", "/data/a"),
        ):
            assert parse_error(*endpoint.send(method, path, headers)) == (403, "AccessDenied")
    assert parse_error(*endpoint.send("GET", f"/data/a?AWSAccessKeyId={KEY}", {})) == (
        403,
        "AccessDenied",
    )


def test_a_signature_is_valid_only_for_the_signed_request(endpoint: Endpoint) -> None:
    signed_headers = endpoint.signed("GET", "/data/a", {})
    assert endpoint.send("GET", "/data/a", signed_headers) == (200, b"secret")
    stamp = signed_headers["X-Amz-Date"]
    other_second = f"{stamp[:-2]}{(int(stamp[-2]) + 1) % 10}Z"

    other_requests = {
        "path": ("GET", "/data/b", signed_headers),
        "query": ("GET", "/data/a?x-id=x", signed_headers),
        "method": ("DELETE", "/data/a", signed_headers),
        "host": ("GET", "/data/a", signed_headers | {"Host": "other"}),
        "time": ("GET", "/data/a", signed_headers | {"X-Amz-Date": other_second}),
    }

    refused = {
        change: parse_error(*endpoint.send(*request)) for change, request in other_requests.items()
    }
    assert refused == dict.fromkeys(other_requests, (403, "SignatureDoesNotMatch"))
    copying = endpoint.signed("PUT", "/data/b", {}) | {"x-amz-copy-source": "/data/a"}
    assert parse_error(*endpoint.send("PUT", "/data/b", copying)) == (403, "AccessDenied")
    body = endpoint.signed(
        "PUT", "/data/b", {"Content-Length": "3"}, hashlib.sha256(b"one").hexdigest()
    )
    assert parse_error(*endpoint.send("PUT", "/data/b", body, b"two")) == (
        400,
        "XAmzContentSHA256Mismatch",
    )
    assert parse_error(*endpoint.send("GET", "/data/b", endpoint.signed("GET", "/data/b", {}))) == (
        404,
        "NoSuchKey",
    )


def test_a_signature_expires(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def url(version: str, seconds: int) -> str:
        client = endpoint.connect(signature_version=version)
        return client.generate_presigned_url(
            "get_object", {"Bucket": "data", "Key": "a"}, ExpiresIn=seconds
        )

    for version in ("s3v4", "s3"):
        with urllib.request.urlopen(url(version, 60)) as answer:
            assert answer.read() == b"secret"

    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda **_: an_hour_ago)
    old = [url("s3v4", 60), url("s3v4", 8 * 86400), url("s3", -3600)]

    longer = [
        re.sub(r"Expires=\d+", lambda match: match[0] + "00", link) for link in (old[0], old[2])
    ]
    for link, refusal in zip(
        [*old, *longer], ["AccessDenied"] * 3 + ["SignatureDoesNotMatch"] * 2, strict=True
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(link)

        assert parse_error(caught.value.code, caught.value.read()) == (403, refusal)

    skewed = endpoint.signed("GET", "/data/a", {})
    assert parse_error(*endpoint.send("GET", "/data/a", skewed)) == (403, "RequestTimeTooSkewed")


def test_signatures_of_chunks_match_amazons_example() -> None:
    """The example is in Amazon's page "Signature Calculations for the Authorization Header:
    Transferring Payload in Multiple Chunks"."""
    scope = "20130524/us-east-1/s3/aws4_request"
    seed = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
    key = compute_signing_key("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", scope)
    signature = Signature(key, "20130524T000000Z", scope, seed)
    chunks = [hashlib.sha256(b"a" * size).hexdigest() for size in (65536, 1024)]
    assert [signature.chunk(digest) for digest in [*chunks, EMPTY_SHA256]] == [
        "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
        "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
    ]


def test_a_chunk_modified_in_transit_is_refused(endpoint: Endpoint) -> None:
    def put(signed: bytes, received: bytes) -> tuple[int, str]:
        fixed = {
            "Content-Encoding": "aws-chunked",
            "x-amz-decoded-content-length": str(len(signed)),
        }
        headers = endpoint.signed("PUT", "/data/c", fixed, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")
        scope = re.findall(r"Credential=[^/]+/([^,]+),", headers["Authorization"])[0]
        seed = headers["Authorization"].rpartition("=")[2]
        signature = Signature(
            compute_signing_key(SECRET, scope), headers["X-Amz-Date"], scope, seed
        )

        lines = [
            b"%x;chunk-signature=%s\r\n%s\r\n" % (len(data), signature.chunk(digest).encode(), data)
            for data, digest in (
                (received, hashlib.sha256(signed).hexdigest()),
                (b"", EMPTY_SHA256),
            )
        ]

        body = b"".join(lines)

        return parse_error(
            *endpoint.send("PUT", "/data/c", headers | {"Content-Length": str(len(body))}, body)
        )

    assert put(b"one" * 50_000, b"one" * 50_000) == (200, "")
    assert put(b"one", b"two") == (403, "SignatureDoesNotMatch")
    assert endpoint.client.get_object(Bucket="data", Key="c")["Body"].read() == b"one" * 50_000


@pytest.mark.parametrize(
    "length",
    ["-1", "-600000000", "9" * 30, "1e9", "+5", "0x10", "٣".encode().decode("latin-1"), "5, 5"],
)
def test_an_invalid_length_is_refused_before_the_body_is_read(
    endpoint: Endpoint, length: str
) -> None:
    initial_memory = measure_memory(endpoint)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as stranger:
        stranger.sendall(
            f"PUT /data/x HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode("latin-1")
        )
        assert b" 400 " in stranger.recv(1000)
    # the request has a valid length, but no signature
    with socket.create_connection(("127.0.0.1", endpoint.port)) as stranger:
        stranger.sendall(b"PUT /data/x HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000000\r\n\r\n")
        assert b" 403 " in stranger.recv(1000)
    assert measure_memory(endpoint) - initial_memory < 4


def measure_memory(endpoint: Endpoint) -> float:
    """Return the memory of the endpoint's process in MB."""
    return (
        int(
            re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{endpoint.process.pid}/status").read_text())[
                0
            ]
        )
        / 1000
    )


def test_thousands_of_idle_connections_cost_little_and_block_no_request(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 10_000:
        pytest.skip("needs a higher limit on open files")

    resource.setrlimit(resource.RLIMIT_NOFILE, (10_000, limits[1]))
    server = Endpoint(tmp_path)
    idle_connections = []

    try:
        for number in range(4000):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(b"GET /data/a HTTP/1.1\r\nHost:" if number % 2 else b"")
            idle_connections.append(connection)

        server.client.put_object(Bucket="data", Key="a", Body=b"x" * 3_000_000)
        assert len(server.client.get_object(Bucket="data", Key="a")["Body"].read()) == 3_000_000
        assert measure_memory(server) < 200
        assert len(os.listdir(f"/proc/{server.process.pid}/task")) <= THREAD_COUNT + 2
    finally:
        for connection in idle_connections:
            connection.close()

        server.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_pipelined_requests_are_all_answered(endpoint: Endpoint) -> None:
    lines = "".join(
        f"{name}: {value}\r\n" for name, value in endpoint.signed("GET", "/data/a", {}).items()
    )
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as connection:
        connection.sendall(f"GET /data/a HTTP/1.1\r\n{lines}\r\n".encode() * 3)
        answers = receive(connection, 3)
        assert answers.count(b"secret") == 3
        until(
            "the connection to be idle again",
            lambda: all(mask & select.EPOLLIN for mask in epoll_masks(endpoint)),
        )
        switches = psutil.Process(endpoint.process.pid).num_ctx_switches
        initial_switches = switches().voluntary
        head = f"GET /data/a HTTP/1.1\r\n{lines}\r\n".encode()
        connection.sendall(head[:30])
        until("the server to peek at it", lambda: switches().voluntary > initial_switches)
        connection.sendall(head[30:])
        receive(connection, 1)


def epoll_masks(endpoint: Endpoint) -> list[int]:
    """Return the epoll events of each of the server's sockets; a socket has no events while a
    thread has its connection."""
    texts = [path.read_text() for path in Path(f"/proc/{endpoint.process.pid}/fdinfo").iterdir()]
    return [
        int(mask, 16) for text in texts for mask in re.findall(r"tfd:\s+\d+ events:\s+(\w+)", text)
    ]


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive `count` answers, each of which ends with "secret"."""
    answers = b""
    while answers.count(b"secret") < count:
        data = connection.recv(10_000)
        assert data, answers
        answers += data
    return answers


@pytest.mark.parametrize(
    "line", ["X : y", "X y", ": y", "X\x0b: y", " folded", "X: a\rb", "X: a\nContent-Length: 0"]
)
def test_a_body_after_an_invalid_header_line_is_never_read_as_a_request(
    endpoint: Endpoint, line: str
) -> None:
    signed = endpoint.signed("PUT", "/data/smuggled", {"Content-Length": "0"})
    header_text = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
    body = f"PUT /data/smuggled HTTP/1.1\r\n{header_text}\r\n"
    outer = endpoint.signed("PUT", "/data/outer", {})
    fields = "".join(f"{name}: {value}\r\n" for name, value in outer.items())
    head = f"PUT /data/outer HTTP/1.1\r\n{fields}{line}\r\nContent-Length: {len(body)}\r\n\r\n"

    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as connection:
        connection.sendall((head + body).encode())
        answer = b""
        with suppress(ConnectionError):
            while data := connection.recv(10_000):
                answer += data

    assert answer.count(b"HTTP/1.1 ") == 1, answer
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert (
        parse_error(
            *endpoint.send("GET", "/data/smuggled", endpoint.signed("GET", "/data/smuggled", {}))
        )[0]
        == 404
    )


def test_slow_bodies_of_signed_requests_do_not_delay_others(endpoint: Endpoint) -> None:
    """More clients than threads send only half of their bodies."""
    slow = []

    try:
        for number in range(3 * THREAD_COUNT):
            path = f"/data/slow-{number}"
            fields = endpoint.signed("PUT", path, {"Content-Length": "10"})
            lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            connection = socket.create_connection(("127.0.0.1", endpoint.port), timeout=30)
            connection.sendall(f"PUT {path} HTTP/1.1\r\n{lines}\r\nhalf ".encode())
            slow.append(connection)

        assert endpoint.client.get_object(Bucket="data", Key="a")["Body"].read() == b"secret"
        for connection in slow:
            connection.sendall(b"whole")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")

        assert (
            endpoint.client.get_object(Bucket="data", Key="slow-0")["Body"].read() == b"half whole"
        )
    finally:
        for connection in slow:
            connection.close()

    def released() -> bool:
        endpoint.client.get_object(Bucket="data", Key="a")
        return len(os.listdir(f"/proc/{endpoint.process.pid}/task")) <= THREAD_COUNT + 2

    until("the end of the threads of slow clients", released)


@pytest.mark.parametrize("fields", ["chunked", "", "\r\nTransfer-Encoding: chunked", "identity"])
def test_a_body_of_chunks_is_never_read_as_another_request(endpoint: Endpoint, fields: str) -> None:
    headers = endpoint.signed("GET", "/data/a", {})
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    request = f"GET /data/a HTTP/1.1\r\n{head}"
    with socket.create_connection(("127.0.0.1", endpoint.port)) as client:
        hidden = f"{len(request) + 2:x}\r\n{request}\r\n\r\n0\r\n\r\n"
        client.sendall(f"{request}Transfer-Encoding: {fields}\r\n\r\n{hidden}".encode())
        answer = b""
        # the server closes the connection without reading the body
        with contextlib.suppress(ConnectionResetError):
            while block := client.recv(1 << 16):
                answer += block
    assert b" 411 " in answer.splitlines()[0]
    assert answer.count(b"HTTP/1.1") == 1
