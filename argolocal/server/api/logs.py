"""The addresses of logs: the lines of all pods of a workflow, or of one pod.

Source: Argo's util/logs/workflow-logger.go. Log files contain no times, so the logs of pods are
sent in the order of the pods' start, and each line gets the time of the last change of its log.
"""

import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argolocal.common.checked_names import LABEL_PATTERN, format_untrusted
from argolocal.common.json_text import to_json
from argolocal.language.regexp import compile_matcher
from argolocal.language.selector import MISSING, Requirement
from argolocal.manifest import object_labels
from argolocal.manifest.allowed_values import COMPLETED_PHASES
from argolocal.manifest.types import Object
from argolocal.page.live import Watchers
from argolocal.page.log_files import LocalLog
from argolocal.server.api.backend import Backend
from argolocal.server.api.bodies import query_flag
from argolocal.server.api.errors import INTERNAL, INVALID_ARGUMENT, ApiError
from argolocal.server.api.selectors import parse_count, parse_labels, parse_time
from argolocal.server.api.streams import Stream, StreamLimit

MAIN_CONTAINER = "main"
BLOCK_BYTES = 1 << 18
# a longer line is sent in parts
MAX_LINE_BYTES = 1 << 20
MAX_PATTERN_LENGTH = 10_000
NEW_LINES_INTERVAL_S = 0.2


@dataclass(frozen=True)
class LogOptions:
    """The options of a request for logs. `is_line_shown`: function that returns True if the client
    wants a line with this text. `tail_lines`, `limit_bytes`: maximum number of lines and of bytes
    for each pod, or None. `since`: time in seconds since the epoch; older logs are left out."""

    pod: str
    container: str
    is_line_shown: Callable[[str], bool]
    selector: Sequence[Requirement]
    is_followed: bool = False
    has_times: bool = False
    tail_lines: int | None = None
    limit_bytes: int | None = None
    since: float = 0.0

    @classmethod
    def parse(cls, query: QueryParams, pod: str) -> "LogOptions":
        """Return the options in the parameters of a request. Raises ApiError."""
        since = 0.0
        if query.get("logOptions.sinceSeconds"):
            since = time() - parse_count(query, "logOptions.sinceSeconds")
        elif query.get("logOptions.sinceTime.seconds"):
            since = parse_count(query, "logOptions.sinceTime.seconds")
        else:
            # the name under which `argo` sends the option
            since = parse_time(query.get("logOptions.sinceTime", "")) or 0.0

        container = query.get("logOptions.container", "") or MAIN_CONTAINER
        if not re.fullmatch(LABEL_PATTERN, container):
            raise ApiError(
                INVALID_ARGUMENT, f"{format_untrusted(container)} is not the name of a container"
            )

        return cls(
            pod or query.get("podName", ""),
            container,
            _compile_grep(query.get("grep", "")),
            parse_labels(query.get("selector", "")),
            is_followed=query_flag(query, "logOptions.follow"),
            has_times=query_flag(query, "logOptions.timestamps"),
            tail_lines=_parse_limit(query, "logOptions.tailLines"),
            limit_bytes=_parse_limit(query, "logOptions.limitBytes"),
            since=since,
        )


@dataclass
class PodLog:
    """A log that is sent. `offset`: number of bytes that were read. `rest`: the bytes at the end
    that are not a complete line yet. `sent`: number of bytes that were sent."""

    pod: str
    log: LocalLog
    offset: int = 0
    rest: bytes = b""
    sent: int = 0

    def read_lines(self, is_complete: bool) -> Iterator[str]:
        """Yield the new lines of a log. `is_complete`: the pod has ended, so that its last line may
        lack a line break."""
        while block := self.log.read(self.offset, BLOCK_BYTES):
            self.offset += len(block)
            *lines, self.rest = (self.rest + block).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if len(self.rest) > MAX_LINE_BYTES:
                yield self.rest.decode(errors="replace")
                self.rest = b""
        if is_complete and self.rest:
            yield self.rest.decode(errors="replace")
            self.rest = b""


@dataclass
class LogReader:
    """Reads the logs of a run again and again, and returns each line once."""

    folder: Path
    run: str
    options: LogOptions
    logs: dict[str, PodLog] = field(default_factory=dict)

    def read(self, workflow: Object, has_ended: bool) -> Iterator[str]:
        """Yield the JSON texts of the new lines. `has_ended` is True if the pods write no more
        lines."""
        self._add_logs(workflow)
        for log in self.logs.values():
            for line in log.read_lines(has_ended):
                text = self._format(log, line)
                if text:
                    yield text

    def _add_logs(self, workflow: Object) -> None:
        """Add the logs of the pods that have started since the last call."""
        for pod, labels in list_pods(workflow):
            path = self.folder / f"{pod}{self._suffix()}.log"
            if pod in self.logs or not self._is_selected(pod, labels) or not path.is_file():
                continue
            log = LocalLog(pod, path)
            if path.stat().st_mtime >= self.options.since:
                offset = _find_tail(log, self.options.tail_lines)
                self.logs[pod] = PodLog(pod, log, offset)

    def _suffix(self) -> str:
        """Return the end of the name of a log, without its extension."""
        if self.options.container == MAIN_CONTAINER:
            return ""
        return f".{self.options.container}"

    def _is_selected(self, pod: str, labels: Mapping[str, str]) -> bool:
        if self.options.pod not in ("", pod):
            return False
        return all(item.matches(labels.get(item.key, MISSING)) for item in self.options.selector)

    def _format(self, log: PodLog, line: str) -> str:
        """Return the JSON text of a line, or "" if the client does not want the line."""
        limit = self.options.limit_bytes
        if not self.options.is_line_shown(line) or (limit is not None and log.sent >= limit):
            return ""
        if limit is not None:
            line = line.encode()[: limit - log.sent].decode(errors="ignore")
            log.sent += len(line.encode()) + 1
        if self.options.has_times:
            moment = datetime.fromtimestamp(log.log.path.stat().st_mtime, UTC)
            line = f"{moment.isoformat().replace('+00:00', 'Z')} {line}"
        return to_json({"result": {"content": line, "podName": log.pod}}, separators=(",", ":"))


class WorkflowLogs:
    """The answers to requests for logs."""

    def __init__(self, backend: Backend, limit: StreamLimit) -> None:
        self.backend = backend
        self.limit = limit
        self.watchers = Watchers(self._read_version, change_interval_s=NEW_LINES_INTERVAL_S)

    def routes(self) -> list[Route]:
        address = "/workflows/{namespace}/{name}"
        return [
            Route(f"{address}/log", self.respond, methods=["GET"]),
            Route(f"{address}/{{pod}}/log", self.respond, methods=["GET"]),
        ]

    async def respond(self, request: Request) -> Response:
        """Answer GET /workflows/NAMESPACE/NAME/log and .../POD/log."""
        self.limit.check()
        parameters = request.path_params
        # parse the options in a thread, because a pattern of thousands of characters needs seconds
        options = await run_in_threadpool(
            LogOptions.parse, request.query_params, parameters.get("pod", "")
        )
        entry = await run_in_threadpool(
            self.backend.find_entry, parameters["namespace"], parameters["name"]
        )
        # report a malformed run now, because an error after the first bytes of the stream would
        # come with the status 200
        await run_in_threadpool(self.backend.workflow, entry)
        reader = LogReader(self.backend.files(entry).logs, entry.name, options)
        return Stream(request, self.limit.count(self.lines(reader)))

    async def lines(self, reader: LogReader) -> AsyncGenerator[str]:
        """Yield the lines of the logs; with `follow`, also the lines that are written until the run
        ends."""
        yield ""
        async with aclosing(self.watchers.versions(reader.run)) as versions:
            async for _ in versions:
                workflow = await run_in_threadpool(self._find, reader.run)
                if workflow is None:
                    return
                has_ended = workflow["status"]["phase"] in COMPLETED_PHASES
                lines = reader.read(workflow, has_ended or not reader.options.is_followed)
                while batch := await run_in_threadpool(_take, lines):
                    for line in batch:
                        yield line
                yield ""
                if has_ended or not reader.options.is_followed:
                    return

    def _find(self, name: str) -> Object | None:
        entry = self.backend.run_catalogue.refresh_run(name)
        return self.backend.workflow(entry) if entry else None

    def _read_version(self, name: str) -> str:
        """Return a text that changes with a run and its logs."""
        entry = self.backend.run_catalogue.refresh_run(name)
        if entry is None:
            return "deleted"
        paths = self.backend.files(entry).logs.glob("*.log")
        size = sum(LocalLog(path.name, path).size() for path in paths)
        return f"{entry.file_version}-{size}"


def list_pods(workflow: Object) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the names and labels of the pods of a workflow, in the order of their start."""
    name = workflow["metadata"]["name"]
    spec = workflow["status"].get("storedWorkflowTemplateSpec") or workflow["spec"]
    templates = {item.get("name"): item for item in spec.get("templates") or []}
    stored_templates = workflow["status"].get("storedTemplates") or {}
    nodes = [
        node for node in (workflow["status"].get("nodes") or {}).values() if node["type"] == "Pod"
    ]
    for node in sorted(nodes, key=lambda node: node["startedAt"] or ""):
        template_name = (node.get("templateRef") or {}).get("template") or node.get("templateName")
        scope = str(node.get("templateScope") or "")
        template = stored_templates.get(f"{scope}/{template_name}") or templates.get(template_name)
        labels = dict(((template or {}).get("metadata") or {}).get("labels") or {})
        labels[object_labels.WORKFLOW] = name
        yield pod_name(name, node, template_name), labels


def pod_name(workflow: str, node: Mapping[str, Any], template: str | None) -> str:
    """Return the name of the pod of a node. The behaviour follows Argo's util/pod_name.go, version
    2."""
    if node["name"] == workflow:
        return workflow
    number = node["id"].rpartition("-")[2]
    prefix = f"{workflow}-{template}" if template else workflow
    return f"{prefix[:242]}-{number}"


def _take(lines: Iterator[str]) -> list[str]:
    """Return the next lines of a log, with at most about BLOCK_BYTES bytes."""
    batch: list[str] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size > BLOCK_BYTES:
            break
    return batch


def _find_tail(log: LocalLog, count: int | None) -> int:
    """Return the offset of the last `count` lines of a log; 0 for None."""
    if count is None:
        return 0
    end = log.size()
    if count == 0:
        return end

    # the line break at the end of the log belongs to the last line
    remaining = count + (log.read(end - 1, 1) == b"\n" if end else 0)
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        block = log.read(start, end - start)
        position = len(block)
        while (position := block.rfind(b"\n", 0, position)) >= 0:
            remaining -= 1
            if remaining == 0:
                return start + position + 1
        end = start
    return 0


def _parse_limit(query: QueryParams, name: str) -> int | None:
    if not query.get(name):
        return None
    return parse_count(query, name)


def _compile_grep(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a line matches a pattern. Raises ApiError."""
    if not pattern:
        return lambda line: True
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ApiError(INVALID_ARGUMENT, f"grep is longer than {MAX_PATTERN_LENGTH:,} characters")
    try:
        return compile_matcher(pattern)
    except ValueError as error:
        raise ApiError(INTERNAL, f'failed to compile "{pattern[:200]}": {error}') from None
