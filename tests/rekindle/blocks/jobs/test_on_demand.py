"""Workers on on-demand nodes, which replace workers on spot nodes, are rendered as a Deployment that
the coordinator scales."""

import json
from typing import Any

import pytest

from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from tests.commands import ROOT

SPOT = "cluster.pods.train.preset=[gke-spot,gpu,on-demand-after-10m]"
ACCOUNT = "cluster.signal_account=rekindle-coordinator"


def render_objects(*sets: str) -> dict[str, dict[str, Any]]:
    """Return the objects that the templates of a workflow apply, by the name of the template."""
    manifest = render_manifest(
        load_config(ROOT / "configs/digits.yaml", [ACCOUNT, *sets], {}).config
    )
    return {
        template["name"]: json.loads(template["resource"]["manifest"])
        for template in manifest["spec"]["templates"]
        if template["name"].startswith("train") and "manifest" in template.get("resource", {})
    }


def read_variables(pod_spec: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in pod_spec["containers"][0]["env"]}


def find_pod_specs(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [spec for item in value for spec in find_pod_specs(item)]
    if not isinstance(value, dict):
        return []
    if "containers" in value:
        return [value]
    return [spec for item in value.values() for spec in find_pod_specs(item)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_replacements_run_on_other_nodes_and_join_the_same_coordinator(backend: str) -> None:
    objects = render_objects(SPOT, f"cluster.backend={backend}")
    deployment = objects["train-on-demand"]
    name = deployment["metadata"]["name"]
    pod_spec = deployment["spec"]["template"]["spec"]
    variables = read_variables(pod_spec)

    assert deployment["spec"]["replicas"] == 0
    assert "nodeSelector" not in pod_spec
    affinity = json.dumps(pod_spec["affinity"])
    assert '"cloud.google.com/gke-spot", "operator": "NotIn", "values": ["true"]' in affinity
    assert "gke-spot" not in json.dumps(pod_spec["tolerations"])
    assert variables["REKINDLE_CAPACITY"] == "on-demand"
    job_name = name.removesuffix("-on-demand")
    assert variables["MASTER_ADDR"] == BACKENDS[backend].host.format(job_name)

    all_specs = find_pod_specs([*objects.values()])
    (coordinator,) = [spec for spec in all_specs if "REKINDLE_JOB" in read_variables(spec)]
    assert read_variables(coordinator)["REKINDLE_ON_DEMAND"] == name
    assert read_variables(coordinator)["REKINDLE_ON_DEMAND_AFTER"] == "600"
    assert coordinator["automountServiceAccountToken"]
    spot_specs = [spec for spec in all_specs if "nodeSelector" in spec]
    assert spot_specs
    assert all(read_variables(spec)["REKINDLE_CAPACITY"] == "spot" for spec in spot_specs)


def test_the_coordinator_knows_the_number_of_workers_in_a_pod() -> None:
    two_gpus = ["cluster.pods.train.gpus=2", "train.workers=2", "train.max_workers=4"]
    objects = render_objects(SPOT, *two_gpus)
    counts = {
        variables["REKINDLE_POD_WORKERS"]
        for variables in map(read_variables, find_pod_specs([*objects.values()]))
        if "REKINDLE_POD_WORKERS" in variables
    }
    assert counts == {"2"}


def test_harvested_workers_and_replacements_are_separate_deployments() -> None:
    objects = render_objects(SPOT, "cluster.harvest=true", "train.max_workers=4")
    assert objects["train-on-demand"]["metadata"]["name"].endswith("-train-on-demand")
    assert objects["train-harvest"]["metadata"]["name"].endswith("-train")
    harvested = objects["train-harvest"]["spec"]["template"]["spec"]
    assert harvested["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([SPOT, "cluster.signal_account="], "set cluster.signal_account to rekindle-coordinator"),
        (["cluster.pods.train.preset=on-demand-after-10m"], "do not run on preemptible nodes"),
        (["cluster.pods.serve.preset=on-demand-after-10m"], "only the workers of a training"),
        ([SPOT, "cluster.gang=volcano", "cluster.queue=q"], "only Kueue admits single pods"),
    ],
)
def test_settings_that_prevent_replacements_are_rejected(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render_objects(*sets)
