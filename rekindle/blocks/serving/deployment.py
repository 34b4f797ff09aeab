"""The Deployment that serves one release of a model. Each release has its own, so that it can be verified before it
gets traffic, and brought back as it was: with its weights, image, flags and resources.
"""

from math import ceil

from rekindle.blocks.pod import SERVING_SECRET, Manifest, container, environment, metadata, pod_spec
from rekindle.blocks.settings import ClusterConfig
from rekindle.release.config import PORT, VERSION_ANNOTATION, ServeConfig

STARTUP_SECONDS = 600  # to load the model; `verify` waits as long for it

# Available and Progressing, in any order: all pods are of the version that the controller has seen, and ready. Right
# after an apply that may be the version before, as a condition cannot compare observedGeneration with generation: who
# needs the new one waits for it (steps.verify), and an old failure costs an attempt of the step, not the step.
SUCCESS = ",".join(
    f"status.conditions.{i}.reason in (NewReplicaSetAvailable,MinimumReplicasAvailable)" for i in range(2)
)
FAILURE = tuple(f"status.conditions.{i}.reason == ProgressDeadlineExceeded" for i in range(3))
SCORING = {"app.kubernetes.io/component": "scoring"}  # who may connect to these pods: configs/platform/network.yaml


def labels(model: str, server: str = "") -> dict[str, str]:
    """The labels of a model's objects, or of those of one Deployment of it."""
    instance = {"app.kubernetes.io/instance": server} if server else {}
    return {"app.kubernetes.io/name": model} | instance


def deployment(
    model: str, server: str, serve: ServeConfig, cluster: ClusterConfig, flags: list[str], version: str = ""
) -> Manifest:
    """`rekindle step steps.serve FLAGS`, called `server`, for `version` of the model.

    Source: Kubernetes apps/v1 DeploymentSpec.
    """
    own = labels(model, server)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": server, "labels": own, "annotations": {VERSION_ANNOTATION: version}},
        "spec": {
            "replicas": serve.min_replicas,
            "selector": {"matchLabels": own},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "progressDeadlineSeconds": STARTUP_SECONDS + 60,
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": metadata(cluster.pod("serve"), own | SCORING),
                "spec": _server(own, serve, cluster, flags),
            },
        },
    }


def _server(own: dict[str, str], serve: ServeConfig, cluster: ClusterConfig, flags: list[str]) -> Manifest:
    """The PodSpec of a server: unless the config says otherwise, with a core for each thread of its processes."""
    pod = cluster.pod("serve")
    pod = pod.model_copy(update={"cpu": pod.cpu or str(serve.processes * serve.threads)})
    runs = container(
        "serve",
        pod,
        ["-m", "rekindle", "step", "steps.serve", *flags],
        envFrom=environment(SERVING_SECRET),
        ports=[{"name": "http", "containerPort": PORT}],
        startupProbe=_probe("/health/ready", period=1, failures=STARTUP_SECONDS),
        readinessProbe=_probe("/health/ready", period=2, failures=3),
        livenessProbe=_probe("/health/live", period=10, failures=3),
    )
    grace = ceil(serve.drain_seconds + serve.grace_seconds) + 5  # the server's own, and time to end
    return pod_spec(pod, cluster.serving_account, [runs], own, terminationGracePeriodSeconds=grace)


def _probe(path: str, period: int, failures: int) -> Manifest:
    check = {"httpGet": {"path": path, "port": "http"}}
    return {**check, "periodSeconds": period, "timeoutSeconds": 3, "failureThreshold": failures}


def disruption_budget(name: str) -> Manifest:
    """Nodes are drained one server at a time, and never none, which would block a drain. Source: policy/v1."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(name)}},
    }
