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

PULL_FAILURE_REASONS = (
    *(
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
    ),
)


@contextmanager
def run_pod(
    cluster: Cluster,
    name: str,
    config: ClusterConfig,
    images: dict[str, str],
    args: Sequence[str],
    seconds: float,
) -> Iterator[Object]:
    """Run a pod named NAME-SUFFIX, yield it when its containers have ended or `seconds` have
    passed, and then delete it."""
    settings = PodConfig.model_validate({"cpu": "50m", "memory": "512Mi"})
    pod = pod_manifest(f"{name}-{uuid.uuid4().hex[:6]}", config, settings, images, args)
    _create(cluster, pod)
    try:
        yield _wait(cluster, pod["metadata"]["name"], seconds)
    finally:
        cluster.delete(PODS, pod["metadata"]["name"], gracePeriodSeconds=0)


def read_log(cluster: Cluster, pod: Object) -> list[str]:
    """Return the lines of the log of container `main`."""
    return [line.decode(errors="replace") for line in cluster.log(pod["metadata"]["name"], "main")]


def _create(cluster: Cluster, pod: Object) -> None:
    """Create a pod. If this function raises ApiError, the pod does not exist: a pod whose creation
    was not confirmed is deleted."""
    try:
        cluster.create(PODS, pod)
    except ApiError as error:
        # not an error: because the name is unique, an earlier attempt whose response was lost has
        # created this pod
        if error.code == 409:
            return
        if not 400 <= error.code < 500:
            with suppress(ApiError):
                cluster.delete(PODS, pod["metadata"]["name"], gracePeriodSeconds=0)
        raise


def _wait(cluster: Cluster, name: str, seconds: float) -> Object:
    """Wait until each container has exited or cannot start, or until `seconds` have passed, and
    return the pod."""
    deadline = time.monotonic() + seconds

    while True:
        pod = cluster.get(PODS, name)
        states = container_states(pod).values()

        has_settled = [
            state.get("terminated")
            or (state.get("waiting") or {}).get("reason") in PULL_FAILURE_REASONS
            for state in states
        ]
        if (has_settled and all(has_settled)) or time.monotonic() > deadline:
            return pod

        time.sleep(min(1, seconds))


def container_states(pod: Object) -> dict[str, Any]:
    """Return the state of each container, by name: waiting, running or terminated, with details."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return {status["name"]: status.get("state") or {} for status in statuses}


def pod_manifest(
    name: str,
    config: ClusterConfig,
    settings: PodConfig,
    images: dict[str, str],
    args: Sequence[str],
) -> Object:
    """Return a pod with the settings of a step's pod. The container `main` runs `args`; the other
    containers only test whether their images can start."""
    containers = [
        pods.hardened_container(
            key,
            settings.model_copy(update={"image": image}),
            [*args] if key == "main" else ["-c", "pass"],
        )
        for key, image in images.items()
    ]

    # network policies select the pods of steps by the label WORKFLOW
    labels = {**PART_OF_REKINDLE, WORKFLOW: name}
    spec = pods.pod_spec(settings, config.pod_account, containers, labels, restartPolicy="Never")

    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }
