"""The Deployment that serves one release of a model.

Each release has its own Deployment, so that a release can be verified before it gets traffic, and a
rollback can restore the weights, image, flags and resources of the release.
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
from rekindle.release.serve_config import DEFAULT_PORT, VERSION_ANNOTATION, ServeConfig

# time limit in seconds for loading the model, also for the step `verify`
STARTUP_SECONDS = 600

# When all pods of a Deployment are ready, its conditions Available and Progressing, in any order,
# have the reasons in SUCCESS. Right after an apply, the status may still describe the previous
# manifest, and the expressions in SUCCESS cannot compare observedGeneration with generation. So
# steps.verify itself waits for the new pods, and a template that fails because of the status of the
# previous manifest is retried.
SUCCESS = ",".join(
    f"status.conditions.{i}.reason in (NewReplicaSetAvailable,MinimumReplicasAvailable)"
    for i in range(2)
)
FAILURE = tuple(f"status.conditions.{i}.reason == ProgressDeadlineExceeded" for i in range(3))
# network policies select the pods of batch scoring by this label (configs/platform/network.yaml)
SCORING_LABEL = {COMPONENT_LABEL: "scoring"}


def labels(model_name: str, server_name: str = "") -> dict[str, str]:
    """Return the labels of the objects of a model or, with `server_name`, of its Deployment
    `server_name`."""
    instance_label = {INSTANCE_LABEL: server_name} if server_name else {}
    return {NAME_LABEL: model_name} | instance_label


def build_deployment(
    model_name: str,
    server_name: str,
    serve_config: ServeConfig,
    cluster: ClusterConfig,
    serve_flags: list[str],
    model_version: str = "",
) -> Manifest:
    """Return the Deployment `server_name`, which runs `rekindle step steps.serve FLAGS` for
    `model_version` of the model.

    Source: the fields are defined by Kubernetes (apps/v1, DeploymentSpec).
    """
    label_selector = labels(model_name, server_name)

    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": server_name,
            "labels": label_selector,
            "annotations": {VERSION_ANNOTATION: model_version},
        },
        "spec": {
            "replicas": serve_config.min_replicas,
            "selector": {"matchLabels": label_selector},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "progressDeadlineSeconds": STARTUP_SECONDS + 60,
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": pod_metadata(cluster.pod("serve"), label_selector | SCORING_LABEL),
                "spec": _build_server_pod(label_selector, serve_config, cluster, serve_flags),
            },
        },
    }


def _build_server_pod(
    pod_labels: dict[str, str],
    serve_config: ServeConfig,
    cluster: ClusterConfig,
    serve_flags: list[str],
) -> Manifest:
    """Return the PodSpec of a model server, which requests one CPU core per thread unless the
    config says otherwise."""
    pod_config = cluster.pod("serve")
    pod_config = pod_config.model_copy(
        update={"cpu": pod_config.cpu or str(serve_config.processes * serve_config.threads)}
    )

    main_container = hardened_container(
        "serve",
        pod_config,
        ["-m", "rekindle", "step", "steps.serve", *serve_flags],
        env=[*POD_ADDRESS, *token_variables(serve_config)],
        envFrom=environment_sources(SERVING_SECRET),
        ports=[{"name": "http", "containerPort": DEFAULT_PORT}],
        startupProbe=_build_probe(
            "/health/ready", period_seconds=1, failure_threshold=STARTUP_SECONDS
        ),
        readinessProbe=_build_probe("/health/ready", period_seconds=2, failure_threshold=3),
        livenessProbe=_build_probe("/health/live", period_seconds=10, failure_threshold=3),
    )

    # the grace period includes 5 s for the exit of the process
    grace_seconds = (
        ceil(serve_config.drain_seconds + serve_config.grace_seconds + serve_config.body_seconds)
        + 5
    )

    return pod_spec(
        pod_config,
        cluster.serving_account,
        [main_container],
        pod_labels,
        terminationGracePeriodSeconds=grace_seconds,
    )


def _build_probe(path: str, period_seconds: int, failure_threshold: int) -> Manifest:
    http_check = {"httpGet": {"path": path, "port": "http"}}
    return {
        **http_check,
        "periodSeconds": period_seconds,
        "timeoutSeconds": 3,
        "failureThreshold": failure_threshold,
    }


def build_disruption_budget(budget_name: str) -> Manifest:
    """Return a budget that lets a drain evict one server at a time. Source: policy/v1."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": budget_name, "labels": labels(budget_name)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(budget_name)}},
    }
