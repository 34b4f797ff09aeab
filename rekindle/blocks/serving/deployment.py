"""The Deployment that serves one release of a model. Each release has its own, so that it can be verified before it
gets traffic, and brought back as it was: with its weights, image, flags and resources.
"""

from math import ceil

from rekindle.blocks.pod import SERVING_SECRET, Manifest, container, environment, metadata, pod_spec
from rekindle.blocks.settings import ClusterConfig, PodConfig
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
    pod = server_pod(serve, cluster)
    grace = ceil(serve.drain_seconds + serve.grace_seconds) + 5  # the server's own, and time to end
    runs = [server("serve", pod, flags)]
    return pod_spec(pod, cluster.serving_account, runs, own, terminationGracePeriodSeconds=grace)


def server_pod(serve: ServeConfig, cluster: ClusterConfig) -> PodConfig:
    """What one server gets: unless the config says otherwise, a core for each thread of its processes."""
    pod = cluster.pod("serve")
    return pod.model_copy(update={"cpu": pod.cpu or str(serve.processes * serve.threads)})


def server(name: str, pod: PodConfig, flags: list[str], port: str = "http") -> Manifest:
    """The container, with its probes; it listens at the port called `port`."""
    return container(
        name,
        pod,
        ["-m", "rekindle", "step", "steps.serve", *flags],
        envFrom=environment(SERVING_SECRET),
        ports=[{"name": port, "containerPort": PORT}],
        startupProbe=_probe("/health/ready", port, period=1, failures=STARTUP_SECONDS),
        readinessProbe=_probe("/health/ready", port, period=2, failures=3),
        livenessProbe=_probe("/health/live", port, period=10, failures=3),
    )


def _probe(path: str, port: str, period: int, failures: int) -> Manifest:
    check = {"httpGet": {"path": path, "port": port}}
    return {**check, "periodSeconds": period, "timeoutSeconds": 3, "failureThreshold": failures}
