"""The addresses of WorkflowTemplates, ClusterWorkflowTemplates and CronWorkflows. The behaviour
follows Argo's server/workflowtemplate, server/clusterworkflowtemplate and server/cronworkflow."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from argolocal import validate
from argolocal.common.checked_names import format_untrusted
from argolocal.manifest import read as manifests
from argolocal.manifest.types import Object
from argolocal.server.api.backend import Backend, check_metadata, refuse_invalid
from argolocal.server.api.bodies import Body
from argolocal.server.api.errors import (
    ALREADY_EXISTS,
    INVALID_ARGUMENT,
    ApiError,
    missing_object,
)
from argolocal.server.api.selectors import parse_list_options
from argolocal.state.stored_objects import ObjectConflict, ObjectExists, ObjectMissing

Answer = Callable[[Body, Mapping[str, str]], Object]


@dataclass(frozen=True)
class StoredKind:
    """A kind of stored objects, such as WorkflowTemplate. `address`: beginning of the URL paths for
    objects of this kind; `field`: name of the request body's field that contains the object."""

    kind: str
    address: str
    field: str
    is_namespaced: bool = True

    @property
    def plural(self) -> str:
        """The name of the kind in messages of the Kubernetes API."""
        return f"{self.kind.lower()}s"


WORKFLOW_TEMPLATE = StoredKind("WorkflowTemplate", "/workflow-templates", "template")
CLUSTER_TEMPLATE = StoredKind(
    "ClusterWorkflowTemplate", "/cluster-workflow-templates", "template", is_namespaced=False
)
CRON_WORKFLOW = StoredKind("CronWorkflow", "/cron-workflows", "cronWorkflow")


class StoredKindAddresses:
    """The answers to requests for the objects of one kind."""

    def __init__(self, backend: Backend, stored: StoredKind) -> None:
        self.backend = backend
        self.objects = backend.objects
        self.stored = stored

    def routes(self) -> list[Route]:
        folder = self.stored.address
        all_namespaces: list[Route] = []
        if self.stored.is_namespaced:
            all_namespaces = [Route(f"{folder}/", self.list, methods=["GET"])]
            folder = f"{folder}/{{namespace}}"
        # `argo template update` sends the name only in the object
        update = self._with_body(self.update)
        item = f"{folder}/{{name}}"
        routes = [
            *all_namespaces,
            Route(folder, self.list, methods=["GET"]),
            Route(folder, self._with_body(self.create), methods=["POST"]),
            Route(f"{folder}/lint", self._with_body(self.lint), methods=["POST"]),
            Route(f"{folder}/", update, methods=["PUT"]),
            Route(item, self.get, methods=["GET"]),
            Route(item, update, methods=["PUT"]),
            Route(item, self.delete, methods=["DELETE"]),
        ]
        if self.stored is CRON_WORKFLOW:
            routes += [
                Route(f"{item}/suspend", self._with_body(self.suspend), methods=["PUT"]),
                Route(f"{item}/resume", self._with_body(self.resume), methods=["PUT"]),
            ]
        return routes

    def _with_body(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            body = await Body.read(request)
            result = await run_in_threadpool(answer, body, request.path_params)
            return JSONResponse(result)

        return respond

    def list(self, request: Request) -> Response:
        """Answer GET /KIND/NAMESPACE."""
        query = request.query_params
        options = parse_list_options(query, request.path_params.get("namespace", ""))
        pattern = query.get("namePattern", "")
        items: list[Object] = []
        if self.backend.has_namespace(options.namespace):
            items = [self._present(item) for item in self.objects.list(self.stored.kind)]

        selected = [
            item
            for item in items
            if options.matches_labels(item["metadata"].get("labels") or {})
            and options.matches_name(item["metadata"]["name"])
            and pattern in item["metadata"]["name"]
        ]
        end = options.offset + options.limit if options.limit else len(selected)
        metadata = {"resourceVersion": str(self.objects.version())}
        if end < len(selected):
            metadata["continue"] = str(end)
        page = selected[options.offset : end]
        return JSONResponse({"metadata": metadata, "items": page or None})

    def get(self, request: Request) -> Response:
        """Answer GET /KIND/NAMESPACE/NAME."""
        return JSONResponse(self._present(self._find(request.path_params)))

    def create(self, body: Body, path: Mapping[str, str]) -> Object:
        """Store a new object."""
        manifest = self._read(body, path)
        metadata = manifest["metadata"]
        if not metadata.get("name") and metadata.get("generateName"):
            identity = manifests.ObjectIdentity(suffix=manifests.generate_suffix())
            metadata["name"] = identity.name(metadata["generateName"])

        def create() -> Object:
            try:
                return self.objects.create(manifest)
            except ObjectExists:
                raise ApiError(
                    ALREADY_EXISTS,
                    f'{self.stored.plural}.argoproj.io "{metadata["name"]}" already exists',
                ) from None

        if body.part("createOptions").texts("dryRun"):
            self._validate(manifest)
            return manifest
        return self._present(refuse_invalid(create))

    def lint(self, body: Body, path: Mapping[str, str]) -> Object:
        """Check an object without storing it."""
        manifest = self._read(body, path)
        self._validate(manifest)
        return manifest

    def update(self, body: Body, path: Mapping[str, str]) -> Object:
        """Replace the spec, the labels and the annotations of an object. The status of the object
        does not change."""
        manifest = self._read(body, path)
        path_name = path.get("name", "")
        name = manifest["metadata"].setdefault("name", path_name)
        if path_name not in ("", name):
            raise ApiError(
                INVALID_ARGUMENT,
                f"the object is named {format_untrusted(name)}, and must be"
                f" {format_untrusted(path_name)}",
            )
        self._find({**path, "name": name})
        self._validate(manifest)
        version = body.part(self.stored.field).part("metadata").text("resourceVersion")

        def change(current: Object) -> None:
            if version not in ("", current["metadata"]["resourceVersion"]):
                raise ObjectConflict(
                    f'Operation cannot be fulfilled on {self.stored.plural}.argoproj.io "{name}":'
                    " the object has been modified; please apply your changes to the latest version"
                    " and try again"
                )
            for field in ("labels", "annotations"):
                current["metadata"][field] = manifest["metadata"].get(field) or {}
            current["spec"] = manifest["spec"]

        return self._change(name, change)

    def delete(self, request: Request) -> Response:
        """Answer DELETE /KIND/NAMESPACE/NAME."""
        item = self._find(request.path_params)
        if not request.query_params.get("deleteOptions.dryRun"):
            try:
                self.objects.delete(self.stored.kind, item["metadata"]["name"])
            except ObjectMissing:
                raise missing_object(self.stored.plural, item["metadata"]["name"]) from None
        return JSONResponse({})

    def suspend(self, body: Body, path: Mapping[str, str]) -> Object:
        """Let no further runs of a CronWorkflow start."""
        return self._set_suspended(path, True)

    def resume(self, body: Body, path: Mapping[str, str]) -> Object:
        """Let runs of a CronWorkflow start again."""
        return self._set_suspended(path, False)

    def _set_suspended(self, path: Mapping[str, str], is_suspended: bool) -> Object:
        item = self._find(path)

        def change(current: Object) -> None:
            current["spec"]["suspend"] = is_suspended

        return self._change(item["metadata"]["name"], change)

    def _change(self, name: str, change: Callable[[Object], None]) -> Object:
        try:
            return self._present(self.objects.update(self.stored.kind, name, change))
        except ObjectMissing:
            raise missing_object(self.stored.plural, name) from None
        except ObjectConflict as error:
            raise ApiError(ALREADY_EXISTS, str(error)) from error

    def _read(self, body: Body, path: Mapping[str, str]) -> Object:
        """Return the object in the body of a request. Raises ApiError."""
        namespace = ""
        if self.stored.is_namespaced:
            namespace = path["namespace"]
            self.backend.require_namespace(namespace)
        manifest = body.manifest(self.stored.field, self.stored.kind, namespace)
        check_metadata(manifest)
        return manifest

    def _validate(self, manifest: Object) -> None:
        refuse_invalid(lambda: validate.check(manifest, find_object=self.backend.cluster.find))

    def _find(self, path: Mapping[str, str]) -> Object:
        """Return the object that the address of a request names. Raises ApiError."""
        name = path["name"]
        item = None
        if self.backend.has_namespace(path.get("namespace", "")):
            item = self.objects.find(self.stored.kind, name)
        if item is None:
            raise missing_object(self.stored.plural, name)
        return item

    def _present(self, item: Object) -> Object:
        """Return a copy of an object with the namespace of the API."""
        if not self.stored.is_namespaced:
            return item
        return {**item, "metadata": {**item["metadata"], "namespace": self.backend.namespace}}
