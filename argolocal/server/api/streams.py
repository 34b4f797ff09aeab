"""Responses that do not end: the changes of workflows, and events.

A client that accepts text/event-stream gets server-sent events, any other client gets one JSON
object in each line, as from grpc-gateway. Each object of a stream is {"result": ...} or {"error":
...}.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from argolocal.common.json_text import to_json
from argolocal.errors import DAMAGE_ERRORS
from argolocal.manifest.types import Object
from argolocal.page.live import Watchers
from argolocal.server.api.backend import Backend
from argolocal.server.api.catalogue import Change, Entry, Facts, RunCatalogue
from argolocal.server.api.errors import RESOURCE_EXHAUSTED, ApiError, make_api_error
from argolocal.server.api.selectors import (
    Fields,
    ListOptions,
    parse_count,
    parse_labels,
    selected_name,
)

# Each open stream needs a connection and about 100 kB of memory.
MAX_STREAMS = 1000
# encoded objects that several watches of the same change share
MAX_CACHED_EVENTS = 100
EVENT_STREAM = "text/event-stream"
# resource versions with which a watch first gets all workflows
ANY_VERSIONS = ("", "0")


class Stream(StreamingResponse):
    """A stream of JSON objects. The generator of the stream is closed as soon as the client
    disconnects."""

    def __init__(self, request: Request, objects: AsyncGenerator[str]) -> None:
        """`objects` are JSON texts without line breaks; "" keeps the connection alive."""
        self.objects = objects
        self.subject = f"{request.method} {request.url.path}"
        self.is_event_stream = EVENT_STREAM in request.headers.get("accept", "")
        super().__init__(
            self._encode(), media_type=EVENT_STREAM if self.is_event_stream else "application/json"
        )

    async def _encode(self) -> AsyncGenerator[str]:
        try:
            async for text in self.objects:
                yield self._format(text)
        except Exception as error:
            # the status has been sent, so the error is the last object of the stream
            api_error = make_api_error(error, self.subject)
            yield self._format(to_json({"error": format_stream_error(api_error)}))

    def _format(self, text: str) -> str:
        if not self.is_event_stream:
            return f"{text}\n" if text else ""
        return f"data: {text}\n\n" if text else ":\n\n"

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.objects):
            await super().stream_response(send)


class StreamLimit:
    """The number of open streams, which is bounded."""

    def __init__(self, maximum: int = MAX_STREAMS) -> None:
        self.maximum = maximum
        self.open = 0

    def check(self) -> None:
        """Raise ApiError if no further stream may open."""
        if self.open >= self.maximum:
            raise ApiError(
                RESOURCE_EXHAUSTED,
                f"{self.maximum} watches and logs are open, which is the maximum: close some of"
                " them, and try again",
            )

    async def count(self, objects: AsyncGenerator[str]) -> AsyncGenerator[str]:
        """Yield the objects of a stream, which counts as open until it ends."""
        self.open += 1
        try:
            async with aclosing(objects):
                async for item in objects:
                    yield item
        finally:
            self.open -= 1


@dataclass(frozen=True)
class Watch:
    """The workflows that a client watches. `name`: the only workflow, or "" for all. `version`:
    resource version before the first change that the client gets."""

    options: ListOptions
    fields: Fields
    name: str
    version: int
    has_existing: bool


class WorkflowWatches:
    """The answers to requests that watch workflows."""

    def __init__(self, backend: Backend, limit: StreamLimit) -> None:
        self.backend = backend
        self.run_catalogue: RunCatalogue = backend.run_catalogue
        self.limit = limit
        self.watchers = Watchers(self._read_version)
        self.encoded: OrderedDict[tuple[int, str, Fields], str] = OrderedDict()

    def routes(self) -> list[Route]:
        return [
            Route("/workflow-events/", self.watch, methods=["GET"]),
            Route("/workflow-events/{namespace}", self.watch, methods=["GET"]),
            Route("/stream/events/", self.watch_events, methods=["GET"]),
            Route("/stream/events/{namespace}", self.watch_events, methods=["GET"]),
        ]

    async def watch(self, request: Request) -> Response:
        """Answer GET /workflow-events/NAMESPACE."""
        self.limit.check()
        namespace = request.path_params.get("namespace", "")
        watch = await run_in_threadpool(self._parse, request.query_params, namespace)
        if self.backend.has_namespace(namespace):
            objects = self.events(watch)
        else:
            objects = self._silence(namespace)
        return Stream(request, self.limit.count(objects))

    async def watch_events(self, request: Request) -> Response:
        """Answer GET /stream/events/NAMESPACE. Kubernetes events do not exist here, so the stream
        stays empty."""
        self.limit.check()
        parse_labels(request.query_params.get("listOptions.labelSelector", ""))
        return Stream(request, self.limit.count(self._silence("events")))

    async def _silence(self, subject: str) -> AsyncGenerator[str]:
        """Keep a stream open without sending objects."""
        async with aclosing(self.watchers.versions(f"nothing/{subject}")) as versions:
            async for _ in versions:
                yield ""

    def _parse(self, query: Mapping[str, str], namespace: str) -> Watch:
        name = selected_name(query)
        if name:
            entry = self.backend.find_entry(namespace, name)
            # a watch of a run that cannot be read would stay silent
            self.backend.workflow(entry)
            name = entry.name

        labels = parse_labels(query.get("listOptions.labelSelector", ""))
        fields = Fields.parse(query.get("fields", ""), "result.object.")
        version_text = query.get("listOptions.resourceVersion", "")
        has_existing = version_text in ANY_VERSIONS
        if has_existing:
            if not name:
                self.run_catalogue.refresh()
            version = self.run_catalogue.latest_version
        else:
            version = parse_count(query, "listOptions.resourceVersion")
            self.run_catalogue.changes_since(version)
        return Watch(ListOptions(labels=labels), fields, name, version, has_existing)

    async def events(self, watch: Watch) -> AsyncGenerator[str]:
        """Yield the workflows that exist, if the watch includes them, and then each change."""
        # send the headers of the response at once, even if the first event happens much later
        yield ""
        if watch.has_existing:
            for entry in await run_in_threadpool(self._list, watch):
                text = await run_in_threadpool(self._encode_existing, watch, entry)
                if text:
                    yield text

        version = watch.version
        subject = f"run/{watch.name}" if watch.name else "runs"
        async with aclosing(self.watchers.versions(subject)) as versions:
            async for new_version in versions:
                if new_version is None:
                    yield ""
                    continue
                try:
                    changes = self.run_catalogue.changes_since(version)
                except ApiError as error:
                    yield to_json({"error": format_stream_error(error)})
                    return
                for change in coalesce(changes):
                    version = change.resource_version
                    if watch.name in ("", change.name):
                        text = await run_in_threadpool(self._encode_change, watch, change)
                        if text:
                            yield text

    def _read_version(self, subject: str) -> str:
        kind, _, name = subject.partition("/")
        if kind == "nothing":
            return ""
        if kind == "run":
            entry = self.run_catalogue.refresh_run(name)
            return str(entry.resource_version if entry else "deleted")
        self.run_catalogue.refresh()
        return str(self.run_catalogue.latest_version)

    def _list(self, watch: Watch) -> Sequence[Entry]:
        if watch.name:
            entry = self.run_catalogue.find_listed(watch.name)
            return [entry] if entry else []
        return [entry for entry, _ in self.run_catalogue.list()]

    def _encode_existing(self, watch: Watch, entry: Entry) -> str:
        if entry.resource_version > watch.version:
            # the run has changed after the start of the watch, which reports this change
            return ""
        return self._encode_change(watch, Change(entry.resource_version, "ADDED", entry.name))

    def _encode_change(self, watch: Watch, change: Change) -> str:
        """Return the event of a change, or "" if the watch does not include it."""
        entry = self.run_catalogue.find_listed(change.name)
        if change.type == "DELETED":
            facts = change.facts
        else:
            facts = self.run_catalogue.facts(entry) if entry else None
        if facts is None or not watch.options.matches_labels(facts.labels):
            return ""

        key = (change.resource_version, change.type, watch.fields)
        text = self.encoded.get(key)
        if text is None:
            workflow = self._read(change, entry, facts, watch.fields)
            if workflow is None:
                return ""
            event = {"type": change.type, "object": watch.fields.select(workflow)}
            text = to_json({"result": event}, separators=(",", ":"))
            self.encoded[key] = text
            while len(self.encoded) > MAX_CACHED_EVENTS:
                self.encoded.pop(next(iter(self.encoded)), None)
        return text

    def _read(
        self, change: Change, entry: Entry | None, facts: Facts, fields: Fields
    ) -> Object | None:
        """Return the workflow of a change, or None if it was deleted in the meantime."""
        if change.type == "DELETED":
            return {
                "metadata": {
                    "name": change.name,
                    "namespace": self.backend.namespace,
                    "uid": facts.uid,
                    "labels": dict(facts.labels),
                    "resourceVersion": str(change.resource_version),
                }
            }
        if entry is None:
            return None
        try:
            if fields.excludes("status.nodes"):
                return self.run_catalogue.summary(entry)
            return self.run_catalogue.workflow(entry)
        except DAMAGE_ERRORS:
            return None


def coalesce(changes: Iterable[Change]) -> Iterator[Change]:
    """Yield the last change of each run, because a watch gets the current object of the run for
    each of its changes."""
    kept: dict[str, Change] = {}
    for change in changes:
        earlier = kept.pop(change.name, None)
        if earlier and earlier.type == "ADDED" and change.type == "MODIFIED":
            kept[change.name] = Change(change.resource_version, "ADDED", change.name)
        else:
            kept[change.name] = change
    yield from kept.values()


def format_stream_error(error: ApiError) -> Object:
    """Return an error in a stream, as grpc-gateway sends it."""
    return {
        "grpc_code": error.code,
        "http_code": error.http_status,
        "message": error.message,
        "http_status": "",
    }
