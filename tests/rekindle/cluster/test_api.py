"""What a user of a cluster would lose: events while a server restarts, answers, and the way out of a refusal."""

import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle.cluster import api
from rekindle.cluster.api import PODS, WORKFLOWS, Cluster
from rekindle.cluster.errors import ApiError, BadObject
from rekindle.errors import ConfigError
from tests.rekindle.cluster.server import ApiServer, status
from tests.waiting import until

WORKFLOWS_AT = "/apis/argoproj.io/v1alpha1/namespaces/models/workflows"


def workflow(name: str, phase: str = "Running") -> dict[str, Any]:
    return {"kind": "Workflow", "metadata": {"name": name}, "spec": {}, "status": {"phase": phase}}


class Events:
    """What a watch gives, read by a thread; `next()` waits for one."""

    def __init__(self, events: Iterator[tuple[str, dict[str, Any]]]) -> None:
        self.events, self.found = events, queue.Queue[tuple[str, str, str]]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for kind, changed in self.events:
            self.found.put((kind, changed["metadata"]["name"], changed["status"]["phase"]))

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

    def lost(error: Exception) -> None:
        if not heard:
            server.start()
        heard.append(str(error))

    events = Events(cluster.watch(WORKFLOWS, on_lost=lost))
    events.next()
    server.stop()
    server.put(WORKFLOWS_AT, workflow("a", "Succeeded"))
    assert events.next() == ("MODIFIED", "a", "Succeeded")
    assert heard and "does not answer (Connection refused)" in heard[0]


def watches(server: ApiServer) -> list[str]:
    return [path for _, path, _ in server.requests if "watch=true" in path]


def test_a_server_that_ends_each_watch_at_once_is_asked_ever_less_often(
    server: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    server.put(WORKFLOWS_AT, workflow("a"))
    server.refuse("GET", "watch=true", 200, "", times=6)
    before, pauses = {*threading.enumerate()}, list[float]()  # other tests leave watches behind: they end here

    def sleep(seconds: float) -> None:
        if threading.current_thread() in before:
            raise SystemExit
        pauses.append(seconds)

    monkeypatch.setattr(api, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    events = Events(cluster.watch(WORKFLOWS))
    events.next()
    until("the watch that is not ended", lambda: len(watches(server)) == 7)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    server.put(WORKFLOWS_AT, workflow("a", "Succeeded"))
    assert events.next() == ("MODIFIED", "a", "Succeeded")


def test_what_is_not_allowed_ends_a_watch_at_once(server: ApiServer, cluster: Cluster):
    server.refuse("GET", "workflows", 403, status(403, "Forbidden", "no"))
    with pytest.raises(ApiError):
        next(iter(cluster.watch(WORKFLOWS)))


@pytest.mark.parametrize("code", [429, 500, 503])
def test_an_overloaded_server_is_asked_again(server: ApiServer, cluster: Cluster, code: int):
    server.put(WORKFLOWS_AT, workflow("a"))
    server.refuse("GET", "workflows/a", code, "later", times=2)
    assert cluster.get(WORKFLOWS, "a")["metadata"]["name"] == "a"


REFUSALS = json.loads((Path(__file__).parent / "refusals.json").read_text())  # what a real API server (1.34) answered
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
        "\n  spec.replicas: Invalid value: -1",
        "\n  spec.template.spec.containers[0].image: Required",
    ],
    "wrong type": ["cannot unmarshal string into Go struct field DeploymentSpec.spec.replicas"],
    "webhook": ["validator.pytorchjob.training-operator.kubeflow.org refuses", 'Unsupported value: "Boss"'],
    "webhook away": ["webhook validator.pytorchjob.away.example.com does not answer", 'service "away" not found'],
    "too large": ["1.5 MB"],
    "too large for etcd": ["1.5 MB", "split the pipeline"],
    "being deleted": ["is being deleted", "--namespace"],
}
AGAIN = {"stranger", "forbidden", "quota", "webhook away", "being deleted"}  # may go well another time


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_server_refuses_comes_with_what_to_change(server: ApiServer, cluster: Cluster, case: str):
    code, body = REFUSALS[case]["code"], REFUSALS[case]["body"]
    server.refuse("PUT", "workflows", code, body, times=9)
    with pytest.raises(ApiError) as error:
        cluster.replace(WORKFLOWS, workflow("a"))
    assert error.value.code == code
    assert [word for word in WORDS[case] if word not in str(error.value)] == []
    assert isinstance(error.value, BadObject) == (case not in AGAIN)


def test_what_a_proxy_says_is_shown_as_it_is(server: ApiServer, cluster: Cluster):
    server.refuse("PUT", "workflows", 418, "<html>teapot</html>", times=9)
    with pytest.raises(ApiError, match=r"418.*teapot"):
        cluster.replace(WORKFLOWS, workflow("a"))


def test_an_answer_that_is_no_json_is_one_error_that_names_the_server(server: ApiServer, cluster: Cluster):
    for body in ("<html>log in</html>", "[" * 100_000):
        server.refuse("GET", "version", 200, body)
        with pytest.raises(ApiError, match=f"127.0.0.1:{server.port} is not a Kubernetes API: GET /version answers"):
            cluster.call("GET", "/version")


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
