"""A chat webhook for tests: an HTTP server that can fail, be slow, or refuse."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "/services/T0S3CR3T/hook"  # path of its address; must not leak


class Hook(ThreadingHTTPServer):
    """Answers with each of `statuses` in turn, then with 200. `received`: messages it accepted."""

    daemon_threads = True

    def __init__(self, statuses: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses, self.received, self.requests = list(statuses), list[dict[str, Any]](), 0
        self.silent = threading.Event()  # while set, requests stay unanswered

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{SECRET}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        hook: Any = self.server
        hook.requests += 1
        status = hook.statuses.pop(0) if hook.statuses else 200

        if hook.silent.is_set() or self.path != SECRET:
            self.close_connection = True
            return

        if status == 200:
            hook.received.append(body)

        self.send_response(status)
        self.send_header("location", "http://127.0.0.1:9/elsewhere")
        text = b"no_team\x1b"
        if status == 405:
            words = f"Cannot POST {self.path}: {self.path[1:].upper()}, {hook.url}"
            text = words.encode()
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def hook(*statuses: int) -> Iterator[Hook]:
    with Hook(statuses) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
