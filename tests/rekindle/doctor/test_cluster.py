"""What would be lost if the doctor of a cluster errs: a fault that nobody finds before the run does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rekindle.blocks.settings import ClusterConfig
from rekindle.cli import commands
from rekindle.cluster.api import Cluster
from rekindle.doctor import cluster as doctor
from rekindle.errors import Check
from rekindle.training.spec import TrainConfig
from tests.commands import ROOT
from tests.rekindle.cluster.server import status
from tests.rekindle.cluster.sound import PODS_AT, SoundCluster

IMAGE = "rekindle:0.1"
GPUS = {"pods": {"train": {"gpus": 4}}}


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SoundCluster]:
    with SoundCluster(tmp_path) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


def examined(cluster: Any = None, train: Any = None, seconds: float = 5) -> dict[str, Check]:
    """What was found, by name."""
    settings = ClusterConfig.model_validate(cluster or {}), TrainConfig.model_validate(train or {})
    return {check.name: check for check in doctor.check(Cluster.connect(), *settings, seconds)}


def wrong(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.found for name, check in checks.items() if not check.ok}


def test_in_a_sound_namespace_nothing_is_wrong_and_nothing_is_left(sound: SoundCluster):
    checks = examined()
    assert wrong(checks) == {}
    names = {"API server", "training operator", "your rights", "account", "artifact repository", "pod of serve"}
    assert names | {"webhook", "init container", f"image {IMAGE}", "MLflow from a pod"} <= set(checks)
    assert sound.objects[PODS_AT] == {}


@pytest.mark.parametrize(
    "gpus, workers, words",
    [(4, 4, ""), (4, 2, "train.workers is 2: it must be a multiple of cluster.pods.train.gpus (4)")],
)
def test_the_webhook_is_given_the_job_of_the_config_and_no_check_hides_the_others(
    sound: SoundCluster, gpus: int, workers: int, words: str
):
    flags = ["--set", f"cluster.pods.train.gpus={gpus}", "--set", f"train.workers={workers}"]
    config = [str(ROOT / "configs/demo.yaml"), "--set", "train.max_workers=4", *flags]
    done = CliRunner().invoke(commands, ["platform", "check", *config, "--wait", "5", "-o", "json"])
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert (checks["webhook"]["ok"], words in checks["webhook"]["found"]) == (not words, True)
    assert [name for name, check in checks.items() if not check["ok"]] == (["webhook"] if words else [])
    assert "MLflow from a pod" in checks
    replicas = [body["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] for _, path, body in sound.requests
                if "pytorchjobs" in path]  # fmt: skip
    assert replicas == ([] if words else [1, 1]), "four workers are one pod of four GPUs"


def test_a_kind_that_is_not_installed_is_named_with_its_installer(sound: SoundCluster):
    del sound.fixed["/apis/kubeflow.org/v1"]
    sound.refuse("GET", "/apis/kubeflow.org/v1$", 404, "404 page not found")
    sound.fixed["/apis/argoproj.io/v1alpha1"]["resources"].pop()
    checks = examined()
    assert wrong(checks) == {"kubeflow.org/v1": "no pytorchjobs", "argoproj.io/v1alpha1": "no workflowtaskresults"}
    assert "training operator 1.9" in checks["kubeflow.org/v1"].remedy
    assert "Argo Workflows 3.7" in checks["argoproj.io/v1alpha1"].remedy


@pytest.mark.parametrize(
    "name, labels, old, too_old",
    [
        ("Argo's controller", {"app": "workflow-controller"}, "workflow-controller:v3.6.12", True),
        ("Argo's controller", {"app": "workflow-controller"}, "workflow-controller:v4.0.0", False),
        ("training operator", {"control-plane": "kubeflow-training-operator"}, "training-operator:v1.8.1", True),
        ("training operator", {"control-plane": "kubeflow-training-operator"}, "training-operator:v1-855e096", False),
    ],
)
def test_a_controller_that_is_too_old_is_found(
    sound: SoundCluster, name: str, labels: dict[str, str], old: str, too_old: bool
):
    sound.controller("somewhere", labels, f"registry.example.com/{old}", configMap={"name": "init"})
    sound.put(
        "/api/v1/namespaces/somewhere/configmaps", sound.objects["/api/v1/namespaces/kubeflow/configmaps"]["init"]
    )
    assert wrong(examined()) == ({name: f"{old} in somewhere"} if too_old else {})


def test_a_controller_that_is_away_and_one_that_looks_elsewhere_are_found(sound: SoundCluster):
    sound.remove("/api/v1/pods", "kubeflow-training-operator")
    argo = sound.objects["/api/v1/pods"]["workflow-controller"]
    argo["spec"]["containers"][0]["args"] = ["--managed-namespace", "other"]
    checks = examined()
    assert "no pod with the label control-plane=kubeflow-training-operator" in checks["training operator"].found
    assert "sees only namespace other" in checks["Argo's controller"].found
    assert "Let it watch models" in checks["Argo's controller"].remedy


@pytest.mark.parametrize("gang, scheduler", [("volcano", "volcano"), ("coscheduling", "scheduler-plugins-scheduler")])
def test_a_gang_that_the_operator_does_not_start_whole_is_found(sound: SoundCluster, gang: str, scheduler: str):
    asked = {"gang": gang, "queue": "q"}
    checks = examined(asked)
    assert wrong(checks) == {"gang": "it has no gang scheduler"}
    assert f"--gang-scheduler-name={scheduler}" in checks["gang"].remedy
    operator = sound.objects["/api/v1/pods"]["kubeflow-training-operator"]["spec"]["containers"][0]
    operator["command"] = ["/manager", "--gang-scheduler-name", "another"]
    assert wrong(examined(asked)) == {"gang": "the training operator has --gang-scheduler-name=another"}
    operator["command"] = ["/manager", f"--gang-scheduler-name={scheduler}"]
    assert wrong(examined(asked)) == {}


def test_a_queue_that_nobody_serves_is_found(sound: SoundCluster):
    asked = {"gang": "kueue", "queue": "q"}
    assert wrong(examined(asked)) == {"gang": "there is no Kueue"}
    sound.fixed["/apis/kueue.x-k8s.io/v1beta2"] = {"resources": [{"name": "localqueues"}]}
    queues = "/apis/kueue.x-k8s.io/v1beta2/namespaces/models/localqueues"
    sound.put(queues, {"metadata": {"name": "train"}, "spec": {"clusterQueue": "research"}})
    checks = examined(asked)
    assert wrong(checks) == {"queue q": "it is not here"} and "(train)" in checks["queue q"].remedy
    assert wrong(examined(asked | {"queue": "train"})) == {}


def test_a_kubernetes_that_is_too_old_ends_the_examination(sound: SoundCluster):
    sound.version_is("29")
    assert wrong(examined()) == {"API server": f"http://127.0.0.1:{sound.port}, Kubernetes v1.29.0"}


def test_the_versions_that_are_wanted_are_those_of_the_document():
    text = (ROOT / "docs/cluster.md").read_text()
    needed, _, _ = text.partition("## 1.")
    assert f"Kubernetes {'.'.join(map(str, doctor.KUBERNETES))} or newer" in needed
    assert f"[Argo Workflows](https://argo-workflows.readthedocs.io) {'.'.join(map(str, doctor.ARGO))}" in needed
    assert needed.split("training operator](")[1].split(") ")[1].startswith(".".join(map(str, doctor.OPERATOR)))


def test_a_webhook_that_looks_at_nothing_and_one_that_is_dead_are_found(sound: SoundCluster):
    sound.webhook = False
    assert "no webhook looks at jobs" in wrong(examined())["webhook"]
    why = 'failed calling webhook "validator.pytorchjob": no endpoints available'
    sound.refuse("POST", "pytorchjobs", 500, status(500, "InternalError", why), times=9)
    checks = examined()
    assert list(wrong(checks)) == ["webhook"] and "does not answer" in checks["webhook"].found
    assert "rollout restart" in checks["webhook"].remedy


def test_a_right_that_is_missing_is_named(sound: SoundCluster):
    sound.denied = {("pytorchjobs", "patch"), ("pods", "delete")}
    assert wrong(examined()) == {
        "your rights": "may not delete pods",
        "account": "may not patch pytorchjobs.kubeflow.org",
    }


def test_what_may_not_be_looked_at_is_a_warning_and_the_rest_is_examined(sound: SoundCluster):
    del sound.fixed["/api/v1/namespaces/models"]
    sound.refuse("GET", "/namespaces/models$", 403, status(403, "Forbidden", "no"), times=9)
    checks = examined()
    assert wrong(checks).keys() == {"namespace", "init container"}
    assert not checks["namespace"].required and checks["namespace"].found.startswith("not checked: ")
    assert "MLflow from a pod" in checks


def test_a_broken_repository_hides_nothing_and_no_password_is_shown(sound: SoundCluster):
    maps = sound.objects["/api/v1/namespaces/models/configmaps"]
    maps["rekindle"]["data"]["S3_ENDPOINT_URL"] = "http://ann:hunter2@s3:9000"
    assert "hunter2" not in str(examined()["artifact repository"])
    data = maps["artifact-repositories"]["data"]
    data.update(dict.fromkeys(data, "a: [b"))
    checks = examined()
    assert wrong(checks).keys() == {"artifact repository"} and "MLflow from a pod" in checks
    assert "ConfigMap artifact-repositories" in checks["artifact repository"].found


def test_an_image_that_is_still_being_pulled_is_no_failure_and_says_how_to_wait(sound: SoundCluster):
    sound.states[IMAGE] = {"waiting": {"reason": "ContainerCreating"}}
    checks = examined(seconds=0.1)
    assert "still being pulled" in checks[f"image {IMAGE}"].found and "--wait 900" in checks[f"image {IMAGE}"].remedy
    for name in ("object store from a pod", "MLflow from a pod"):
        assert checks[name].found == f"not checked: image {IMAGE} is not there yet"
    assert not any(check.required for check in checks.values() if not check.ok)
    assert sound.objects[PODS_AT] == {}


def test_an_image_that_is_nowhere_is_a_failure(sound: SoundCluster):
    sound.states["nowhere:1"] = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    checks = examined({"pods": {"serve": {"image": "nowhere:1"}}})
    assert wrong(checks) == {"image nowhere:1": "ImagePullBackOff: not found"}
    assert "--push" in checks["image nowhere:1"].remedy and checks["image nowhere:1"].required


def test_a_pod_that_no_node_takes_is_not_said_to_lack_its_image(sound: SoundCluster):
    sound.unscheduled = "0/3 nodes are available: Insufficient memory"
    checks = examined(seconds=0.1)
    assert "Insufficient memory" in checks["pod of the probe"].found and checks["pod of the probe"].required
    assert f"image {IMAGE}" not in checks and "not checked" in checks["MLflow from a pod"].found


def test_a_pod_that_does_not_answer_in_time_is_said(sound: SoundCluster):
    sound.states[IMAGE] = {"running": {}}
    checks = examined(seconds=0.1)
    assert "gave no answer within 0.1 s" in checks["MLflow from a pod"].found and checks["MLflow from a pod"].required


@pytest.mark.parametrize("answers", [1, 9])
def test_a_pod_whose_creation_was_never_confirmed_does_not_stay(sound: SoundCluster, answers: int):
    """Made by the first attempt, of which the answer is lost; then the server says that it is there, or nothing."""
    sound.lost = 1
    if answers > 1:
        sound.refuse("POST", f"{PODS_AT}$", 503, status(503, "Unavailable", "away"), times=answers)
    checks = examined()
    assert ("MLflow from a pod" in checks) == (answers == 1)
    assert sound.objects.get(PODS_AT, {}) == {}


def test_a_server_that_could_write_the_bucket_or_would_never_start_is_found(sound: SoundCluster):
    secrets = sound.objects["/api/v1/namespaces/models/secrets"]
    kept = secrets["rekindle-serving"]
    secrets["rekindle-serving"] = {**kept, "data": secrets["rekindle-s3"]["data"]}
    assert "whoever takes a server over has the bucket" in wrong(examined())["serving credentials"]
    del secrets["rekindle-serving"], sound.objects["/api/v1/namespaces/models/serviceaccounts"]["rekindle-serving"]
    checks = examined()
    assert wrong(checks).keys() == {"serving account", "serving credentials"}
    assert checks["serving account"].required and not checks["serving credentials"].required
    assert "create secret generic rekindle-serving" in checks["serving credentials"].remedy


def test_another_backend_needs_its_own_kinds_and_no_training_operator(sound: SoundCluster):
    sound.remove("/api/v1/pods", "kubeflow-training-operator")
    sound.refuse("GET", "/apis/jobset.x-k8s.io/v1alpha2$", 404, "404 page not found", times=1)
    assert wrong(examined({"backend": "jobset"})) == {"jobset.x-k8s.io/v1alpha2": "no jobsets"}
    sound.fixed["/apis/jobset.x-k8s.io/v1alpha2"] = {"resources": [{"name": "jobsets"}]}
    assert wrong(examined({"backend": "jobset"})) == {}
    refused = "failurePolicy rules action RestartJob is not allowed when RestartJob feature gate is disabled"
    sound.refuse("POST", "jobsets", 422, status(422, "Invalid", refused), times=9)
    checks = examined({"backend": "jobset", "restart_job": True})
    assert "feature gate is disabled" in checks["job"].found and "cluster.restart_job" in checks["job"].remedy
