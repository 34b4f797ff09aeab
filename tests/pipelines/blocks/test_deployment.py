"""The serving objects: when a rollout counts as done, and that no request is lost in one."""

from typing import Any

import pytest
from hera.workflows import models as m

from pipelines.blocks.autoscaler import autoscaler
from pipelines.blocks.cluster import ClusterConfig
from pipelines.blocks.deployment import FAILURE, PORT, SUCCESS, deployment
from pipelines.blocks.disruption_budget import disruption_budget
from pipelines.blocks.service import service
from pipelines.local.selector import verdict
from steps.serve import ServeConfig

CLUSTER, SERVE = ClusterConfig.model_validate({}), ServeConfig.model_validate({"min_replicas": 2})


def status(reason: str, **counts: int) -> dict[str, Any]:
    available = {"type": "Available", "reason": "MinimumReplicasAvailable"}
    return {"status": {"conditions": [available, {"type": "Progressing", "reason": reason}], **counts}}


OLD_AND_NEW = {"replicas": 2, "availableReplicas": 1, "unavailableReplicas": 1}


@pytest.mark.parametrize(
    "name, document, expected",
    [
        ("just applied", {"status": {}}, None),
        ("first pod starts", status("NewReplicaSetCreated", replicas=1, unavailableReplicas=1), None),
        ("first pod ready", status("NewReplicaSetAvailable", replicas=1, availableReplicas=1), True),
        ("old serves, new starts", status("ReplicaSetUpdated", **OLD_AND_NEW), None),
        ("new never became ready", status("ProgressDeadlineExceeded", **OLD_AND_NEW), False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_deployment_is_done_when_the_new_pods_serve(name: str, document: Any, expected: bool | None) -> None:
    assert verdict(document, SUCCESS, ",".join(FAILURE))[0] is expected


def test_the_old_model_serves_until_the_new_one_is_ready() -> None:
    spec = deployment("cards", SERVE, CLUSTER, [])["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    (server,) = spec["template"]["spec"]["containers"]
    assert server["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert server["livenessProbe"]["httpGet"]["path"] == "/health/live"
    slowest = server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"]
    assert slowest < spec["progressDeadlineSeconds"]  # a slow start is not taken for a failed one
    grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > SERVE.drain_seconds + SERVE.grace_seconds  # the kubelet waits for the server's own drain


def test_the_autoscaler_alone_decides_how_many_serve() -> None:
    assert "replicas" not in deployment("cards", SERVE, CLUSTER, [])["spec"]
    spec = autoscaler("cards", SERVE)["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "cards"}


def test_service_budget_and_deployment_mean_the_same_pods() -> None:
    spec = deployment("cards", SERVE, CLUSTER, [])["spec"]
    labels = spec["template"]["metadata"]["labels"]
    budget, address = disruption_budget("cards")["spec"], service("cards", 9000)["spec"]
    ours = spec["selector"]["matchLabels"]
    assert ours == budget["selector"]["matchLabels"] == address["selector"] and ours.items() <= labels.items()
    assert m.PodDisruptionBudgetSpec.model_validate(budget).max_unavailable is not None
    (port,) = address["ports"]
    (container,) = spec["template"]["spec"]["containers"]
    assert port["port"] == 9000 and container["ports"] == [{"name": port["targetPort"], "containerPort": PORT}]
