"""Limits the memory for the bodies of arriving requests, fairly between clients.

Clients that never finish large bodies could use up all memory. If the memory limit for bodies is
exceeded, the server drops the largest body of the client with the most data (of equal bodies, the
oldest). Small requests of other clients are never rejected.
"""

import asyncio
import time
from collections import Counter

from starlette.requests import ClientDisconnect, Request

from rekindle.release.serve_config import Limits

# a too large body is still read to its end if it is at most this multiple of the permitted size, so
# that its client receives the status 413
OVERSIZE_FACTOR = 4
# memory for all arriving bodies, as a multiple of the largest permitted body
BUDGET_FACTOR = 16


class RefusalError(Exception):
    """Raised for a request that is rejected with an HTTP status and a reason.

    `should_close` is True to close the connection without reading the rest of the request.
    """

    def __init__(self, status: int, reason: str, should_close: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.close = should_close


class ArrivingBody:
    """The body of an arriving request."""

    def __init__(self, client_host: str, deadline: asyncio.Timeout) -> None:
        self.client = client_host
        self.deadline = deadline
        self.start_time = time.monotonic()
        self.data = bytearray()
        # reason why the body was dropped, or ""
        self.drop_reason = ""


class ArrivingBodies:
    """The bodies of all arriving requests."""

    def __init__(self, server_limits: Limits) -> None:
        self.limits = server_limits
        self.arriving_bodies: set[ArrivingBody] = set()
        # client address → number of received bytes of arriving bodies
        self.bytes_by_client: Counter[str] = Counter()

    async def read(self, request: Request) -> bytes:
        """Return the request's body. Raises RefusalError if the body is too large, too slow or
        incomplete, or was dropped to free memory."""
        server_limits = self.limits
        too_large_refusal = RefusalError(
            413, f"the request is larger than {server_limits.max_bytes:,} bytes: send it in parts."
        )

        if (
            int(request.headers.get("content-length", 0))
            > OVERSIZE_FACTOR * server_limits.max_bytes
        ):
            raise too_large_refusal

        now_seconds = asyncio.get_running_loop().time()
        deadline_timeout = asyncio.timeout_at(
            request.scope["state"].get("start_time", now_seconds) + server_limits.body_seconds
        )
        arriving_body = ArrivingBody(
            request.client.host if request.client else "", deadline_timeout
        )
        received_bytes = 0
        self.arriving_bodies.add(arriving_body)

        try:
            async with deadline_timeout:
                async for body_chunk in request.stream():
                    received_bytes += len(body_chunk)
                    if received_bytes > OVERSIZE_FACTOR * server_limits.max_bytes:
                        break
                    if received_bytes <= server_limits.max_bytes:
                        self._add_chunk(arriving_body, body_chunk)
        except TimeoutError as error:
            if not arriving_body.drop_reason:
                timeout_reason = (
                    f"the request took longer than {server_limits.body_seconds:g} s to arrive."
                )
                raise RefusalError(408, timeout_reason, should_close=True) from error
        except ClientDisconnect as error:
            raise RefusalError(
                400, "the client disconnected before its request had arrived."
            ) from error
        finally:
            self._remove_body(arriving_body)

        if arriving_body.drop_reason:
            raise RefusalError(
                503,
                f"{arriving_body.drop_reason}, so this request was dropped: try again soon.",
                should_close=True,
            )

        if received_bytes > server_limits.max_bytes:
            raise too_large_refusal

        return bytes(arriving_body.data)

    def _add_chunk(self, arriving_body: ArrivingBody, body_chunk: bytes) -> None:
        if arriving_body.drop_reason:
            return

        arriving_body.data += body_chunk
        self.bytes_by_client[arriving_body.client] += len(body_chunk)

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

    def _drop_body(self, arriving_body: ArrivingBody, reason: str) -> None:
        arriving_body.drop_reason = reason
        self._remove_body(arriving_body)
        arriving_body.data.clear()
        if not arriving_body.deadline.expired():
            # set the deadline of the body to now, which ends `read`
            arriving_body.deadline.reschedule(asyncio.get_running_loop().time())

    def _remove_body(self, arriving_body: ArrivingBody) -> None:
        if arriving_body in self.arriving_bodies:
            self.arriving_bodies.remove(arriving_body)
            self.bytes_by_client[arriving_body.client] -= len(arriving_body.data)
            if not self.bytes_by_client[arriving_body.client]:
                del self.bytes_by_client[arriving_body.client]
