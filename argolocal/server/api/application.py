"""The REST API of an Argo server for the runs of one home (a directory of runs), below /api/v1. The
command `argo`, with ARGO_HTTP1=true, and Hera's WorkflowsService work with this API.

    run_catalogue = RunCatalogue(LocalRuns(home), NAMESPACE)
    api = make_api(Backend(cluster, queue, objects, run_catalogue, open_store))
    application = WithApi(api, page.application())

The behaviour follows Argo 4.0, api/openapi-spec/swagger.json.
"""

from collections.abc import Mapping
from getpass import getuser
from importlib.metadata import version
from platform import machine, python_version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from argolocal.common import program
from argolocal.errors import FORM_ERRORS, ArgolocalError
from argolocal.server.api.actions import Actions
from argolocal.server.api.archive import Archive
from argolocal.server.api.artifacts import Artifacts
from argolocal.server.api.backend import Backend
from argolocal.server.api.bodies import Body
from argolocal.server.api.errors import (
    UNIMPLEMENTED,
    ApiError,
    error_response,
    make_api_error,
)
from argolocal.server.api.logs import WorkflowLogs
from argolocal.server.api.stored import (
    CLUSTER_TEMPLATE,
    CRON_WORKFLOW,
    WORKFLOW_TEMPLATE,
    StoredKindAddresses,
)
from argolocal.server.api.streams import StreamLimit, WorkflowWatches
from argolocal.server.api.workflows import Workflows

# the version of Argo whose clients can use this API
ARGO_VERSION = "v4.0.7"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
# beginnings of addresses that need Kubernetes → what the addresses are for
KUBERNETES_ADDRESSES: Mapping[str, str] = {
    "/event-sources": "event sources of Argo Events",
    "/stream/event-sources": "event sources of Argo Events",
    "/sensors": "sensors of Argo Events",
    "/stream/sensors": "sensors of Argo Events",
    "/events": "events that start workflows",
    "/workflow-event-bindings": "events that start workflows",
    "/sync": "limits of semaphores that clients change",
}


# beginnings of the addresses that are not below /api/v1
ARTIFACT_ADDRESSES = (
    "/artifacts/",
    "/artifacts-by-uid/",
    "/input-artifacts/",
    "/input-artifacts-by-uid/",
    "/artifact-files/",
)
API = "/api/v1"


class WithApi:
    """An application that answers requests to the addresses of the API, and passes all other
    requests to another application."""

    def __init__(self, api: ASGIApp, other_app: ASGIApp) -> None:
        self.api = api
        self.others = other_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_api = scope["type"] == "http" and path.startswith((f"{API}/", *ARTIFACT_ADDRESSES))
        await (self.api if is_api else self.others)(scope, receive, send)


def make_api(backend: Backend) -> Starlette:
    """Return the application that answers requests to the addresses of the API, without access
    control."""
    limit = StreamLimit()
    parts = [
        Workflows(backend),
        Actions(backend),
        WorkflowWatches(backend, limit),
        WorkflowLogs(backend, limit),
        Archive(backend),
        *(
            StoredKindAddresses(backend, stored)
            for stored in (WORKFLOW_TEMPLATE, CLUSTER_TEMPLATE, CRON_WORKFLOW)
        ),
    ]
    routes: list[BaseRoute] = [route for part in parts for route in part.routes()]
    information = Information(backend.namespace)
    routes += [*information.routes(), Route("/{path:path}", refuse_unknown, methods=METHODS)]
    handlers: Mapping[Any, Any] = {
        ApiError: answer_error,
        ArgolocalError: answer_error,
        HTTPException: answer_error,
        ClientDisconnect: answer_error,
        OSError: answer_error,
        **dict.fromkeys(FORM_ERRORS, answer_error),
        Exception: answer_error,
    }
    application = Starlette(
        routes=[Mount(API, routes=routes), *Artifacts(backend).routes()],
        exception_handlers=handlers,
    )
    application.router.redirect_slashes = False
    return application


class Information:
    """The answers to requests for facts about the server."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def routes(self) -> list[Route]:
        return [
            Route("/info", self.show_info, methods=["GET"]),
            Route("/version", self.show_version, methods=["GET"]),
            Route("/userinfo", self.show_user, methods=["GET"]),
            Route("/tracking/event", self.ignore_event, methods=["POST"]),
        ]

    def show_info(self, request: Request) -> Response:
        """Answer GET /info."""
        modals = dict.fromkeys(("feedback", "firstTimeUser", "newVersion"), False)
        return JSONResponse(
            {"managedNamespace": self.namespace, "links": [], "columns": [], "modals": modals}
        )

    def show_version(self, request: Request) -> Response:
        """Answer GET /version. The answer is the version of Argo whose API this server
        implements."""
        name = f"{program.name} {version('rekindle')}"
        return JSONResponse(
            {
                "version": ARGO_VERSION,
                "buildDate": "1970-01-01T00:00:00Z",
                "gitCommit": name,
                "gitTag": ARGO_VERSION,
                "gitTreeState": "clean",
                "goVersion": f"Python {python_version()}",
                "compiler": "cpython",
                "platform": f"linux/{machine()}",
            }
        )

    def show_user(self, request: Request) -> Response:
        """Answer GET /userinfo: the user who has the token of the home (the directory of runs)."""
        return JSONResponse({"subject": getuser(), "name": getuser()})

    async def ignore_event(self, request: Request) -> Response:
        """Answer POST /tracking/event, the report of use by Argo's pages."""
        await Body.read(request)
        return JSONResponse({})


def refuse_unknown(request: Request) -> Response:
    """Answer a request to an address that this API does not have. Raises ApiError."""
    path = f"/{request.path_params['path']}"
    for beginning, purpose in KUBERNETES_ADDRESSES.items():
        if path == beginning or path.startswith(f"{beginning}/"):
            raise ApiError(
                UNIMPLEMENTED,
                f"{program.name} server does not support {purpose}: they need an Argo server on"
                " Kubernetes",
            )
    raise ApiError(
        UNIMPLEMENTED, f"{program.name} server does not answer {request.method} {API}{path[:300]}"
    )


def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request that failed."""
    return error_response(make_api_error(error, f"{request.method} {request.url.path}"))
