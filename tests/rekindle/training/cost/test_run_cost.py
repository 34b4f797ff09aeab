"""The cost of a whole run follows from the times of its nodes, its trainings and the prices in its
manifest."""

import json
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import InvalidDocument
from rekindle import project
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.training.cost import pod_requests, tariff
from rekindle.training.cost.prices import PRICES_FILE, Prices
from rekindle.training.cost.run_cost import compute_run_costs

GPU_SPOT = ["families=[transformer]", "cluster.pods.train.preset=[gke-spot,gpu]"]
EXAMPLE = Prices.load(project.REFERENCE / "template")
assert EXAMPLE


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A manifest that was rendered with the example prices."""
    (tmp_path / PRICES_FILE).write_text((project.REFERENCE / "template" / PRICES_FILE).read_text())
    monkeypatch.chdir(tmp_path)
    return render_manifest(load_config(project.REFERENCE / "configs/cluster.yaml", GPU_SPOT).config)


def make_pod_node(name: str, template: str, start: int, end: int, **outputs: str) -> dict[str, Any]:
    times = {
        "startedAt": f"2026-01-01T00:00:{start:02d}Z",
        "finishedAt": f"2026-01-01T00:00:{end:02d}Z",
    }
    parameters = [{"name": key, "value": value} for key, value in outputs.items()]
    node = {
        "name": name,
        "type": "Pod",
        "templateName": template,
        "outputs": {"parameters": parameters},
    }
    return {name: node | times}


def test_a_run_costs_all_attempts_of_its_steps_and_its_trainings(manifest: dict[str, Any]):
    nodes = make_pod_node("w.prepare(0)", "prepare", 0, 10) | make_pod_node(
        "w.prepare(1)", "prepare", 20, 40
    )
    nodes.update(
        make_pod_node("w.train", "train", 40, 50)
        | make_pod_node("w.ship.release", "release", 50, 56)
    )
    nodes.update(
        make_pod_node(
            "w.onExit.report", "report", 57, 58, training_costs=json.dumps({"train": 1.5})
        )
    )
    nodes["w.champion"] = {"name": "w.champion", "type": "Skipped", "templateName": "champion"}
    recorded_manifest = tariff.read_recorded_manifest(manifest)
    prices = tariff.read_prices(recorded_manifest)
    assert prices == EXAMPLE
    assert prices
    costs = compute_run_costs({"nodes": nodes}, recorded_manifest, prices)

    assert costs["steps"] == {
        "prepare": pytest.approx(30 * (2 * 0.0218 + 8 * 0.0029) / 3600),
        "ship.release": pytest.approx(6 * (0.0218 + 2 * 0.0029) / 3600),
        "onExit.report": pytest.approx((0.25 * 0.0218 + 0.0029) / 3600),
        "train": 1.5,
    }

    assert costs["total"] == pytest.approx(sum(costs["steps"].values()))
    assert costs["words"].startswith(
        "1.50 USD (train 1.50, prepare 0.00056, ship.release 0.000046, "
    )
    assert (
        compute_run_costs({"nodes": nodes}, recorded_manifest, prices, {"train": 2.0})["steps"][
            "train"
        ]
        == 2
    )
    assert compute_run_costs({"nodes": nodes}, recorded_manifest, None) == {}


JOB = """
kind: {kind}
spec:
  {field}:
    Master: {{replicas: 1, template: {{spec: {{containers: [{{resources: {{requests: {{cpu: 2}}}}}}]}}}}}}
    Worker: {{replicas: {workers}, template: {{spec: {{containers: [{{resources: {{requests: {{cpu: 1}}}}}}]}}}}}}
"""
BATCH = """
kind: {kind}
spec: {{parallelism: {workers}, template: {{spec: {{containers: [{{resources: {{requests: {{cpu: 1}}}}}}]}}}}}}
"""
HOURLY = Prices.parse(
    {
        "currency": "EUR",
        "default": "cpu",
        "classes": {"cpu": {"on_demand": {"cpu_hour": 3600, "gib_hour": 0}}},
    },
    PRICES_FILE,
)  # a CPU costs 1 per second


def compute_job_costs(text: str, action: str = "apply", **more: Any) -> dict[str, float]:
    """Return the costs of a run whose step `train` applied a job, in two attempts of the pod that
    waits for it."""
    template = {"name": "train", "resource": {"action": action, "manifest": text}}
    nodes = make_pod_node("w.train(0)", "train", 0, 10) | make_pod_node(
        "w.train(1)", "train", 20, 30
    )
    for node in nodes.values():
        node["inputs"] = {"parameters": [{"name": "workers", "value": "3"}]}
    manifest = {"spec": {"templates": [template]}} | more
    return compute_run_costs({"nodes": nodes}, manifest, HOURLY)["steps"]


@pytest.mark.parametrize(
    "kind", ["PyTorchJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob", "MPIJob", "OtherJob"]
)
def test_a_job_without_ledger_costs_all_its_replicas_for_the_time_of_its_step(kind: str):
    text = JOB.format(kind=kind, field="replicaSpecs", workers=3)
    assert compute_job_costs(text) == {"train": 30 * (2 + 3)}, (
        "the job continues while its watcher is replaced"
    )


def test_the_number_of_replicas_may_be_an_input_of_the_step():
    workers = "{{inputs.parameters.workers}}"
    assert compute_job_costs(BATCH.format(kind="Job", workers=workers)) == {"train": 30 * 3}


def test_only_pods_that_end_with_the_step_are_part_of_its_cost():
    assert compute_job_costs(BATCH.format(kind="Deployment", workers=3)) == {}
    assert compute_job_costs(BATCH.format(kind="Job", workers=3), action="delete") == {}


@pytest.mark.parametrize("config", ["trees", "mpi"])
def test_the_job_of_another_framework_is_part_of_the_cost(config: str):
    rendered = render_manifest(
        load_config(project.REFERENCE / f"configs/{config}.yaml", environment={}).config
    )
    name = {"trees": "train-trees", "mpi": "train"}[config]
    nodes = make_pod_node(f"w.{name}(0)", name, 0, 10) | make_pod_node(
        "w.train-network(0)", "train-network", 0, 10
    )
    (template,) = [
        template for template in rendered["spec"]["templates"] if template["name"] == name
    ]
    assert EXAMPLE
    expected = sum(
        item.count * EXAMPLE.compute_pod_cost(item.pod, 10)
        for item in pod_requests.list_object_replicas(template)
    )
    costs = compute_run_costs({"nodes": nodes}, rendered, EXAMPLE)["steps"]
    assert costs == {name: pytest.approx(expected)}, (
        "a training with a ledger is charged by its ledger"
    )
    assert expected > 0


def test_a_step_of_a_workflow_template_is_part_of_the_cost():
    template = {"name": "work", "container": {"resources": {"requests": {"cpu": 1}}}}
    nodes = make_pod_node("w.a", "", 0, 10)
    nodes["w.a"]["templateRef"] = {"name": "shared", "template": "work"}
    manifest = {"spec": {}, "storedTemplates": {"namespaced/shared/work": template}}
    assert compute_run_costs({"nodes": nodes}, manifest, HOURLY)["steps"] == {"a": 10}


def test_the_pods_of_a_job_have_prices_on_spot_nodes_and_on_demand(manifest: dict[str, Any]):
    (train,) = [
        template for template in manifest["spec"]["templates"] if template["name"] == "train"
    ]
    leader = 0.25 * 0.0218 + 0.5 * 0.0029
    assert EXAMPLE
    replicas = pod_requests.list_object_replicas(train)
    spot, on_demand = (
        sum(
            replica.count * EXAMPLE.compute_pod_cost(replica.pod, 3600, is_spot)
            for replica in replicas
        )
        for is_spot in (None, False)
    )
    assert spot == pytest.approx(4 * (4 * 0.01 + 16 * 0.0012 + 0.224) + leader)
    assert on_demand == pytest.approx(4 * (4 * 0.025 + 16 * 0.0029 + 0.56) + leader)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("backend", ["pytorchjob", "jobset", "trainjob"])
def test_a_training_has_its_workers_also_those_on_idle_capacity_and_its_coordinator(backend: str):
    sets = [*GPU_SPOT, f"cluster.backend={backend}", "cluster.harvest=true"]
    manifest = render_manifest(load_config("configs/cluster.yaml", sets).config)
    train_tariff = tariff.build_tariffs(manifest, EXAMPLE, ["train", "other"])["train"]
    role = {"pytorchjob": "Worker", "jobset": "worker", "trainjob": "node"}[backend]
    assert list(train_tariff.workers) == [role, "harvest"]
    harvested_pod = train_tariff.find_worker_pod("fraud-7xk2p-train-5d8f9-abcde")
    assert harvested_pod is train_tariff.workers["harvest"]
    assert (
        train_tariff.find_worker_pod(f"fraud-7xk2p-train-{role.lower()}-1")
        is train_tariff.workers[role]
    )
    assert train_tariff.coordinator
    assert train_tariff.coordinator.gib == 0.5
    assert tariff.build_tariffs(manifest, None, ["train"]) == {}


def test_workers_that_replace_workers_on_spot_nodes_are_charged_on_demand():
    presets = "cluster.pods.train.preset=[gke-spot,gpu,on-demand-after-10m]"
    sets = [*GPU_SPOT[:1], presets, "cluster.signal_account=c", "cluster.harvest=true"]
    manifest = render_manifest(load_config("configs/cluster.yaml", sets).config)
    train_tariff = tariff.build_tariffs(manifest, EXAMPLE, ["train"])["train"]
    is_spot = {
        name: train_tariff.prices.is_spot(train_tariff.find_worker_pod(name))
        for name in (
            "fraud-7xk2p-train-worker-0",
            "fraud-7xk2p-train-5d8f9-abcde",
            "fraud-7xk2p-train-on-demand-5d8f9-abcde",
            "my-on-demand-model-7xk2p-train-worker-0",
        )
    }
    assert [*is_spot.values()] == [True, True, False, True]


def test_the_trials_of_a_sweep_are_charged_like_workers():
    config = load_config(
        "configs/sweep.yaml", ["cluster.pods.train.preset=[karpenter-spot,gpu]"]
    ).config
    trial_tariff = tariff.build_trial_tariff(render_manifest(config), EXAMPLE)
    assert trial_tariff
    assert trial_tariff.prices.classify(trial_tariff.find_worker_pod("rank0")) == "l4"
    assert trial_tariff.prices.is_spot(trial_tariff.find_worker_pod("rank0"))


@pytest.mark.parametrize("text", ["", "service.yaml", "aaaa"])
def test_a_workflow_with_a_parameter_of_its_own_called_manifest_has_no_cost(text: str):
    workflow = {
        "metadata": {},
        "spec": {"arguments": {"parameters": [{"name": "manifest", "value": text}]}},
    }
    assert tariff.read_recorded_manifest(workflow) is workflow
    assert tariff.read_prices(workflow) is None


@pytest.mark.parametrize("costs", ['{"a": 1e308, "b": 1e308}', '{"a": -1}'])
def test_recorded_costs_that_no_training_can_have_are_one_error(
    manifest: dict[str, Any], costs: str
) -> None:
    status = {"nodes": make_pod_node("w.report", "report", 0, 10, training_costs=costs)}
    with pytest.raises(InvalidDocument, match=r"training_costs of w\.report is malformed"):
        compute_run_costs(status, manifest, EXAMPLE)
