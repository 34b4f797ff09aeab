"""`rekindle platform check` finds each fault of a namespace before a run fails because of it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rekindle.blocks.settings import ClusterConfig
from rekindle.cli import commands
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.kueue.queued_jobs import QueuedJob
from rekindle.doctor import cluster_checks as doctor
from rekindle.doctor import operator_checks
from rekindle.errors import Check
from rekindle.training.spec import TrainConfig
from tests.commands import ROOT
from tests.rekindle.cluster.healthy import PODS_AT, HealthyCluster
from tests.rekindle.cluster.kueue import objects as kueue
from tests.rekindle.cluster.server import make_status
from tests.rekindle.cluster.workflows import REASON, WORKLOADS, make_kueue_workload

IMAGE = "rekindle:0.1"
GPUS = {"pods": {"train": {"gpus": 4}}}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HealthyCluster]:
    with HealthyCluster(tmp_path) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


def run_checks(
    cluster: Any = None, train: Any = None, seconds: float = 5, jobs: Sequence[QueuedJob] = ()
) -> dict[str, Check]:
    configs = ClusterConfig.model_validate(cluster or {}), TrainConfig.model_validate(train or {})
    checks = doctor.check_cluster(Cluster.connect(), *configs, seconds, queued_jobs=jobs)
    return {check.name: check for check in checks}


def list_failures(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.found for name, check in checks.items() if not check.ok}


def test_all_checks_pass_in_a_healthy_namespace_and_leave_no_pods(server: HealthyCluster):
    checks = run_checks()
    assert list_failures(checks) == {}

    names = {
        "API server",
        "training operator",
        "your rights",
        "account",
        "artifact repository",
        "pod of serve",
    }

    assert names | {"webhook", "init container", f"image {IMAGE}", "MLflow from a pod"} <= set(
        checks
    )
    assert server.objects[PODS_AT] == {}


@pytest.mark.parametrize(
    "gpus, workers, words",
    [
        (4, 4, ""),
        (4, 2, "train.workers is 2: it must be a multiple of cluster.pods.train.gpus (4)"),
    ],
)
def test_the_webhook_check_uses_the_config_and_its_failure_hides_no_other_check(
    server: HealthyCluster, gpus: int, workers: int, words: str
):
    flags = ["--set", f"cluster.pods.train.gpus={gpus}", "--set", f"train.workers={workers}"]
    config = [str(ROOT / "configs/demo.yaml"), "--set", "train.max_workers=4", *flags]
    result = CliRunner().invoke(
        commands, ["platform", "check", *config, "--wait", "5", "-o", "json"]
    )
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert checks["webhook"]["ok"] == (not words)
    assert words in checks["webhook"]["found"]
    assert [name for name, check in checks.items() if not check["ok"]] == (
        ["webhook"] if words else []
    )
    assert "MLflow from a pod" in checks

    replicas = [
        body["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
        for _, path, body in server.requests
        if "pytorchjobs" in path
    ]

    assert replicas == ([] if words else [1, 1]), "four workers are one pod of four GPUs"


def test_a_missing_kind_is_named_with_its_installer(server: HealthyCluster):
    del server.fixed["/apis/kubeflow.org/v1"]
    server.refuse("GET", "/apis/kubeflow.org/v1$", 404, "404 page not found")
    server.fixed["/apis/argoproj.io/v1alpha1"]["resources"].pop()
    checks = run_checks()
    assert list_failures(checks) == {
        "kubeflow.org/v1": "no pytorchjobs",
        "argoproj.io/v1alpha1": "no workflowtaskresults",
    }
    assert "training operator 1.9" in checks["kubeflow.org/v1"].remedy
    assert "Argo Workflows 3.7" in checks["argoproj.io/v1alpha1"].remedy


@pytest.mark.parametrize(
    "name, labels, old, too_old",
    [
        ("Argo's controller", {"app": "workflow-controller"}, "workflow-controller:v3.6.12", True),
        ("Argo's controller", {"app": "workflow-controller"}, "workflow-controller:v4.0.0", False),
        (
            "training operator",
            {"control-plane": "kubeflow-training-operator"},
            "training-operator:v1.8.1",
            True,
        ),
        (
            "training operator",
            {"control-plane": "kubeflow-training-operator"},
            "training-operator:v1-855e096",
            False,
        ),
    ],
)
def test_an_outdated_controller_is_found(
    server: HealthyCluster, name: str, labels: dict[str, str], old: str, too_old: bool
):
    server.controller(
        "somewhere", labels, f"registry.example.com/{old}", configMap={"name": "init"}
    )
    server.put(
        "/api/v1/namespaces/somewhere/configmaps",
        server.objects["/api/v1/namespaces/kubeflow/configmaps"]["init"],
    )
    assert list_failures(run_checks()) == ({name: f"{old} in somewhere"} if too_old else {})


def test_missing_controllers_and_controllers_of_other_namespaces_are_found(server: HealthyCluster):
    server.remove("/api/v1/pods", "kubeflow-training-operator")
    argo = server.objects["/api/v1/pods"]["workflow-controller"]
    argo["spec"]["containers"][0]["args"] = ["--managed-namespace", "other"]
    checks = run_checks()
    assert (
        "no pod with the label control-plane=kubeflow-training-operator"
        in checks["training operator"].found
    )
    assert "sees only namespace other" in checks["Argo's controller"].found
    assert "Let the controller watch models" in checks["Argo's controller"].remedy


@pytest.mark.parametrize(
    "gang, scheduler", [("volcano", "volcano"), ("coscheduling", "scheduler-plugins-scheduler")]
)
def test_an_operator_without_the_gang_scheduler_is_reported(
    server: HealthyCluster, gang: str, scheduler: str
):
    settings = {"gang": gang, "queue": "q"}
    checks = run_checks(settings)
    assert list_failures(checks) == {
        "gang": "the training operator does not have --gang-scheduler-name"
    }
    assert f"--gang-scheduler-name={scheduler}" in checks["gang"].remedy
    operator = server.objects["/api/v1/pods"]["kubeflow-training-operator"]["spec"]["containers"][0]
    operator["command"] = ["/manager", "--gang-scheduler-name", "another"]
    assert list_failures(run_checks(settings)) == {
        "gang": "the training operator has --gang-scheduler-name=another"
    }
    operator["command"] = ["/manager", f"--gang-scheduler-name={scheduler}"]
    assert list_failures(run_checks(settings)) == {}


def pod_check(**train: Any) -> tuple[bool, bool, str]:
    check = run_checks({"pods": {"train": train}})["pod of train"]
    return check.ok, check.required, check.found


def test_a_pod_that_no_node_can_run_is_not_reported_as_fine(server: HealthyCluster):
    assert pod_check(cpu="8") == (True, True, "would be admitted, and fits a node")
    stays = "would be admitted, but stay Pending: "

    assert pod_check(cpu="64") == (
        False,
        True,
        f"{stays}the pod does not fit into any node (64 cpu of 16 of large)",
    )

    labels = "no node has the labels disk=ssd; an autoscaler may add one"
    assert pod_check(node_selector={"disk": "ssd"}) == (False, False, stays + labels)

    running = {
        "spec": {"nodeName": "large", "containers": [{"resources": {"requests": {"cpu": "10"}}}]}
    }
    server.put("/api/v1/pods", {"metadata": {"name": "other", "labels": {}}, **running})
    in_use = "the pod fits into a node, but other pods use its resources now (8 cpu of 6 of large)"
    assert pod_check(cpu="8") == (False, False, stays + in_use)
    server.put(
        "/api/v1/pods",
        {"metadata": {"name": "other", "labels": {}}, **running, "status": {"phase": "Succeeded"}},
    )
    assert pod_check(cpu="8")[0]

    (node,) = server.fixed["/api/v1/nodes"]["items"]
    node["spec"]["taints"] = [{"key": "team", "value": "a", "effect": "NoSchedule"}]
    taint = "every node has a taint that the pod does not tolerate (team=a:NoSchedule)"
    assert pod_check(cpu="8") == (False, True, stays + taint)

    for toleration in (
        {"key": "team", "operator": "Exists"},
        {"key": "team", "value": "a"},
        {"operator": "Exists"},
    ):
        assert pod_check(cpu="8", tolerations=[toleration])[0]

    assert not pod_check(cpu="8", tolerations=[{"key": "team", "value": "b"}])[0]
    node["spec"] = {"unschedulable": True}
    assert pod_check(cpu="8") == (False, False, f"{stays}no node exists; an autoscaler may add one")


def test_pods_are_not_compared_with_nodes_that_the_user_may_not_read(server: HealthyCluster):
    server.refuse("GET", "/api/v1/nodes", 403, make_status(403, "Forbidden", "nodes is forbidden"))
    ok, _, findings = pod_check(cpu="64")
    assert ok
    assert findings.startswith("would be admitted; not compared with the nodes of the cluster: ")


def test_a_queue_that_admits_no_job_is_found(server: HealthyCluster):
    settings = {"gang": "kueue", "queue": "research"}
    jobs = [QueuedJob("train", "PyTorchJob", "research")]
    server.refuse("GET", "/apis/kueue", 404, "404 page not found", times=2)
    checks = run_checks(settings, jobs=jobs)
    assert "Kueue is not installed" in list_failures(checks)["queue research"]
    assert checks["queue research"].remedy == "have Kueue installed, or leave cluster.gang empty."

    labels = server.fixed["/api/v1/namespaces/models"]
    kueue.install_kueue(server)
    server.fixed["/api/v1/namespaces/models"] = labels
    assert list_failures(run_checks(settings, jobs=jobs)) == {}

    kueue.configure_kueue(server, integrations={"frameworks": ["batch/job"]})
    check = run_checks(settings, jobs=jobs)["queue research"]
    assert not check.ok
    assert check.required
    assert check.found.startswith("Kueue does not manage PyTorchJobs on this cluster")
    assert "`- kubeflow.org/pytorchjob`" in check.remedy

    server.refuse("GET", "/clusterqueues", 403, make_status(403, "Forbidden", "no"), times=9)
    kueue.configure_kueue(server)
    check = run_checks(settings, jobs=jobs)["queue research"]
    assert not check.ok
    assert not check.required, "what may not be read is a warning"


def test_waiting_jobs_are_listed_with_the_jobs_ahead_and_the_reason(server: HealthyCluster):
    assert run_checks()["waiting jobs"].ok
    for second, owner in enumerate(["early-1-train", "demo-1-train"]):
        workload = make_kueue_workload(owner, second, QuotaReserved="False")
        server.put(WORKLOADS.format("v1beta2"), workload)

    result = CliRunner().invoke(commands, ["platform", "check", "--wait", "5"])
    assert result.exit_code == 0, "a job that waits is not a failure of the namespace"
    first, second = [
        line for line in result.output.splitlines() if line.startswith("warn waiting jobs: ")
    ]
    assert first.endswith(f": early-1-train waits in the queue train: {REASON}")
    assert second.endswith(
        f": demo-1-train waits in the queue train, behind early-1-train: {REASON}"
    )


def test_of_many_waiting_jobs_the_first_are_listed(server: HealthyCluster):
    for second in range(13):
        workload = make_kueue_workload(f"search-{second}", second, QuotaReserved="False")
        server.put(WORKLOADS.format("v1beta2"), workload)
    result = CliRunner().invoke(commands, ["platform", "check", "--wait", "5", "-o", "json"])
    texts = [check["found"] for check in json.loads(result.stdout) if "waiting" in check["name"]]
    assert texts[0].startswith("search-0 waits in the queue train: ")
    assert texts[10:] == ["3 more jobs wait behind them in the queues"]


def test_a_queue_that_may_not_be_read_is_a_warning(server: HealthyCluster):
    server.refuse("GET", "/workloads", 403, make_status(403, "Forbidden", "no"), times=9)
    check = run_checks()["waiting jobs"]
    assert not check.ok
    assert not check.required
    assert check.found.startswith("not checked: ")


def test_an_outdated_kubernetes_ends_the_checks(server: HealthyCluster):
    server.version_is("29")
    assert list_failures(run_checks()) == {
        "API server": f"http://127.0.0.1:{server.port}, Kubernetes v1.29.0"
    }


def test_required_versions_match_the_documentation():
    text = (ROOT / "docs/cluster.md").read_text()
    needed, _, _ = text.partition("## 1.")
    assert f"Kubernetes {'.'.join(map(str, doctor.MIN_KUBERNETES))} or newer" in needed
    assert (
        "[Argo Workflows](https://argo-workflows.readthedocs.io)"
        f" {'.'.join(map(str, operator_checks.MIN_ARGO))}" in needed
    )
    assert (
        needed.split("training operator](")[1]
        .split(") ")[1]
        .startswith(".".join(map(str, operator_checks.MIN_OPERATOR)))
    )


@pytest.mark.slow
def test_missing_and_unreachable_webhooks_are_found(server: HealthyCluster):
    server.webhook = False
    assert "the webhook does not validate jobs" in list_failures(run_checks())["webhook"]
    message = 'failed calling webhook "validator.pytorchjob": no endpoints available'
    server.refuse("POST", "pytorchjobs", 500, make_status(500, "InternalError", message), times=9)
    checks = run_checks()
    assert list(list_failures(checks)) == ["webhook"]
    assert "does not answer" in checks["webhook"].found
    assert "rollout restart" in checks["webhook"].remedy


def test_missing_permissions_are_named(server: HealthyCluster):
    server.denied = {("pytorchjobs", "patch"), ("pods", "delete"), ("workloads", "list")}
    checks = run_checks()
    assert list_failures(checks) == {
        "your rights": (
            "may not delete pods; may not patch pytorchjobs.kubeflow.org; may not list"
            " workloads.kueue.x-k8s.io"
        ),
        "account": "may not patch pytorchjobs.kubeflow.org",
    }
    assert "kubectl -n models create rolebinding" in checks["your rights"].remedy


def test_an_object_that_may_not_be_read_is_a_warning_and_other_checks_run(server: HealthyCluster):
    del server.fixed["/api/v1/namespaces/models"]
    server.refuse("GET", "/namespaces/models$", 403, make_status(403, "Forbidden", "no"), times=9)
    checks = run_checks()
    assert list_failures(checks).keys() == {"namespace", "init container"}
    assert not checks["namespace"].required
    assert checks["namespace"].found.startswith("not checked: ")
    assert "MLflow from a pod" in checks


def test_a_broken_artifact_repository_hides_no_check_and_shows_no_password(server: HealthyCluster):
    maps = server.objects["/api/v1/namespaces/models/configmaps"]
    maps["rekindle"]["data"]["S3_ENDPOINT_URL"] = "http://ann:hunter2@s3:9000"
    assert "hunter2" not in str(run_checks()["artifact repository"])
    data = maps["artifact-repositories"]["data"]
    data.update(dict.fromkeys(data, "a: [b"))
    checks = run_checks()
    assert list_failures(checks).keys() == {"artifact repository"}
    assert "MLflow from a pod" in checks
    assert "ConfigMap artifact-repositories" in checks["artifact repository"].found


def test_an_image_being_pulled_is_a_warning_that_tells_how_to_wait(server: HealthyCluster):
    server.states[IMAGE] = {"waiting": {"reason": "ContainerCreating"}}
    checks = run_checks(seconds=0.1)
    assert "still being pulled" in checks[f"image {IMAGE}"].found
    assert "--wait 900" in checks[f"image {IMAGE}"].remedy
    for name in ("object store from a pod", "MLflow from a pod"):
        assert checks[name].found == f"not checked: image {IMAGE} is not available"
    assert not any(check.required for check in checks.values() if not check.ok)
    assert server.objects[PODS_AT] == {}


def test_a_missing_image_is_a_failure(server: HealthyCluster):
    server.states["nowhere:1"] = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    checks = run_checks({"pods": {"serve": {"image": "nowhere:1"}}})
    assert list_failures(checks) == {"image nowhere:1": "ImagePullBackOff: not found"}
    assert "--push" in checks["image nowhere:1"].remedy
    assert checks["image nowhere:1"].required


def test_an_unschedulable_pod_is_not_reported_as_a_missing_image(server: HealthyCluster):
    server.unscheduled = "0/3 nodes are available: Insufficient memory"
    checks = run_checks(seconds=0.1)
    assert "Insufficient memory" in checks["pod of the probe"].found
    assert checks["pod of the probe"].required
    assert f"image {IMAGE}" not in checks
    assert "not checked" in checks["MLflow from a pod"].found


def test_a_pod_without_a_result_in_time_is_reported(server: HealthyCluster):
    server.states[IMAGE] = {"running": {}}
    checks = run_checks(seconds=0.1)
    assert "gave no answer within 0.1 s" in checks["MLflow from a pod"].found
    assert checks["MLflow from a pod"].required


@pytest.mark.slow
@pytest.mark.parametrize("answers", [1, 9])
def test_a_pod_is_deleted_even_if_its_creation_was_never_confirmed(
    server: HealthyCluster, answers: int
):
    """The first request creates the pod, but its response is lost; the server then answers 409 or
    is unavailable."""
    server.lost = 1
    if answers > 1:
        server.refuse(
            "POST", f"{PODS_AT}$", 503, make_status(503, "Unavailable", "away"), times=answers
        )
    checks = run_checks()
    assert ("MLflow from a pod" in checks) == (answers == 1)
    assert server.objects.get(PODS_AT, {}) == {}


def test_serving_keys_that_can_write_and_missing_serving_accounts_are_found(server: HealthyCluster):
    secrets = server.objects["/api/v1/namespaces/models/secrets"]
    original = secrets["rekindle-serving"]
    secrets["rekindle-serving"] = {**original, "data": secrets["rekindle-s3"]["data"]}
    assert (
        "a compromised server could write to the bucket"
        in list_failures(run_checks())["serving credentials"]
    )
    del (
        secrets["rekindle-serving"],
        server.objects["/api/v1/namespaces/models/serviceaccounts"]["rekindle-serving"],
    )
    checks = run_checks()
    assert list_failures(checks).keys() == {"serving account", "serving credentials"}
    assert checks["serving account"].required
    assert not checks["serving credentials"].required
    assert "create secret generic rekindle-serving" in checks["serving credentials"].remedy


def test_a_config_with_tokens_needs_their_secret(server: HealthyCluster):
    flags = [
        "platform",
        "check",
        str(ROOT / "configs/demo.yaml"),
        "--wait=5",
        "--set=serve.token=true",
        "-o",
        "json",
    ]

    (check,) = [
        c for c in json.loads(CliRunner().invoke(commands, flags).stdout) if c["name"] == "tokens"
    ]
    assert check["ok"] is False
    assert check["found"] == "Secret rekindle-token lacks REKINDLE_TOKEN"
    assert "create secret generic rekindle-token" in check["remedy"]
    assert "REKINDLE_TOKEN=..." in check["remedy"]
    secret = {"metadata": {"name": "rekindle-token"}, "data": {"REKINDLE_TOKEN": "eA=="}}
    server.put("/api/v1/namespaces/models/secrets", secret)
    checks = {
        check["name"]: check["ok"]
        for check in json.loads(CliRunner().invoke(commands, flags).stdout)
    }
    assert checks["tokens"]
    assert "tokens" not in run_checks()


def test_a_program_with_secrets_needs_them_in_the_namespace(server: HealthyCluster):
    configs = ClusterConfig.model_validate({}), TrainConfig.model_validate({})
    (check,) = [
        check
        for check in doctor.check_cluster(Cluster.connect(), *configs, 5, secret_names=["HF_TOKEN"])
        if check.name == "program secrets"
    ]
    assert not check.ok
    assert check.found == "Secret rekindle-program lacks HF_TOKEN"
    assert "create secret generic rekindle-program" in check.remedy


def test_other_backends_need_their_own_kinds_but_not_the_training_operator(server: HealthyCluster):
    server.remove("/api/v1/pods", "kubeflow-training-operator")
    server.refuse("GET", "/apis/jobset.x-k8s.io/v1alpha2$", 404, "404 page not found", times=1)
    assert list_failures(run_checks({"backend": "jobset"})) == {
        "jobset.x-k8s.io/v1alpha2": "no jobsets"
    }
    server.fixed["/apis/jobset.x-k8s.io/v1alpha2"] = {"resources": [{"name": "jobsets"}]}
    assert list_failures(run_checks({"backend": "jobset"})) == {}
    refused = (
        "failurePolicy rules action RestartJob is not allowed when RestartJob feature gate is"
        " disabled"
    )
    server.refuse("POST", "jobsets", 422, make_status(422, "Invalid", refused), times=9)
    checks = run_checks({"backend": "jobset", "restart_job": True})
    assert "feature gate is disabled" in checks["job"].found
    assert "cluster.restart_job" in checks["job"].remedy
