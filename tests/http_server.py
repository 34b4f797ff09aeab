"""A small HTTP server that answers each request with the result of a function.

with HttpServer(lambda request: Answer(404)) as server:
    ...  # requests to server.url
    assert server.requests[0].path == "/"
"""

import sys
import threading
from collections.abc import Callable, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self


class Request(NamedTuple):
    method: str
    # path of the request with its query
    path: str
    headers: Message
    body: bytes


class Answer(NamedTuple):
    status: int = 200
    body: str | bytes = ""
    headers: Mapping[str, str] = {}


class HttpServer:
    """Serves requests until the `with` block ends. The function `answer` returns an Answer, or raw
    bytes to send; for b"", the connection is closed without an answer."""

    def __init__(
        self, answer: Callable[[Request], Answer | bytes], host: str = "127.0.0.1"
    ) -> None:
        self.answer = answer
        self.requests: list[Request] = []

        class Handler(_Handler):
            server_of_test = self

        self._server = _Server((host, 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://{host}:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # the error only means that the client was killed
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_of_test: HttpServer

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, self.headers, body)
        self.server_of_test.requests.append(request)

        answer = self.server_of_test.answer(request)
        if isinstance(answer, bytes):
            self.wfile.write(answer)
            return

        body_bytes = answer.body.encode() if isinstance(answer.body, str) else answer.body
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body_bytes)))
        self.end_headers()

        if self.command != "HEAD":
            self.wfile.write(body_bytes)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
