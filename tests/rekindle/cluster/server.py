"""Simulate a cluster by a small HTTP server with the JSON of the Kubernetes API: objects, lists,
watches, logs, and failures.

with ApiServer(folder) as server:
    server.put("/api/v1/namespaces/models/pods", pod)
    server.refuse("POST", "/workflows", 403, status(403, "Forbidden", "..."))
    server.cut()                    # breaks the connection of every open watch and log
    server.expire()                 # makes all resource versions too old: 410
    server.stop(); server.start()   # same address, same objects
"""

import json
import re
import socket
import subprocess
import sys
import threading
import uuid
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from argolocal.manifest.patch import apply_merge_patch
from argolocal.manifest.types import Object

OBJECT_PATH_PATTERN = re.compile(r"(/apis?/.*?/namespaces/[^/]+/[^/]+)/([^/]+)$")
LOG = re.compile(r"(.*/pods)/([^/]+)/log$")


def make_status(code: int, reason: str, message: str, **details: Any) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


class ApiServer:
    """The server runs on its own port until the `with` block ends."""

    def __init__(self, folder: Path, namespace: str = "models") -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.namespace = namespace
        self.changed = threading.Condition()
        # collection → name → object
        self.objects: dict[str, dict[str, Object]] = {}
        self.history: list[tuple[int, str, str, Object]] = []
        self.version = 100
        self.oldest = 0
        self.generation = 0
        self.stopped = False
        self.refusals: list[tuple[str, str, int, Object | str, int]] = []
        # (pod, container) → time, text
        self.logs: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self.ended: set[tuple[str, str]] = set()
        # method, path with its query, body
        self.requests: list[tuple[str, str, Object]] = []
        self.tokens: set[str | None] = set()
        # path → object outside the namespace
        self.fixed: dict[str, Object] = {}
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        url = f"http://127.0.0.1:{self.port}"

        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [
                {
                    "name": "here",
                    "context": {"cluster": "c", "user": "u", "namespace": self.namespace},
                }
            ],
        }

        self.kubeconfig.write_text(json.dumps(config))

        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        server = self

        class Handler(_Handler):
            api = server

        ThreadingHTTPServer.allow_reuse_address = True
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.http.daemon_threads = True
        self.stopped = False
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.stopped = True
        self.http.shutdown()
        self.http.server_close()
        self.cut()

    def put(self, collection: str, manifest: Object) -> Object:
        """Create or change an object, as a controller of a cluster would."""
        with self.changed:
            name = manifest["metadata"]["name"]
            existing = self.objects.setdefault(collection, {})
            previous = existing.get(name, {}).get("metadata", {})
            self.version += 1

            stamp = {
                "uid": previous.get("uid") or str(uuid.uuid4()),
                "namespace": self.namespace,
                "creationTimestamp": previous.get("creationTimestamp") or "2026-11-21T20:00:00Z",
            }

            metadata = {**stamp, **manifest["metadata"], "resourceVersion": str(self.version)}
            existing[name] = {**manifest, "metadata": metadata}
            self._record(collection, "MODIFIED" if previous else "ADDED", existing[name])

            return existing[name]

    def remove(self, collection: str, name: str) -> None:
        with self.changed:
            self.version += 1
            gone = self.objects[collection].pop(name)
            metadata = {**gone["metadata"], "resourceVersion": str(self.version)}
            self._record(collection, "DELETED", {**gone, "metadata": metadata})

    def write_log(self, pod: str, text: str, timestamp: str = "", container: str = "main") -> None:
        """Append a line to a container's log."""
        with self.changed:
            stamp = timestamp or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
            self.logs.setdefault((pod, container), []).append((stamp, text))
            self.changed.notify_all()

    def end_log(self, pod: str, container: str = "main") -> None:
        with self.changed:
            self.ended.add((pod, container))
            self.changed.notify_all()

    def refuse(self, method: str, path: str, code: int, body: Object | str, times: int = 1) -> None:
        """Answer the next `times` requests with the given method and a matching path with the given
        answer."""
        self.refusals.append((method, path, code, body, times))

    def admit(self, path: str, body: Object, dry_run: bool) -> tuple[int, Object] | None:
        """Return the answer to the creation of an object, or None to store the object."""
        if dry_run:
            return (201, body)
        return None

    def cut(self) -> None:
        with self.changed:
            self.generation += 1
            self.changed.notify_all()

    def expire(self) -> None:
        with self.changed:
            self.oldest = self.version
            self.history.clear()

    def refusal(self, method: str, path: str) -> tuple[int, Object | str] | None:
        for i, (refused, pattern, code, body, times) in enumerate(self.refusals):
            if refused == method and re.search(pattern, path):
                self.refusals[i : i + 1] = (
                    [(method, pattern, code, body, times - 1)] if times > 1 else []
                )
                return code, body
        return None

    def _record(self, collection: str, kind: str, changed: Object) -> None:
        self.history.append((self.version, collection, kind, changed))
        self.changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # send packets at once; otherwise each answer waits 40 ms for the acknowledgement of its headers
    disable_nagle_algorithm = True
    api: ApiServer

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def handle_any(self) -> None:
        if self.api.stopped:  # end the connection if the client has kept it open
            return self.break_connection()

        body_bytes = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(body_bytes) or b"{}")
        parts = urlsplit(self.path)
        api = self.api
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        api.requests.append((self.command, self.path, body))
        api.tokens.add(self.headers.get("Authorization"))

        refused = api.refusal(self.command, self.path)
        if refused:
            self.answer(*refused)
        elif match := LOG.search(parts.path):
            self.log(match[2], query)
        elif query.get("watch"):
            self.watch(parts.path, query)
        else:
            self.answer(*self.respond(parts.path, body, query))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    def respond(self, path: str, body: Object, query: dict[str, str]) -> tuple[int, Object]:
        api = self.api
        if self.command == "GET" and path in api.fixed:
            return 200, api.fixed[path]

        collection, _, name = path.rpartition("/")
        if self.command == "GET" and "items" in api.fixed.get(collection, {}):
            return find_item(api.fixed[collection]["items"], name)

        if self.command == "POST":
            answer = api.admit(path, body, "dryRun" in query)
            if answer:
                return answer

            if body["metadata"]["name"] in api.objects.get(path, {}):
                return 409, make_status(
                    409, "AlreadyExists", f'x "{body["metadata"]["name"]}" already exists'
                )

            return 201, api.put(path, body)

        named = OBJECT_PATH_PATTERN.search(path)
        if not named:
            return 200, self.list_objects(path, query)

        collection = named[1]
        name = named[2]

        existing = api.objects.get(collection, {}).get(name)
        if existing is None:
            return 404, make_status(404, "NotFound", f'x "{name}" not found', name=name)
        if self.command == "DELETE":
            api.remove(collection, name)

        if self.command == "PUT":
            if body["metadata"]["resourceVersion"] != existing["metadata"]["resourceVersion"]:
                return 409, make_status(409, "Conflict", "the object has been modified")

            existing = api.put(collection, body)

        if self.command == "PATCH":
            version = (body.get("metadata") or {}).get(
                "resourceVersion", existing["metadata"]["resourceVersion"]
            )
            if version != existing["metadata"]["resourceVersion"]:
                return 409, make_status(409, "Conflict", "the object has been modified")

            if "dryRun" in query:
                existing = apply_merge_patch(existing, body)
            else:
                existing = api.put(collection, apply_merge_patch(existing, body))

        return 200, existing

    def list_objects(self, path: str, query: dict[str, str]) -> Object:
        with self.api.changed:
            items = [
                item for item in self.api.objects.get(path, {}).values() if is_selected(item, query)
            ]
            return {
                "kind": "List",
                "metadata": {"resourceVersion": str(self.api.version)},
                "items": items or None,
            }  # null is sent for an empty list, as Go does

    def watch(self, path: str, query: dict[str, str]) -> None:
        api = self.api
        since = int(query["resourceVersion"])
        self.begin()

        with api.changed:
            if since < api.oldest:
                gone = make_status(
                    410, "Expired", f"too old resource version: {since} ({api.oldest})"
                )
                self.chunk(json.dumps({"type": "ERROR", "object": gone}))
                return self.chunk("")

            generation = api.generation
            while api.generation == generation:
                for version, collection, kind, changed in [
                    event for event in api.history if event[0] > since
                ]:
                    since = version
                    if collection == path and is_selected(changed, query):
                        self.chunk(json.dumps({"type": kind, "object": changed}))

                api.changed.wait(0.05)

        self.break_connection()

    def log(self, pod: str, query: dict[str, str]) -> None:
        api = self.api
        key = (pod, query["container"])
        sent = 0
        self.begin()

        with api.changed:
            generation = api.generation
            while api.generation == generation:
                lines = [
                    line
                    for line in api.logs.get(key, [])
                    if line[0][:19] + "Z" >= query.get("sinceTime", "")
                ]
                for timestamp, text in lines[sent:]:
                    self.chunk(f"{timestamp} {text}" if query.get("timestamps") else text)

                sent = len(lines)
                if not query.get("follow") or key in api.ended:
                    return self.chunk("")

                api.changed.wait(0.05)

        self.break_connection()

    def answer(self, code: int, body: Object | str) -> None:
        text = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, text: str) -> None:
        data = f"{text}\n".encode() if text else b""
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def break_connection(self) -> None:
        """End the connection in the middle of the answer."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def find_item(items: list[Any], name: str) -> tuple[int, Object]:
    """Return the answer to a request for one object of a fixed list. A malformed object in the list
    is the answer for every name."""
    for item in items:
        try:
            is_found = item["metadata"]["name"] == name
        except (KeyError, TypeError, IndexError):
            is_found = True
        if is_found:
            return 200, item
    return 404, make_status(404, "NotFound", "not found")


def is_selected(candidate: Object, query: dict[str, str]) -> bool:
    labels = candidate["metadata"].get("labels") or {}
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    requirements = [
        requirement for requirement in query.get("labelSelector", "").split(",") if requirement
    ]
    for requirement in requirements:
        key, value = re.split("!?=", requirement)
        if (labels.get(key) == value) == ("!=" in requirement):
            return False
    return name in ("", candidate["metadata"]["name"])


class Kubelet(ApiServer):
    """Runs the containers of a new pod on this machine, with the environment of this process."""

    def admit(self, path: str, body: Any, dry_run: bool) -> Any:
        if path.endswith("/pods") and not dry_run:
            (container,) = body["spec"]["containers"]
            result = subprocess.run(
                [sys.executable, *container["args"]], capture_output=True, text=True
            )
            ended = {
                "name": container["name"],
                "state": {"terminated": {"exitCode": result.returncode}},
            }
            self.put(path, body | {"status": {"containerStatuses": [ended]}})

            for line in (result.stdout + result.stderr).splitlines():
                self.write_log(body["metadata"]["name"], line)

        return super().admit(path, body, dry_run)


class BrokenKubelet(Kubelet):
    """A kubelet that writes another text to the log of a container than the container prints."""

    text = ""

    def write_log(self, pod: str, text: str, timestamp: str = "", container: str = "main") -> None:
        super().write_log(pod, self.text, timestamp, container)
