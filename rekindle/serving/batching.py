"""Batching of requests: one queue, and two tasks per model process (one if a batch has a single
request).

While a process works on a batch, a full batch waits in its pipe, so that the process is never idle
while answers are sent.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rekindle.errors import RekindleError
from rekindle.serving.model_process import Answer, Batch, ModelProcess


@dataclass
class WaitingRequest:
    """A request in the queue."""

    body: bytes
    is_replay: bool  # True: the request is not counted
    answer: asyncio.Future[Answer]
    arrival_time: float


@dataclass
class Feed:
    """A process, and locks that keep its batches and its answers in order."""

    process: ModelProcess
    send_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    receive_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Batches:
    """Queue of requests. After the oldest request has waited `delay` s, a free process takes a
    batch.

    A batch has at most `size` requests, and at most the process's share of the queue.
    """

    processes: Sequence[ModelProcess]
    size: int
    delay: float
    count_batch: Callable[[Batch], None]  # called with each answered batch
    queue: deque[WaitingRequest] = field(default_factory=deque)
    # a request arrived, or a process is free
    change_event: asyncio.Event = field(default_factory=asyncio.Event)
    # the error that ended the model process; later requests get it, too
    error: RekindleError | None = None

    async def answer(self, body: bytes, is_replay: bool = False) -> Answer:
        """Return the answer to a request. Raises RekindleError if the model process ended."""
        if self.error:
            raise self.error
        loop = asyncio.get_running_loop()
        request = WaitingRequest(body, is_replay, loop.create_future(), loop.time())
        self.queue.append(request)
        self.change_event.set()
        return await request.answer

    async def run(self) -> None:
        """Run until a process ends; then raise RekindleError, also in all waiting requests."""
        feeds = [Feed(process) for process in self.processes]

        tasks = [
            asyncio.create_task(self._serve(feed))
            for feed in feeds
            for _ in range(2 if self.size > 1 else 1)
        ]

        try:
            await asyncio.gather(*tasks)
        except RekindleError as error:
            self.error = error
            for request in self.queue:
                resolve(request, error)

            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _serve(self, feed: Feed) -> None:
        loop = asyncio.get_running_loop()
        process = feed.process

        while True:
            requests: list[WaitingRequest] = []
            try:
                async with feed.send_lock:
                    requests = await self._next(feed)
                    replays = {index for index, request in enumerate(requests) if request.is_replay}
                    bodies = [request.body for request in requests]
                    await loop.run_in_executor(process.threads, process.send, bodies, replays)
                    await feed.receive_lock.acquire()

                try:
                    batch = await loop.run_in_executor(process.threads, process.receive)
                finally:
                    feed.receive_lock.release()
            except (RekindleError, asyncio.CancelledError) as error:
                if isinstance(error, RekindleError):
                    stop_error = error
                else:
                    stop_error = RekindleError("the server is stopping: try another.")

                for request in requests:
                    resolve(request, stop_error)

                raise

            self.change_event.set()
            self.count_batch(batch)
            for request, answer in zip(requests, batch.answers, strict=True):
                resolve(request, answer)

    async def _next(self, feed: Feed) -> list[WaitingRequest]:
        """Return the next batch; while the process works, wait for a full batch."""
        loop = asyncio.get_running_loop()
        while True:
            while not self.queue or (feed.receive_lock.locked() and len(self.queue) < self.size):
                self.change_event.clear()
                await self.change_event.wait()
            wait = self.queue[0].arrival_time + self.delay - loop.time()
            if wait <= 0 or len(self.queue) >= self.size:
                share = -(-len(self.queue) // len(self.processes))
                return [self.queue.popleft() for _ in range(min(self.size, share))]
            await asyncio.sleep(wait)


def resolve(request: WaitingRequest, result: Answer | RekindleError) -> None:
    """Complete a request, unless its client has stopped waiting."""
    if request.answer.done():
        return
    if isinstance(result, Answer):
        request.answer.set_result(result)
    else:
        request.answer.set_exception(result)
