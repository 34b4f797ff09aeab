"""A step whose pods do not start is Pending, with the reason. The tests need no image, because the
pods never run a container."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.kube import Kube
from tests.cluster.run import rekindle
from tests.waiting import until

JOB = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {
        "name": "{{workflow.name}}-job",
        "labels": {"workflows.argoproj.io/workflow": "{{workflow.name}}"},
    },
}
PATIENCE_S = 90


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    """A namespace whose default account may apply jobs."""
    kube = Kube(f"rekindle-test-{uuid.uuid4().hex[:6]}")
    kube("create", "namespace", kube.namespace)
    kube(
        "create",
        "rolebinding",
        "all",
        "--clusterrole=cluster-admin",
        f"--serviceaccount={kube.namespace}:default",
    )
    yield kube
    kube("delete", "namespace", kube.namespace, "--wait=false")


def container(cpu: str) -> dict[str, Any]:
    return {"name": "pytorch", "image": "localhost/none:1", "resources": {"requests": {"cpu": cpu}}}


def workflow(cpu: str) -> dict[str, Any]:
    """Return a workflow with a retried step and a PyTorchJob whose pods request `cpu`."""
    labels = {"labels": {"workflows.argoproj.io/workflow": "{{workflow.name}}"}}
    pod = {"metadata": labels, "spec": {"containers": [container(cpu)]}}
    job = JOB | {"spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": pod}}}}

    resource = {
        "action": "apply",
        "setOwnerReference": True,
        "manifest": yaml.safe_dump(job),
        "successCondition": "status.replicaStatuses.Master.succeeded > 0",
    }

    step = {name: value for name, value in container(cpu).items() if name != "name"}

    templates = [
        {
            "name": "main",
            "dag": {"tasks": [{"name": name, "template": name} for name in ("step", "job")]},
        },
        {"name": "step", "retryStrategy": {"limit": 2}, "container": {**step, "command": ["true"]}},
        {"name": "job", "retryStrategy": {"limit": 2}, "resource": resource},
    ]

    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "waits-"},
        "spec": {"entrypoint": "main", "templates": templates},
    }


@pytest.mark.parametrize(
    ("cpu", "quota", "reasons"),
    [
        ("1000", {}, {"step": "Insufficient cpu", "job": "Insufficient cpu"}),
        ("10m", {}, {"step": "localhost/none:1", "job": "localhost/none:1"}),
        ("1000", {"count/pods": "2"}, {"job": "exceeded quota"}),
    ],
    ids=["no room", "no image", "quota"],
)
def test_a_step_whose_pods_do_not_start_has_the_reason(
    kube: Kube, tmp_path: Path, cpu: str, quota: dict[str, str], reasons: dict[str, str]
) -> None:
    if quota:
        kube.apply(
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "q"},
                "spec": {"hard": quota},
            }
        )

        until(
            "the quota",
            lambda: (kube.get("resourcequota", "q") or {}).get("status", {}).get("hard"),
        )

    (tmp_path / "w.yaml").write_text(yaml.safe_dump(workflow(cpu)))
    flags = ["--namespace", kube.namespace, "-o", "json"]
    name = json.loads(rekindle("submit", "--manifest", str(tmp_path / "w.yaml"), *flags))[
        "workflow"
    ]
    run: dict[str, Any] = {}

    def is_waiting() -> bool:
        run.update(json.loads(rekindle("status", name, "--cluster", *flags)))
        steps = {step["name"]: step for step in run["steps"]}
        return all(
            task in steps and steps[task]["phase"] == "Pending" and reason in steps[task]["message"]
            for task, reason in reasons.items()
        )

    until("the reasons", is_waiting, PATIENCE_S, pause=1, evidence=lambda: run)
    table = rekindle("status", name, "--cluster", "--namespace", kube.namespace)
    assert f"{name}: Pending" in table
    kube("delete", "workflow", name)
    kube("wait", "pod", "--all", "--for=delete", "--timeout=60s", timeout=70)
