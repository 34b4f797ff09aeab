"""Tests of the objects that serve a model: the conditions of a rollout are correct, and a rollout
does not lose requests."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hera.workflows import models as m

from argolocal.language.selector import evaluate_conditions
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.blocks.serving.autoscaler import build_autoscaler
from rekindle.blocks.serving.model_deployment import (
    FAILURE,
    SUCCESS,
    build_deployment,
    build_disruption_budget,
)
from rekindle.blocks.serving.service import build_client_service
from rekindle.blocks.settings import ClusterConfig
from rekindle.release.serve_config import DEFAULT_PORT, ServeConfig

MANIFEST = render_manifest(
    load_config(Path(__file__).parents[3] / "golden/config.yaml", environment={}).config
)

CLUSTER = ClusterConfig.model_validate({})
SERVE = ServeConfig.model_validate({"min_replicas": 2})


def server_pod(serve: ServeConfig = SERVE, cluster: ClusterConfig = CLUSTER) -> Any:
    return build_deployment("cards", "cards-1", serve, cluster, [])["spec"]["template"]["spec"]


def make_status(reason: str, **counts: int) -> dict[str, Any]:
    available = {"type": "Available", "reason": "MinimumReplicasAvailable"}
    return {
        "status": {"conditions": [available, {"type": "Progressing", "reason": reason}], **counts}
    }


OLD_AND_NEW = {"replicas": 2, "availableReplicas": 1, "unavailableReplicas": 1}
ONE_OF_THREE_IS_NEW = {"replicas": 3, "updatedReplicas": 1, "availableReplicas": 3}


@pytest.mark.parametrize(
    "name, document, expected",
    [
        ("just applied", {"status": {}}, None),
        (
            "first pod starts",
            make_status("NewReplicaSetCreated", replicas=1, unavailableReplicas=1),
            None,
        ),
        (
            "first pod ready",
            make_status("NewReplicaSetAvailable", replicas=1, availableReplicas=1),
            True,
        ),
        ("two old pods still serve", make_status("ReplicaSetUpdated", **ONE_OF_THREE_IS_NEW), None),
        ("old pod serves, new pod starts", make_status("ReplicaSetUpdated", **OLD_AND_NEW), None),
        (
            "new pod never becomes ready",
            make_status("ProgressDeadlineExceeded", **OLD_AND_NEW),
            False,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rollout_succeeds_when_the_new_pods_are_ready(
    name: str, document: Any, expected: bool | None
) -> None:
    assert evaluate_conditions(document, SUCCESS, ",".join(FAILURE))[0] is expected


def test_an_earlier_failed_rollout_costs_one_attempt_but_not_the_release() -> None:
    """After an apply, Argo evaluates the conditions of a rollout immediately, maybe before the
    controller has observed the new Deployment."""
    story = yaml.safe_load((Path(__file__).parents[1] / "statuses/Deployment.yaml").read_text())
    # the status shows the end of the old rollout first, and then the new rollout
    seen = [story["failed"][-1], *story["rollout"]]

    assert [
        evaluate_conditions({"status": each}, SUCCESS, ",".join(FAILURE))[0] for each in seen
    ] == [
        False,
        None,
        True,
    ]

    templates = {each["name"]: each for each in MANIFEST["spec"]["templates"]}
    retry = templates["deployment"]["retryStrategy"]
    assert int(retry["limit"]) >= 2
    assert retry["retryPolicy"] == "Always"
    assert "expression" not in retry
    # the backoff is enough time for the controller to observe the new Deployment
    assert retry["backoff"]["duration"] == "2s"


def test_verify_waits_at_least_for_the_startup_limit_of_a_server() -> None:
    """Right after an apply, the condition may still see the old pods. A slow start of the new pods
    must not reject a good model."""
    old = make_status(
        "NewReplicaSetAvailable",
        observedGeneration=1,
        replicas=1,
        updatedReplicas=1,
        availableReplicas=1,
    )

    # this status was recorded from a cluster
    unobserved = old | {"metadata": {"generation": 2}}
    assert evaluate_conditions(unobserved, SUCCESS, ",".join(FAILURE))[0]
    templates = {each["name"]: each for each in MANIFEST["spec"]["templates"]}
    verify = next(each for each in templates["promote"]["dag"]["tasks"] if each["name"] == "verify")
    wait = {each["name"]: each["value"] for each in verify["arguments"]["parameters"]}[
        "wait_seconds"
    ]
    deployment = next(t for t in templates.values() if t["name"] == "deployment")["resource"][
        "manifest"
    ]
    (server,) = json.loads(deployment)["spec"]["template"]["spec"]["containers"]
    probe = server["startupProbe"]
    assert float(wait) >= probe["periodSeconds"] * probe["failureThreshold"]
    assert float(wait) < templates["verify"]["activeDeadlineSeconds"]


def test_the_old_pods_serve_until_the_new_pods_are_ready() -> None:
    spec = build_deployment("cards", "cards-1", SERVE, CLUSTER, [])["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    (server,) = spec["template"]["spec"]["containers"]
    assert server["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert server["livenessProbe"]["httpGet"]["path"] == "/health/live"
    slowest = server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"]
    # the deadline is longer, so that a slow start does not count as a failure
    assert slowest < spec["progressDeadlineSeconds"]
    grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    # the kubelet waits until the server has drained, and has answered a request that began at the
    # end of the drain
    assert grace > SERVE.drain_seconds + SERVE.grace_seconds + SERVE.body_seconds


def test_a_server_requests_one_core_per_thread_of_its_processes() -> None:
    for values, cores in (({}, "1"), ({"processes": 3, "threads": 2}, "6")):
        pod = server_pod(ServeConfig.model_validate(values))
        assert pod["containers"][0]["resources"]["requests"]["cpu"] == cores
    cluster = ClusterConfig.model_validate({"pods": {"serve": {"cpu": "500m"}}})
    pod = server_pod(ServeConfig.model_validate({"processes": 3}), cluster)
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == "500m"


def test_a_release_starts_with_the_minimum_of_the_autoscaler() -> None:
    assert build_deployment("cards", "cards-1", SERVE, CLUSTER, [])["spec"]["replicas"] == 2
    spec = build_autoscaler("cards", SERVE, "cards-1")["spec"]
    assert spec["minReplicas"] == 2
    assert spec["maxReplicas"] == 4
    assert spec["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "cards-1",
    }


def test_the_autoscaler_uses_memory_and_custom_metrics_and_removes_pods_one_by_one() -> None:
    values = {
        "memory_percent": 80,
        "metrics": {"rekindle_requests_waiting": "4"},
        "scale_down_seconds": 60,
    }

    spec = build_autoscaler("cards", ServeConfig.model_validate(values), "cards-1")["spec"]
    cpu, memory, waiting = spec["metrics"]
    assert cpu["resource"]["name"] == "cpu"
    assert memory["resource"]["name"] == "memory"
    assert memory["resource"]["target"] == {"type": "Utilization", "averageUtilization": 80}
    assert waiting["pods"]["metric"] == {"name": "rekindle_requests_waiting"}
    assert waiting["pods"]["target"] == {"type": "AverageValue", "averageValue": "4"}
    scale_down = spec["behavior"]["scaleDown"]
    assert scale_down["stabilizationWindowSeconds"] == 60
    assert scale_down["policies"][0]["value"] == 1


def test_clients_reach_one_release_and_node_drains_evict_one_pod_at_a_time() -> None:
    spec = build_deployment("cards", "cards-1", SERVE, CLUSTER, [])["spec"]
    labels = spec["template"]["metadata"]["labels"]
    budget = build_disruption_budget("cards")["spec"]
    address = build_client_service("cards", 9000, "cards-1")["spec"]
    selector = spec["selector"]["matchLabels"]
    assert selector == address["selector"]
    assert selector.items() <= labels.items()
    assert budget["selector"]["matchLabels"].items() < selector.items()
    assert selector != build_client_service("cards", 9000, "cards-2")["spec"]["selector"]
    assert m.PodDisruptionBudgetSpec.model_validate(budget).max_unavailable is not None
    (port,) = address["ports"]
    (container,) = spec["template"]["spec"]["containers"]
    assert port["port"] == 9000
    assert container["ports"] == [{"name": port["targetPort"], "containerPort": DEFAULT_PORT}]
