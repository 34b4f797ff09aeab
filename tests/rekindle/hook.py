"""A chat webhook for tests: an HTTP server that can fail, be slow, or refuse."""

import json
import threading
from typing import Any

from tests.http_server import Answer, HttpServer, Request

# path of the webhook's address, which is a secret, which must not be shown
SECRET = "/services/T0S3CR3T/hook"


class Hook(HttpServer):
    """Answers each request with the next of `statuses`, and then with 200. `received`: messages
    that the webhook has accepted."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(self.receive)
        self.url = f"http://127.0.0.1:{self.port}{SECRET}"
        self.statuses = list(statuses)
        self.received: list[dict[str, Any]] = []
        # while this event is set, requests stay unanswered
        self.silent = threading.Event()

    def receive(self, request: Request) -> Answer | bytes:
        status = self.statuses.pop(0) if self.statuses else 200

        if self.silent.is_set() or request.path != SECRET:
            return b""

        if status == 200:
            self.received.append(json.loads(request.body))

        text = "no_team\x1b"
        if status == 405:
            text = f"Cannot POST {request.path}: {request.path[1:].upper()}, {self.url}"

        return Answer(status, text, {"location": "http://127.0.0.1:9/elsewhere"})
