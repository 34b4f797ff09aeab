"""Run a small pod in a namespace, and read its log and the states of its containers."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from argolocal.manifest.object_labels import WORKFLOW
from argolocal.manifest.types import Object
from rekindle.blocks import pod_settings as pods
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import PODS, Cluster
from rekindle.kubernetes_names import PART_OF_REKINDLE

# `reason` of a waiting container that cannot start
PULL_FAILURE_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
)


@contextmanager
def run_pod(
    cluster: Cluster,
    pod_name: str,
    cluster_config: ClusterConfig,
    images_by_container: dict[str, str],
    python_arguments: Sequence[str],
    timeout_seconds: float,
) -> Iterator[Object]:
    """Run a pod named NAME-SUFFIX, yield the pod when its containers have ended or
    `timeout_seconds` have passed, and then delete the pod."""
    pod_settings = PodConfig.model_validate({"cpu": "50m", "memory": "512Mi"})
    pod_object = build_pod_manifest(
        f"{pod_name}-{uuid.uuid4().hex[:6]}",
        cluster_config,
        pod_settings,
        images_by_container,
        python_arguments,
    )
    _create_pod(cluster, pod_object)
    try:
        yield _wait_for_containers(cluster, pod_object["metadata"]["name"], timeout_seconds)
    finally:
        cluster.delete(PODS, pod_object["metadata"]["name"], gracePeriodSeconds=0)


def read_log(cluster: Cluster, pod_object: Object) -> list[str]:
    """Return the lines of the log of container `main`."""
    return [
        line.decode(errors="replace")
        for line in cluster.log(pod_object["metadata"]["name"], "main")
    ]


def _create_pod(cluster: Cluster, pod_object: Object) -> None:
    """Create a pod. If _create_pod raises ApiError, the pod does not exist, because a pod whose
    creation was not confirmed is deleted."""
    try:
        cluster.create(PODS, pod_object)
    except ApiError as error:
        # 409 is not an error: the name is unique, so an earlier attempt whose response was lost has
        # created the pod
        if error.code == 409:
            return
        if not 400 <= error.code < 500:
            with suppress(ApiError):
                cluster.delete(PODS, pod_object["metadata"]["name"], gracePeriodSeconds=0)
        raise


def _wait_for_containers(cluster: Cluster, pod_name: str, timeout_seconds: float) -> Object:
    """Wait until each container has exited or cannot start, or until `timeout_seconds` have
    passed, and return the pod."""
    deadline = time.monotonic() + timeout_seconds

    while True:
        pod_object = cluster.get(PODS, pod_name)
        container_state_list = get_container_states(pod_object).values()

        has_settled = [
            container_state.get("terminated")
            or (container_state.get("waiting") or {}).get("reason") in PULL_FAILURE_REASONS
            for container_state in container_state_list
        ]
        if (has_settled and all(has_settled)) or time.monotonic() > deadline:
            return pod_object

        time.sleep(min(1, timeout_seconds))


def get_container_states(pod_object: Object) -> dict[str, Any]:
    """Return the state of each container, by name: waiting, running or terminated, with details."""
    container_statuses = (pod_object.get("status") or {}).get("containerStatuses") or []
    return {
        container_status["name"]: container_status.get("state") or {}
        for container_status in container_statuses
    }


def build_pod_manifest(
    pod_name: str,
    cluster_config: ClusterConfig,
    pod_settings: PodConfig,
    images_by_container: dict[str, str],
    python_arguments: Sequence[str],
) -> Object:
    """Return a pod with the settings of a step's pod. The container `main` runs
    `python_arguments`; the other containers only test whether their images can start."""
    containers = [
        pods.hardened_container(
            key,
            pod_settings.model_copy(update={"image": image}),
            [*python_arguments] if key == "main" else ["-c", "pass"],
        )
        for key, image in images_by_container.items()
    ]

    # network policies select the pods of steps by the label WORKFLOW
    pod_labels = {**PART_OF_REKINDLE, WORKFLOW: pod_name}
    pod_spec = pods.pod_spec(
        pod_settings, cluster_config.pod_account, containers, pod_labels, restartPolicy="Never"
    )

    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod_name, "labels": pod_labels},
        "spec": pod_spec,
    }
