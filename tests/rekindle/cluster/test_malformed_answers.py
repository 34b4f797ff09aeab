"""`rekindle platform check` and `rekindle rollback` end with results or one error if the API server
answers with malformed documents."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.manifest.types import Object
from rekindle import tracking
from rekindle.blocks.settings import ClusterConfig
from rekindle.cluster.cluster_objects import ClusterObjects
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.doctor import cluster_checks
from rekindle.doctor.pod_checks import run_pod_checks
from rekindle.errors import Check, RekindleError
from rekindle.release.rollback import roll_back
from rekindle.release.serve_config import VERSION_ANNOTATION
from rekindle.storage import Store
from rekindle.training.spec import TrainConfig
from tests.rekindle.cluster import valid_objects
from tests.rekindle.cluster.healthy import HealthyCluster
from tests.rekindle.mlflow_documents import DOCUMENTS, MODEL_VERSION, MlflowServer
from tests.rekindle.mutations import make_mutations

API = "/api/v1/namespaces/models"
POD = re.compile(rf"{API}/pods/rekindle-[^/]*")
LOG = re.compile(rf"{API}/pods/rekindle-[^/]*/log")
PROBE_POD = {**valid_objects.POD, "metadata": {**valid_objects.METADATA, "name": "rekindle-x"}}
DEPLOYMENTS_AT = "/apis/apps/v1/namespaces/models/deployments"


class ChangedCluster(HealthyCluster):
    """Answers the requests with a method and path with a changed document."""

    forged: tuple[str, str | re.Pattern[str], Object | str] | None = None

    def refusal(self, method: str, path: str) -> tuple[int, Object | str] | None:
        if self.forged and method == self.forged[0]:
            actual = path.partition("?")[0]
            if re.fullmatch(self.forged[1], actual):
                return (201 if method == "POST" else 200), self.forged[2]
        return super().refusal(method, path)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChangedCluster]:
    with ChangedCluster(tmp_path) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


def check_platform() -> list[Check]:
    settings = ClusterConfig.model_validate({}), TrainConfig.model_validate({})
    return cluster_checks.check_cluster(Cluster.connect(), *settings, probe_timeout_seconds=0.05)


# the documents that `rekindle platform check` reads
CHECKED_DOCUMENTS: dict[str, tuple[str, str | re.Pattern[str], Any]] = {
    "version": ("GET", "/version", {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}),
    "kinds": ("GET", "/apis/argoproj.io/v1alpha1", {"resources": [{"name": "workflows"}]}),
    "controllers": ("GET", "/api/v1/pods", {"items": [valid_objects.POD], "metadata": {}}),
    "nodes": ("GET", "/api/v1/nodes", {"items": [valid_objects.CLUSTER_NODE], "metadata": {}}),
    "namespace": ("GET", API, {"metadata": {"name": "models", "labels": {"a": "b"}}}),
    "map": ("GET", f"{API}/configmaps/rekindle", {"metadata": {"name": "x"}, "data": {"a": "b"}}),
    "secret": ("GET", f"{API}/secrets/rekindle-s3", {"metadata": {"name": "x"}, "data": {}}),
    "review": (
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {"status": {"allowed": True, "reason": "x"}},
    ),
    "probe's pod": ("GET", POD, PROBE_POD),
    "probe's log": ("GET", LOG, {"object store": [True, "x"], "MLflow": [False, "y"]}),
}


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"5",
        b'{"MLflow": 5}',
        b'{"MLflow": [1, 2]}',
        b'{"MLflow": []}',
        b'{"x": [true, "y"]}',
    ],
)
def test_a_malformed_line_of_the_probe_is_not_its_result(
    server: ChangedCluster, line: bytes
) -> None:
    server.forged = ("GET", LOG, line.decode())
    checks = list(run_pod_checks(Cluster.connect(), ClusterConfig.model_validate({}), 5))
    assert {check.name for check in checks if "image" not in check.name} <= {
        "probe",
        "x from a pod",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED_DOCUMENTS)
def test_a_platform_check_has_results_after_a_malformed_answer(
    server: ChangedCluster, name: str
) -> None:
    method, path, valid = CHECKED_DOCUMENTS[name]
    for body in list(make_mutations(valid))[::29]:
        server.forged = (method, path, body.decode(errors="replace"))
        checks = check_platform()
        assert checks
        assert all(isinstance(check.ok, bool) for check in checks)


def answer_with_versions(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the simulated MLflow list two promoted versions; the second one is the champion."""
    versions = [
        {
            **MODEL_VERSION,
            "version": number,
            "tags": [
                *(tag for tag in MODEL_VERSION["tags"] if tag["key"] != tracking.DEPLOYMENT),
                {"key": tracking.DEPLOYMENT, "value": f"demo-{number}"},
            ],
        }
        for number in ("1", "2")
    ]
    model = {"name": "demo", "aliases": [{"alias": "champion", "version": "2"}]}
    for path, document in {
        "mlflow/model-versions/search": {"model_versions": versions},
        "mlflow/model-versions/get": {"model_version": versions[1]},
        "mlflow/registered-models/get": {"registered_model": model},
    }.items():
        monkeypatch.setitem(DOCUMENTS, path, document)


# the objects that `rekindle rollback` reads
SERVED_DOCUMENTS: dict[str, tuple[str, Any, Callable[[object], object]]] = {
    "Deployments": (
        DEPLOYMENTS_AT,
        {**valid_objects.DEPLOYMENT, "metadata": {**valid_objects.METADATA, "name": "demo-1"}},
        lambda obj: {"items": [obj], "metadata": {}},
    ),
    "Deployment": (f"{DEPLOYMENTS_AT}/demo-1", valid_objects.DEPLOYMENT, lambda obj: obj),
    "Service": (f"{API}/services/demo", valid_objects.SERVICE, lambda obj: obj),
    "autoscaler": (
        "/apis/autoscaling/v2/namespaces/models/horizontalpodautoscalers/demo",
        valid_objects.AUTOSCALER,
        lambda obj: obj,
    ),
}


@pytest.fixture
def serving(server: ChangedCluster) -> ChangedCluster:
    """A cluster in which version 2 of the model is deployed, and version 1 can be deployed."""
    for number in (1, 2):
        annotations = {VERSION_ANNOTATION: str(number)}
        metadata = {
            **valid_objects.METADATA,
            "name": f"demo-{number}",
            "annotations": annotations,
        }
        server.put(DEPLOYMENTS_AT, {**valid_objects.DEPLOYMENT, "metadata": metadata})
    server.put(f"{API}/services", valid_objects.SERVICE)
    autoscalers = "/apis/autoscaling/v2/namespaces/models/horizontalpodautoscalers"
    server.put(autoscalers, valid_objects.AUTOSCALER)
    return server


@pytest.fixture
def store(s3: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with MlflowServer() as mlflow:
        answer_with_versions(mlflow, monkeypatch)
        yield s3


def test_a_rollback_reaches_the_traffic_of_the_valid_objects(
    serving: ChangedCluster, store: Store
) -> None:
    results: list[Any] = []
    try:
        roll_back(ClusterObjects(Cluster.connect()), store, "demo", "", 0.05, results.append)
    except RekindleError as error:
        results.append(str(error))
    assert results, results
    paths = [path for method, path, _ in serving.requests if method == "PATCH"]
    assert any("/services/demo" in path for path in paths)


@pytest.mark.parametrize("name", SERVED_DOCUMENTS)
def test_a_rollback_is_one_error_after_a_malformed_object(
    serving: ChangedCluster, store: Store, name: str
) -> None:
    path, valid, wrap = SERVED_DOCUMENTS[name]
    for body in list(make_mutations(valid))[::151]:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            continue

        serving.forged = ("GET", re.escape(path), json.dumps(wrap(value)))
        try:
            roll_back(ClusterObjects(Cluster.connect()), store, "demo", "", 0.05, lambda _: None)
        except RekindleError as error:
            assert not re.search("[\x00-\x1f\x7f-\x9f]", str(error)), (body, str(error))
        store.delete(["releases/demo/promotion.json"])
