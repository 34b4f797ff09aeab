"""The Deployment that serves a model: a new version takes over only when it is ready, then the old one drains."""

from math import ceil

from pipelines.blocks.cluster import ClusterConfig
from pipelines.blocks.pod import Manifest, container, pod_spec
from steps.serve import ServeConfig

PORT = 8080
STARTUP_SECONDS = 600  # to load the model

SUCCESS = "status.availableReplicas > 0,!status.unavailableReplicas"
FAILURE = tuple(f"status.conditions.{i}.reason == ProgressDeadlineExceeded" for i in range(3))


def labels(name: str) -> dict[str, str]:
    """What the Service, the autoscaler and the budget find the pods by."""
    return {"app.kubernetes.io/name": name}


def deployment(name: str, serve: ServeConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """`python -m steps serve FLAGS`. Without `replicas`: the autoscaler owns that number.

    Source: Kubernetes apps/v1 DeploymentSpec.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {
            "selector": {"matchLabels": labels(name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "progressDeadlineSeconds": STARTUP_SECONDS + 60,
            "revisionHistoryLimit": 3,
            "template": {"metadata": {"labels": labels(name)}, "spec": _server(name, serve, cluster, flags)},
        },
    }


def _server(name: str, serve: ServeConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    pod = cluster.pod("serve")
    server = container(
        "serve",
        pod,
        ["-m", "steps", "serve", *flags],
        ports=[{"name": "http", "containerPort": PORT}],
        startupProbe=_probe("/health/ready", period=1, failures=STARTUP_SECONDS),
        readinessProbe=_probe("/health/ready", period=2, failures=3),
        livenessProbe=_probe("/health/live", period=10, failures=3),
    )
    apart = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    spread = [{**apart, "labelSelector": {"matchLabels": labels(name)}}]
    grace = ceil(serve.drain_seconds + serve.grace_seconds) + 5  # the server's own, and time to end
    return pod_spec(
        pod, cluster.pod_account, [server], terminationGracePeriodSeconds=grace, topologySpreadConstraints=spread
    )


def _probe(path: str, period: int, failures: int) -> Manifest:
    check = {"httpGet": {"path": path, "port": "http"}}
    return {**check, "periodSeconds": period, "timeoutSeconds": 3, "failureThreshold": failures}
