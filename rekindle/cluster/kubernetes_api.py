"""Access to the Kubernetes API in one namespace. Objects are plain data, and errors contain a
remedy.

    cluster = Cluster.connect(context="prod", namespace="models")     # defaults: as kubectl
    cluster.create(WORKFLOWS, manifest)
    for kind, workflow in cluster.watch(WORKFLOWS, name="demo-4k2xp"): ...

If the connection is lost or the server is overloaded, a call is retried for some seconds, and a
watch is retried without limit. Each object is compared with its type (objects/types.py): a
malformed object is an error, and in a list it is left out with one warning. Only `connect` imports
the kubernetes client, which takes half a second.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from argolocal.manifest.allowed_values import API_VERSION
from argolocal.manifest.types import Object
from rekindle.cluster.errors import ApiError, MalformedObject, api_error
from rekindle.errors import format_address, say
from rekindle.names import PathName, show

TIMEOUTS_S = (4, 30)  # time limits in seconds: for connecting, and for waiting for a response
# time limit in seconds of one watch request; a dead connection is detected 15 s later
WATCH_SECONDS = 45
RETRYABLE_CODES = (429, 500, 502, 503, 504)
# a page has 200 objects of at most 1.5 MB, which is the limit of etcd
MAX_ANSWER_BYTES = 512 << 20
BACKOFF_S = 0.3  # pause before the second retry of a request; it then doubles each time
# `reason` of an incomplete response, after which a watch retries silently
CONNECTION_LOST = "BrokenOff"
STARTUP_SECONDS = 30.0  # seconds that a restarted API server may need to load its users and roles


@dataclass(frozen=True)
class Resource:
    """A kind of Kubernetes objects, given by its path in the API."""

    api: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the path of an object or, without `name`, of all objects. Raises InvalidName if
        `name` cannot be used as one segment of a path."""
        if self.namespaced:
            scope = f"namespaces/{PathName(namespace, 'the namespace').quoted}"
        else:
            scope = ""
        root = "apis" if "/" in self.api else "api"
        last = PathName(name, self.plural).quoted if name else ""
        return "/" + "/".join(filter(None, (root, self.api, scope, self.plural, last, subresource)))


WORKFLOWS = Resource(API_VERSION, "workflows")
WORKFLOW_TEMPLATES = Resource(API_VERSION, "workflowtemplates")
CRON_WORKFLOWS = Resource(API_VERSION, "cronworkflows")
PODS = Resource("v1", "pods")
SERVICES = Resource("v1", "services")


class Cluster:
    """One namespace of one cluster."""

    def __init__(self, client: Any, context: str, namespace: str, flags: str = "") -> None:
        self.client = client
        self.context = context
        self.namespace = namespace
        self.flags = flags  # flags of kubectl and rekindle that select this cluster and namespace
        self.server: str = format_address(client.configuration.host)
        self.reported: set[str] = set()  # warnings that were already printed

    @classmethod
    def connect(cls, context: str | None = None, namespace: str | None = None) -> "Cluster":
        """Connect as kubectl does, with KUBECONFIG, ~/.kube/config or the ServiceAccount of this
        pod. Raises ConfigError."""
        from kubernetes.client import ApiClient
        from urllib3 import Retry

        from rekindle.cluster import kubeconfig

        settings, context_name, default_namespace = kubeconfig.load_settings(context)

        settings.retries = Retry(
            total=4,
            backoff_factor=BACKOFF_S,
            status_forcelist=RETRYABLE_CODES,
            allowed_methods=None,
            redirect=0,
            raise_on_status=False,
        )

        flags = f" --context {shlex.quote(context)}" if context else ""
        flags += f" --namespace {namespace}" if namespace not in (None, default_namespace) else ""

        return cls(ApiClient(settings), context_name, namespace or default_namespace, flags)

    def in_namespace(self, namespace: str) -> "Cluster":
        return Cluster(self.client, self.context, namespace, self.flags)

    def get(self, resource: Resource, name: str) -> Object:
        """Return the object. Raises ApiError; raises MalformedObject if the object does not match
        its type."""
        obj = self.call("GET", resource.path(self.namespace, name))
        self._require_valid(resource, obj)
        return obj

    def find(self, resource: Resource, name: str) -> Object | None:
        """Return the object, or None if it does not exist."""
        try:
            return self.get(resource, name)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def list_objects(
        self,
        resource: Resource,
        labels: str = "",
        metadata_only: bool = False,
        on_malformed: Callable[[object], None] | None = None,
    ) -> list[Object]:
        """Return all objects that are not malformed. For each malformed object, print one warning,
        and call `on_malformed`. Raises ApiError, also if the server repeats a page token."""
        media_type = (
            "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
        )
        query = {"labelSelector": labels, "limit": "200"}
        objects = list[Object]()
        tokens = set[str]()

        while True:
            page = self.call(
                "GET",
                resource.path(self.namespace),
                query=query,
                accept=media_type if metadata_only else "",
            )

            for item in self._items(resource, page):
                if self._is_valid(resource, item, metadata_only):
                    objects.append(cast(Object, item))
                elif on_malformed:
                    on_malformed(item)

            token = self._page_metadata(resource, page).get("continue") or ""
            if not token:
                return objects
            if token in tokens:
                raise ApiError(
                    f"{self.server} repeats the page token {show(token)} of {resource.plural}, so"
                    " the list does not end: check that it is the address of a Kubernetes API."
                )

            tokens.add(token)
            query["continue"] = token

    def _items(self, resource: Resource, page: Object) -> list[object]:
        """Return the items of a list. Raises MalformedObject."""
        items = page.get("items")
        # the API may return null instead of an empty list
        if items is None and "items" in page:
            return []
        if isinstance(items, list):
            return items
        raise self._malformed(resource, "list", "items: it must be a list")

    def _page_metadata(self, resource: Resource, page: Object) -> dict[str, str]:
        """Return the metadata of a list. Raises MalformedObject."""
        metadata = page.get("metadata", {})
        fields = ("continue", "resourceVersion")
        is_valid = isinstance(metadata, dict) and all(
            isinstance(metadata.get(field, ""), str) for field in fields
        )
        if is_valid:
            return metadata
        raise self._malformed(
            resource, "list", "metadata: it must be an object, and its fields must be texts"
        )

    def _is_valid(self, resource: Resource, item: object, metadata_only: bool = False) -> bool:
        """Return False for a malformed object, and print one warning, which names the object."""
        try:
            self._require_valid(resource, item, metadata_only)
        except MalformedObject as error:
            if str(error) not in self.reported:
                self.reported.add(str(error))
                say(f"warning: an object is passed over: {error}")
            return False
        return True

    def _require_valid(self, resource: Resource, item: object, metadata_only: bool = False) -> None:
        """Raise MalformedObject if an object does not match its type."""
        # imported in this function, because pydantic would slow down `rekindle --help`
        from rekindle.cluster.objects.validation import find_fault

        fault = find_fault(resource.plural, item, metadata_only)
        if fault:
            raise self._malformed(resource, describe_name(item), fault)

    def _malformed(self, resource: Resource, name: str, fault: str) -> MalformedObject:
        return MalformedObject(
            f"{self.server} answered with a malformed object, {resource.plural} {name}: {fault}."
            " Correct or delete the object with kubectl."
        )

    def read(self, kind: str, method: str, path: str, body: object = None) -> Object:
        """Return an answer that is not an object: a "version", "apiresources" or "accessreviews".
        Raises ApiError, and MalformedObject if the answer is not of this type."""
        # imported in this function, because pydantic would slow down `rekindle --help`
        from rekindle.cluster.objects.validation import find_fault

        answer = self.call(method, path, body)
        fault = find_fault(kind, answer)
        if fault:
            raise MalformedObject(
                f"{self.server} answered {method} {path} with a malformed document: {fault}. Check"
                " that it is the address of a Kubernetes API."
            )
        return answer

    def create(self, resource: Resource, body: Object, dry_run: bool = False) -> Object:
        return self.call(
            "POST", resource.path(self.namespace), body, {"dryRun": "All"} if dry_run else {}
        )

    def replace(self, resource: Resource, body: Object) -> Object:
        """Replace an object. Raises ApiError 409 if the object has changed since `body` was
        read."""
        return self.call("PUT", resource.path(self.namespace, body["metadata"]["name"]), body)

    def patch(self, resource: Resource, name: str, change: Object, dry_run: bool = False) -> Object:
        """Apply a merge patch, in which None removes a field and a list replaces the whole old
        list."""
        return self.call(
            "PATCH",
            resource.path(self.namespace, name),
            change,
            {"dryRun": "All"} if dry_run else {},
        )

    def delete(self, resource: Resource, name: str, **options: object) -> None:
        """Delete an object if it exists.

        With `propagationPolicy="Foreground"`, the object exists until all objects that it owns are
        deleted.
        """
        try:
            self.call("DELETE", resource.path(self.namespace, name), options)
        except ApiError as error:
            if error.code != 404:
                raise

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        accept: str = "",
    ) -> Object:
        """Send a request, retry it after a temporary error, and return the response. Raises
        ApiError."""
        data = self._read(self._request(method, path, body, query, accept)) or b"{}"
        answer = parse_object(data)
        if answer is not None:
            return answer
        raise ApiError(
            f"{self.server} is not a Kubernetes API: {method} {path} answers {data[:80]!r}"
        )

    def _read(self, response: Any) -> bytes:
        """Return the body of a response. Raises ApiError."""
        from urllib3.exceptions import HTTPError

        from rekindle.content.http_answers import UnreadableAnswer, read_limited

        try:
            return read_limited(response, MAX_ANSWER_BYTES)
        except (HTTPError, OSError, UnreadableAnswer) as error:
            raise ApiError(
                f"{self.server} does not answer as a Kubernetes API does ({_cause(error)}): check"
                " its address."
            ) from error
        finally:
            response.release_conn()

    def lines(self, path: str, query: Mapping[str, str], silence: float) -> Iterator[bytes]:
        """Yield the lines of a streamed response. Raises ApiError, also if the connection is lost
        or no data arrives for `silence` seconds."""
        from urllib3.exceptions import HTTPError

        response = self._request("GET", path, query=query, timeout=(TIMEOUTS_S[0], silence))

        try:
            yield from response
        except (HTTPError, OSError) as error:
            raise ApiError(
                f"lost the connection to {self.server}: {error}", reason=CONNECTION_LOST
            ) from error
        finally:
            response.close()

    def log(self, pod: str, container: str, silence: float = 10, **query: str) -> Iterator[bytes]:
        """Yield the lines of a container's log. Raises ApiError, also if no line arrives for
        `silence` seconds."""
        path = PODS.path(self.namespace, pod, "log")
        return self.lines(path, {"container": container, **query}, silence)

    def watch(
        self,
        resource: Resource,
        name: str = "",
        labels: str = "",
        on_lost: Callable[[ApiError], None] | None = None,
    ) -> Iterator[tuple[str, Object]]:
        """Yield ("ADDED" | "MODIFIED" | "DELETED", object) without end, existing objects first.

        Resumes after an expired resource version, a server restart and a lost connection; calls
        `on_lost` while the server is unreachable. Raises ApiError for permanent errors, such as a
        missing permission or an unknown kind. A malformed object is left out with a warning; with
        `name`, it raises MalformedObject.
        """
        selectors = {"fieldSelector": f"metadata.name={name}"} if name else {}
        selectors.update({"labelSelector": labels} if labels else {})
        known_objects: dict[str, Object] = {}  # known objects by uid
        version = ""
        pause = 0.1
        last_success: float | None = None

        while True:
            started_at = time.monotonic()
            try:
                if not version:
                    version, changes = self._relist(resource, name, selectors, known_objects)
                    last_success = time.monotonic()
                    yield from changes

                query = {
                    **selectors,
                    "watch": "true",
                    "allowWatchBookmarks": "true",
                    "resourceVersion": version,
                    "timeoutSeconds": str(WATCH_SECONDS),
                }
                for line in self.lines(resource.path(self.namespace), query, WATCH_SECONDS + 15):
                    kind, obj, version = _parse_event(line)
                    last_success = time.monotonic()
                    pause = 0.1

                    if kind != "BOOKMARK" and self._is_watchable(resource, name, obj):
                        _record_event(known_objects, kind, obj)
                        yield kind, obj
            except MalformedObject:
                raise
            except ApiError as error:
                if error.code == 410:
                    version = ""
                elif last_success is None or (
                    error.code not in (0, *RETRYABLE_CODES)
                    and time.monotonic() - last_success > STARTUP_SECONDS
                ):
                    raise
                elif on_lost and error.reason != CONNECTION_LOST:
                    on_lost(error)

            if time.monotonic() - started_at > WATCH_SECONDS / 2:
                pause = 0.1

            # pause even if the watch ended normally, because some proxies end every watch
            # immediately
            time.sleep(pause)
            pause = min(5.0, pause * 2)

    def _is_watchable(self, resource: Resource, name: str, obj: object) -> bool:
        """Return False for a malformed object. If only one object is watched (`name`), raise
        MalformedObject instead."""
        if name:
            self._require_valid(resource, obj)
            return True
        return self._is_valid(resource, obj)

    def _relist(
        self,
        resource: Resource,
        name: str,
        selectors: Mapping[str, str],
        known_objects: dict[str, Object],
    ) -> tuple[str, list[tuple[str, Object]]]:
        """List the objects and update `known_objects`; return the resource version, and the
        differences from the previous `known_objects` as events."""
        page = self.call("GET", resource.path(self.namespace), query=selectors)
        version = self._page_metadata(resource, page).get("resourceVersion")
        if not version:
            raise self._malformed(resource, "list", "metadata.resourceVersion: it is missing")

        current_objects: dict[str, Object] = {}
        for item in self._items(resource, page):
            if self._is_watchable(resource, name, item):
                obj = cast(Object, item)
                current_objects[_uid(obj)] = obj

        changes = [
            ("DELETED", known_objects[uid]) for uid in known_objects if uid not in current_objects
        ]

        changes += [
            ("MODIFIED" if uid in known_objects else "ADDED", item)
            for uid, item in current_objects.items()
            if uid not in known_objects or _version(item) != _version(known_objects[uid])
        ]

        known_objects.clear()
        known_objects.update(current_objects)

        return version, changes

    def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        accept: str = "",
        timeout: tuple[float, float] = TIMEOUTS_S,
    ) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        if method == "PATCH":
            media_type = "application/merge-patch+json"
        else:
            media_type = "application/json"

        headers = {"Accept": accept or "application/json"} | (
            {"Content-Type": media_type} if body is not None else {}
        )
        query_params = [(key, value) for key, value in (query or {}).items() if value]

        request = self.client.param_serialize(
            method,
            path,
            query_params=query_params,
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )

        try:
            response = self.client.call_api(*request, _request_timeout=timeout).response
        except (HTTPError, OSError, ApiException) as error:
            raise ApiError(
                f"{self.server} does not answer ({_cause(error)}): check that the cluster is up and"
                f" that context {self.context!r} is the right one (`kubectl config get-contexts`)."
            ) from error

        if response.status < 300:
            return response

        raise api_error(
            response.status, self._read(response), path, self.server, self.context, self.namespace
        )


def parse_object(data: bytes) -> Object | None:
    """Return the JSON object in a response; None for another text."""
    # imported in this function, because pydantic would slow down `rekindle --help`
    from pydantic_core import from_json

    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError:
        return None
    if isinstance(value, dict):
        return value
    return None


def describe_name(obj: object) -> str:
    """Return the name of an object that may be malformed, for a message."""
    metadata = obj.get("metadata") if isinstance(obj, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if isinstance(name, str):
        return show(name)
    return "without a name"


def _parse_event(line: bytes) -> tuple[str, Object, str]:
    """Return the type of an event of a watch, its object, and the resource version of the object.
    Raises ApiError."""
    event = parse_object(line) or {}
    kind = event.get("type")
    changed = event.get("object")

    if kind == "ERROR":
        # imported in this function, because pydantic would slow down `rekindle --help`
        from rekindle.documents import KubernetesStatus, validate_value

        with suppress(ValueError):
            status = validate_value(KubernetesStatus, changed)
            raise ApiError(str(status.message), status.code or 500, str(status.reason))

    version = _version(changed) if isinstance(changed, dict) else ""
    if isinstance(kind, str) and isinstance(changed, dict) and version:
        return kind, changed, version

    raise ApiError(f"an event of a watch is incomplete: {line[:80]!r}", reason=CONNECTION_LOST)


def _version(obj: Object) -> str:
    """Return the resource version of an object that may be malformed; "" without one."""
    metadata = obj.get("metadata")
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if isinstance(version, str):
        return version
    return ""


def _uid(obj: Object) -> str:
    """Return the uid of a valid object, or its name if it does not have one."""
    return obj["metadata"].get("uid") or obj["metadata"]["name"]


def _record_event(known_objects: dict[str, Object], kind: str, obj: Object) -> None:
    if kind == "DELETED":
        known_objects.pop(_uid(obj), None)
    else:
        known_objects[_uid(obj)] = obj


def _cause(error: Exception) -> str:
    """Return the innermost cause of an error as text, without the exceptions that urllib3 wraps
    around this cause."""
    reason: Any = getattr(error, "reason", None) or error
    text = (
        str(getattr(reason, "reason", None) or reason)
        .rpartition(": ")[2]
        .rpartition("] ")[2]
        .strip()
        .rstrip(")")
    )
    return text or type(error).__name__
