"""The URL paths of the API for workflows: list, get, create, lint, submit and delete. Source:
Argo's server/workflow/workflow_server.go."""

import time
from collections.abc import Iterable, Mapping, Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from argolocal.common.checked_names import format_untrusted
from argolocal.common.json_text import to_json
from argolocal.common.wording import escape_to_one_line
from argolocal.errors import DAMAGE_ERRORS
from argolocal.manifest.allowed_values import API_VERSION
from argolocal.manifest.types import Object
from argolocal.runner import requests
from argolocal.runner.requests import RunRequest
from argolocal.server.api.backend import Backend, refuse_invalid, require_new_name
from argolocal.server.api.bodies import Body
from argolocal.server.api.catalogue import Entry, Facts
from argolocal.server.api.errors import INTERNAL, INVALID_ARGUMENT, ApiError, missing_object
from argolocal.server.api.selectors import Fields, ListOptions, parse_list_options
from argolocal.server.cron.controller import build_workflow

DELETE_TIMEOUT_S = 60.0
MAX_SHOWN_CHARACTERS = 200
# names of kinds in requests to submit → kind. Source: Argo's pkg/apis/workflow/register.go
SUBMITTED_KINDS = {
    "CronWorkflow": "CronWorkflow",
    "cronworkflow": "CronWorkflow",
    "cronworkflows": "CronWorkflow",
    "cwf": "CronWorkflow",
    "cronwf": "CronWorkflow",
    "WorkflowTemplate": "WorkflowTemplate",
    "workflowtemplate": "WorkflowTemplate",
    "workflowtemplates": "WorkflowTemplate",
    "wftmpl": "WorkflowTemplate",
    "ClusterWorkflowTemplate": "ClusterWorkflowTemplate",
    "clusterworkflowtemplate": "ClusterWorkflowTemplate",
    "clusterworkflowtemplates": "ClusterWorkflowTemplate",
    "clusterwftmpl": "ClusterWorkflowTemplate",
    "cwft": "ClusterWorkflowTemplate",
}


class Workflows:
    """The answers to requests for workflows."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def routes(self) -> list[Route]:
        folder = "/workflows/{namespace}"
        return [
            # all namespaces
            Route("/workflows/", self.list, methods=["GET"]),
            Route(folder, self.list, methods=["GET"]),
            Route(folder, self.create, methods=["POST"]),
            Route(f"{folder}/lint", self.lint, methods=["POST"]),
            Route(f"{folder}/submit", self.submit, methods=["POST"]),
            Route(f"{folder}/{{name}}", self.get, methods=["GET"]),
            Route(f"{folder}/{{name}}", self.delete, methods=["DELETE"]),
        ]

    def list(self, request: Request) -> Response:
        """Answer GET /workflows/NAMESPACE."""
        options = parse_list_options(request.query_params, request.path_params.get("namespace", ""))
        fields = Fields.parse(request.query_params.get("fields", ""))
        entries = select_entries(self.backend, options)
        has_nodes = not fields.excludes("items.status.nodes")
        return answer_list(self.backend, entries, options, fields, has_nodes)

    def get(self, request: Request) -> Response:
        """Answer GET /workflows/NAMESPACE/NAME."""
        query = request.query_params
        entry = self.backend.find_entry(
            request.path_params["namespace"], request.path_params["name"], query.get("uid", "")
        )
        fields = Fields.parse(query.get("fields", ""))
        return JSONResponse(fields.select(self.backend.workflow(entry)))

    async def create(self, request: Request) -> Response:
        """Answer POST /workflows/NAMESPACE."""
        body = await Body.read(request)
        return await run_in_threadpool(self._create, body, request.path_params["namespace"])

    def _create(self, body: Body, namespace: str) -> Response:
        self.backend.require_namespace(namespace)
        manifest = body.manifest("workflow", "Workflow", namespace)
        is_dry_run = bool(body.part("createOptions").texts("dryRun"))
        return JSONResponse(
            create_workflow(self.backend, manifest, is_dry_run, body.boolean("serverDryRun"))
        )

    async def lint(self, request: Request) -> Response:
        """Answer POST /workflows/NAMESPACE/lint."""
        body = await Body.read(request)
        return await run_in_threadpool(self._lint, body, request.path_params["namespace"])

    def _lint(self, body: Body, namespace: str) -> Response:
        manifest = body.manifest("workflow", "Workflow", namespace)
        self.backend.validate(manifest)
        return JSONResponse(manifest)

    async def submit(self, request: Request) -> Response:
        """Answer POST /workflows/NAMESPACE/submit, which starts a run of a stored object."""
        body = await Body.read(request)
        return await run_in_threadpool(self._submit, body, request.path_params["namespace"])

    def _submit(self, body: Body, namespace: str) -> Response:
        self.backend.require_namespace(namespace)
        kind = SUBMITTED_KINDS.get(body.text("resourceKind"))
        if kind is None:
            raise ApiError(
                INVALID_ARGUMENT,
                f"Resource kind '{body.text('resourceKind')[:100]}' is not supported for"
                " submitting",
            )

        manifest = self._make_submitted(kind, body.text("resourceName"), namespace)
        options = body.part("submitOptions")
        apply_options(manifest, options)
        return JSONResponse(
            create_workflow(
                self.backend,
                manifest,
                options.boolean("dryRun"),
                options.boolean("serverDryRun"),
            )
        )

    def _make_submitted(self, kind: str, name: str, namespace: str) -> Object:
        """Return the manifest of a workflow that a stored object describes."""
        stored = self.backend.objects.find(kind, name)
        if stored is None:
            raise missing_object(f"{kind.lower()}s", name)

        metadata: Object = {"generateName": f"{name}-", "namespace": namespace}
        if kind == "CronWorkflow":
            workflow = build_workflow(stored, int(time.time()))
            del workflow["metadata"]["name"]
            return {**workflow, "metadata": {**workflow["metadata"], **metadata}}

        reference: Object = {"name": name}
        if kind == "ClusterWorkflowTemplate":
            reference["clusterScope"] = True
        return {
            "apiVersion": API_VERSION,
            "kind": "Workflow",
            "metadata": metadata,
            "spec": {"workflowTemplateRef": reference},
        }

    def delete(self, request: Request) -> Response:
        """Answer DELETE /workflows/NAMESPACE/NAME."""
        entry = self.backend.find_entry(
            request.path_params["namespace"], request.path_params["name"]
        )
        if not request.query_params.get("deleteOptions.dryRun"):
            delete_run(self.backend, entry)
        return JSONResponse({})


def create_workflow(
    backend: Backend, manifest: Object, is_dry_run: bool, is_server_dry_run: bool
) -> Object:
    """Queue a workflow, and return its object. A dry run of the client returns the workflow
    unchanged, and a dry run of the server returns it with a generated name. Raises ApiError."""
    require_new_name(backend, manifest["metadata"].get("name"))
    if is_dry_run:
        backend.validate(manifest)
        return manifest
    if is_server_dry_run:
        workflow = backend.validate(manifest)
        metadata = {**manifest["metadata"], "resourceVersion": "0"}
        for field in ("name", "uid", "creationTimestamp"):
            metadata[field] = workflow["metadata"][field]
        return {**manifest, "metadata": metadata}
    return backend.submit(manifest)


def select_entries(backend: Backend, options: ListOptions) -> Sequence[tuple[Entry, Facts]]:
    """Return the runs in a list, in Argo's order: first the runs in progress, then the runs that
    have ended, each from the newest to the oldest."""
    if not backend.has_namespace(options.namespace):
        return []
    backend.run_catalogue.refresh()
    selected = [
        (entry, facts)
        for entry, facts in backend.run_catalogue.list()
        if matches(entry, facts, options)
    ]

    def rank(item: tuple[Entry, Facts]) -> tuple[bool, float]:
        facts = item[1]
        return (facts.finished > 0, -(facts.finished or facts.created))

    return sorted(selected, key=rank)


def matches(entry: Entry, facts: Facts, options: ListOptions) -> bool:
    """Return True if a run belongs to the list that a client requests."""
    if not options.matches_name(entry.name) or not options.matches_labels(facts.labels):
        return False
    conditions = [
        options.created_after is None or facts.created > options.created_after,
        options.finished_before is None or 0 < facts.finished < options.finished_before,
        options.min_started is None or facts.started >= options.min_started,
        options.max_started is None or facts.started <= options.max_started,
    ]
    return all(conditions)


def answer_list(
    backend: Backend,
    entries: Sequence[tuple[Entry, Facts]],
    options: ListOptions,
    fields: Fields,
    has_nodes: bool,
) -> Response:
    """Return a part of a list as a WorkflowList with only some fields. Runs that were deleted in
    the meantime are left out of the list."""
    run_catalogue = backend.run_catalogue
    end = options.offset + options.limit if options.limit else len(entries)
    metadata: Object = {"resourceVersion": str(run_catalogue.latest_version)}
    if end < len(entries):
        metadata["continue"] = str(end)
    if options.has_remaining_count:
        metadata["remainingItemCount"] = max(0, len(entries) - end)

    texts: list[bytes] = []
    for entry, _ in entries[options.offset : end]:
        try:
            if has_nodes:
                item = fields.select_item(run_catalogue.workflow(entry))
                texts.append(to_json(item).encode())
            else:
                texts.append(backend.item_texts.read(entry, fields))
        except DAMAGE_ERRORS:
            continue
    return Response(format_page(metadata, texts, fields), media_type="application/json")


def format_page(metadata: Object, item_texts: list[bytes], fields: Fields) -> bytes:
    """Return the JSON text of a list with these items. An empty list is null in the JSON text, as
    in Argo."""
    page = fields.select({"metadata": metadata, "items": None})
    if "items" not in page or not item_texts:
        return to_json(page).encode()

    del page["items"]
    members = [f"{to_json(name)}:{to_json(value)}".encode() for name, value in page.items()]
    members.append(b'"items":[' + b",".join(item_texts) + b"]")
    return b"{" + b",".join(members) + b"}"


def apply_options(manifest: Object, options: Body) -> None:
    """Change a manifest by the options of a submission. Raises ApiError. Source: Argo's
    ApplySubmitOpts."""
    spec = manifest["spec"]
    metadata = manifest["metadata"]
    for option, field in (
        ("entryPoint", "entrypoint"),
        ("serviceAccount", "serviceAccountName"),
        ("podPriorityClassName", "podPriorityClassName"),
    ):
        if options.text(option):
            spec[field] = options.text(option)

    priority = options.integer("priority")
    if priority is not None:
        spec["priority"] = priority
    for field in ("labels", "annotations"):
        pairs = _parse_pairs(options.text(field), field)
        if pairs:
            metadata[field] = {**(metadata.get(field) or {}), **pairs}

    override_parameters(spec, options.texts("parameters"))
    if options.text("generateName"):
        metadata["generateName"] = options.text("generateName")
    if options.text("name"):
        metadata["name"] = options.text("name")


def override_parameters(spec: Object, parameters: Iterable[str]) -> None:
    """Set parameters, each given as NAME=VALUE, in the spec of a workflow. Raises ApiError."""
    values: dict[str, str] = {}
    for text in parameters:
        name, separator, value = text.partition("=")
        if not separator:
            raise ApiError(
                INTERNAL,
                f"expected parameter of the form: NAME=VALUE. Received:"
                f" {escape_to_one_line(text[:MAX_SHOWN_CHARACTERS])}",
            )
        values[name] = value

    if not values:
        return
    arguments = dict(spec.get("arguments") or {})
    kept_parameters = [
        item for item in arguments.get("parameters") or [] if item.get("name") not in values
    ]
    changed = [{"name": name, "value": value} for name, value in values.items()]
    spec["arguments"] = {**arguments, "parameters": [*changed, *kept_parameters]}


def _parse_pairs(text: str, what: str) -> Mapping[str, str]:
    """Return the labels or annotations in a text NAME=VALUE,NAME=VALUE. Raises ApiError."""
    pairs: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise ApiError(
                INTERNAL,
                f"expected {what} of the form: NAME1=VALUE2,NAME2=VALUE2. Received:"
                f" {format_untrusted(text)}",
            )
        pairs[name] = value
    return pairs


def delete_run(backend: Backend, entry: Entry) -> None:
    """Delete a run with its logs; a run in progress is terminated first. Raises ApiError."""
    files = backend.files(entry)
    if files.runner():
        requests.send(files, RunRequest(shutdown="Terminate"), DELETE_TIMEOUT_S)
        deadline = time.monotonic() + DELETE_TIMEOUT_S
        while files.runner() and time.monotonic() < deadline:
            time.sleep(0.05)

    if not files.is_own_folder():
        # raises the error of a malformed manifest
        files.workflow()
        raise ApiError(
            INTERNAL, f"{files.root} is a link, or its manifest has another name: remove it by hand"
        )
    refuse_invalid(files.remove)
    backend.run_catalogue.refresh_run(entry.name)
