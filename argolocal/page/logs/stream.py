"""HTTP routes of a log, in addition to the tab `logs`: events with new lines, and the download of
the whole file.

    /runs/RUN/log-events?pod=A&from=1000
    /runs/RUN/logs/A
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from argolocal.common.checked_names import RunName
from argolocal.common.json_text import to_json
from argolocal.errors import ConfigError
from argolocal.page.live import RECONNECT_MS, EventStream, Watchers, format_event
from argolocal.page.log_files import LogFile
from argolocal.page.logs.reading import PAGE_BYTES, LogLine, LogPage, make_line, split_lines
from argolocal.page.sources import RunSource

# maximum size of the new lines in an event; if a pod writes faster, so that there are more new
# bytes, the viewer gets only the last lines
MAX_EVENT_BYTES = 256_000
NEW_LINES_INTERVAL_S = 0.2
CACHED_EVENTS = 8
DOWNLOAD_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class NewLines:
    """The lines that a pod has written since the last event. `rest`: the incomplete last line.
    `skipped`: number of new bytes before `lines` that are not sent. `end`: position in the log at
    which the next event starts."""

    lines: list[LogLine]
    rest: LogLine | None
    skipped: int
    end: int


@dataclass
class FollowedLog:
    """A log that viewers follow, and its last events. `events`: (first byte, size of the log) →
    event, and position in the log at which the next event starts."""

    log: LogFile
    viewers: int = 0
    events: OrderedDict[tuple[int, int], tuple[str, int]] = field(default_factory=OrderedDict)


class LogStreams:
    """Sends new lines of logs. All viewers of a log share one watcher of its size, and share events
    with the same lines."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self.followed: dict[str, FollowedLog] = {}
        self.watchers = Watchers(self._read_size, change_interval_s=NEW_LINES_INTERVAL_S)

    def routes(self) -> list[Route]:
        return [
            Route("/runs/{run}/log-events", self.respond),
            Route("/runs/{run}/logs/{pod}", self.download),
        ]

    def _find(self, run: str, pod: str) -> LogFile:
        """Return the log of a pod. Raises HTTPException with status 404 if the log does not
        exist."""
        run_name = RunName.parse_or_none(run)
        logs: Mapping[str, LogFile] = {}
        if run_name and self.source.version(run_name):
            logs = self.source.logs(run_name)
        if pod not in logs:
            raise HTTPException(404, f"the log {pod[:100]!r} of the run {run[:100]!r} is missing.")
        return logs[pod]

    def download(self, request: Request) -> Response:
        """Answer GET /runs/RUN/logs/POD with the whole log as a file."""
        log = self._find(request.path_params["run"], request.path_params["pod"])
        disposition = f'attachment; filename="{log.name}.log"'
        return StreamingResponse(
            _read_all(log),
            media_type="text/plain; charset=utf-8",
            headers={"Content-Disposition": disposition},
        )

    async def respond(self, request: Request) -> Response:
        """Answer GET /runs/RUN/log-events?pod=POD&from=BYTE. When the browser reconnects, its
        request contains the position of the last event."""
        run = request.path_params["run"]
        pod = request.query_params.get("pod", "")
        position = request.headers.get("last-event-id") or request.query_params.get("from", "0")
        if not position.isdecimal() or len(position) > 15:
            raise ConfigError(f"from is {position[:40]!r}: it must be a number of bytes.")

        log = await run_in_threadpool(self._find, run, pod)
        return EventStream(self.events(f"{run}/{pod}", log, int(position)))

    async def events(self, name: str, log: LogFile, offset: int) -> AsyncGenerator[str]:
        """Yield an event with the lines from the byte `offset`, then an event whenever lines are
        added."""
        followed_log = self.followed.setdefault(name, FollowedLog(log))
        followed_log.viewers += 1
        try:
            yield f"retry: {RECONNECT_MS}\n\n"
            async with aclosing(self.watchers.versions(name)) as versions:
                async for version in versions:
                    if version is None:
                        yield ": keep-alive\n\n"
                        continue
                    event, offset = await run_in_threadpool(
                        _make_event, followed_log, offset, int(version)
                    )
                    if event:
                        yield event
        finally:
            followed_log.viewers -= 1
            if not followed_log.viewers:
                del self.followed[name]

    def _read_size(self, name: str) -> str:
        followed_log = self.followed.get(name)
        return str(followed_log.log.size() if followed_log else 0)


def _make_event(followed_log: FollowedLog, offset: int, size: int) -> tuple[str, int]:
    """Return the event for the bytes from `offset` to `size`, and the position at which the next
    event starts. The returned event is "" if the log has no new bytes."""
    key = (offset, size)
    cached_event = followed_log.events.get(key)
    if cached_event:
        return cached_event

    new_lines = read_new_lines(followed_log.log, offset, size)
    if new_lines is None:
        return "", offset
    event = format_event("lines", to_json(asdict(new_lines)), str(new_lines.end))
    followed_log.events[key] = event, new_lines.end
    while len(followed_log.events) > CACHED_EVENTS:
        followed_log.events.popitem(last=False)
    return event, new_lines.end


def read_new_lines(log: LogFile, offset: int, size: int) -> NewLines | None:
    """Return the lines from the byte `offset` to the byte `size`, or None if the log has no new
    bytes."""
    skipped = 0
    if size < offset:
        # the log was replaced by a shorter log, so read the new log from its start
        offset = 0
    if size - offset > MAX_EVENT_BYTES:
        start = size - PAGE_BYTES
        start += log.read(start, PAGE_BYTES).find(b"\n") + 1
        skipped = start - offset
        offset = start

    data = log.read(offset, size - offset)
    if not data:
        return None

    length = data.rfind(b"\n") + 1
    if not length and len(data) > PAGE_BYTES:
        # the data are a part of a very long line
        length = len(data)
    page = LogPage(offset, offset + length, size, data[:length])
    lines = split_lines(page, None) if length else []
    incomplete_line = None
    if data[length:]:
        incomplete_line = make_line(data[length:], offset + length)
    return NewLines(lines, incomplete_line, skipped, offset + length)


def _read_all(log: LogFile) -> Iterator[bytes]:
    """Yield the current content of a log in blocks."""
    offset = 0
    size = log.size()
    while offset < size:
        block = log.read(offset, min(DOWNLOAD_BLOCK_BYTES, size - offset))
        if not block:
            return
        yield block
        offset += len(block)
