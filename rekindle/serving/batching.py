"""Requests that wait together are answered together: one queue, and a task for each process that holds the model."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rekindle.errors import RekindleError
from rekindle.serving.worker import Answer, ModelProcess


@dataclass
class Waiting:
    """A request in the queue."""

    body: bytes
    answer: asyncio.Future[Answer]
    since: float


@dataclass
class Batches:
    """A free process takes the oldest requests, its share and at most `size`, once the first has waited `delay` s."""

    processes: Sequence[ModelProcess]
    size: int
    delay: float
    queue: deque[Waiting] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    error: RekindleError | None = None  # why no request is answered any more

    async def answer(self, body: bytes) -> Answer:
        """The answer to one request. Raises RekindleError if the process with the model ended."""
        if self.error:
            raise self.error
        loop = asyncio.get_running_loop()
        request = Waiting(body, loop.create_future(), loop.time())
        self.queue.append(request)
        self.arrived.set()
        return await request.answer

    async def run(self) -> None:
        """Until a process ends, which raises RekindleError, also for every request that waits."""
        feeds = [asyncio.create_task(self._feed(process)) for process in self.processes]
        try:
            await asyncio.gather(*feeds)
        except RekindleError as error:
            self.error = error
            for request in self.queue:
                resolve(request, error)
            raise
        finally:
            for feed in feeds:
                feed.cancel()

    async def _feed(self, process: ModelProcess) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next()
            try:
                answers = await loop.run_in_executor(process.thread, process.answers, [r.body for r in batch])
            except (RekindleError, asyncio.CancelledError) as error:
                stopped = error if isinstance(error, RekindleError) else RekindleError("the server ends: try another.")
                for request in batch:
                    resolve(request, stopped)
                raise
            for request, answer in zip(batch, answers, strict=True):
                resolve(request, answer)

    async def _next(self) -> list[Waiting]:
        """The next batch."""
        loop = asyncio.get_running_loop()
        while True:
            while not self.queue:
                self.arrived.clear()
                await self.arrived.wait()
            wait = self.queue[0].since + self.delay - loop.time()
            if wait <= 0 or len(self.queue) >= self.size:
                share = -(-len(self.queue) // len(self.processes))
                return [self.queue.popleft() for _ in range(min(self.size, share))]
            await asyncio.sleep(wait)


def resolve(request: Waiting, result: Answer | RekindleError) -> None:
    """Give a request its answer, unless its client has stopped waiting."""
    if request.answer.done():
        return
    if isinstance(result, Answer):
        request.answer.set_result(result)
    else:
        request.answer.set_exception(result)
