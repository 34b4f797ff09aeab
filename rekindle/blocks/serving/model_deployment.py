"""The Deployment that serves one release of a model.

Each release has its own Deployment, so that it can be verified before it gets traffic, and a
rollback can restore its weights, image, flags and resources.
"""

from math import ceil

from rekindle.blocks.pod_settings import (
    POD_ADDRESS,
    Manifest,
    environment_sources,
    hardened_container,
    pod_metadata,
    pod_spec,
    token_variables,
)
from rekindle.blocks.settings import ClusterConfig
from rekindle.kubernetes_names import COMPONENT_LABEL, INSTANCE_LABEL, NAME_LABEL, SERVING_SECRET
from rekindle.release.serve_config import PORT, VERSION_ANNOTATION, ServeConfig

STARTUP_SECONDS = 600  # time limit for loading the model; `verify` uses it, too

# When all pods are ready, the conditions Available and Progressing, in any order, have these
# reasons. Right after an apply, the status may still describe the previous manifest: these
# expressions cannot compare observedGeneration with generation. So steps.verify itself waits for
# the new pods, and the template is retried if it has failed because of the previous manifest.
SUCCESS = ",".join(
    f"status.conditions.{i}.reason in (NewReplicaSetAvailable,MinimumReplicasAvailable)"
    for i in range(2)
)
FAILURE = tuple(f"status.conditions.{i}.reason == ProgressDeadlineExceeded" for i in range(3))
# network policies select this label: configs/platform/network.yaml
SCORING_LABEL = {COMPONENT_LABEL: "scoring"}


def labels(model: str, server: str = "") -> dict[str, str]:
    """Return the labels of the objects of a model or, with `server`, of its Deployment
    `server`."""
    instance = {INSTANCE_LABEL: server} if server else {}
    return {NAME_LABEL: model} | instance


def deployment(
    model: str,
    server: str,
    serve: ServeConfig,
    cluster: ClusterConfig,
    flags: list[str],
    version: str = "",
) -> Manifest:
    """Return the Deployment `server`, which runs `rekindle step steps.serve FLAGS` for `version` of
    the model.

    Source: Kubernetes apps/v1 DeploymentSpec.
    """
    selector = labels(model, server)

    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": server,
            "labels": selector,
            "annotations": {VERSION_ANNOTATION: version},
        },
        "spec": {
            "replicas": serve.min_replicas,
            "selector": {"matchLabels": selector},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "progressDeadlineSeconds": STARTUP_SECONDS + 60,
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": pod_metadata(cluster.pod("serve"), selector | SCORING_LABEL),
                "spec": _server_pod(selector, serve, cluster, flags),
            },
        },
    }


def _server_pod(
    labels: dict[str, str], serve: ServeConfig, cluster: ClusterConfig, flags: list[str]
) -> Manifest:
    """Return the PodSpec of a model server, which requests one CPU core per thread unless the
    config says otherwise."""
    pod = cluster.pod("serve")
    pod = pod.model_copy(update={"cpu": pod.cpu or str(serve.processes * serve.threads)})

    main = hardened_container(
        "serve",
        pod,
        ["-m", "rekindle", "step", "steps.serve", *flags],
        env=[*POD_ADDRESS, *token_variables(serve)],
        envFrom=environment_sources(SERVING_SECRET),
        ports=[{"name": "http", "containerPort": PORT}],
        startupProbe=_probe("/health/ready", period=1, failures=STARTUP_SECONDS),
        readinessProbe=_probe("/health/ready", period=2, failures=3),
        livenessProbe=_probe("/health/live", period=10, failures=3),
    )

    # 5 s more, in which the process exits
    grace_seconds = ceil(serve.drain_seconds + serve.grace_seconds + serve.body_seconds) + 5

    return pod_spec(
        pod, cluster.serving_account, [main], labels, terminationGracePeriodSeconds=grace_seconds
    )


def _probe(path: str, period: int, failures: int) -> Manifest:
    check = {"httpGet": {"path": path, "port": "http"}}
    return {**check, "periodSeconds": period, "timeoutSeconds": 3, "failureThreshold": failures}


def disruption_budget(name: str) -> Manifest:
    """Return a budget that lets a drain evict one server at a time. Source: policy/v1."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(name)}},
    }
