"""The bodies of requests that are still arriving: all of them together have a budget, and each client a fair share.

Clients that hold back the end of large bodies would fill it. So whoever needs room gets it from the client that holds
the most, which loses its largest body, the oldest of equal ones: no small request is refused for the sake of these.
"""

import asyncio
import time
from collections import Counter

from starlette.requests import ClientDisconnect, Request

from rekindle.release.config import Limits

OVERSIZE = 4  # a body up to this many times the limit is read to its end, so that the client sees the 413
BUDGET = 16  # times the largest body: memory for all bodies that are still arriving


class Refusal(Exception):
    """A request that gets no predictions: the HTTP status and the reason; `close`: the rest of it is not read."""

    def __init__(self, status: int, reason: str, close: bool = False) -> None:
        super().__init__(reason)
        self.status, self.close = status, close


class Body:
    """A body of which a part has arrived."""

    def __init__(self, client: str, deadline: asyncio.Timeout) -> None:
        self.client, self.deadline, self.since = client, deadline, time.monotonic()
        self.data = bytearray()
        self.dropped = ""  # why it had to make room


class Bodies:
    """All bodies that are still arriving."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.arriving: set[Body] = set()
        self.held: Counter[str] = Counter()  # bytes by the address of the client

    async def read(self, request: Request) -> bytes:
        """The request's body, whatever its framing. Raises Refusal if it is too large, too slow or cut off."""
        limits = self.limits
        too_large = Refusal(413, f"the request is larger than {limits.max_bytes:,} bytes: send it in parts.")
        if int(request.headers.get("content-length", 0)) > OVERSIZE * limits.max_bytes:
            raise too_large
        deadline = asyncio.timeout(limits.body_seconds)
        body, size = Body(request.client.host if request.client else "", deadline), 0
        self.arriving.add(body)
        try:
            async with deadline:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > OVERSIZE * limits.max_bytes:
                        break
                    if size <= limits.max_bytes:
                        self._add(body, chunk)
        except TimeoutError as error:
            if not body.dropped:
                reason = f"the request took longer than {limits.body_seconds:g} s to arrive."
                raise Refusal(408, reason, close=True) from error
        except ClientDisconnect as error:
            raise Refusal(400, "the client went away before its request had arrived.") from error
        finally:
            self._remove(body)
        if body.dropped:
            raise Refusal(503, f"{body.dropped}, and others needed its room: try again soon.", close=True)
        if size > limits.max_bytes:
            raise too_large
        return bytes(body.data)

    def _add(self, body: Body, chunk: bytes) -> None:
        if body.dropped:
            return
        body.data += chunk
        self.held[body.client] += len(chunk)
        while self.held.total() > BUDGET * self.limits.max_bytes:
            hoarder = max(self.arriving, key=lambda other: (self.held[other.client], len(other.data), -other.since))
            self._drop(hoarder, "too many large requests arrive at once")

    def drop_oldest(self, reason: str) -> bool:
        """End the request that arrives for the longest time: it gets a 503. False if no body is arriving."""
        if self.arriving:
            self._drop(min(self.arriving, key=lambda body: body.since), reason)
            return True
        return False

    def _drop(self, loser: Body, reason: str) -> None:
        loser.dropped = reason
        self._remove(loser)
        loser.data.clear()
        if not loser.deadline.expired():  # it may be about to tell the client that it was too slow
            loser.deadline.reschedule(asyncio.get_running_loop().time())

    def _remove(self, body: Body) -> None:
        if body in self.arriving:
            self.arriving.remove(body)
            self.held[body.client] -= len(body.data)
            if not self.held[body.client]:
                del self.held[body.client]
