"""Groups requests to a model server into batches: all model processes share one queue, from which
two asyncio tasks per process take batches (one task if batches have a single request).

While a model process works on a batch, the next full batch waits in the pipe of the process, so
that the process does not wait for the server.
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
    # True for a request of the step `verify`, which the metrics do not count
    is_replay: bool
    answer: asyncio.Future[Answer]
    arrival_time: float


@dataclass
class ProcessFeed:
    """A model process, and the locks that keep the batches and answers of the process in order."""

    process: ModelProcess
    send_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    receive_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class RequestQueue:
    """The queue of requests. A free model process takes a batch once the oldest request has waited
    `delay` seconds, or `size` requests wait.

    A batch has at most `size` requests, and at most the queue's length divided by the number of
    processes.
    """

    processes: Sequence[ModelProcess]
    size: int
    delay: float
    # function that is called with each answered batch
    count_batch: Callable[[Batch], None]
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
        event_loop = asyncio.get_running_loop()
        waiting_request = WaitingRequest(
            body, is_replay, event_loop.create_future(), event_loop.time()
        )
        self.queue.append(waiting_request)
        self.change_event.set()
        return await waiting_request.answer

    async def run(self) -> None:
        """Pass batches to the model processes until a process ends. After the end of a process, all
        waiting requests and `run` raise RekindleError."""
        process_feeds = [ProcessFeed(model_process) for model_process in self.processes]

        feed_tasks = [
            asyncio.create_task(self._feed_process(process_feed))
            for process_feed in process_feeds
            for _ in range(2 if self.size > 1 else 1)
        ]

        try:
            await asyncio.gather(*feed_tasks)
        except RekindleError as error:
            self.error = error
            for waiting_request in self.queue:
                resolve_request(waiting_request, error)

            raise
        finally:
            for feed_task in feed_tasks:
                feed_task.cancel()

    async def _feed_process(self, process_feed: ProcessFeed) -> None:
        event_loop = asyncio.get_running_loop()
        model_process = process_feed.process

        while True:
            batch_requests: list[WaitingRequest] = []
            try:
                async with process_feed.send_lock:
                    batch_requests = await self._take_batch(process_feed)
                    replay_indices = {
                        index
                        for index, waiting_request in enumerate(batch_requests)
                        if waiting_request.is_replay
                    }
                    request_bodies = [waiting_request.body for waiting_request in batch_requests]
                    await event_loop.run_in_executor(
                        model_process.threads, model_process.send, request_bodies, replay_indices
                    )
                    await process_feed.receive_lock.acquire()

                try:
                    answered_batch = await event_loop.run_in_executor(
                        model_process.threads, model_process.receive
                    )
                finally:
                    process_feed.receive_lock.release()
            except (RekindleError, asyncio.CancelledError) as error:
                if isinstance(error, RekindleError):
                    stop_error = error
                else:
                    stop_error = RekindleError("the server is stopping: try another.")

                for waiting_request in batch_requests:
                    resolve_request(waiting_request, stop_error)

                raise

            self.change_event.set()
            self.count_batch(answered_batch)
            for waiting_request, answer in zip(batch_requests, answered_batch.answers, strict=True):
                resolve_request(waiting_request, answer)

    async def _take_batch(self, process_feed: ProcessFeed) -> list[WaitingRequest]:
        """Take the next batch from the queue. While the model process works on a batch, wait until
        the next batch is full."""
        event_loop = asyncio.get_running_loop()
        while True:
            while not self.queue or (
                process_feed.receive_lock.locked() and len(self.queue) < self.size
            ):
                self.change_event.clear()
                await self.change_event.wait()
            wait_seconds = self.queue[0].arrival_time + self.delay - event_loop.time()
            if wait_seconds <= 0 or len(self.queue) >= self.size:
                process_share = -(-len(self.queue) // len(self.processes))
                return [self.queue.popleft() for _ in range(min(self.size, process_share))]
            await asyncio.sleep(wait_seconds)


def resolve_request(
    waiting_request: WaitingRequest, answer_or_error: Answer | RekindleError
) -> None:
    """Complete a request, unless its client has stopped waiting."""
    if waiting_request.answer.done():
        return
    if isinstance(answer_or_error, Answer):
        waiting_request.answer.set_result(answer_or_error)
    else:
        waiting_request.answer.set_exception(answer_or_error)
