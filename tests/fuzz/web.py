"""Fuzz the answers of web servers: any answer leads to at most one short error message, and after a
redirect no secret is sent to another host."""

import os
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch
from urllib.parse import urlsplit

from argolocal.pods import artifacts
from argolocal.pods.artifacts import ArtifactError
from argolocal.pods.kinds import http
from tests.fuzz.mutation import mutate_bytes

Case = Callable[[random.Random], None]
SECRET = b"s3cr3t"
HOSTS = [
    "a.example",
    "sub.a.example",
    "b.example",
    "a.example.b.example",
    "ba.example",
    "a.example:81",
    "me:pw@b.example",
    "[::1%25.a.example]",
]
LOCATIONS = [
    "/x",
    "",
    "?q",
    "//{0}/y",
    "http://{0}/z",
    "HTTP://{0}",
    "https://{0}/z",
    "file:///etc/passwd",
    "ftp://{0}/",
    "http:///x",
    "http://[",
    "\xe4 b",
    "http:b.example/y",
]
STATUSES = [200, 200, 301, 302, 303, 307, 308, 300, 304, 404, 500, 100, 999]


class Web:
    """A proxy which answers requests to any host with prepared answers, and records the heads of
    the requests."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.answers: list[bytes] = []
        self.heads: list[bytes] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            connection = self.listener.accept()[0]
            with connection, suppress(OSError):
                connection.settimeout(5)
                head = b""
                while b"\r\n\r\n" not in head and (data := connection.recv(1 << 16)):
                    head += data
                self.heads.append(head)
                connection.sendall(
                    self.answers.pop(0) if self.answers else b"HTTP/1.1 200 OK\r\n\r\nend"
                )


def make_answer(rng: random.Random) -> bytes:
    location = rng.choice(LOCATIONS).format(rng.choice(HOSTS))
    headers = [f"Location: {location}"] if rng.random() < 0.9 else []

    headers += rng.sample(
        [
            "Content-Length: 3",
            "Content-Length: -1",
            "Transfer-Encoding: chunked",
            "Location: /l",
            " x",
        ],
        rng.randrange(3),
    )

    lines = [f"HTTP/1.{rng.randrange(2)} {rng.choice(STATUSES)} Said", *headers, "", "abc"]
    data = "\r\n".join(lines).encode("latin-1")

    if rng.random() < 0.3:
        return mutate_bytes(data, rng, [data, b"3\r\nabc\r\n0\r\n\r\n"])

    return data


def web_answers(folder: Path) -> Case:
    """Give changed answers to the requests of http templates and http artifacts."""
    web = Web()
    address = f"http://127.0.0.1:{web.listener.getsockname()[1]}"
    proxies = {"http_proxy": address, "https_proxy": address, "no_proxy": "", "NO_PROXY": ""}

    def case(rng: random.Random) -> None:
        with patch.dict(os.environ, proxies):
            request_answers(rng)

    def request_answers(rng: random.Random) -> None:
        web.heads.clear()
        web.answers = [make_answer(rng) for _ in range(rng.randrange(1, 14))]
        if rng.random() < 0.9:
            url = f"http://{rng.choice(HOSTS[:3])}/x"
        else:
            url = mutate_bytes(b"http://me:s3cr3t@a.example/x?y", rng, [SECRET]).decode(
                errors="replace"
            )

        headers = [
            {"name": name, "value": SECRET.decode()}
            for name in rng.sample(["Authorization", "cookie", "Proxy-authorization"], 2)
        ]
        web_request = {
            "url": url,
            "method": rng.choice(["GET", "POST", "HEAD"]),
            "body": "hi",
            "headers": headers,
            "timeoutSeconds": 5,
        }

        if rng.random() < 0.5:
            phase, message, _ = http.run_http_template(web_request, lambda name: {})
            assert phase in ("Succeeded", "Failed")
            assert len(message) < 50_000
        else:
            with suppress(ArtifactError):
                artifacts.load(
                    {"name": "a", "http": web_request, "archive": {"none": {}}},
                    folder / "in",
                    lambda _: None,
                )

        if url.endswith("/x") and "@" not in url:
            first_host = urlsplit(url).hostname
        else:
            first_host = None

        for head in web.heads if first_host else ():
            if head.count(b" ") > 1:
                target = head.split(b" ")[1].decode("latin-1")
            else:
                target = ""

            host = urlsplit(target if "//" in target else f"//{target}").hostname or ""
            assert SECRET not in head or host == first_host or host.endswith(f".{first_host}"), (
                first_host,
                head,
            )

        assert len(web.heads) <= 11

    return case
