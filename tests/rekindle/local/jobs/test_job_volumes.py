"""The volumes of a job's pods are the same as for a workflow's pods: claims are shared, and volumes
of Secrets contain the Secrets' files."""

import json
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.pods import filesystem
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.training_job import TrainingJobs
from tests.argolocal.running import execute_manifest
from tests.builders import make_workflow

pytestmark = pytest.mark.skipif(
    not filesystem.supports_namespaces(), reason="needs mount namespaces"
)
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "data"},
    "spec": {},
}
CONFIG = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "c"},
    "data": {"key": "from the ConfigMap"},
}
CLAIM_VOLUME = {"name": "v", "persistentVolumeClaim": {"claimName": "data"}}
CONFIG_VOLUME = {"name": "c", "configMap": {"name": "c"}}


def make_job(
    script: str, *volumes: dict[str, Any], env: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    mounts = [{"name": volume["name"], "mountPath": f"/tmp/{volume['name']}"} for volume in volumes]
    container = {
        "name": "xgboost",
        "image": "busybox",
        "command": ["sh", "-ec"],
        "args": [script],
        "volumeMounts": mounts,
        "env": [*env],
    }

    replica = {
        "replicas": 1,
        "template": {"spec": {"containers": [container], "volumes": [*volumes]}},
    }
    spec = {
        "xgbReplicaSpecs": {"Master": replica, "Worker": replica},
        "runPolicy": {"cleanPodPolicy": "None"},
    }

    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "XGBoostJob",
        "metadata": {"name": "j"},
        "spec": spec,
    }


def run(home: Path, obj: dict[str, Any], **more: Any) -> dict[str, Any]:
    conditions = {
        "successCondition": "status.replicaStatuses.Master.succeeded == 1",
        "failureCondition": "status.conditions.1.type == Failed",
    }
    resource = {"action": "apply", "manifest": json.dumps(obj), **conditions}
    container = {"image": "busybox", "command": ["cat", "/tmp/v/Worker"], "volumeMounts": []}
    container["volumeMounts"] = [{"name": "v", "mountPath": "/tmp/v"}]
    steps = [[{"name": "job", "template": "job"}], [{"name": "read", "template": "read"}]]

    templates = [
        {"name": "main", "steps": steps},
        {"name": "job", "resource": resource},
        {"name": "read", "container": container},
    ]

    cluster = LocalCluster(home)
    cluster.store_objects([CLAIM, CONFIG])

    manifest = make_workflow(*templates, volumes=[CLAIM_VOLUME], **more)

    return execute_manifest(manifest, {}, cluster)


def test_the_pods_of_a_job_and_of_the_workflow_share_a_claim(tmp_path: Path) -> None:
    script = """
        case $HOSTNAME in
            *worker*) cat /tmp/c/key > /tmp/v/draft; mv /tmp/v/draft /tmp/v/Worker;;
            *) until test -e /tmp/v/Worker; do sleep 0.05; done;;
        esac
        ! echo x 2> /dev/null > /tmp/c/key"""
    status = run(tmp_path, make_job(script, CLAIM_VOLUME, CONFIG_VOLUME))
    assert status["phase"] == "Succeeded", status
    assert (tmp_path / "claims/data/Worker").read_text() == "from the ConfigMap"
    assert [file for file in (tmp_path / "runs").rglob("key")] == []


def test_a_job_whose_secret_is_missing_fails_and_names_the_secret(tmp_path: Path) -> None:
    env = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k"}}}
    status = run(tmp_path, make_job("true", env=(env,)), onExit="read")
    messages = " ".join(node.get("message", "") for node in status["nodes"].values())
    assert status["phase"] == "Failed"
    assert "'none'" in str(LocalCluster(tmp_path).kinds and messages + _describe_job(tmp_path))
    assert "w.onExit" in {node["name"] for node in status["nodes"].values()}


def _describe_job(home: Path) -> str:
    return str(TrainingJobs(LocalCluster(home), "XGBoostJob").read("j"))


@pytest.mark.parametrize(
    ("volume", "reason"),
    [
        ({"name": "v", "hostPath": {"path": "/"}}, "hostPath is not supported"),
        ({"name": "v", "emptyDir": {}, "configMap": {"name": "c"}}, "exactly one kind"),
        ({"name": "../v", "emptyDir": {}}, "RFC 1123 label"),
    ],
)
def test_a_volume_that_pods_do_not_support_is_rejected(
    tmp_path: Path, volume: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        TrainingJobs(LocalCluster(tmp_path), "XGBoostJob").check(make_job("true", volume))
