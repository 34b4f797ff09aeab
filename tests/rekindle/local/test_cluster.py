"""Tests of this machine as a cluster: the addresses, credentials and images of its pods."""

import socket
from pathlib import Path

import pytest

from argolocal.controllers.controller import Controller
from argolocal.manifest.read import build_workflow
from argolocal.runner.preflight import check_workflow
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from tests import builders


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    """Return a cluster with invented addresses of external services, so no embedded service is
    started."""
    monkeypatch.setenv("S3_ENDPOINT_URL", "test://s3")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "test://mlflow")
    monkeypatch.setenv("S3_BUCKET", "bucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    return LocalCluster(tmp_path)


def make_manifest(container: dict) -> dict:
    return build_workflow(builders.make_workflow({"name": "main", "container": container}))


def test_pods_get_the_addresses_and_credentials_of_the_services(cluster: LocalCluster) -> None:
    assert cluster.configmap("rekindle")["S3_ENDPOINT_URL"] == "test://s3"
    assert cluster.secret("rekindle-s3") == {"AWS_ACCESS_KEY_ID": "key"}
    extra = {"kind": "ConfigMap", "metadata": {"name": "rekindle"}, "data": {"EXTRA": "2"}}
    Controller(cluster, "ConfigMap").apply(extra)
    assert cluster.configmap("rekindle")["EXTRA"] == "2"
    container = {
        "image": "busybox",
        "command": ["true"],
        "envFrom": [{"secretRef": {"name": "rekindle-s3"}}],
    }
    assert check_workflow(make_manifest(container), cluster) == []


@pytest.mark.parametrize(
    "command", [["python", "-m", "rekindle", "step", "steps.train"], ["python"]]
)
def test_an_image_of_this_repository_is_recognized_by_its_command(
    command: list[str], cluster: LocalCluster
) -> None:
    checked = make_manifest(
        {"image": "registry.example/mine@sha256:0", "command": command[:1], "args": command[1:]}
    )
    if command[1:]:
        assert check_workflow(checked, cluster) == []
    else:
        with pytest.raises(ConfigError, match=r"registry\.example/mine"):
            check_workflow(checked, cluster)


def test_the_error_for_a_models_occupied_port_names_its_setting(cluster: LocalCluster) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ConfigError, match=r"--set serve\.port="),
    ):
        service = {
            "metadata": {"name": "m"},
            "spec": {"selector": {"a": "b"}, "ports": [{"port": server.getsockname()[1]}]},
        }
        cluster.kinds.controllers(cluster, cluster.home)["Service"].check(service)


def test_a_program_gets_its_secrets_from_the_environment_of_the_user(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("UNRELATED", "\udcff")
    assert cluster.secret("rekindle-program")["HF_TOKEN"] == "hunter2"
