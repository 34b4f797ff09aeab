"""Tests of the client of the Kubernetes API: watches continue after a restart of the server, calls
are retried, and errors contain a remedy."""

import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle.cluster import kubernetes_api
from rekindle.cluster.errors import ApiError, BadObject, make_api_error
from rekindle.cluster.kubernetes_api import PODS, WORKFLOWS, Cluster
from rekindle.errors import ConfigError
from tests.rekindle.cluster.server import ApiServer, make_status
from tests.rekindle.cluster.workflows import WORKFLOWS_AT, make_workflow
from tests.waiting import until


class Events:
    """The events of a watch, read by a thread; `next()` waits for the next event."""

    def __init__(self, events: Iterator[tuple[str, dict[str, Any]]]) -> None:
        self.events, self.received = events, queue.Queue[tuple[str, str, str]]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for kind, changed in self.events:
            self.received.put((kind, changed["metadata"]["name"], changed["status"]["phase"]))

    def next(self) -> tuple[str, str, str]:
        return self.received.get(timeout=20)


@pytest.fixture
def events(server: ApiServer, cluster: Cluster) -> Events:
    server.put(WORKFLOWS_AT, make_workflow("a"))
    events = Events(cluster.watch(WORKFLOWS))
    assert events.next() == ("ADDED", "a", "Running")
    return events


def test_a_watch_with_an_expired_version_yields_each_missed_change_once(
    server: ApiServer, events: Events
):
    server.stop()
    server.put(WORKFLOWS_AT, make_workflow("b"))
    server.put(WORKFLOWS_AT, make_workflow("c"))
    server.remove(WORKFLOWS_AT, "a")
    server.expire()
    server.start()

    assert [events.next() for _ in range(3)] == [
        ("DELETED", "a", "Running"),
        ("ADDED", "b", "Running"),
        ("ADDED", "c", "Running"),
    ]

    server.put(WORKFLOWS_AT, make_workflow("b", "Succeeded"))
    assert events.next() == ("MODIFIED", "b", "Succeeded")


def test_an_interrupted_watch_continues_where_it_stopped(server: ApiServer, events: Events):
    for phase in ("One", "Two", "Three"):
        server.cut()
        server.put(WORKFLOWS_AT, make_workflow("a", phase))
        assert events.next() == ("MODIFIED", "a", phase)
    assert events.received.empty()


def test_a_watch_continues_after_a_restarted_server_has_briefly_no_roles(
    server: ApiServer, events: Events
):
    server.refuse(
        "GET",
        "watch=true",
        403,
        make_status(403, "Forbidden", "RBAC: clusterrole not found"),
        times=2,
    )
    server.cut()
    server.put(WORKFLOWS_AT, make_workflow("a", "Succeeded"))
    assert events.next() == ("MODIFIED", "a", "Succeeded")


def test_a_watch_reports_that_the_server_is_unavailable(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, make_workflow("a"))
    errors: list[str] = []

    def on_lost(error: Exception) -> None:
        if not errors:
            server.start()
        errors.append(str(error))

    events = Events(cluster.watch(WORKFLOWS, on_lost=on_lost))
    events.next()
    server.stop()
    server.put(WORKFLOWS_AT, make_workflow("a", "Succeeded"))
    assert events.next() == ("MODIFIED", "a", "Succeeded")
    assert errors
    assert "does not answer (Connection refused)" in errors[0]


def list_watches(server: ApiServer) -> list[str]:
    return [path for _, path, _ in server.requests if "watch=true" in path]


def test_pauses_between_watches_grow_if_the_server_ends_each_watch_at_once(
    server: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    server.put(WORKFLOWS_AT, make_workflow("a"))
    server.refuse("GET", "watch=true", 200, "", times=6)
    # wait for the watches of other tests, which end now
    other_threads = {*threading.enumerate()}
    pauses = list[float]()

    def sleep(seconds: float) -> None:
        if threading.current_thread() in other_threads:
            raise SystemExit
        pauses.append(seconds)

    monkeypatch.setattr(
        kubernetes_api, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    )
    events = Events(cluster.watch(WORKFLOWS))
    events.next()
    until("the seventh watch", lambda: len(list_watches(server)) == 7)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    server.put(WORKFLOWS_AT, make_workflow("a", "Succeeded"))
    assert events.next() == ("MODIFIED", "a", "Succeeded")


def test_a_missing_permission_ends_a_watch(server: ApiServer, cluster: Cluster):
    server.refuse("GET", "workflows", 403, make_status(403, "Forbidden", "no"))
    with pytest.raises(ApiError):
        next(iter(cluster.watch(WORKFLOWS)))


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_call_to_an_overloaded_server_is_retried(server: ApiServer, cluster: Cluster, code: int):
    server.put(WORKFLOWS_AT, make_workflow("a"))
    server.refuse("GET", "workflows/a", code, "later", times=2)
    assert cluster.get(WORKFLOWS, "a")["metadata"]["name"] == "a"


# answers that were recorded from a real API server (1.34)
REFUSALS = json.loads((Path(__file__).parent / "refusals.json").read_text())
WORDS = {
    "stranger": ["rejects the credentials of context 'here'"],
    "forbidden": ["ann may not create workflows", "models", "rekindle platform render"],
    "quota": ["quota 'compute'", "requests.cpu=2", "lower"],
    "pod security": ["enforces PodSecurity", "allowPrivilegeEscalation"],
    "no namespace": ["namespace nowhere does not exist", "rekindle platform render"],
    "no such workflow": ["workflows.argoproj.io 'a' does not exist", "rekindle status --cluster"],
    "no such kind": ["Argo Workflows is not installed", "doctor --cluster"],
    "exists": ["'a' exists already", "generateName"],
    "changed": ["was changed by another client", "try again"],
    "invalid deployment": [
        "change spec.replicas: Invalid value: -1",
        "; spec.template.spec.containers[0].image: Required",
        "alphanumeric character (e.g. 'my-name',  or '123-abc')",
    ],
    "wrong type": ["cannot unmarshal string into Go struct field DeploymentSpec.spec.replicas"],
    "webhook": [
        "validator.pytorchjob.training-operator.kubeflow.org refuses",
        'Unsupported value: "Boss"',
    ],
    "webhook away": [
        "webhook validator.pytorchjob.away.example.com does not answer",
        'service "away" not found',
    ],
    "too large": ["1.5 MB"],
    "too large for etcd": ["1.5 MB", "split the pipeline"],
    "being deleted": ["is being deleted", "--namespace"],
}
RETRYABLE = {"stranger", "forbidden", "quota", "webhook away", "being deleted"}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_of_the_server_come_with_a_remedy(server: ApiServer, cluster: Cluster, case: str):
    code = REFUSALS[case]["code"]
    body = REFUSALS[case]["body"]
    server.refuse("PUT", "workflows", code, body, times=9)
    with pytest.raises(ApiError) as error:
        cluster.replace(WORKFLOWS, make_workflow("a"))
    assert error.value.code == code
    assert "regex" not in str(error.value)
    assert [word for word in WORDS[case] if word not in str(error.value)] == []
    assert isinstance(error.value, BadObject) == (case not in RETRYABLE)


def test_the_answer_of_a_proxy_is_shown_unchanged(server: ApiServer, cluster: Cluster):
    server.refuse("PUT", "workflows", 418, "<html>teapot</html>", times=9)
    with pytest.raises(ApiError, match=r"418.*teapot"):
        cluster.replace(WORKFLOWS, make_workflow("a"))


def test_an_answer_that_is_not_json_is_an_error_that_names_the_server(
    server: ApiServer, cluster: Cluster
):
    for body in ("<html>log in</html>", "[" * 100_000):
        server.refuse("GET", "version", 200, body)
        with pytest.raises(
            ApiError, match=f"127.0.0.1:{server.port} is not a Kubernetes API: GET /version answers"
        ):
            cluster.call("GET", "/version")


def test_a_list_whose_page_token_repeats_is_an_error(server: ApiServer, cluster: Cluster) -> None:
    page = json.dumps({"items": [], "metadata": {"continue": "same"}})
    server.refuse("GET", WORKFLOWS_AT, 200, page, times=2)
    with pytest.raises(ApiError, match='repeats the page token "same" of workflows'):
        cluster.list_objects(WORKFLOWS)


@pytest.mark.parametrize(
    "body",
    [
        '{"details": []}',
        '{"message": [], "details": "x"}',
        '{"details": {"causes": [1]}}',
        '{"details": {"causes": [{"field": 1}]}}',
        "[" * 5000,
        "\\xff",
    ],
)
@pytest.mark.parametrize("code", [403, 422, 500])
def test_a_malformed_status_of_a_server_is_one_error(code: int, body: str) -> None:
    error = make_api_error(
        code, body.encode(), PODS.path("models", "a"), "server", "context", "models"
    )
    assert error.code == code
    assert len(error.lines) == 1


@pytest.mark.parametrize("message_place", ["message", "cause"])
def test_a_long_message_of_a_server_is_one_error(message_place: str) -> None:
    text = 200_000 * " in body should match '.*"
    status: dict[str, object] = {"message": text}
    if message_place == "cause":
        status = {"message": "", "details": {"causes": [{"field": "a", "message": text}]}}
    error = make_api_error(
        422, json.dumps(status).encode(), PODS.path("m", "a"), "server", "c", "m"
    )
    assert len(str(error)) < 20_000


@pytest.mark.parametrize(
    "event",
    [
        "1",
        "[]",
        "null",
        '{"type": "ADDED"}',
        '{"type": "ADDED", "object": {}}',
        '{"type": "ADDED", "object": {"metadata": []}}',
        '{"type": "ERROR", "object": []}',
        '{"type": "ERROR", "object": {"code": "x"}}',
        '{"type": "BOOKMARK"}',
    ],
)
def test_a_malformed_event_of_a_watch_counts_as_a_lost_connection(event: str) -> None:
    with pytest.raises(ApiError, match="an event of a watch is incomplete"):
        kubernetes_api._parse_event(event.encode())


def test_an_unreachable_cluster_is_named(server: ApiServer, cluster: Cluster):
    server.stop()
    with pytest.raises(
        ApiError,
        match=r"http://127.0.0.1:\d+ does not answer \(Connection refused\).*context 'here'",
    ):
        cluster.get(PODS, "a")


def test_missing_kubeconfigs_and_unknown_contexts_have_a_remedy(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ConfigError, match='Did you mean "here"'):
        Cluster.connect(context="hree")
    server.kubeconfig.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be used"):
        Cluster.connect()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig.with_name("none")))
    with pytest.raises(ConfigError, match="no cluster is configured"):
        Cluster.connect()


def test_the_namespace_option_overrides_the_context(server: ApiServer, tmp_path: Path):
    assert Cluster.connect().namespace == "models"
    other_cluster = Cluster.connect(context="here", namespace="other")
    assert other_cluster.namespace == "other"
    assert other_cluster.flags == " --context here --namespace other"
