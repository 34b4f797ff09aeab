"""Deployments and Services of a small server, and clients that send requests to it."""

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from argolocal.controllers.controller import Controller
from argolocal.language.selector import evaluate_conditions
from tests import polling

SUCCESS = "status.availableReplicas > 0,!status.unavailableReplicas"
FAILURE = ",".join(
    f"status.conditions.{index}.reason == ProgressDeadlineExceeded" for index in range(3)
)
SERVER = """
import http.server, os, pathlib, signal, sys, threading, time
version, slow = sys.argv[1], float(sys.argv[2])
time.sleep(slow)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health" and pathlib.Path("/tmp/sick").exists():
            return self.send_error(503)
        if self.path == "/slow":
            time.sleep(1.0)
        body = (version + " " + str(os.getpid())).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8080), Handler)
server.daemon_threads = False
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
print("serving", version, flush=True)
server.serve_forever(0.05)  # poll interval for the shutdown
server.server_close()   # waits for open requests
print("drained", version, flush=True)
"""


def make_release(version: str, slow: float = 0) -> dict:
    """Return the Deployment of a release, as `deploy` creates it."""
    obj = make_deployment(version, slow=slow)
    labels = {
        "app": "fraud",
        "app.kubernetes.io/name": "fraud",
        "app.kubernetes.io/instance": f"fraud-{version}",
    }
    obj["metadata"]["name"] = f"fraud-{version}"
    obj["metadata"]["labels"] = labels
    obj["metadata"]["annotations"] = {"rekindle.dev/version": version}
    obj["spec"]["selector"]["matchLabels"] = obj["spec"]["template"]["metadata"]["labels"] = labels
    return obj


def make_release_service(version: str, port: int, **spec: Any) -> dict:
    """Return the Service that sends requests to the release `version`."""
    obj = make_service(port)
    obj["spec"].update({"selector": {"app.kubernetes.io/instance": f"fraud-{version}"}, **spec})
    return obj


def make_deployment(
    version: str, program: str = SERVER, slow: float = 0, replicas: int = 1, **spec: Any
) -> dict:
    health = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 1}
    container = {
        "name": "serve",
        "image": "any",
        "command": ["python", "-c", program, version, str(slow)],
        "ports": [{"name": "http", "containerPort": 8080}],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "startupProbe": {**health, "periodSeconds": 1, "failureThreshold": 20},
        "readinessProbe": {**health, "periodSeconds": 0.1, "failureThreshold": 2},
        "livenessProbe": {**health, "periodSeconds": 0.2, "failureThreshold": 5},
    }

    template = {"metadata": {"labels": {"app": "fraud"}}, "spec": {"containers": [container]}}
    template["spec"]["terminationGracePeriodSeconds"] = 5

    spec = {
        "selector": {"matchLabels": {"app": "fraud"}},
        "replicas": replicas,
        "template": template,
        **spec,
    }

    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "fraud"},
        "spec": spec,
    }


def make_service(port: int, name: str = "fraud") -> dict:
    spec = {
        "selector": {"app": "fraud"},
        "ports": [{"name": "http", "port": port, "targetPort": "http"}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def get(port: int, path: str = "/") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


def wait(
    kinds: dict[str, Controller],
    holds: Callable[[dict], Any],
    seconds: float = 60,
    name: str = "fraud",
) -> dict:
    return polling.wait(kinds["Deployment"], holds, name, seconds)


def is_rolled_out(status: dict) -> bool | None:
    """Return True if a Deployment is available, False if its rollout has failed, else None."""
    return evaluate_conditions({"status": status}, SUCCESS, FAILURE)[0]


def is_answering(port: int, version: str) -> bool:
    try:
        return get(port).startswith(version)
    except OSError:
        return False


class Answers(list[str]):
    """The answers to the requests of several clients: the versions that have answered, and errors.
    `latest`: maps a client to its last answer."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: dict[int, str] = {}


@contextmanager
def run_clients(port: int) -> Iterator[Answers]:
    """Run four clients that send one request after the other. Yield the answers to the clients."""
    seen = Answers()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                answer = get(port).split()[0]
            except OSError as error:
                answer = str(error)
            seen.append(answer)
            seen.latest[threading.get_ident()] = answer

    clients = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for client in clients:
        client.start()

    yield seen
    stop.set()
    for client in clients:
        client.join()


def make_serving_workflow(name: str, port: int, *command: str) -> dict[str, Any]:
    """Return a workflow that deploys `command` (default: the step steps.server of the current
    project)."""
    labels = {"app": name}
    probe = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1, "failureThreshold": 60}

    container = {
        "name": "serve",
        "image": "any",
        "command": [*command] or ["python", "-m", "rekindle", "step", "steps.server"],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "startupProbe": probe,
    }

    spec = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
    }

    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": spec,
    }

    ports = [{"port": port, "targetPort": 8080}]

    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels, "ports": ports},
    }

    conditions = {"successCondition": SUCCESS, "failureCondition": FAILURE}

    templates = [
        {
            "name": kind,
            "resource": {"action": "apply", "manifest": yaml.safe_dump(obj), **more},
            "retryStrategy": {
                "limit": 2,
                "retryPolicy": "Always",
                "backoff": {"duration": "500ms"},
            },
        }
        for kind, obj, more in (
            ("service", service, {}),
            ("deployment", deployment, conditions),
        )
    ]

    tasks = [
        {"name": "service", "template": "service"},
        {"name": "deployment", "template": "deployment"},
    ]
    main_template = {"name": "main", "dag": {"tasks": tasks}}
    metadata = {"name": f"serve-{name}"}
    body = {"entrypoint": "main", "templates": [main_template, *templates]}

    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": metadata,
        "spec": body,
    }
