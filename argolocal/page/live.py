"""Server-sent events, which tell an open page that its run, or the list of runs, has changed.

An event contains only the new version of its subject, not the content. The page in the browser
requests its content after each event, so the server renders each version only once for all viewers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

CHECK_INTERVAL_S = 0.2
# interval for a subject that has changed in the last ACTIVE_S seconds, because it is likely to
# change again
CHECK_INTERVAL_AFTER_CHANGE_S = 0.1
ACTIVE_S = 10.0
# maximum share of a CPU core that is spent on checking one subject
CHECK_SHARE = 0.01
MAX_CHECK_INTERVAL_S = 2.0
# minimum number of seconds between two updates of a page that changes all the time
CHANGE_INTERVAL_S = 0.5
# number of changes after a pause that are shown without delay
CHANGES_AT_ONCE = 5
# maximum share of a CPU core that is spent on rendering a page that changes all the time
RENDER_SHARE = 0.25
MAX_CHANGE_INTERVAL_S = 10.0
# seconds of silence before an empty event is sent, because proxies and browsers close silent
# connections
KEEP_ALIVE_S = 15.0
RECONNECT_MS = 1000

log = logging.getLogger("uvicorn.error")


class EventStream(StreamingResponse):
    """A response with server-sent events. The generator of the events is closed as soon as the
    viewer disconnects."""

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.events):
            await super().stream_response(send)


class Subject:
    """A run, a log, or the list of runs, which at least one viewer has open. `version`: the last
    version that viewers were notified about. `task`: the task that watches the subject."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.viewers = 0
        self.task: asyncio.Task[None] | None = None
        # event that the next change sets; each change replaces it by a new event
        self.changed = asyncio.Event()

    def change(self, version: str) -> None:
        self.version = version
        self.changed.set()
        self.changed = asyncio.Event()


class ChangeBudget:
    """Limits how often viewers are notified about changes: at most CHANGES_AT_ONCE times in quick
    succession, then once per interval. `changes`: number of changes that are allowed now."""

    def __init__(self, now: float) -> None:
        self.changes = float(CHANGES_AT_ONCE)
        self.updated_at = now

    def spend(self, now: float, interval_s: float) -> bool:
        """Return True if viewers may be notified about a change now, and count the change.
        `interval_s`: seconds until one more change is allowed."""
        self.changes += (now - self.updated_at) / interval_s
        self.changes = min(self.changes, CHANGES_AT_ONCE)
        self.updated_at = now

        if self.changes < 1:
            return False
        self.changes -= 1
        return True


class Watchers:
    """Watches each subject once for all of its viewers, and only while it has viewers.

    The methods of Watchers may be called only in the thread of the event loop.
    """

    def __init__(
        self,
        read_version: Callable[[str], str],
        render_seconds: Callable[[str], float] = lambda subject: 0.0,
        change_interval_s: float = CHANGE_INTERVAL_S,
    ) -> None:
        """`read_version`: function that returns the version of a subject. `render_seconds`:
        function that returns the CPU seconds of the last rendering of a subject's page."""
        self.read_version = read_version
        self.render_seconds = render_seconds
        self.change_interval_s = change_interval_s
        self.subjects: dict[str, Subject] = {}

    async def versions(self, name: str) -> AsyncGenerator[str | None]:
        """Yield the current version of a subject, then each new version. Yields None after
        KEEP_ALIVE_S without a change."""
        subject = self._enter(name)
        try:
            yielded_version: str | None = None
            while True:
                # no `await` may stand between this line and the comparison, because the generator
                # could miss a change during the `await`
                change_event = subject.changed
                if subject.version is not None and subject.version != yielded_version:
                    yielded_version = subject.version
                    yield yielded_version
                    continue
                try:
                    await asyncio.wait_for(change_event.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield None
        finally:
            self._leave(name, subject)

    def _enter(self, name: str) -> Subject:
        subject = self.subjects.get(name)
        if subject is None:
            subject = self.subjects[name] = Subject()
            subject.task = asyncio.create_task(self._watch(name, subject))
        subject.viewers += 1
        return subject

    def _leave(self, name: str, subject: Subject) -> None:
        subject.viewers -= 1
        if not subject.viewers:
            del self.subjects[name]
            if subject.task:
                subject.task.cancel()

    async def _watch(self, name: str, subject: Subject) -> None:
        """Check the version of a subject again and again, and notify its viewers about changes."""
        start = time.monotonic()
        budget = ChangeBudget(start)
        last_change = start
        while True:
            try:
                version, check_seconds = await run_in_threadpool(self._check, name)
            except Exception as error:
                # for example, the home is unreadable for a moment
                log.warning("%s cannot be watched: %s", name or "the list of runs", error)
                await asyncio.sleep(MAX_CHECK_INTERVAL_S)
                continue

            now = time.monotonic()
            if version != subject.version and budget.spend(now, self.change_interval(name)):
                subject.change(version)
                last_change = now

            is_active = now - last_change < ACTIVE_S
            interval = CHECK_INTERVAL_AFTER_CHANGE_S if is_active else CHECK_INTERVAL_S
            pause = max(interval, check_seconds / CHECK_SHARE)
            await asyncio.sleep(min(pause, MAX_CHECK_INTERVAL_S))

    def change_interval(self, name: str) -> float:
        """Return the minimum seconds between two updates of a page that changes all the time."""
        seconds = max(self.change_interval_s, self.render_seconds(name) / RENDER_SHARE)
        return min(seconds, MAX_CHANGE_INTERVAL_S)

    def _check(self, name: str) -> tuple[str, float]:
        """Return the version of a subject, and the CPU seconds that reading it took."""
        start = time.thread_time()
        version = self.read_version(name)
        return version, time.thread_time() - start

    async def events(self, name: str) -> AsyncGenerator[str]:
        """Yield the versions of a subject in the format of server-sent events."""
        yield f"retry: {RECONNECT_MS}\n\n"
        async with aclosing(self.versions(name)) as versions:
            async for version in versions:
                if version is None:
                    yield ": keep-alive\n\n"
                else:
                    yield format_event("version", version)

    async def respond(self, request: Request) -> EventStream:
        """Answer GET /events?run=NAME, or /events for the list of runs."""
        return EventStream(self.events(request.query_params.get("run", "")))


def format_event(name: str, data: str, id: str = "") -> str:
    """Format one server-sent event. The data and the id of an event contain no line breaks."""
    lines = [f"event: {name}", f"data: {data}"]
    if id:
        lines.append(f"id: {id}")
    return "\n".join([*lines, "", ""])
