"""Tests of the prices of a project, and of the price class of each pod of a manifest."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle import project
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from rekindle.training.cost import pod_requests
from rekindle.training.cost.pod_requests import PodRequests
from rekindle.training.cost.prices import PRICES_ANNOTATION, PRICES_FILE, Prices
from rekindle.training.cost.tariff import TrainingTariff

EXAMPLE = project.REFERENCE / "template" / PRICES_FILE
RATE = {"cpu_hour": 1, "gib_hour": 0.5}
GPU = {"resource": "nvidia.com/gpu"}


def make_prices(**changes: Any) -> Prices:
    values = {"currency": "EUR", "default": "cpu", "classes": {"cpu": {"on_demand": RATE}}}
    return Prices.parse(values | changes, PRICES_FILE)


def find_pod_classes(*sets: str) -> dict[tuple[str, str], tuple[str, bool]]:
    """Return the price class of all pods, and whether they are spot pods, for configs/cluster.yaml,
    by template and role."""
    example = Prices.load(EXAMPLE.parent)
    classes = {}
    assert example

    for template in render_manifest(load_config("configs/cluster.yaml", sets).config)["spec"][
        "templates"
    ]:
        pod = pod_requests.read_template_pod(template)
        if pod:
            found = [("", pod)]
        else:
            found = [
                (replicas.role, replicas.pod)
                for replicas in pod_requests.list_object_replicas(template)
            ]

        classes.update(
            {
                (template["name"], role): (example.classify(pod), example.is_spot(pod))
                for role, pod in found
            }
        )

    return classes


@pytest.fixture
def priced_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the example of a price list, outside of any other project."""
    (tmp_path / PRICES_FILE).write_text(EXAMPLE.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_file_nothing_has_a_price(tmp_path: Path):
    assert Prices.load(tmp_path) is None


def test_the_example_prices_gpu_and_spot_pods_of_a_cluster_by_their_nodes():
    classes = find_pod_classes("families=[transformer]")
    assert classes["train", "Worker"] == ("l4", True)
    assert classes["train", "Master"] == ("cpu", False)
    assert classes["prepare", ""] == ("cpu", False)
    assert find_pod_classes("families=[transformer]", "cluster.pods.train.preset=[eks-spot]")[
        "train", "Worker"
    ] == (
        "cpu",
        True,
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("backend", ["pytorchjob", "jobset", "trainjob"])
def test_every_kind_of_job_has_a_coordinator_and_workers_with_their_own_requests(backend: str):
    config = load_config(
        "configs/cluster.yaml", [f"cluster.backend={backend}", "families=[transformer]"]
    ).config
    templates = render_manifest(config)["spec"]["templates"]
    replicas = [
        replica for template in templates for replica in pod_requests.list_object_replicas(template)
    ]
    (worker,) = [item for item in replicas if "rekindle.training.launch.launcher" in item.command]
    (leader,) = [item for item in replicas if "rekindle.training.membership.server" in item.command]
    assert worker.pod.cpus == 4
    assert worker.pod.gib == 16
    assert worker.pod.gpus == 1
    assert leader.pod.cpus == 0.25
    assert leader.pod.gib == 0.5
    assert leader.pod.gpus == 0
    assert leader.count == 1
    # the number of nodes in a TrainJob replaces the number in its runtime
    assert worker.count == (1 if backend == "trainjob" else 4)


def test_a_pod_costs_its_requests_by_the_hour():
    prices = make_prices(
        classes={
            "cpu": {"on_demand": RATE},
            "gpu": {"selector": GPU, "on_demand": RATE | {"gpu_hour": 3}},
        }
    )
    assert prices.compute_pod_cost(PodRequests(cpus=2, gib=4), 1800) == 2
    assert (
        prices.compute_pod_cost(PodRequests(cpus=2, gib=4, devices={"nvidia.com/gpu": 1}), 3600)
        == 7
    )
    assert prices.compute_resource_cost("gpu", False, 3600, 0, 7200) == 7


@pytest.mark.parametrize(
    "name",
    [
        "nvidia.com/gpu",
        "nvidia.com/gpu.shared",
        "nvidia.com/mig-1g.5gb",
        "nvidia.com/mig-1g.10gb.shared",
        "nvidia.com/pgpu",
        "amd.com/gpu",
        "amd.com/cpx_nps4",
        "gpu.intel.com/i915",
        "gpu.intel.com/xe",
        "google.com/tpu",
        "habana.ai/gaudi",
        "aws.amazon.com/neuron",
        "aws.amazon.com/neuroncore",
        "k8s.amazonaws.com/vgpu",
        "huawei.com/Ascend910",
        "huawei.com/Ascend310P",
        "huawei.com/Ascend910-2c",
        "cambricon.com/mlu",
    ],
)
def test_each_kind_of_accelerator_counts_as_a_gpu(name: str):
    assert pod_requests.read_pod({"containers": [{"resources": {"limits": {name: "4"}}}]}).gpus == 4


@pytest.mark.parametrize(
    "name",
    [
        "rdma/hca",
        "rdma/hca_shared_devices_a",
        "vpc.amazonaws.com/efa",
        "smarter-devices/fuse",
        "nvidia.com/hostdev",
        "openshift.io/mlnxnics",
        "networking.gke.io.networks/rdma-0",
        "devices.kubevirt.io/kvm",
        "hugepages-2Mi",
        "nvidia.com/gpumem",
        "gpu.intel.com/millicores",
        "gpu.intel.com/i915_monitoring",
        "huawei.com/Ascend910A-memory",
    ],
)
def test_a_device_beside_the_gpus_is_not_charged_as_a_gpu(name: str):
    pod = pod_requests.read_pod(
        {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 4, name: 1}}}]}
    )
    assert pod.gpus == 4
    assert pod.requests["nvidia.com/gpu"] == 4
    assert pod.requests.get(name, 1) == 1
    rate = {"cpu_hour": 0, "gib_hour": 0, "gpu_hour": 3}

    prices = make_prices(
        classes={
            "cpu": {"on_demand": rate},
            "a": {"selector": {"resource": name}, "on_demand": rate},
        }
    )

    assert prices.compute_pod_cost(pod, 3600) == 12
    tariff = TrainingTariff(prices=prices, workers={"": pod})
    assert tariff.compute_worker_cost("x-worker-0", 3600) == 3
    assert TrainingTariff.model_validate_json(tariff.model_dump_json()) == tariff, (
        "a pod of the cluster computes the cost"
    )


def test_a_device_of_another_name_is_charged_as_a_gpu_if_the_selector_of_its_class_names_it():
    rate = {"cpu_hour": 0, "gib_hour": 0, "gpu_hour": 3}
    chip = {"selector": {"resource": "example.com/chip"}, "on_demand": rate}
    pod = PodRequests(devices={"example.com/chip": 2, "rdma/hca": 1})
    assert (
        make_prices(classes={"cpu": {"on_demand": rate}, "chip": chip}).compute_pod_cost(pod, 3600)
        == 6
    )
    assert make_prices(classes={"cpu": {"on_demand": rate}}).compute_pod_cost(pod, 3600) == 0


def test_limits_count_as_requests_and_sidecars_are_added():
    template = yaml.safe_load("""
        container: {resources: {limits: {cpu: 500m, memory: 1Gi, nvidia.com/mig-1g.5gb: "1"}, requests: {cpu: 250m}}}
        sidecars: [{resources: {requests: {cpu: "1", memory: 512Mi}}}]
        affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
          {matchExpressions: [{key: zone, operator: In, values: [a]}, {key: gpu, operator: In, values: [l4]}]},
          {matchExpressions: [{key: zone, operator: In, values: [b]}, {key: gpu, operator: In, values: [l4]}]}]}}}
        tolerations: [{key: spot, value: "yes"}, {key: spot, value: soon}, {key: gpu, operator: Exists}]
    """)

    pod = pod_requests.read_template_pod(template)
    assert pod
    tolerations = (("spot", "yes"), ("spot", "soon"), ("gpu", ""))
    assert pod == PodRequests(1.25, 1.5, {"gpu": "l4"}, tolerations, {"nvidia.com/mig-1g.5gb": 1})

    selectors = [
        {"tolerations": {"spot": "yes", "gpu": ""}},
        {"tolerations": {"spot": "soon"}},
        {"labels": {"gpu": "l4"}},
        {"resource": "nvidia.com/mig-1g.5gb"},
    ]

    assert all(make_prices(spot=[selector]).is_spot(pod) for selector in selectors)
    assert not make_prices(spot=[{"labels": {"gpu": "l4", "zone": "a"}}]).is_spot(pod)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"currency": "dollar"}, "currency is 'dollar': it has the wrong form"),
        (
            {"default": "cpus"},
            'default is "cpus": it must be the name of a class. Did you mean "cpu"?',
        ),
        ({"clases": {}}, 'clases is not a known key. Did you mean "classes"?'),
        (
            {"classes": {"cpu": {"on_demand": RATE | {"cpu_hour": -1}}}},
            "classes.cpu.on_demand.cpu_hour is -1",
        ),
        (
            {"classes": {"cpu": {"on_demand": {"cpu_hour": 1}}}},
            "classes.cpu.on_demand.gib_hour is missing",
        ),
        (
            {"classes": {"cpu": {"on_demand": RATE}, "b": {"on_demand": RATE}}},
            "classes.b.selector is missing",
        ),
        ({"spot": [{}]}, "spot.0 is empty, and would match every pod"),
        (
            {"classes": {name: {"selector": GPU, "on_demand": RATE} for name in ("cpu", "b")}},
            "classes.cpu.selector matches every pod of class b, too",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_and_the_rule(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        make_prices(**changes)
    assert str(error.value).startswith(f"{PRICES_FILE}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping of keys"),
        ("default: [", "is not YAML"),
        ("- a", "must be a mapping of keys"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / PRICES_FILE).write_text(text)
    with pytest.raises(ConfigError, match=message):
        Prices.load(tmp_path)


def test_a_pod_of_two_classes_and_a_spot_pod_without_a_price_are_errors():
    by_zone = {"selector": {"labels": {"zone": "a"}}, "on_demand": RATE}
    prices = make_prices(
        classes={
            "cpu": {"on_demand": RATE},
            "gpu": {"selector": GPU, "on_demand": RATE},
            "zone": by_zone,
        },
        spot=[{"labels": {"spot": "yes"}}],
    )
    with pytest.raises(
        ConfigError, match=r"the classes gpu and zone both match a pod with zone=a, nvidia\.com/gpu"
    ):
        prices.classify(PodRequests(labels={"zone": "a"}, devices={"nvidia.com/gpu": 1}))

    with pytest.raises(ConfigError, match=r"classes\.cpu\.spot is missing"):
        prices.compute_pod_cost(PodRequests(cpus=1, labels={"spot": "yes"}), 1)


def test_prices_change_neither_the_manifest_nor_its_hash_but_the_run_contains_them(
    priced_project: Path,
):
    config = load_config(project.REFERENCE / "configs/demo.yaml").config

    def render() -> tuple[dict[str, Any], dict[str, str]]:
        manifest = render_manifest(config)
        values = {
            item["name"]: item["value"] for item in manifest["spec"]["arguments"]["parameters"]
        }
        values.update({"recorded": zlib.decompress(base64.b64decode(values["manifest"])).decode()})
        for item in manifest["spec"]["arguments"]["parameters"]:
            item["value"] = ""
        return manifest, values

    priced, values = render()
    (priced_project / PRICES_FILE).unlink()
    plain, plain_values = render()
    assert priced == plain
    assert {name for name in values if values[name] != plain_values[name]} == {
        "manifest",
        "recorded",
    }
    annotations = json.loads(values["recorded"])["metadata"]["annotations"]
    assert Prices.parse(json.loads(annotations[PRICES_ANNOTATION]), "") == Prices.load(
        EXAMPLE.parent
    )
