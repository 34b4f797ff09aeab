"""What a user of a cluster would lose: events while a server restarts, answers, and the way out of a refusal."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.cluster.api import PODS, WORKFLOWS, Cluster
from pipelines.cluster.errors import ApiError, BadObject
from steps.errors import ConfigError
from tests.pipelines.cluster.server import ApiServer, status

WORKFLOWS_AT = "/apis/argoproj.io/v1alpha1/namespaces/models/workflows"


def workflow(name: str, phase: str = "Running") -> dict[str, Any]:
    return {"kind": "Workflow", "metadata": {"name": name}, "spec": {}, "status": {"phase": phase}}


class Events:
    """What a watch gives, read by a thread; `next()` waits for one."""

    def __init__(self, events: Iterator[tuple[str, dict[str, Any]]]) -> None:
        self.events, self.found = events, queue.Queue[tuple[str, str, str]]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for kind, each in self.events:
            self.found.put((kind, each["metadata"]["name"], each["status"]["phase"]))

    def next(self) -> tuple[str, str, str]:
        return self.found.get(timeout=20)


@pytest.fixture
def events(server: ApiServer, cluster: Cluster) -> Events:
    server.put(WORKFLOWS_AT, workflow("a"))
    events = Events(cluster.watch(WORKFLOWS))
    assert events.next() == ("ADDED", "a", "Running")
    return events


def test_a_watch_whose_version_expired_tells_what_changed_meanwhile_and_nothing_twice(
    server: ApiServer, events: Events
):
    server.stop()
    server.put(WORKFLOWS_AT, workflow("b"))
    server.put(WORKFLOWS_AT, workflow("c"))
    server.remove(WORKFLOWS_AT, "a")
    server.expire()
    server.start()
    assert [events.next() for _ in range(3)] == [
        ("DELETED", "a", "Running"), ("ADDED", "b", "Running"), ("ADDED", "c", "Running"),
    ]  # fmt: skip
    server.put(WORKFLOWS_AT, workflow("b", "Succeeded"))
    assert events.next() == ("MODIFIED", "b", "Succeeded")


def test_a_watch_that_is_cut_off_goes_on_where_it_was(server: ApiServer, events: Events):
    for phase in ("One", "Two", "Three"):
        server.cut()
        server.put(WORKFLOWS_AT, workflow("a", phase))
        assert events.next() == ("MODIFIED", "a", phase)
    assert events.found.empty()


def test_a_server_that_has_just_restarted_and_knows_no_roles_yet_does_not_end_a_watch(
    server: ApiServer, events: Events
):
    server.refuse("GET", "watch=true", 403, status(403, "Forbidden", "RBAC: clusterrole not found"), times=2)
    server.cut()
    server.put(WORKFLOWS_AT, workflow("a", "Succeeded"))
    assert events.next() == ("MODIFIED", "a", "Succeeded")


def test_whoever_watches_hears_that_the_server_is_away(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, workflow("a"))
    heard: list[str] = []
    events = Events(cluster.watch(WORKFLOWS, lost=lambda error: heard.append(str(error))))
    events.next()
    server.stop()
    server.put(WORKFLOWS_AT, workflow("a", "Succeeded"))
    threading.Timer(6, server.start).start()
    assert events.next() == ("MODIFIED", "a", "Succeeded")
    assert heard and "does not answer (Connection refused)" in heard[0]


def test_what_is_not_allowed_ends_a_watch_at_once(server: ApiServer, cluster: Cluster):
    server.refuse("GET", "workflows", 403, status(403, "Forbidden", "no"))
    with pytest.raises(ApiError):
        next(iter(cluster.watch(WORKFLOWS)))


@pytest.mark.parametrize("code", [429, 500, 503])
def test_an_overloaded_server_is_asked_again(server: ApiServer, cluster: Cluster, code: int):
    server.put(WORKFLOWS_AT, workflow("a"))
    server.refuse("GET", "workflows/a", code, "later", times=2)
    assert cluster.get(WORKFLOWS, "a")["metadata"]["name"] == "a"


FORBIDDEN = (
    'workflows.argoproj.io is forbidden: User "ann" cannot create resource "workflows" in API group "argoproj.io" in '
    'the namespace "models"'
)
QUOTA = (
    'pods "a" is forbidden: exceeded quota: compute, requested: requests.cpu=4, used: requests.cpu=30, limited: '
    "requests.cpu=32"
)
INVALID = status(
    422, "Invalid", 'Workflow.argoproj.io "a" is invalid: spec.entrypoint: Invalid value: "integer"',
    causes=[{"reason": "FieldValueTypeInvalid", "message": 'Invalid value: "integer"', "field": "spec.entrypoint"}],
)  # fmt: skip
DENIED = 'admission webhook "validator.pytorchjob.training-operator.kubeflow.org" denied the request: no worker'
AWAY = (
    'Internal error occurred: failed calling webhook "validator.pytorchjob": failed to call webhook: Post '
    '"https://training-operator.kubeflow.svc:443/": no endpoints available for service "training-operator"'
)


@pytest.mark.parametrize(("code", "body", "words"), [
    (401, status(401, "Unauthorized", "Unauthorized"), ["does not know you", "context 'here'"]),
    (403, status(403, "Forbidden", FORBIDDEN), ["ann may not create workflows", "models", "rekindle platform render"]),
    (403, status(403, "Forbidden", QUOTA), ["quota 'compute'", "requests.cpu=32", "lower"]),
    (404, status(404, "NotFound", 'namespaces "models" not found'),
     ["no namespace models", "rekindle platform render"]),
    (404, "404 page not found\n", ["Argo Workflows is not installed", "doctor --cluster"]),
    (409, status(409, "AlreadyExists", 'workflows.argoproj.io "a" already exists'),
     ["'a' exists already", "generateName"]),
    (422, INVALID, ["spec.entrypoint: Invalid value"]),
    (400, status(400, "BadRequest", DENIED),
     ["validator.pytorchjob.training-operator.kubeflow.org refuses", "no worker"]),
    (500, status(500, "InternalError", AWAY),
     ["webhook validator.pytorchjob does not answer", "no endpoints available"]),
    (413, status(413, "RequestEntityTooLarge", "limit is 3145728"), ["1.5 MB"]),
    (418, "<html>teapot</html>", ["418", "teapot"]),
])  # fmt: skip
def test_what_the_server_refuses_comes_with_what_to_change(
    server: ApiServer, cluster: Cluster, code: int, body: Any, words: list[str]
):
    server.refuse("PUT", "workflows", code, body, times=9)
    with pytest.raises(ApiError) as error:
        cluster.replace(WORKFLOWS, workflow("a"))
    assert error.value.code == code
    assert [word for word in words if word not in str(error.value)] == []
    assert isinstance(error.value, BadObject) == (code in (400, 404, 409, 413, 422))


def test_a_cluster_that_is_not_there_is_named(server: ApiServer, cluster: Cluster):
    server.stop()
    with pytest.raises(ApiError, match=r"http://127.0.0.1:\d+ does not answer \(Connection refused\).*context 'here'"):
        cluster.get(PODS, "a")


def test_no_kubeconfig_and_a_mistyped_context_say_what_to_do(server: ApiServer, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match='Did you mean "here"'):
        Cluster.connect(context="hree")
    server.kubeconfig.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be used"):
        Cluster.connect()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig.with_name("none")))
    with pytest.raises(ConfigError, match="no cluster is configured"):
        Cluster.connect()


def test_the_namespace_is_the_flag_s_else_that_of_the_context(server: ApiServer, tmp_path: Path):
    assert Cluster.connect().namespace == "models"
    there = Cluster.connect(context="here", namespace="other")
    assert (there.namespace, there.flags) == ("other", " --context here --namespace other")
