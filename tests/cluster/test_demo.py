"""The demo on a real cluster: from `submit` to a model that serves, and the same bits as on this machine."""

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen
from typing import Any

import pytest

from tests.cluster.run import Place, Run, local, rekindle

MODEL = "demo"


@pytest.fixture(scope="module")
def demo(place: Place) -> Run:
    """configs/demo.yaml, from `submit` to its end."""
    run = Run.submit(place)
    assert run.ended() == "Succeeded"
    return run


@contextmanager
def reached(place: Place) -> Iterator[str]:
    """The address of the model's service, for this machine."""
    command = ["kubectl", "--namespace", place.kube.namespace, "port-forward", f"service/{MODEL}", f":{place.port}"]
    with Popen(command, stdout=PIPE, text=True) as forward:
        assert forward.stdout
        try:  # Forwarding from 127.0.0.1:43210 -> 8080
            yield "http://" + forward.stdout.readline().split()[2]
        finally:
            forward.terminate()


def served(place: Place) -> dict[str, Any]:
    """What serves: it scores its own example, and says which weights did."""
    with reached(place) as address:
        with urllib.request.urlopen(f"{address}/v1/models/demo/example") as answer:
            body = answer.read()
        request = urllib.request.Request(
            f"{address}/v1/models/demo:predict", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return {"sha256": answer.headers["model-sha256"], **json.load(answer)}


@pytest.fixture(scope="module")
def here(place: Place, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same on this machine."""
    return local(tmp_path_factory.mktemp("home"), *place.sets())


def test_the_demo_serves_a_verified_model(demo: Run):
    outputs = demo.outputs()
    assert outputs["verdict"] == "release"
    answer = served(demo.place)
    assert answer["sha256"] == outputs["model_sha256"] == demo.sha256()
    assert 0 < answer["predictions"][0] < 1
    assert [node["phase"] for node in demo.nodes("verify")] == ["Succeeded"]


def test_no_step_of_the_demo_was_tried_twice(demo: Run):
    attempts = {node["displayName"]: node["phase"] for node in demo.workflow()["status"]["nodes"].values()}
    assert not {name: phase for name, phase in attempts.items() if phase not in ("Succeeded", "Skipped", "Omitted")}


def test_a_cluster_gives_the_bits_of_this_machine(demo: Run, here: dict[str, Any]):
    assert here["model_sha256"] == demo.outputs()["model_sha256"]
    assert here["metrics"]["ap"] == json.loads(demo.outputs()["metrics"])["ap"]


def test_the_manifest_of_the_cluster_is_that_of_this_machine(demo: Run, here: dict[str, Any]):
    submitted = demo.workflow()
    arguments = {parameter["name"]: parameter["value"] for parameter in submitted["spec"]["arguments"]["parameters"]}
    annotated = submitted["metadata"]["annotations"]["rekindle.dev/manifest-sha256"]
    assert arguments["manifest_hash"] == annotated == here["manifest_sha256"]


def test_a_gate_that_refuses_leaves_the_champion_serving(demo: Run):
    kept = Run.submit(demo.place, "gate.minimum={auc: 0.9999}", "train.seed=9")
    assert kept.ended() == "Succeeded"
    assert kept.outputs()["verdict"] == "keep"
    assert served(demo.place)["sha256"] == demo.sha256() != kept.sha256()


def test_a_worse_model_never_replaces_a_better_one(demo: Run):
    worse = Run.submit(demo.place, "train.steps=2", "train.learning_rate=0.3", "gate.minimum={auc: 0.01}")
    assert worse.ended() == "Succeeded"
    assert worse.outputs()["verdict"] == "keep"
    assert served(demo.place)["sha256"] == demo.sha256() != worse.sha256()


def test_a_rollback_lets_the_former_release_answer_and_makes_it_the_champion(demo: Run):
    place, kube = demo.place, demo.place.kube
    other = Run.submit(place, "train.seed=9", "gate={minimum: {auc: 0.01}, tolerance: 1, confidence: 0.999}")
    assert other.ended() == "Succeeded"
    assert other.outputs()["verdict"] == "release"
    assert served(place)["sha256"] == other.sha256() != demo.sha256()
    service = kube.get("service", "mlflow")
    assert service
    answer = rekindle(
        *("rollback", MODEL, "--namespace", kube.namespace, "-o", "json"),
        MLFLOW_TRACKING_URI=f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}",
        S3_BUCKET=place.store.bucket,
        S3_ENDPOINT_URL=os.environ["REKINDLE_TEST_S3"],
        AWS_ACCESS_KEY_ID=os.environ["AWS_ACCESS_KEY_ID"],
        AWS_SECRET_ACCESS_KEY=os.environ["AWS_SECRET_ACCESS_KEY"],
    )
    assert json.loads(answer)["version"] == "1"
    assert served(place)["sha256"] == demo.sha256()
