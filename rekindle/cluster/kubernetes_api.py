"""Access to the Kubernetes API in one namespace. Objects are plain data, and errors contain a
remedy.

    cluster = Cluster.connect(context="prod", namespace="models")     # defaults: as kubectl
    cluster.create(WORKFLOWS, manifest)
    for kind, workflow in cluster.watch(WORKFLOWS, name="demo-4k2xp"): ...

If the connection is lost or the server is overloaded, a call is retried for some seconds, and a
watch is retried without limit. Each object is compared with its type (objects/types.py): reading a
malformed object raises an error, and listing leaves malformed objects out, with one warning for
each. Only `connect` imports the kubernetes client, which takes half a second.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from argolocal.manifest.allowed_values import API_VERSION
from argolocal.manifest.types import Object
from rekindle.cluster.errors import ApiError, MalformedObject, make_api_error
from rekindle.errors import format_address, write_stderr
from rekindle.names import PathName, format_untrusted

# time limits in seconds: for connecting, and for waiting for a response
TIMEOUTS_S = (4, 30)
# time limit in seconds of one watch request; a dead connection is detected 15 s later
WATCH_SECONDS = 45
RETRYABLE_CODES = (429, 500, 502, 503, 504)
# size limit of a response: a page of a list has 200 objects of at most 1.5 MB, the limit of etcd
MAX_ANSWER_BYTES = 512 << 20
# number of retries of a failed request
MAX_RETRIES = 4
# pause before the second retry of a request; the pause doubles with each retry
BACKOFF_S = 0.3
# `reason` of the error for an incomplete response, after which a watch retries silently
CONNECTION_LOST = "BrokenOff"
# seconds that a restarted API server may need to load its users and roles
STARTUP_SECONDS = 30.0


@dataclass(frozen=True)
class Resource:
    """A kind of Kubernetes objects, given by its path in the API."""

    api: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, object_name: str = "", subresource: str = "") -> str:
        """Return the API path of an object or, without `object_name`, of all objects of this kind.
        Raises InvalidName if `object_name` cannot be used as one segment of a path."""
        if self.namespaced:
            namespace_segment = f"namespaces/{PathName(namespace, 'the namespace').quoted}"
        else:
            namespace_segment = ""
        api_root = "apis" if "/" in self.api else "api"
        name_segment = PathName(object_name, self.plural).quoted if object_name else ""
        return "/" + "/".join(
            filter(
                None,
                (api_root, self.api, namespace_segment, self.plural, name_segment, subresource),
            )
        )


WORKFLOWS = Resource(API_VERSION, "workflows")
WORKFLOW_TEMPLATES = Resource(API_VERSION, "workflowtemplates")
CLUSTER_WORKFLOW_TEMPLATES = Resource(API_VERSION, "clusterworkflowtemplates", namespaced=False)
CRON_WORKFLOWS = Resource(API_VERSION, "cronworkflows")
PODS = Resource("v1", "pods")
SERVICES = Resource("v1", "services")


class Cluster:
    """One namespace of one cluster."""

    def __init__(
        self, api_client: Any, context: str, namespace: str, command_flags: str = ""
    ) -> None:
        self.client = api_client
        self.context = context
        self.namespace = namespace
        # flags of kubectl and rekindle that select this cluster and namespace
        self.flags = command_flags
        self.server: str = format_address(api_client.configuration.host)
        # texts of the warnings that were already printed
        self.reported: set[str] = set()

    @classmethod
    def connect(
        cls,
        context: str | None = None,
        namespace: str | None = None,
        max_retries: int = MAX_RETRIES,
    ) -> "Cluster":
        """Connect as kubectl does, with KUBECONFIG, ~/.kube/config or the ServiceAccount of this
        pod. Raises ConfigError."""
        from kubernetes.client import ApiClient
        from urllib3 import Retry

        from rekindle.cluster import kubeconfig

        settings, context_name, default_namespace = kubeconfig.load_settings(context)

        settings.retries = Retry(
            total=max_retries,
            backoff_factor=BACKOFF_S,
            status_forcelist=RETRYABLE_CODES,
            allowed_methods=None,
            redirect=0,
            raise_on_status=False,
        )

        flags = ""
        if context:
            flags += f" --context {shlex.quote(context)}"
        if namespace not in (None, default_namespace):
            flags += f" --namespace {namespace}"

        return cls(ApiClient(settings), context_name, namespace or default_namespace, flags)

    def in_namespace(self, namespace: str) -> "Cluster":
        return Cluster(self.client, self.context, namespace, self.flags)

    def get(self, resource: Resource, object_name: str) -> Object:
        """Read an object from the API server. Raises ApiError; raises MalformedObject if the object
        does not match its type."""
        kubernetes_object = self.call("GET", resource.path(self.namespace, object_name))
        self._require_valid(resource, kubernetes_object)
        return kubernetes_object

    def find(self, resource: Resource, object_name: str) -> Object | None:
        """Read an object from the API server; return None if the object does not exist."""
        try:
            return self.get(resource, object_name)
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
        """Return all objects of a kind that are not malformed. For each malformed object, print one
        warning, and call `on_malformed`. Raises ApiError, also if the server repeats a page
        token."""
        media_type = (
            "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
        )
        list_query = {"labelSelector": labels, "limit": "200"}
        valid_objects = list[Object]()
        seen_tokens = set[str]()

        while True:
            list_page = self.call(
                "GET",
                resource.path(self.namespace),
                query=list_query,
                accept=media_type if metadata_only else "",
            )

            for listed_object in self._read_items(resource, list_page):
                if self._is_valid(resource, listed_object, metadata_only):
                    valid_objects.append(cast(Object, listed_object))
                elif on_malformed:
                    on_malformed(listed_object)

            continue_token = self._read_page_metadata(resource, list_page).get("continue") or ""
            if not continue_token:
                return valid_objects
            if continue_token in seen_tokens:
                raise ApiError(
                    f"{self.server} repeats the page token {format_untrusted(continue_token)} of"
                    f" {resource.plural}, so the list does not end: check that it is the address"
                    " of a Kubernetes API."
                )

            seen_tokens.add(continue_token)
            list_query["continue"] = continue_token

    def _read_items(self, resource: Resource, list_page: Object) -> list[object]:
        """Return the items of a Kubernetes list. Raises MalformedObject."""
        listed_objects = list_page.get("items")
        # the API may return null instead of an empty list
        if listed_objects is None and "items" in list_page:
            return []
        if isinstance(listed_objects, list):
            return listed_objects
        raise self._make_malformed_error(resource, "list", "items: it must be a list")

    def _read_page_metadata(self, resource: Resource, list_page: Object) -> dict[str, str]:
        """Return the metadata of a Kubernetes list. Raises MalformedObject."""
        page_metadata = list_page.get("metadata", {})
        text_fields = ("continue", "resourceVersion")
        is_valid = isinstance(page_metadata, dict) and all(
            isinstance(page_metadata.get(field_name, ""), str) for field_name in text_fields
        )
        if is_valid:
            return page_metadata
        raise self._make_malformed_error(
            resource, "list", "metadata: it must be an object, and its fields must be texts"
        )

    def _is_valid(
        self, resource: Resource, listed_object: object, metadata_only: bool = False
    ) -> bool:
        """Return True for a valid object. For a malformed object, print one warning with its name,
        and return False."""
        try:
            self._require_valid(resource, listed_object, metadata_only)
        except MalformedObject as error:
            if str(error) not in self.reported:
                self.reported.add(str(error))
                write_stderr(f"warning: an object is passed over: {error}")
            return False
        return True

    def _require_valid(
        self, resource: Resource, listed_object: object, metadata_only: bool = False
    ) -> None:
        """Raise MalformedObject if an object does not match its type."""
        # imported in this function, because pydantic would slow down `rekindle --help`
        from rekindle.cluster.objects.validation import find_fault

        object_fault = find_fault(resource.plural, listed_object, metadata_only)
        if object_fault:
            raise self._make_malformed_error(resource, describe_name(listed_object), object_fault)

    def _make_malformed_error(
        self, resource: Resource, object_name: str, fault: str
    ) -> MalformedObject:
        return MalformedObject(
            f"{self.server} answered with a malformed object, {resource.plural} {object_name}:"
            f" {fault}. Correct or delete the object with kubectl."
        )

    def read(self, kind: str, method: str, path: str, body: object = None) -> Object:
        """Send a request, and return an answer that is not a Kubernetes object. `kind`: the type of
        the answer, "version", "apiresources" or "accessreviews". Raises ApiError; raises
        MalformedObject if the answer is not of the type `kind`."""
        # imported in this function, because pydantic would slow down `rekindle --help`
        from rekindle.cluster.objects.validation import find_fault

        answer_object = self.call(method, path, body)
        answer_fault = find_fault(kind, answer_object)
        if answer_fault:
            raise MalformedObject(
                f"{self.server} answered {method} {path} with a malformed document:"
                f" {answer_fault}. Check that it is the address of a Kubernetes API."
            )
        return answer_object

    def create(self, resource: Resource, body: Object, dry_run: bool = False) -> Object:
        return self.call(
            "POST", resource.path(self.namespace), body, {"dryRun": "All"} if dry_run else {}
        )

    def replace(self, resource: Resource, body: Object) -> Object:
        """Replace an object on the API server. Raises ApiError 409 if the object has changed since
        `body` was read."""
        return self.call("PUT", resource.path(self.namespace, body["metadata"]["name"]), body)

    def patch(
        self, resource: Resource, object_name: str, change: Object, dry_run: bool = False
    ) -> Object:
        """Apply a merge patch, in which None removes a field and a list replaces the whole old
        list."""
        return self.call(
            "PATCH",
            resource.path(self.namespace, object_name),
            change,
            {"dryRun": "All"} if dry_run else {},
        )

    def delete(self, resource: Resource, object_name: str, **options: object) -> None:
        """Delete an object if it exists.

        With `propagationPolicy="Foreground"`, the object exists until all objects that it owns are
        deleted.
        """
        try:
            self.call("DELETE", resource.path(self.namespace, object_name), options)
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
        """Send a request, retry the request after a temporary error, and return the response.
        Raises ApiError."""
        response_body = self._read(self._request(method, path, body, query, accept)) or b"{}"
        answer_object = parse_object(response_body)
        if answer_object is not None:
            return answer_object
        raise ApiError(
            f"{self.server} is not a Kubernetes API: {method} {path} answers {response_body[:80]!r}"
        )

    def _read(self, response: Any) -> bytes:
        """Return the body of a response. Raises ApiError."""
        from urllib3.exceptions import HTTPError

        from rekindle.content.http_answers import UnreadableAnswer, read_limited

        try:
            return read_limited(response, MAX_ANSWER_BYTES)
        except (HTTPError, OSError, UnreadableAnswer) as error:
            raise ApiError(
                f"{self.server} does not answer as a Kubernetes API does"
                f" ({_describe_cause(error)}): check its address."
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
        missing permission or an unknown kind. A malformed object is left out with a warning. If
        `name` is set, a malformed object raises MalformedObject.
        """
        selectors: dict[str, str] = {}
        if name:
            selectors["fieldSelector"] = f"metadata.name={name}"
        if labels:
            selectors["labelSelector"] = labels
        known_objects: dict[str, Object] = {}  # by uid
        resource_version = ""
        pause_seconds = 0.1
        last_success_time: float | None = None

        while True:
            start_time = time.monotonic()
            try:
                if not resource_version:
                    resource_version, change_events = self._list_again(
                        resource, name, selectors, known_objects
                    )
                    last_success_time = time.monotonic()
                    yield from change_events

                watch_query = {
                    **selectors,
                    "watch": "true",
                    "allowWatchBookmarks": "true",
                    "resourceVersion": resource_version,
                    "timeoutSeconds": str(WATCH_SECONDS),
                }
                for line in self.lines(
                    resource.path(self.namespace), watch_query, WATCH_SECONDS + 15
                ):
                    event_type, changed_object, resource_version = _parse_event(line)
                    last_success_time = time.monotonic()
                    pause_seconds = 0.1

                    if event_type != "BOOKMARK" and self._is_watchable(
                        resource, name, changed_object
                    ):
                        _record_event(known_objects, event_type, changed_object)
                        yield event_type, changed_object
            except MalformedObject:
                raise
            except ApiError as error:
                if error.code == 410:
                    resource_version = ""
                elif last_success_time is None or (
                    error.code not in (0, *RETRYABLE_CODES)
                    and time.monotonic() - last_success_time > STARTUP_SECONDS
                ):
                    raise
                elif on_lost and error.reason != CONNECTION_LOST:
                    on_lost(error)

            if time.monotonic() - start_time > WATCH_SECONDS / 2:
                pause_seconds = 0.1

            # pause even if the watch ended normally, because some proxies end every watch
            # immediately
            time.sleep(pause_seconds)
            pause_seconds = min(5.0, pause_seconds * 2)

    def _is_watchable(
        self, resource: Resource, object_name: str, kubernetes_object: object
    ) -> bool:
        """Return True for a valid object, False for a malformed object. If `object_name` is set, so
        that only one object is watched, a malformed object raises MalformedObject."""
        if object_name:
            self._require_valid(resource, kubernetes_object)
            return True
        return self._is_valid(resource, kubernetes_object)

    def _list_again(
        self,
        resource: Resource,
        object_name: str,
        selectors: Mapping[str, str],
        known_objects: dict[str, Object],
    ) -> tuple[str, list[tuple[str, Object]]]:
        """List the objects and update `known_objects`; return the resource version, and the
        differences from the previous `known_objects` as events."""
        list_page = self.call("GET", resource.path(self.namespace), query=selectors)
        resource_version = self._read_page_metadata(resource, list_page).get("resourceVersion")
        if not resource_version:
            raise self._make_malformed_error(
                resource, "list", "metadata.resourceVersion: it is missing"
            )

        current_objects: dict[str, Object] = {}
        for listed_object in self._read_items(resource, list_page):
            if self._is_watchable(resource, object_name, listed_object):
                valid_object = cast(Object, listed_object)
                current_objects[_read_uid(valid_object)] = valid_object

        change_events = [
            ("DELETED", known_objects[uid]) for uid in known_objects if uid not in current_objects
        ]

        change_events += [
            ("MODIFIED" if uid in known_objects else "ADDED", listed_object)
            for uid, listed_object in current_objects.items()
            if uid not in known_objects
            or _read_version(listed_object) != _read_version(known_objects[uid])
        ]

        known_objects.clear()
        known_objects.update(current_objects)

        return resource_version, change_events

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

        request_headers = {"Accept": accept or "application/json"} | (
            {"Content-Type": media_type} if body is not None else {}
        )
        query_params = [
            (key, parameter_value)
            for key, parameter_value in (query or {}).items()
            if parameter_value
        ]

        request_arguments = self.client.param_serialize(
            method,
            path,
            query_params=query_params,
            header_params=request_headers,
            body=body,
            auth_settings=["BearerToken"],
        )

        try:
            response = self.client.call_api(*request_arguments, _request_timeout=timeout).response
        except (HTTPError, OSError, ApiException) as error:
            raise ApiError(
                f"{self.server} does not answer ({_describe_cause(error)}): check that the cluster"
                f" is up and that context {self.context!r} is the right one (`kubectl config"
                " get-contexts`)."
            ) from error

        if response.status < 300:
            return response

        raise make_api_error(
            response.status, self._read(response), path, self.server, self.context, self.namespace
        )


def parse_object(json_bytes: bytes) -> Object | None:
    """Parse a response of the API server as a JSON object; return None if the response is not a
    JSON object."""
    # imported in this function, because pydantic would slow down `rekindle --help`
    from pydantic_core import from_json

    try:
        parsed_value = from_json(json_bytes, allow_inf_nan=False)
    except ValueError:
        return None
    if isinstance(parsed_value, dict):
        return parsed_value
    return None


def describe_name(kubernetes_object: object) -> str:
    """Return the name of an object that may be malformed, for a message."""
    object_metadata = (
        kubernetes_object.get("metadata") if isinstance(kubernetes_object, dict) else None
    )
    name = object_metadata.get("name") if isinstance(object_metadata, dict) else None
    if isinstance(name, str):
        return format_untrusted(name)
    return "without a name"


def _parse_event(event_line: bytes) -> tuple[str, Object, str]:
    """Return the type of an event of a watch, its object, and the resource version of the object.
    Raises ApiError."""
    watch_event = parse_object(event_line) or {}
    event_type = watch_event.get("type")
    changed_object = watch_event.get("object")

    if event_type == "ERROR":
        # imported in this function, because pydantic would slow down `rekindle --help`
        from rekindle.documents import KubernetesStatus, validate_value

        with suppress(ValueError):
            error_status = validate_value(KubernetesStatus, changed_object)
            raise ApiError(
                str(error_status.message), error_status.code or 500, str(error_status.reason)
            )

    resource_version = _read_version(changed_object) if isinstance(changed_object, dict) else ""
    if isinstance(event_type, str) and isinstance(changed_object, dict) and resource_version:
        return event_type, changed_object, resource_version

    raise ApiError(
        f"an event of a watch is incomplete: {event_line[:80]!r}", reason=CONNECTION_LOST
    )


def _read_version(kubernetes_object: Object) -> str:
    """Return the resource version of an object that may be malformed; "" for an object without a
    resource version."""
    object_metadata = kubernetes_object.get("metadata")
    resource_version = (
        object_metadata.get("resourceVersion") if isinstance(object_metadata, dict) else None
    )
    if isinstance(resource_version, str):
        return resource_version
    return ""


def _read_uid(kubernetes_object: Object) -> str:
    """Return the uid of a valid object, or its name if it does not have one."""
    return kubernetes_object["metadata"].get("uid") or kubernetes_object["metadata"]["name"]


def _record_event(
    known_objects: dict[str, Object], event_type: str, kubernetes_object: Object
) -> None:
    if event_type == "DELETED":
        known_objects.pop(_read_uid(kubernetes_object), None)
    else:
        known_objects[_read_uid(kubernetes_object)] = kubernetes_object


def _describe_cause(error: Exception) -> str:
    """Return the message of the innermost cause of an error, without the exceptions in which
    urllib3 wraps it."""
    inner_reason: Any = getattr(error, "reason", None) or error
    cause_text = (
        str(getattr(inner_reason, "reason", None) or inner_reason)
        .rpartition(": ")[2]
        .rpartition("] ")[2]
        .strip()
        .rstrip(")")
    )
    return cause_text or type(error).__name__
