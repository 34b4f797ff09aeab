"""Tests of the ports of models on this machine: a chosen port is kept, but if no port was chosen, a
model gets a port that no other program uses."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.view import foreground
from rekindle import project
from rekindle.cli.sources import Source
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.model_services import allow_any_port, may_use_any_port
from rekindle.view.pipeline_display import create_run
from tests.argolocal.running import execute_manifest


@pytest.fixture
def taken() -> Iterator[int]:
    """Yield a port at which a program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def make_services_workflow(*models: str, port: int) -> dict[str, Any]:
    """Return a workflow that applies the Services of the models."""
    templates = []
    tasks = []

    for model in models:
        spec = {
            "selector": {"app": model},
            "ports": [{"name": "http", "port": port, "targetPort": "http"}],
        }
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": model}, "spec": spec}
        templates.append(
            {"name": model, "resource": {"action": "apply", "manifest": json.dumps(service)}}
        )
        tasks.append({"name": model, "template": model})

    spec = {
        "entrypoint": "main",
        "templates": [{"name": "main", "dag": {"tasks": tasks}}, *templates],
    }
    metadata = {"generateName": "releases-"}

    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": metadata,
        "spec": spec,
    }


def port_of(cluster: LocalCluster, model: str) -> int:
    service = cluster.find("Service", model)
    assert service
    return service["spec"]["ports"][0]["port"]


def test_a_port_that_was_taken_during_the_training_is_replaced_by_the_next_free_port(
    tmp_path: Path, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = LocalCluster(tmp_path)
    workflow = allow_any_port(make_services_workflow("demo", port=taken))
    foreground.create_run(cluster, workflow, {}, checks_ports=False).files.close()
    assert execute_manifest(workflow, {}, cluster)["phase"] == "Succeeded"
    port = port_of(cluster, "demo")
    assert port > taken
    assert (
        capsys.readouterr().err.count(
            f"at port {port}, because port {taken} is taken (setting serve.port)"
        )
        == 1
    )


def test_a_model_keeps_the_port_of_its_last_release(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        workflow = allow_any_port(make_services_workflow("demo", port=server.getsockname()[1]))
        execute_manifest(workflow, {}, cluster)
    port = port_of(cluster, "demo")
    execute_manifest(workflow, {}, cluster)
    assert port_of(cluster, "demo") == port


def test_two_models_that_are_released_at_once_get_two_ports(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        default = server.getsockname()[1]
    execute_manifest(
        allow_any_port(make_services_workflow("demo", "other", port=default)), {}, cluster
    )
    assert len({port_of(cluster, "demo"), port_of(cluster, "other")}) == 2


def test_a_chosen_port_that_is_taken_rejects_the_run_at_its_start_and_later_fails_the_release(
    tmp_path: Path, taken: int
) -> None:
    cluster = LocalCluster(tmp_path)
    workflow = make_services_workflow("demo", port=taken)
    with pytest.raises(
        ConfigError, match=rf"port {taken} on 127\.0\.0\.1 cannot be used .*--set serve\.port="
    ):
        foreground.create_run(cluster, workflow, {})
    status = execute_manifest(workflow, {}, cluster)
    assert status["phase"] == "Failed"
    assert any(
        f"port {taken} on 127.0.0.1 cannot be used" in node.get("message", "")
        for node in status["nodes"].values()
    )


def test_a_backfill_needs_no_port(tmp_path: Path, taken: int) -> None:
    workflow = make_services_workflow("demo", port=taken)
    workflow["spec"]["arguments"] = {"parameters": [{"name": "backfill", "value": ""}]}
    # the condition is the same as in the gate of a pipeline
    no_backfill = {"when": "{{= workflow.parameters.backfill != 'true' }}"}
    workflow["spec"]["templates"][0]["dag"]["tasks"][0].update(no_backfill)
    assert create_run(tmp_path, workflow, {"backfill": "true"}).run(as_json=False, ask=False) == 0
    with pytest.raises(ConfigError, match=f"port {taken}"):
        create_run(tmp_path, workflow, {})


@pytest.mark.parametrize(("sets", "any_port"), [((), True), (("serve.port=8123",), False)])
def test_a_run_here_may_use_any_port_unless_the_user_has_chosen_one(
    sets: tuple[str, ...], any_port: bool
) -> None:
    manifests = Source(project.REFERENCE / "configs/sweep.yaml", sets).manifests()
    assert may_use_any_port(manifests.main_for_this_machine()) == any_port
    assert not may_use_any_port(manifests.main), "the manifest for a cluster has no such permission"
