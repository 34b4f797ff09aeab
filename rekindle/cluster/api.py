"""The Kubernetes API as seen from one namespace: plain data in, plain data out, every refusal in words.

    cluster = Cluster.connect(context="prod", namespace="models")     # without: kubectl's own
    cluster.create(WORKFLOWS, manifest)
    for kind, workflow in cluster.watch(WORKFLOWS, name="demo-4k2xp"): ...

Calls survive a lost connection and an overloaded server for some seconds, a watch for as long as it takes. Importing
this module is cheap; `connect` imports the kubernetes client (half a second).
"""

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.cluster.errors import ApiError, explained
from rekindle.errors import without_user

Object = dict[str, Any]
TIMEOUT = (4, 30)  # seconds to connect, and to wait for an answer
WATCH_SECONDS = 45  # one watch request; a connection that died unnoticed is found out soon after
AGAIN = (429, 500, 502, 503, 504)
BROKEN = "BrokenOff"  # the reason of an answer that ends too early; asking again is all there is to do
PATIENCE = 30.0  # a server that has just restarted may not know its users and roles yet


@dataclass(frozen=True)
class Resource:
    """Where the API keeps one kind."""

    api: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", part: str = "") -> str:
        within = f"namespaces/{namespace}" if self.namespaced else ""
        root = "apis" if "/" in self.api else "api"
        return "/" + "/".join(each for each in (root, self.api, within, self.plural, name, part) if each)


WORKFLOWS = Resource("argoproj.io/v1alpha1", "workflows")
TEMPLATES = Resource("argoproj.io/v1alpha1", "workflowtemplates")
CRONS = Resource("argoproj.io/v1alpha1", "cronworkflows")
PODS = Resource("v1", "pods")
SERVICES = Resource("v1", "services")


class Cluster:
    """One namespace of one cluster."""

    def __init__(self, client: Any, context: str, namespace: str, flags: str = "") -> None:
        self.client, self.context, self.namespace = client, context, namespace
        self.flags = flags  # of kubectl and rekindle, to come back here
        self.server: str = without_user(client.configuration.host)

    @classmethod
    def connect(cls, context: str | None = None, namespace: str | None = None) -> "Cluster":
        """As kubectl finds its cluster: KUBECONFIG, ~/.kube/config, or the pod this runs in. Raises ConfigError."""
        from kubernetes.client import ApiClient
        from urllib3 import Retry

        from rekindle.cluster import kubeconfig

        settings, chosen, usual = kubeconfig.chosen(context)
        settings.retries = Retry(total=4, backoff_factor=0.3, status_forcelist=AGAIN, allowed_methods=None,
                                 redirect=0, raise_on_status=False)  # fmt: skip
        here = f" --context {shlex.quote(context)}" if context else ""
        there = f" --namespace {namespace}" if namespace not in (None, usual) else ""
        return cls(ApiClient(settings), chosen, namespace or usual, here + there)

    def within(self, namespace: str) -> "Cluster":
        """The same cluster, another namespace."""
        return Cluster(self.client, self.context, namespace, self.flags)

    def get(self, resource: Resource, name: str) -> Object:
        return self.call("GET", resource.path(self.namespace, name))

    def find(self, resource: Resource, name: str) -> Object | None:
        """The object, or None if there is none."""
        try:
            return self.get(resource, name)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def listed(self, resource: Resource, labels: str = "", metadata_only: bool = False) -> list[Object]:
        kind = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
        query, found = {"labelSelector": labels, "limit": "200"}, []
        while True:
            page = self.call("GET", resource.path(self.namespace), query=query, accept=kind if metadata_only else "")
            found += page["items"] or []  # an empty list of metadata comes as null
            if not (more := (page.get("metadata") or {}).get("continue")):
                return found
            query["continue"] = more

    def create(self, resource: Resource, body: Object, dry_run: bool = False) -> Object:
        return self.call("POST", resource.path(self.namespace), body, {"dryRun": "All"} if dry_run else {})

    def replace(self, resource: Resource, body: Object) -> Object:
        """Raises ApiError 409 if it was changed since `body` was read."""
        return self.call("PUT", resource.path(self.namespace, body["metadata"]["name"]), body)

    def patch(self, resource: Resource, name: str, change: Object) -> Object:
        """A merge patch: what is None goes, lists are replaced."""
        return self.call("PATCH", resource.path(self.namespace, name), change)

    def delete(self, resource: Resource, name: str, **options: Any) -> None:
        """Ask for its end; `propagationPolicy="Foreground"`: it is there until all that it owns is gone."""
        self.call("DELETE", resource.path(self.namespace, name), options)

    def call(
        self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None, accept: str = ""
    ) -> Object:
        """One request, tried again where that can help. Raises ApiError."""
        answer = self._open(method, path, body, query, accept, TIMEOUT)
        return json.loads(answer.data or b"{}")

    def lines(self, path: str, query: Mapping[str, str], silence: float) -> Iterator[bytes]:
        """The lines of an answer as they come. Raises ApiError, also for an answer that breaks off."""
        from urllib3.exceptions import HTTPError

        answer = self._open("GET", path, None, query, "", (TIMEOUT[0], silence))
        try:
            yield from answer
        except (HTTPError, OSError) as error:
            raise ApiError(f"the connection to {self.server} broke off: {error}", reason=BROKEN) from error
        finally:
            answer.close()

    def watch(
        self, resource: Resource, name: str = "", labels: str = "", lost: Callable[[ApiError], None] | None = None
    ) -> Iterator[tuple[str, Object]]:
        """("ADDED" | "MODIFIED" | "DELETED", object), from what is there now, without end.

        Goes on after an expired resource version, a restarted server and a lost connection; `lost` hears while the
        server is away. Raises ApiError for what does not pass: no right, no such kind.
        """
        select = {"fieldSelector": f"metadata.name={name}"} if name else {}
        select |= {"labelSelector": labels} if labels else {}
        known: dict[str, Object] = {}  # by uid
        version, pause = "", 0.1
        worked: float | None = None
        while True:
            began = time.monotonic()
            try:
                if not version:
                    version, changes = self._relisted(resource, select, known)
                    worked = time.monotonic()
                    yield from changes
                query = {**select, "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version,
                         "timeoutSeconds": str(WATCH_SECONDS)}  # fmt: skip
                for line in self.lines(resource.path(self.namespace), query, WATCH_SECONDS + 15):
                    kind, found = _event(line)
                    worked, pause = time.monotonic(), 0.1
                    version = found["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        _note(known, kind, found)
                        yield kind, found
            except ApiError as error:
                if error.code == 410:
                    version = ""
                elif worked is None or (error.code not in (0, *AGAIN) and time.monotonic() - worked > PATIENCE):
                    raise
                elif lost and error.reason != BROKEN:
                    lost(error)
            if time.monotonic() - began > WATCH_SECONDS / 2:
                pause = 0.1
            time.sleep(pause)  # also after a watch that ended well: some proxies end each of them at once
            pause = min(5.0, pause * 2)

    def _relisted(
        self, resource: Resource, select: Mapping[str, str], known: dict[str, Object]
    ) -> tuple[str, list[tuple[str, Object]]]:
        """What a new list says that the events so far did not, deletions included."""
        found = self.call("GET", resource.path(self.namespace), query=select)
        now = {each["metadata"]["uid"]: each for each in found["items"] or []}
        changes = [("DELETED", each) for uid, each in known.items() if uid not in now]
        changes += [
            ("MODIFIED" if uid in known else "ADDED", each)
            for uid, each in now.items()
            if _version(each) != _version(known.get(uid))
        ]
        known.clear()
        known.update(now)
        return found["metadata"]["resourceVersion"], changes

    def _open(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, str] | None,
        accept: str,
        timeout: tuple[float, float],
    ) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": accept or "application/json"} | ({"Content-Type": kind} if body is not None else {})
        given = [(key, value) for key, value in (query or {}).items() if value]
        request = self.client.param_serialize(
            method, path, query_params=given, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            answer = self.client.call_api(*request, _request_timeout=timeout).response
        except (HTTPError, OSError, ApiException) as error:
            raise ApiError(
                f"{self.server} does not answer ({_cause(error)}): is the cluster up, and context {self.context!r} "
                "the one you mean (`kubectl config get-contexts`)?"
            ) from error
        if answer.status < 300:
            return answer
        about = {"server": self.server, "context": self.context, "namespace": self.namespace}
        raise explained(answer.status, answer.data, path, **about)


def _event(line: bytes) -> tuple[str, Object]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise ApiError(f"an event of a watch broke off: {line[:80]!r}", reason=BROKEN) from error
    if event["type"] == "ERROR":
        status = event["object"]
        raise ApiError(str(status.get("message")), int(status.get("code") or 500), str(status.get("reason")))
    return event["type"], event["object"]


def _note(known: dict[str, Object], kind: str, found: Object) -> None:
    if kind == "DELETED":
        known.pop(found["metadata"]["uid"], None)
    else:
        known[found["metadata"]["uid"]] = found


def _version(each: Object | None) -> str:
    return each["metadata"]["resourceVersion"] if each else ""


def _cause(error: Exception) -> str:
    """The innermost reason, without urllib3's wrapping."""
    reason: Any = getattr(error, "reason", None) or error
    text = str(getattr(reason, "reason", None) or reason).rpartition(": ")[2].rpartition("] ")[2].strip().rstrip(")")
    return text or type(error).__name__
