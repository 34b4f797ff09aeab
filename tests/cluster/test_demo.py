"""The demo on a real cluster, from `submit` to a serving model with the same bits as on this
machine."""

import json
import time
import urllib.request
from typing import Any

import pytest

from benchmarks.bars import make_bar, report
from tests.cluster.run import Namespace, Run, rekindle, run_locally

MODEL = "demo"


@pytest.fixture(scope="module")
def demo(namespace: Namespace) -> Run:
    """The completed run of configs/demo.yaml."""
    run = Run.submit(namespace)
    assert run.wait_for_end() == "Succeeded"
    return run


def predict(namespace: Namespace) -> dict[str, Any]:
    """Return the prediction of the deployed model for its own example, with the sha256 of the
    model's weights."""
    with namespace.kube.forward(MODEL, namespace.port) as address:
        with urllib.request.urlopen(f"{address}/v1/models/demo/example") as answer:
            body = answer.read()
        request = urllib.request.Request(
            f"{address}/v1/models/demo:predict", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return {"sha256": answer.headers["model-sha256"], **json.load(answer)}


@pytest.fixture(scope="module")
def local_result(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of the demo on this machine, with the same config."""
    return run_locally(tmp_path_factory.mktemp("home"), *namespace.sets())


def test_the_demo_serves_a_verified_model(demo: Run):
    outputs = demo.outputs()
    assert outputs["verdict"] == "release"
    answer = predict(demo.namespace)
    assert answer["sha256"] == outputs["model_sha256"] == demo.sha256()
    assert 0 < answer["predictions"][0] < 1
    assert [node["phase"] for node in demo.nodes("verify")] == ["Succeeded"]


def test_no_step_of_the_demo_is_retried(demo: Run):
    attempts = {
        node["displayName"]: node["phase"] for node in demo.workflow()["status"]["nodes"].values()
    }
    assert not {
        name: phase
        for name, phase in attempts.items()
        if phase not in ("Succeeded", "Skipped", "Omitted")
    }


def test_the_weights_have_the_same_bits_as_in_a_local_run(demo: Run, local_result: dict[str, Any]):
    assert local_result["model_sha256"] == demo.outputs()["model_sha256"]
    assert local_result["metrics"]["ap"] == json.loads(demo.outputs()["metrics"])["ap"]


def test_the_manifest_has_the_same_hash_as_in_a_local_run(demo: Run, local_result: dict[str, Any]):
    submitted = demo.workflow()
    arguments = {
        parameter["name"]: parameter["value"]
        for parameter in submitted["spec"]["arguments"]["parameters"]
    }
    annotated = submitted["metadata"]["annotations"]["rekindle.dev/manifest-sha256"]
    assert arguments["manifest_hash"] == annotated == local_result["manifest_sha256"]


def test_the_champion_keeps_serving_if_the_gate_rejects_a_model(demo: Run):
    rejected_run = Run.submit(demo.namespace, "gate.minimum={auc: 0.9999}", "train.seed=9")
    assert rejected_run.wait_for_end() == "Succeeded"
    assert rejected_run.outputs()["verdict"] == "keep"
    assert predict(demo.namespace)["sha256"] == demo.sha256() != rejected_run.sha256()


def test_a_worse_model_does_not_replace_a_better_model(demo: Run):
    worse = Run.submit(
        demo.namespace, "train.steps=2", "train.learning_rate=0.3", "gate.minimum={auc: 0.01}"
    )
    assert worse.wait_for_end() == "Succeeded"
    assert worse.outputs()["verdict"] == "keep"
    assert predict(demo.namespace)["sha256"] == demo.sha256() != worse.sha256()


def test_a_rollback_serves_the_previous_release_as_champion(demo: Run):
    namespace = demo.namespace
    kube = demo.namespace.kube
    second_run = Run.submit(
        namespace, "train.seed=9", "gate={minimum: {auc: 0.01}, tolerance: 1, confidence: 0.999}"
    )
    assert second_run.wait_for_end() == "Succeeded"
    assert second_run.outputs()["verdict"] == "release"
    assert predict(namespace)["sha256"] == second_run.sha256() != demo.sha256()

    # MLflow accepts requests to 127.0.0.1, but not to the ClusterIP of its Service
    with kube.forward("mlflow", 5000) as address:
        variables = {"MLFLOW_TRACKING_URI": address, **namespace.variables}
        durations = list[float]()
        for version in ("1", "2", "1", "2", "1"):
            start = time.monotonic()
            flags = ("--namespace", kube.namespace, "-o", "json")
            answer = rekindle("rollback", MODEL, version, *flags, variables=variables)
            durations.append(time.monotonic() - start)
            assert json.loads(answer)["version"] == version

    report([make_bar("rollback of a model with one server", durations, "s", 5)], as_json=False)
    assert predict(namespace)["sha256"] == demo.sha256()
