"""A proxy in front of a real HTTP service that counts writing requests and can inject faults at any
of them.

with Proxy("http://127.0.0.1:9000") as proxy:
    proxy.before = lambda write: ...     # called with a Write before it is forwarded, in a thread
    of the proxy
    proxy.away = True                    # connections are closed, as if the service were down
"""

import http.client
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

READS = ("GET", "HEAD")
# POSTs of MLflow that only read
SEARCHES = ("/search", "/get-by-name")
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Write:
    """A writing request; `number` is the number of the request, counted from 1."""

    number: int
    method: str
    path: str

    def __str__(self) -> str:
        return f"{self.number}: {self.method} {self.path.partition('?')[0]}"


class Proxy:
    """A proxy that listens on `host` and forwards requests to `target`."""

    def __init__(self, target: str, host: str = "127.0.0.1") -> None:
        self.target = urlsplit(target)
        self.before: Callable[[Write], None] = lambda write: None
        self.after: Callable[[Write], None] = lambda write: None
        self.away = False
        self.writes: list[Write] = []
        self.lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            through = proxy

        self.server = _Server((host, 0), Handler)
        self.url = f"http://{host}:{self.server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    def note(self, method: str, path: str) -> Write | None:
        """Record a request that writes, and return it; return None for a request that only reads."""
        if method in READS or path.partition("?")[0].endswith(SEARCHES) or "dryRun" in path:
            return None
        with self.lock:
            self.writes.append(write := Write(len(self.writes) + 1, method, path))
        return write


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # the error only means that the client was killed
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    through: Proxy

    def log_message(self, format: str, *args: Any) -> None: ...

    def handle_any(self) -> None:
        proxy = self.through
        if proxy.away:
            return self.break_off()

        body = self.body()
        write = proxy.note(self.command, self.path)
        if write:
            proxy.before(write)
        if proxy.away:
            return self.break_off()

        assert proxy.target.hostname
        upstream = http.client.HTTPConnection(proxy.target.hostname, proxy.target.port, timeout=60)

        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    upstream.putheader(name, value)

            upstream.putheader("Content-Length", str(len(body)))
            upstream.putheader("Connection", "close")
            upstream.endheaders(body)
            answer = upstream.getresponse()
            content = answer.read()
        except OSError:
            return self.break_off()
        finally:
            upstream.close()

        if write:
            proxy.after(write)
        if proxy.away:
            return self.break_off()

        try:
            self.send_response(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in {*HOP_BY_HOP, "date", "server"}:
                    self.send_header(name, value)

            if self.command == "HEAD":
                length = answer.getheader("Content-Length")
            else:
                length = None

            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the client was killed, so close the connection
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    def body(self) -> bytes:
        """Read the body of the request, which has a length or is sent in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while chunk_bytes := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(chunk_bytes)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def break_off(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
