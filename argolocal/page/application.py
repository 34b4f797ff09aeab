"""The web page as an ASGI application. The page shows the list of runs, and each run with its tabs.

Every URL of the page returns
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from urllib.parse import urlencode

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from argolocal.common import program
from argolocal.common.checked_names import RunName
from argolocal.common.json_text import to_json
from argolocal.common.wording import escape_control_chars
from argolocal.errors import FORM_ERRORS, ArgolocalError, ConfigError, NotFound, describe
from argolocal.page import metrics, templating
from argolocal.page.actions.action import Action, PageAction
from argolocal.page.actions.routes import ActionPages
from argolocal.page.live import Watchers
from argolocal.page.logs.stream import LogStreams
from argolocal.page.openapi import Resource, describe_api
from argolocal.page.run_list import RowReader, RunList, RunRow, RunRows
from argolocal.page.sources import Run, RunSource, describe_malformed
from argolocal.page.tab import ChangingTab, Tab, parameters_of
from argolocal.state.journal import Busy

# maximum number of bytes of all rendered pages in memory, and of one rendered page in memory
MAX_CACHED_BYTES = 8_000_000
MAX_CACHED_PAGE_BYTES = 4_000_000
MAX_CACHED_RUNS = 4
log = logging.getLogger("uvicorn.error")
# class of an error → HTTP status of the response; any other error has the status 502, because it
# comes from another service
ERROR_STATUS = {ConfigError: 400, Busy: 409, NotFound: 404}
# seconds after which a page is rendered again even if its run has not changed, because the page
# shows how long something has taken
RUNNING_PAGE_AGE_S = 5
FINISHED_PAGE_AGE_S = 60


@dataclass(frozen=True)
class Section:
    """A page that the navigation lists next to the list of runs, for example the page of models.

    `build` receives the query parameters, and returns an object of the type `content`. The template
    `NAME.html` shows the object that `build` returns.
    """

    name: str
    title: str
    content: type
    build: Callable[[Mapping[str, str]], Any]


@dataclass(frozen=True)
class RunDocument:
    """A JSON object about a run, at the URL path /runs/RUN/NAME. `build` returns the JSON object. A
    command prints the same JSON object with `-o json`."""

    name: str
    title: str
    build: Callable[[Run], Mapping[str, Any]]


@dataclass(frozen=True)
class Parts:
    """The parts from which a web page is assembled. The package `rekindle` adds tabs and sections
    to the page of argolocal.

    `rows`: creates the rows of the list of runs (default: rows without additional columns).
    `packages` are Python packages with templates; the first package that contains a template is
    used. `routes`: additional HTTP routes. `links`: links in the navigation, title → URL.
    `actions`: actions on a run. `page_actions`: actions on other objects than runs. `documents` are
    JSON objects about a run.
    """

    source: RunSource
    tabs: Sequence[Tab]
    sections: Sequence[Section] = ()
    rows: RunRows | None = None
    packages: tuple[str, ...] = ("argolocal.page",)
    routes: Sequence[BaseRoute] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    actions: Sequence[Action] = ()
    page_actions: Sequence[PageAction] = ()
    documents: Sequence[RunDocument] = ()


class Page:
    """The handlers of all HTTP requests to the page. `runs`: runs that were read recently, by name.
    `bodies`: rendered pages that were requested recently, by the key of `cached`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.source = parts.source
        self.tabs = {tab.name: tab for tab in parts.tabs}
        self.documents = {document.name: document for document in parts.documents}
        self.templates = templating.make_environment(parts.packages)
        self.rows = parts.rows or RunRows(parts.source, RowReader())
        self.watchers = Watchers(self._version, self._last_render_seconds)
        self.actions = ActionPages(self, parts.actions, parts.page_actions)
        self.runs: OrderedDict[str, Run] = OrderedDict()
        self.bodies: OrderedDict[tuple[str, ...], bytes] = OrderedDict()
        self.bodies_size = 0
        # name of a run, or "" for the list of runs → CPU seconds of the last rendering of its page
        self.render_seconds: dict[str, float] = {}
        self.render_locks: dict[str, Lock] = {}
        self.lock = Lock()

    def application(self) -> Starlette:
        """Return the ASGI application, without access control."""
        static_files = StaticFiles(
            packages=[(package, "static") for package in self.parts.packages]
        )
        section_routes = [
            Route(f"/{section.name}", self._section_route(section))
            for section in self.parts.sections
        ]
        routes: list[BaseRoute] = [
            Route("/", self.show_list),
            Route("/events", self.watchers.respond),
            *section_routes,
            *self.parts.routes,
            *self.actions.routes(),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.show_api),
            *LogStreams(self.source).routes(),
            Route("/runs/{run}", self.show_run),
            Route("/runs/{run}/{tab}", self.show_run),
            Mount("/static", static_files),
        ]
        handlers: Mapping[Any, Any] = {
            HTTPException: self.refuse,
            ArgolocalError: self.refuse,
            **dict.fromkeys(FORM_ERRORS, self.refuse_malformed),
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    def show_list(self, request: Request) -> Response:
        """Answer GET /: the list of runs."""
        # read the version before the runs, so that a change in between leads to a new version
        version = self._version("")
        query = str(request.query_params)
        key = ("", version, "", query, _period(RUNNING_PAGE_AGE_S), _media_type(request))
        return self.cached(key, lambda: self._render_list(request, version))

    def _render_list(self, request: Request, version: str) -> Response:
        runs = self.rows.find(request.query_params)
        return self.answer(
            request,
            RunList,
            runs,
            "runs.html",
            title="Runs",
            current_section="runs",
            version=version,
        )

    def show_metrics(self, request: Request) -> Response:
        """Answer GET /metrics: all runs as metrics of Prometheus."""
        text = metrics.format_metrics(program.name, self.rows.all())
        return Response(_encode(text), media_type=metrics.CONTENT_TYPE)

    def show_api(self, request: Request) -> Response:
        """Answer GET /openapi.json."""
        resources = [
            Resource(f"/{section.name}", section.title, section.content, {})
            for section in self.parts.sections
        ]
        resources += [
            Resource(f"/runs/{{run}}/{tab.name}", tab.title, tab.content, parameters_of(tab))
            for tab in self.tabs.values()
        ]
        resources += [
            Resource(f"/runs/{{run}}/{document.name}", document.title, dict, {})
            for document in self.documents.values()
        ]
        return JSONResponse(describe_api(resources, self.rows.reader.filters))

    def show_run(self, request: Request) -> Response:
        """Answer GET /runs/RUN/TAB (default: the first tab)."""
        run = self.find_run(request.path_params["run"])
        first_name = next(iter(self.tabs))
        tab_name = request.path_params.get("tab", first_name)
        if tab_name in self.documents:
            body = to_json(self.documents[tab_name].build(run), indent=2)
            return Response(body, media_type="application/json")

        tab = self.tabs.get(tab_name)
        if tab is None:
            raise HTTPException(404, f"the tab {tab_name!r} does not exist.")

        max_age_s = FINISHED_PAGE_AGE_S if run.is_finished else RUNNING_PAGE_AGE_S
        version = self._tab_version(run, tab)
        query = str(request.query_params)
        key = (run.name, version, tab_name, query, _period(max_age_s), _media_type(request))
        return self.cached(key, lambda: self._render_tab(request, run, tab))

    def _render_tab(self, request: Request, run: Run, tab: Tab) -> Response:
        content = tab.build(run, request.query_params)
        return self.answer(
            request,
            tab.content,
            content,
            f"{tab.name}.html",
            title=run.name,
            current_section="runs",
            run=run,
            row=self.row(run),
            tab=tab,
            actions=self.actions.plans(run),
            tabs=[other for other in self.tabs.values() if other.is_shown(run)],
            version=self._tab_version(run, tab),
        )

    def _section_route(self, section: Section) -> Callable[[Request], Response]:
        def show(request: Request) -> Response:
            content = section.build(request.query_params)
            template = f"{section.name}.html"
            return self.answer(
                request,
                section.content,
                content,
                template,
                title=section.title,
                current_section=section.name,
            )

        return show

    def find_run(self, name: str) -> Run:
        """Return a run, from memory if it has not changed. Raises HTTPException with status 404 for
        an unknown run, and ConfigError for malformed files."""
        run_name = RunName.parse_or_none(name)
        version = self.source.version(run_name) if run_name else ""
        if not run_name or not version:
            raise HTTPException(404, f"the run {name[:100]!r} does not exist.")

        with self.lock:
            run = self.runs.get(run_name)
        if run and run.version == version:
            return run

        run = self.source.read(run_name)
        with self.lock:
            self.runs[run_name] = run
            self.runs.move_to_end(run_name)
            while len(self.runs) > MAX_CACHED_RUNS:
                self.runs.popitem(last=False)
        return run

    def row(self, run: Run) -> RunRow:
        """Return the row that the list shows for a run."""
        return self.rows.reader.row(run)

    def cached(self, key: tuple[str, ...], render: Callable[[], Response]) -> Response:
        """Return the response with the key `key` from memory. If the response is not in memory,
        call `render` and keep its result. The key of a response begins"""
        with self.lock:
            render_lock = self.render_locks.setdefault(key[0], Lock())
        # if several viewers request the same page at the same time, it is rendered only once
        with render_lock:
            with self.lock:
                body = self.bodies.get(key)
            if body is None:
                start = time.thread_time()
                body = bytes(render().body)
                self.render_seconds[key[0]] = time.thread_time() - start
                self._keep(key, body)
        return Response(body, media_type=key[-1])

    def _keep(self, key: tuple[str, ...], body: bytes) -> None:
        """Store a rendered page in memory, and remove the oldest pages if there are too many."""
        if len(body) > MAX_CACHED_PAGE_BYTES:
            return
        with self.lock:
            self.bodies[key] = body
            self.bodies_size += len(body)
            while self.bodies_size > MAX_CACHED_BYTES:
                _, oldest = self.bodies.popitem(last=False)
                self.bodies_size -= len(oldest)

    def answer(
        self, request: Request, content: type, value: Any, template: str, **values: Any
    ) -> Response:
        """Return a response with `value`, an object of the type `content`: as JSON or, depending on
        the request's Accept header, as HTML from `template`. `values`: other variables of the
        template."""
        if _media_type(request) == "application/json":
            return Response(_encode_json(content, value), media_type="application/json")

        defaults = {"run": None, "tab": None, "tabs": [], "version": ""}
        html = templating.render(
            self.templates,
            template,
            defaults | values | self._common_values(request) | {"content": value},
        )
        return HTMLResponse(_encode(html))

    def _common_values(self, request: Request) -> dict[str, Any]:
        def link(**changes: object) -> str:
            """Return the URL of this page with some query parameters changed."""
            parameters = {**request.query_params, **changes}
            query = urlencode({key: value for key, value in parameters.items() if value != ""})
            return f"{request.url.path}?{query}" if query else request.url.path

        return {
            "program": program.name,
            "source": self.source,
            "sections": self.parts.sections,
            "links": self.parts.links,
            "link": link,
            "visible": escape_control_chars,
            "note": self.actions.notes.get(request.query_params.get("note", ""), ""),
        }

    def refuse(self, request: Request, error: Exception) -> Response:
        """Return the response to a failed request, which contains the error message."""
        if isinstance(error, HTTPException):
            status = error.status_code
            message = error.detail
        else:
            statuses = (
                status
                for error_class, status in ERROR_STATUS.items()
                if isinstance(error, error_class)
            )
            status = next(statuses, 502)
            message = str(error)

        if _media_type(request) == "application/json":
            return JSONResponse({"error": message}, status)

        values = {"title": "Error", "current_section": "", "run": None, "tab": None, "tabs": []}
        values |= {"version": "", "message": message, "status": status}
        html = templating.render(
            self.templates, "error.html", values | self._common_values(request)
        )
        return HTMLResponse(_encode(html), status)

    def refuse_malformed(self, request: Request, error: Exception) -> Response:
        """Respond to a request for a run whose records have an unexpected form."""
        # write the traceback to the log, because the cause of the error may be a bug of this
        # program
        log.error("%s could not be shown", request.url.path, exc_info=error)
        run = request.path_params.get("run")
        message = describe_malformed(run, error) if run else describe(error)
        return self.refuse(request, HTTPException(500, message))

    def _last_render_seconds(self, subject: str) -> float:
        return self.render_seconds.get(subject.partition("/")[0], 0.0)

    def _tab_version(self, run: Run, tab: Tab | None) -> str:
        """Return the version of a tab's content for a run."""
        if isinstance(tab, ChangingTab):
            return f"{run.version}:{tab.version(run)}"
        return run.version

    def _version(self, subject: str) -> str:
        """Return the version of a subject; the subject RUN is a run, RUN/TAB a tab of a run, and ""
        the list of runs. The version of a removed run is "removed"."""
        if subject:
            name, _, tab_name = subject.partition("/")
            tab = self.tabs.get(tab_name)
            if isinstance(tab, ChangingTab):
                try:
                    return self._tab_version(self.find_run(name), tab)
                except (HTTPException, ArgolocalError):
                    return "removed"

            run_name = RunName.parse_or_none(name)
            return (self.source.version(run_name) if run_name else "") or "removed"

        return hashlib.sha256(self.rows.version().encode()).hexdigest()[:16]


def _encode(text: str) -> bytes:
    """Encode a text in UTF-8. Half of a surrogate pair, which JSON permits, is replaced by `?`."""
    return text.encode(errors="replace")


def _encode_json(content: type, value: Any) -> bytes:
    """Return a value of the type `content` as JSON."""
    adapter = TypeAdapter(content)
    try:
        return adapter.dump_json(value, indent=2)
    except ValueError:
        # a text contains half of a surrogate pair, which `to_json` escapes
        return to_json(adapter.dump_python(value), indent=2).encode()


def redirect(address: str) -> Response:
    """Return a redirect to `address`, as the response to a form."""
    return RedirectResponse(address, 303)


def _period(seconds: int) -> str:
    """Return a text that changes every `seconds` seconds."""
    return str(int(time.time() / seconds))


def _media_type(request: Request) -> str:
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and "text/html" not in accepted:
        return "application/json"
    return "text/html; charset=utf-8"
