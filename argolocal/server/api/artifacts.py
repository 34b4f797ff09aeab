"""The addresses of artifacts, which `argo cp` and Hera load. Source: Argo's
server/artifacts/artifact_server.go."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import islice
from posixpath import basename
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from argolocal.common.checked_names import format_untrusted
from argolocal.errors import ArgolocalError, NotFound
from argolocal.page.tabs.artifact_source import ObjectReader, Stream
from argolocal.server.api.backend import Backend
from argolocal.server.api.catalogue import Entry
from argolocal.server.api.errors import (
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    ApiError,
    missing_object,
)

BLOCK_BYTES = 1 << 18
MAX_LISTED_FILES = 1000
# a file of a run can contain scripts, which must not use the login of the page
SANDBOX = (
    "sandbox; base-uri 'none'; default-src 'none'; img-src 'self'; style-src 'self' 'unsafe-inline'"
)
DIRECTIONS = ("inputs", "outputs")


class Artifacts:
    """The answers to requests for artifacts."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def routes(self) -> list[Route]:
        path_end = "{node}/{artifact}"
        routes = []
        for prefix, direction in (("", "outputs"), ("input-", "inputs")):
            routes += [
                Route(
                    f"/{prefix}artifacts/{{namespace}}/{{name}}/{path_end}",
                    self._make_answer(direction),
                    methods=["GET"],
                ),
                Route(
                    f"/{prefix}artifacts-by-uid/{{uid}}/{path_end}",
                    self._make_answer(direction),
                    methods=["GET"],
                ),
            ]
        files = "/artifact-files/{namespace}/{kind}/{id}/{node}/{direction}/{artifact}"
        return [
            *routes,
            Route(files, self.show_file, methods=["GET"]),
            Route(f"{files}/{{path:path}}", self.show_file, methods=["GET"]),
        ]

    def _make_answer(self, direction: str) -> Any:
        def answer(request: Request) -> Response:
            parameters = request.path_params
            if "uid" in parameters:
                entry = self._find_uid(parameters["uid"])
            else:
                entry = self.backend.find_entry(parameters["namespace"], parameters["name"])
            artifact = self._find(entry, direction, parameters["node"], parameters["artifact"])
            return self._send(artifact, "")

        return answer

    def show_file(self, request: Request) -> Response:
        """Answer GET /artifact-files/...: a file of an artifact, or the list of the artifact's
        files."""
        parameters = request.path_params
        direction = parameters["direction"]
        if direction not in DIRECTIONS:
            raise ApiError(
                INVALID_ARGUMENT,
                f"{format_untrusted(direction)} must be one of {', '.join(DIRECTIONS)}",
            )
        match parameters["kind"]:
            case "workflows":
                entry = self.backend.find_entry(parameters["namespace"], parameters["id"])
            case "archived-workflows":
                entry = self._find_uid(parameters["id"])
            case kind:
                raise ApiError(
                    INVALID_ARGUMENT,
                    f"{format_untrusted(kind)} must be workflows or archived-workflows",
                )

        artifact = self._find(entry, direction, parameters["node"], parameters["artifact"])
        path = parameters.get("path", "")
        if any(part in ("", ".", "..") for part in path.rstrip("/").split("/") if path):
            raise ApiError(INVALID_ARGUMENT, f"{format_untrusted(path)} is not the path of a file")
        if path.endswith("/") or request.url.path.endswith("/"):
            return self._show_folder(artifact, path)
        return self._send(artifact, path)

    def _find_uid(self, uid: str) -> Entry:
        self.backend.run_catalogue.refresh()
        entry = self.backend.run_catalogue.find_uid(uid)
        if entry is None:
            raise missing_object("workflows", uid)
        return entry

    def _find(self, entry: Entry, direction: str, node_id: str, name: str) -> Mapping[str, Any]:
        """Return the location of an artifact of a node. Raises ApiError."""
        node = (self.backend.workflow(entry)["status"].get("nodes") or {}).get(node_id)
        if node is None:
            raise ApiError(
                NOT_FOUND,
                f"the node {format_untrusted(node_id)} does not exist in the workflow {entry.name}",
            )
        for artifact in (node.get(direction) or {}).get("artifacts") or []:
            if artifact.get("name") == name:
                return artifact
        raise ApiError(
            NOT_FOUND,
            f"the artifact {format_untrusted(name)} does not exist in the {direction} of the node"
            f" {format_untrusted(node_id)}",
        )

    def _open_store(self, artifact: Mapping[str, Any]) -> tuple[ObjectReader, str]:
        """Return the store of an artifact, and its key. Raises ApiError."""
        location = artifact.get("s3") or {}
        key = location.get("key")
        if not isinstance(key, str) or not key:
            raise ApiError(
                NOT_FOUND,
                f"the artifact {format_untrusted(artifact.get('name'))} is not in the object store",
            )
        try:
            return self.backend.open_store(location), key
        except (ArgolocalError, KeyError) as error:
            raise ApiError(INTERNAL, str(error)) from error

    def _send(self, artifact: Mapping[str, Any], path: str) -> Response:
        """Return an object of an artifact as a download."""
        store, key = self._open_store(artifact)
        full_key = f"{key.rstrip('/')}/{path}" if path else key
        try:
            stream, size = store.open(full_key)
        except NotFound:
            raise ApiError(
                NOT_FOUND, f"the object {format_untrusted(full_key)} does not exist"
            ) from None
        except ArgolocalError as error:
            raise ApiError(INTERNAL, str(error)) from error
        headers = {
            "Content-Disposition": f'filename="{quote(basename(full_key))}"',
            "Content-Security-Policy": SANDBOX,
            "Content-Length": str(size),
        }
        return StreamingResponse(
            _read_blocks(stream, size), media_type="application/octet-stream", headers=headers
        )

    def _show_folder(self, artifact: Mapping[str, Any], path: str) -> Response:
        """Return the list of the files below a folder of an artifact."""
        store, key = self._open_store(artifact)
        folder = f"{key.rstrip('/')}/{path}"
        objects = list(islice(store.list(folder), MAX_LISTED_FILES))
        if not objects:
            raise ApiError(NOT_FOUND, f"the folder {format_untrusted(folder)} does not exist")
        names = list(dict.fromkeys(_first_part(item.key.removeprefix(folder)) for item in objects))
        return HTMLResponse(_render(names), headers={"Content-Security-Policy": SANDBOX})


def _first_part(path: str) -> str:
    """Return the name of a file, or of the top folder that contains the file, with a slash."""
    name, slash, _ = path.partition("/")
    return f"{name}{slash}"


def _render(names: Sequence[str]) -> str:
    items = "".join(f'<li><a href="./{quote(name)}">{escape(name)}</a></li>\n' for name in names)
    return f'<html><body><ul>\n<li><a href="..">..</a></li>\n{items}</ul></body></html>'


def _read_blocks(stream: Stream, size: int) -> Iterator[bytes]:
    """Yield exactly `size` bytes of a stream, and close the stream."""
    try:
        while size > 0 and (block := stream.read(min(BLOCK_BYTES, size))):
            size -= len(block)
            yield block
    finally:
        stream.close()
