"""`rekindle explain` reports on a training during and after it, on this machine and on a
cluster."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from argolocal.state.journal import RunFiles
from rekindle import project
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError, RekindleError
from rekindle.keys import CHECKPOINTS_NAME, LEDGER_KEY, key
from rekindle.operations.sweep_trials import list_cluster_trials
from rekindle.storage import Store
from rekindle.training.cost.prices import PRICES_FILE
from rekindle.training.ledger.events import Ledger
from rekindle.view.explain import LEDGER_KEY_PATTERN, explain_on_cluster, explain_run
from tests.rekindle.cluster.server import BrokenKubelet, Kubelet
from tests.steps.finished_training import COMPLETE, EVENTS, VERDICT

DEMO = Path(__file__).parents[3] / "configs/demo.yaml"


def make_run(
    home: Path,
    store: Store,
    name: str,
    events: list[dict[str, Any]],
    manifest: dict[str, Any] | None = None,
) -> None:
    """Create a run with a ledger; `manifest`: a manifest that Rekindle has rendered."""
    files = RunFiles(home, name)

    spec = {
        "entrypoint": "main",
        "templates": [{"name": "main"}],
        "arguments": {"ledgers": [key("train", LEDGER_KEY)]},
    }

    files.create(
        {
            "kind": "Workflow",
            "metadata": {"name": name},
            "spec": manifest["spec"] if manifest else spec,
        }
    )

    files.snapshot({"phase": "Succeeded", "nodes": {}, "startedAt": "2026-01-01T00:00:00Z"})
    files.close()
    ledger = Ledger(lambda: store, key("train", LEDGER_KEY, name))

    for event in events:
        ledger.note(**event)

    ledger.close()


def test_explain_reports_a_finished_training_as_text_and_json(tmp_path: Path, s3: Store) -> None:
    make_run(tmp_path, s3, "older", [])
    make_run(tmp_path, s3, "fraud", [*EVENTS, COMPLETE])
    text = explain_run(tmp_path, None, as_json=False)
    assert text.startswith("fraud: Succeeded\n")
    assert (
        "2 workers trained 40 steps in 4 s, 10 steps/s; with starts and pauses it took 5.1 s"
        in text
    )
    loss = (
        "worker-1 was lost (connection closed) at step 10; the others continued 0.1 s later. No"
        " step was lost."
    )
    assert loss in text
    assert text.endswith("72.4 % of 7.6 worker-seconds trained, 27.6 % waited, 0 % lost.")
    report = json.loads(explain_run(tmp_path, "fraud", as_json=True))

    assert report["workflow"] == "fraud"
    assert report["state"] == "complete"
    assert report["preemptions"] == 1
    assert report["steps"] == 40

    assert text.endswith("\n".join(report["words"]))


def test_explain_reports_active_and_aborted_trainings(tmp_path: Path, s3: Store) -> None:
    make_run(tmp_path, s3, "active", EVENTS)
    assert "15 of 40 steps" in explain_run(tmp_path, "active", as_json=False)
    assert "The run is not complete; the newest entry of its ledger is of " in explain_run(
        tmp_path, "active", as_json=False
    )
    make_run(tmp_path, s3, "aborted", [*EVENTS, VERDICT])
    text = explain_run(tmp_path, "aborted", as_json=False)
    assert "Then the run was aborted: worker-0: the gradient is not finite" in text


def test_explain_says_if_no_worker_has_trained_yet(tmp_path: Path, s3: Store) -> None:
    make_run(tmp_path, s3, "fresh", [])
    assert explain_run(tmp_path, "fresh", as_json=False).endswith("No worker has trained yet.")


@pytest.mark.parametrize(
    ("config", "read", "text", "message"),
    [
        ("demo", explain_on_cluster, '{"train": {}}', "words"),
        ("demo", explain_on_cluster, '{"train": {"words": [], "cost": {"total": "1"}}}', "total"),
        ("sweep", list_cluster_trials, '{"trials": []}', "hours"),
    ],
)
def test_a_malformed_answer_of_a_pod_is_one_error(
    config: str,
    read: Callable[..., object],
    text: str,
    message: str,
    tmp_path: Path,
    s3: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = load_config(project.REFERENCE / f"configs/{config}.yaml", environment={}).config
    workflow = render_manifest(settings) | {"metadata": {"name": "run"}}
    arguments = [False] if read == explain_on_cluster else []

    with BrokenKubelet(tmp_path) as server:
        server.text = text
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        server.put("/apis/argoproj.io/v1alpha1/namespaces/models/workflows", workflow)
        with pytest.raises(RekindleError, match=f"is malformed: .*{message}") as error:
            read(Cluster.connect(), "run", *arguments)
    assert len(error.value.lines) == 1


@pytest.mark.slow
def test_a_pod_explains_a_training_on_a_cluster(
    tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, s3, "fraud", [*EVENTS, COMPLETE])
    workflow = render_manifest(load_config(DEMO, ["families=[transformer]"], environment={}).config)
    workflow["metadata"] = {"name": "fraud"}
    workflow["status"] = {"phase": "Succeeded"}

    with Kubelet(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        server.put("/apis/argoproj.io/v1alpha1/namespaces/models/workflows", workflow)
        cluster = Cluster.connect()
        assert explain_on_cluster(cluster, "fraud", as_json=False) == explain_run(
            tmp_path, "fraud", as_json=False
        )
        pods = "/api/v1/namespaces/models/pods"

        created = [
            body
            for method, path, body in server.requests
            if method == "POST" and path.startswith(pods)
        ]

        assert created[0]["spec"]["containers"][0]["image"] == "rekindle:0.1"
        assert not server.objects[pods], "it was deleted"
        monkeypatch.setenv("S3_BUCKET", "")

        with pytest.raises(RekindleError, match=r"of image rekindle:0\.1, .*ended with code 1"):
            explain_on_cluster(cluster, "fraud", as_json=False)

        assert not server.objects[pods]


@pytest.mark.slow
def test_with_prices_explain_reports_the_same_costs_here_and_on_a_cluster(
    tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PRICES_FILE).write_text((project.REFERENCE / "template" / PRICES_FILE).read_text())
    monkeypatch.chdir(tmp_path)
    sets = ["families=[transformer]", "cluster.pods.train.preset=[gke-spot,gpu]"]
    manifest = render_manifest(load_config(project.REFERENCE / "configs/cluster.yaml", sets).config)
    # the manifest of the run contains its own prices
    (tmp_path / PRICES_FILE).unlink()
    make_run(tmp_path, s3, "fraud", [*EVENTS, COMPLETE], manifest)
    text = explain_run(tmp_path, "fraud", as_json=False)
    assert "The training cost 0.00060 USD: 0.00043 trained, 0.00017 waited." in text
    assert "1 preemption cost 0.0000079 USD" in text
    assert "after all losses, spot nodes saved" in text
    assert text.endswith("\n\nThe whole run cost 0.00060 USD (train 0.00060).")
    report = json.loads(explain_run(tmp_path, "fraud", as_json=True))

    assert (
        report["cost"]["total"]
        == report["run_cost"]["total"]
        == report["run_cost"]["steps"]["train"]
    )

    workflow = manifest | {"metadata": {"name": "fraud"}, "status": {"phase": "Succeeded"}}

    with Kubelet(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        server.put("/apis/argoproj.io/v1alpha1/namespaces/models/workflows", workflow)
        assert explain_on_cluster(Cluster.connect(), "fraud", as_json=False) == text


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("ended", [True, False])
def test_explain_reports_the_job_of_another_framework_here_and_on_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    (tmp_path / PRICES_FILE).write_text((project.REFERENCE / "template" / PRICES_FILE).read_text())
    monkeypatch.chdir(tmp_path)
    manifest = render_manifest(
        load_config(project.REFERENCE / "configs/mpi.yaml", environment={}).config
    )

    node = {
        "id": "mpi-1",
        "name": "mpi.train",
        "displayName": "train",
        "type": "Retry",
        "templateName": "train",
        "phase": "Failed",
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:01:00Z",
        "message": "retryStrategy.expression evaluated to false",
    }

    attempt = node | {
        "id": "mpi-2",
        "name": "mpi.train(0)",
        "displayName": "train(0)",
        "type": "Pod",
        "message": "failure condition 'x' evaluated true",
    }

    nodes = {item["id"]: item for item in (node, attempt)} if ended else {}
    status = {"phase": "Failed", "nodes": nodes, "startedAt": "2026-01-01T00:00:00Z"}
    files = RunFiles(tmp_path, "mpi")
    files.create({"kind": "Workflow", "metadata": {"name": "mpi"}, "spec": manifest["spec"]})
    files.snapshot(status)
    files.close()
    text = explain_run(tmp_path, "mpi", as_json=False)
    report = json.loads(explain_run(tmp_path, "mpi", as_json=True))
    (job,) = report["jobs"]
    assert job["kind"] == "MPIJob"
    assert job["pods"] == {"Launcher": 1, "Worker": 2}

    if ended:
        cause = "its job or Deployment has failed: the logs of the pods show why"
        outcome = f"failed after 1 min 00 s. Cause: {cause}. It cost "
        assert f"train: MPIJob (Launcher 1, Worker 2) {outcome}" in text
        assert "The whole run cost" in text
        assert job["seconds"] == 60
        assert job["cost"] == report["run_cost"]["steps"]["train"]
        assert job["cost"] > 0
    else:
        assert "train: MPIJob (Launcher 1, Worker 2) has not started." in text

    workflow = manifest | {"metadata": {"name": "mpi"}, "status": status}
    with Kubelet(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        server.put("/apis/argoproj.io/v1alpha1/namespaces/models/workflows", workflow)
        assert explain_on_cluster(Cluster.connect(), "mpi", as_json=False) == text


def test_an_unknown_run_is_an_error_with_a_hint(tmp_path: Path, s3: Store) -> None:
    with pytest.raises(ConfigError, match="`rekindle run` starts a run"):
        explain_run(tmp_path, None, as_json=False)
    make_run(tmp_path, s3, "fresh", [])
    with pytest.raises(ConfigError, match='Did you mean "fresh"'):
        explain_run(tmp_path, "frsh", as_json=False)


def test_training_report_and_explain_use_the_same_ledger() -> None:
    from rekindle.training.spec import TrainingSpec

    manifest = json.dumps(render_manifest(load_config(DEMO, ["families=[transformer]"]).config))
    assert set(LEDGER_KEY_PATTERN.findall(manifest)) == {"train"}

    inputs = TrainingSpec.model_validate(
        dict.fromkeys(("workload", "dataset", "out"), "x")
        | {
            "digest": "d" * 64,
            "checkpoints": key("train", CHECKPOINTS_NAME),
        }
    )

    assert inputs.ledger == key("train", LEDGER_KEY)
    assert f"--checkpoints={inputs.checkpoints}" in manifest
