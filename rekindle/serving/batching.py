"""Groups requests into batches: all model processes share one queue, from which two asyncio tasks
per process take batches (one task if batches have a single request).

While a process works on a batch, the next full batch waits in its pipe, so that the process does
not wait for the server.
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
    is_replay: bool  # True for a request of `verify`, which is not counted
    answer: asyncio.Future[Answer]
    arrival_time: float


@dataclass
class ProcessFeed:
    """A process, and the locks that keep its batches and answers in order."""

    process: ModelProcess
    send_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    receive_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class RequestQueue:
    """The queue of requests. A free process takes a batch once the oldest request has waited
    `delay` seconds, or `size` requests wait.

    A batch has at most `size` requests, and at most the queue's length divided by the number of
    processes.
    """

    processes: Sequence[ModelProcess]
    size: int
    delay: float
    count_batch: Callable[[Batch], None]  # called with each answered batch
    queue: deque[WaitingRequest] = field(default_factory=deque)
    # set when a request arrives or a process becomes free
    change_event: asyncio.Event = field(default_factory=asyncio.Event)
    # the error that ended a model process; all later requests fail with it
    error: RekindleError | None = None

    async def answer(self, body: bytes, is_replay: bool = False) -> Answer:
        """Queue a request and wait for its answer. Raises RekindleError if a model process has
        ended."""
        if self.error:
            raise self.error
        loop = asyncio.get_running_loop()
        request = WaitingRequest(body, is_replay, loop.create_future(), loop.time())
        self.queue.append(request)
        self.change_event.set()
        return await request.answer

    async def run(self) -> None:
        """Pass batches to the processes until a process ends. Then all waiting requests and this
        method raise RekindleError."""
        feeds = [ProcessFeed(process) for process in self.processes]

        tasks = [
            asyncio.create_task(self._feed_process(feed))
            for feed in feeds
            for _ in range(2 if self.size > 1 else 1)
        ]

        try:
            await asyncio.gather(*tasks)
        except RekindleError as error:
            self.error = error
            for request in self.queue:
                resolve_request(request, error)

            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _feed_process(self, feed: ProcessFeed) -> None:
        loop = asyncio.get_running_loop()
        process = feed.process

        while True:
            requests: list[WaitingRequest] = []
            try:
                async with feed.send_lock:
                    requests = await self._take_batch(feed)
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
                    resolve_request(request, stop_error)

                raise

            self.change_event.set()
            self.count_batch(batch)
            for request, answer in zip(requests, batch.answers, strict=True):
                resolve_request(request, answer)

    async def _take_batch(self, feed: ProcessFeed) -> list[WaitingRequest]:
        """Take the next batch from the queue. While the process is working, wait for a full
        batch."""
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


def resolve_request(request: WaitingRequest, result: Answer | RekindleError) -> None:
    """Complete a request, unless its client has stopped waiting."""
    if request.answer.done():
        return
    if isinstance(result, Answer):
        request.answer.set_result(result)
    else:
        request.answer.set_exception(result)
