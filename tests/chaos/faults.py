"""A proxy in front of an S3 endpoint that injects faults; the proxy runs in a separate thread.

with Proxy(endpoint) as proxy:
    proxy.fault("throttle", seconds=1.0)
    proxy.hold("PUT latest", 2, lambda: ...)    # called while the second such request is held
"""

import asyncio
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
# name of a request in schedules → method and pattern of its path
KINDS = {
    "GET dataset": ("GET", r"/dataset/"),
    "PUT chunk": ("PUT", r"/checkpoints/chunks/"),
    "PUT manifest": ("PUT", r"/checkpoints/manifests/"),
    "PUT latest": ("PUT", r"/checkpoints/latest$"),
    "PUT model.safetensors": ("PUT", r"/model\.safetensors"),
    "PUT model.json": ("PUT", r"/model\.json$"),
}
# longest time to hold a request
MAX_HOLD_S = 5.0


class Proxy:
    """A proxy that listens at `url` on 127.0.0.1. A fault of the proxy lasts for some seconds; a
    new fault replaces the previous fault."""

    def __init__(self, upstream: str, seed: int = 0) -> None:
        address = urlsplit(upstream)
        self.upstream = (address.hostname or "", address.port or 80)
        # kind of request → number of requests so far
        self.requests: dict[str, int] = {}
        self._kind = ""
        self._until = 0.0
        self._holds: dict[tuple[str, int], Callable[[], None]] = {}
        self._draw = random.Random(seed)
        self._clients: set[asyncio.StreamWriter] = set()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def fault(self, kind: str, seconds: float) -> None:
        """Start a fault of the proxy."""
        self._kind = kind
        self._until = time.monotonic() + seconds
        if kind in ("refuse", "reset"):  # requests in progress fail, too
            self._loop.call_soon_threadsafe(
                lambda: [_reset_connection(client) for client in self._clients]
            )

    def hold(self, kind: str, request_number: int, callback: Callable[[], None]) -> None:
        """Call `callback` at the N-th request of a kind, counted from 1. The held request is
        forwarded only after `callback` has returned."""
        self._holds[kind, request_number] = callback

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve_client, sock=self._listening)
        )
        self._loop.run_forever()
        server.close()
        clients = asyncio.all_tasks(self._loop)
        for task in clients:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*clients, return_exceptions=True))
        # lets the open connections be closed
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    @property
    def _fault(self) -> str:
        if time.monotonic() < self._until:
            return self._kind
        return ""

    async def _serve_client(
        self, reader: asyncio.StreamReader, client: asyncio.StreamWriter
    ) -> None:
        self._clients.add(client)
        server: asyncio.StreamWriter | None = None

        try:
            answers, server = await asyncio.open_connection(*self.upstream)
            while await self._proxy_request(reader, client, answers, server):
                pass
        except (OSError, EOFError):
            _reset_connection(client)
        except asyncio.CancelledError:
            # the proxy ends; otherwise Python 3.11 would print an error
            return
        finally:
            self._clients.discard(client)
            for stream in (client, server):
                if stream:
                    stream.close()

    async def _proxy_request(
        self,
        reader: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> bool:
        """Proxy one request and its answer; return False if the connection must be closed."""
        request_head = await _read_head(reader)
        if not request_head:
            return False
        if self._fault == "refuse":
            raise ConnectionResetError

        if self._fault == "hang":
            while self._fault == "hang":
                await asyncio.sleep(0.02)

            raise ConnectionResetError

        if self._fault == "slow":
            await asyncio.sleep(self._draw.uniform(0.05, 0.4))

        if _expects_continue(request_head):
            client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request_head = re.sub(rb"\r\nexpect:[^\r]*", b"", request_head, flags=re.I)

        request_body = await reader.readexactly(_parse_length(request_head))
        if self._fault == "throttle":
            client.write(
                b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length:"
                b" %d\r\n\r\n" % len(SLOW_DOWN)
            )
            client.write(b"" if request_head.startswith(b"HEAD") else SLOW_DOWN)
            await client.drain()

            return not request_head.startswith(b"HEAD")

        await self._hold_request(request_head)
        server.write(request_head + request_body)
        await server.drain()
        answer_head = await _read_head(answers)

        has_body = not request_head.startswith(b"HEAD") and not answer_head.startswith(
            (b"HTTP/1.1 304", b"HTTP/1.1 204")
        )
        if has_body:
            answer_body = await answers.readexactly(_parse_length(answer_head))
        else:
            answer_body = b""

        if self._fault == "deaf":  # the store has executed the request, but the answer is lost
            raise ConnectionResetError

        if self._fault == "reset":
            response = answer_head + answer_body
            client.write(response[: self._draw.randrange(len(response))])
            await client.drain()
            raise ConnectionResetError

        client.write(answer_head + answer_body)
        await client.drain()
        return b"\r\nconnection: close" not in answer_head.lower()

    async def _hold_request(self, head: bytes) -> None:
        method, path = head.split(b" ", 2)[:2]
        for kind, (verb, pattern) in KINDS.items():
            if method.decode() == verb and re.search(pattern, path.decode().partition("?")[0]):
                request_number = self.requests[kind] = self.requests.get(kind, 0) + 1
                callback = self._holds.pop((kind, request_number), None)
                if callback:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.to_thread(callback), MAX_HOLD_S)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """Read the lines of a request's head, up to the empty line; return b"" at the end of the
    connection."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return b""


def _parse_length(head: bytes) -> int:
    length_match = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
    assert length_match or b"chunked" not in head.lower(), head
    if length_match:
        return int(length_match[1])
    return 0


def _expects_continue(head: bytes) -> bool:
    return bool(re.search(rb"\r\nexpect: *100-continue", head, re.I))


def _reset_connection(client: asyncio.StreamWriter) -> None:
    """Reset the connection, as if the other machine had failed."""
    with suppress(OSError):
        connection = client.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.transport.abort()
