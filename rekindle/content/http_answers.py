"""Send HTTP requests; the size of a response and the time in which it must arrive are limited.

answer = send(Session(), "GET", url, max_bytes=64 << 20, timeout_s=30)
"""

import time
from typing import Any, NamedTuple, Protocol

import requests
from urllib3.exceptions import HTTPError

READ_BYTES = 1 << 16
# time limit for the whole body of a response; the timeout of `requests` only limits the wait for
# the next bytes
BODY_TIMEOUT_S = 120.0


class Body(Protocol):
    """The body of an answer, as urllib3 provides it."""

    def read1(self, amt: int, decode_content: bool | None = None) -> bytes:
        """Return the next bytes as soon as they arrive, b"" at the end."""
        ...


class UnreadableAnswer(requests.RequestException):
    """The answer of a server is too large, or arrives too slowly."""


class HttpAnswer(NamedTuple):
    """The answer of a server, read to its end."""

    status_code: int
    reason: str
    content: bytes

    @property
    def ok(self) -> bool:
        return self.status_code < 400

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class Session(requests.Session):
    """A session that sends its login only to the server of the request, not to the target of a
    redirect, and never replaces it by a login from ~/.netrc, as `requests` does.
    """

    def rebuild_auth(self, prepared_request: Any, response: Any) -> None:
        """Remove the login from a request that a redirect sends to another server."""
        if self.should_strip_auth(response.request.url, prepared_request.url):
            prepared_request.headers.pop("Authorization", None)

    def set_token(self, header_value: str) -> None:
        """Send `header_value` as the header Authorization of each request."""

        def add_header(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers["Authorization"] = header_value
            return request

        # set `auth` instead of a header of the session, because a login in ~/.netrc would replace
        # the header
        self.auth = add_header


def send(
    session: requests.Session,
    method: str,
    url: str,
    *,
    max_bytes: int,
    timeout_s: float,
    **request_options: Any,
) -> HttpAnswer:
    """Send a request and read the answer.

    Raises UnreadableAnswer for an answer that has more than `max_bytes` bytes after decompression,
    or whose body takes more than BODY_TIMEOUT_S seconds, and requests.RequestException for other
    errors. `timeout_s`: seconds without data after which the request fails.
    """
    with session.request(
        method, url, stream=True, timeout=timeout_s, **request_options
    ) as response:
        try:
            answer_content = read_limited(response.raw, max_bytes)
        except HTTPError as error:
            raise requests.RequestException(str(error)) from error
        return HttpAnswer(response.status_code, response.reason or "", answer_content)


def read_limited(answer_body: Body, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Read the body of an answer. Raises UnreadableAnswer if the body has more than `max_bytes`
    bytes, or takes more than `timeout_s` seconds, and urllib3's HTTPError for other errors."""
    deadline_time = time.monotonic() + timeout_s
    answer_content = bytearray()

    while body_chunk := answer_body.read1(READ_BYTES, decode_content=True):
        answer_content += body_chunk
        if len(answer_content) > max_bytes:
            raise UnreadableAnswer(f"its answer has more than {max_bytes:,} bytes")
        if time.monotonic() > deadline_time:
            raise UnreadableAnswer(f"its answer takes more than {timeout_s:g} s")

    return bytes(answer_content)
