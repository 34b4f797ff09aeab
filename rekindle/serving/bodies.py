"""Limits the memory for the bodies of arriving requests, fairly between clients.

Clients that never finish large bodies could use up all memory. So if the limit is exceeded, the
server drops the largest (if equal, the oldest) body of the client with the most data. Small
requests of other clients are never rejected.
"""

import asyncio
import time
from collections import Counter

from starlette.requests import ClientDisconnect, Request

from rekindle.release.serve_config import Limits

# a too large body is still read to its end if it is at most this multiple of the permitted size, so
# that its client receives the status 413
OVERSIZE_FACTOR = 4
BUDGET_FACTOR = 16  # memory for all arriving bodies, as a multiple of the largest permitted body


class Refusal(Exception):
    """A rejected request: HTTP status and reason.

    `close`: close the connection without reading the rest of the request.
    """

    def __init__(self, status: int, reason: str, close: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.close = close


class Body:
    """A body that is arriving."""

    def __init__(self, client: str, deadline: asyncio.Timeout) -> None:
        self.client = client
        self.deadline = deadline
        self.start_time = time.monotonic()
        self.data = bytearray()
        self.drop_reason = ""  # reason why the body was dropped, or ""


class Bodies:
    """The bodies of all arriving requests."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.arriving_bodies: set[Body] = set()
        self.bytes_by_client: Counter[str] = Counter()  # client address → number of received bytes

    async def read(self, request: Request) -> bytes:
        """Return the request's body. Raises Refusal if the body is too large, too slow or
        incomplete."""
        limits = self.limits
        too_large = Refusal(
            413, f"the request is larger than {limits.max_bytes:,} bytes: send it in parts."
        )

        if int(request.headers.get("content-length", 0)) > OVERSIZE_FACTOR * limits.max_bytes:
            raise too_large

        now = asyncio.get_running_loop().time()
        deadline = asyncio.timeout_at(
            request.scope["state"].get("start_time", now) + limits.body_seconds
        )
        body = Body(request.client.host if request.client else "", deadline)
        size = 0
        self.arriving_bodies.add(body)

        try:
            async with deadline:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > OVERSIZE_FACTOR * limits.max_bytes:
                        break
                    if size <= limits.max_bytes:
                        self._add_chunk(body, chunk)
        except TimeoutError as error:
            if not body.drop_reason:
                reason = f"the request took longer than {limits.body_seconds:g} s to arrive."
                raise Refusal(408, reason, close=True) from error
        except ClientDisconnect as error:
            raise Refusal(400, "the client disconnected before its request had arrived.") from error
        finally:
            self._remove_body(body)

        if body.drop_reason:
            raise Refusal(
                503, f"{body.drop_reason}, so this request was dropped: try again soon.", close=True
            )

        if size > limits.max_bytes:
            raise too_large

        return bytes(body.data)

    def _add_chunk(self, body: Body, chunk: bytes) -> None:
        if body.drop_reason:
            return

        body.data += chunk
        self.bytes_by_client[body.client] += len(chunk)

        while self.bytes_by_client.total() > BUDGET_FACTOR * self.limits.max_bytes:
            largest_body = max(
                self.arriving_bodies,
                key=lambda other: (
                    self.bytes_by_client[other.client],
                    len(other.data),
                    -other.start_time,
                ),
            )
            self._drop_body(largest_body, "too many large requests arrive at once")

    def drop_oldest(self, reason: str) -> bool:
        """Answer the oldest arriving request with 503. Return False if no body is arriving."""
        if self.arriving_bodies:
            self._drop_body(min(self.arriving_bodies, key=lambda body: body.start_time), reason)
            return True
        return False

    def _drop_body(self, body: Body, reason: str) -> None:
        body.drop_reason = reason
        self._remove_body(body)
        body.data.clear()
        if not body.deadline.expired():
            # the deadline is set to now, which ends `read`
            body.deadline.reschedule(asyncio.get_running_loop().time())

    def _remove_body(self, body: Body) -> None:
        if body in self.arriving_bodies:
            self.arriving_bodies.remove(body)
            self.bytes_by_client[body.client] -= len(body.data)
            if not self.bytes_by_client[body.client]:
                del self.bytes_by_client[body.client]
