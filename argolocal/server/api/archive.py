"""The addresses of archived workflows: the runs that have ended, by their uid. Source: Argo's
server/workflowarchive/archived_workflow_server.go."""

from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from argolocal.manifest.types import Object
from argolocal.server.api.actions import RetryOptions, resubmit_run, retry_run
from argolocal.server.api.backend import Backend
from argolocal.server.api.bodies import Body
from argolocal.server.api.catalogue import Entry, Facts
from argolocal.server.api.errors import INVALID_ARGUMENT, NOT_FOUND, ApiError
from argolocal.server.api.selectors import Fields, parse_labels, parse_list_options
from argolocal.server.api.workflows import answer_list, delete_run, select_entries


class Archive:
    """The answers to requests for archived workflows."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def routes(self) -> list[Route]:
        address = "/archived-workflows"
        return [
            Route(address, self.list, methods=["GET"]),
            Route(f"{address}-label-keys", self.list_label_keys, methods=["GET"]),
            Route(f"{address}-label-values", self.list_label_values, methods=["GET"]),
            Route(f"{address}/{{uid}}", self.get, methods=["GET"]),
            Route(f"{address}/{{uid}}", self.delete, methods=["DELETE"]),
            Route(f"{address}/{{uid}}/retry", self.retry, methods=["PUT"]),
            Route(f"{address}/{{uid}}/resubmit", self.resubmit, methods=["PUT"]),
        ]

    def list(self, request: Request) -> Response:
        """Answer GET /archived-workflows with the workflows without their nodes, as Argo's archive
        does."""
        query = request.query_params
        options = parse_list_options(query, query.get("namespace", ""))
        entries = [item for item in select_entries(self.backend, options) if _has_ended(item[1])]
        return answer_list(self.backend, entries, options, Fields(), has_nodes=False)

    def get(self, request: Request) -> Response:
        """Answer GET /archived-workflows/UID."""
        query = request.query_params
        entry = self._find(request.path_params["uid"], query.get("name", ""))
        return JSONResponse(self.backend.workflow(entry))

    def delete(self, request: Request) -> Response:
        """Answer DELETE /archived-workflows/UID."""
        delete_run(self.backend, self._find(request.path_params["uid"]))
        return JSONResponse({})

    def list_label_keys(self, request: Request) -> Response:
        """Answer GET /archived-workflows-label-keys."""
        labels = [facts.labels for _, facts in self._ended()]
        return JSONResponse({"items": sorted({key for item in labels for key in item}) or None})

    def list_label_values(self, request: Request) -> Response:
        """Answer GET /archived-workflows-label-values for the key in the label selector."""
        requirements = parse_labels(request.query_params.get("listOptions.labelSelector", ""))
        if len(requirements) != 1:
            raise ApiError(
                INVALID_ARGUMENT, f"only allow 1 labelRequirement, found {len(requirements)}"
            )
        requirement = requirements[0]
        if requirement.operator != "exists":
            raise ApiError(INVALID_ARGUMENT, f"operation {requirement.operator} is not supported")
        labels = [facts.labels for _, facts in self._ended()]
        values = {item[requirement.key] for item in labels if requirement.key in item}
        return JSONResponse({"items": sorted(values) or None})

    async def retry(self, request: Request) -> Response:
        """Answer PUT /archived-workflows/UID/retry."""

        def retry(entry: Entry, body: Body) -> Object:
            return retry_run(self.backend, entry, RetryOptions.parse(body))

        return await self._change(request, retry)

    async def resubmit(self, request: Request) -> Response:
        """Answer PUT /archived-workflows/UID/resubmit."""

        def resubmit(entry: Entry, body: Body) -> Object:
            memoized = body.boolean("memoized")
            return resubmit_run(self.backend, entry, memoized, body.texts("parameters"))

        return await self._change(request, resubmit)

    async def _change(self, request: Request, change: Callable[[Entry, Body], Object]) -> Response:
        body = await Body.read(request)

        def answer() -> Response:
            return JSONResponse(change(self._find(request.path_params["uid"]), body))

        return await run_in_threadpool(answer)

    def _ended(self) -> "list[tuple[Entry, Facts]]":
        """Return the runs that have ended."""
        self.backend.run_catalogue.refresh()
        runs = self.backend.run_catalogue.list()
        return [(entry, facts) for entry, facts in runs if _has_ended(facts)]

    def _find(self, uid: str, name: str = "") -> Entry:
        """Return a run that has ended, by its uid. Raises ApiError."""
        for entry, facts in self._ended():
            if facts.uid == uid or (name and entry.name == name):
                return entry
        raise ApiError(NOT_FOUND, "not found")


def _has_ended(facts: Facts) -> bool:
    return facts.finished > 0
