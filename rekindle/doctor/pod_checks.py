"""Check the images, the object store and MLflow from a temporary pod of the namespace.

for check in run_pod_checks(Cluster.connect(namespace="models"), config.cluster):
    print(check)
"""

from collections.abc import Iterator

from pydantic import ConfigDict, RootModel

from argolocal.manifest.types import Object
from rekindle.blocks.settings import POD_DEFAULTS, ClusterConfig
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.pod_runner import (
    PULL_FAILURE_REASONS,
    get_container_states,
    read_log,
    run_pod,
)
from rekindle.documents import parse_and_validate
from rekindle.errors import Check
from rekindle.kubernetes_names import DOCTOR_NAME

# arguments of `python` in the temporary pod
PROBE = ("-m", "rekindle.doctor.probe")
# default time limit in seconds for the pod to start and finish; pulling an image of several GB
# takes longer
PROBE_TIMEOUT_S = 180
REMEDIES = {
    "object store": (
        "Correct S3_ENDPOINT_URL and S3_BUCKET of the ConfigMap rekindle and the keys of the Secret"
        " rekindle-s3; the store must honour If-None-Match and If-Match (MinIO, S3), and a"
        " NetworkPolicy must let pods out."
    ),
    "MLflow": (
        "Correct MLFLOW_TRACKING_URI of the ConfigMap rekindle; the server must allow this Host"
        " name (MLFLOW_SERVER_ALLOWED_HOSTS) and connections from this namespace."
    ),
}


class Findings(RootModel[dict[str, tuple[bool, str]]]):
    """The output of rekindle.doctor.probe: for each service, whether it works, and a detail."""

    model_config = ConfigDict(strict=True)


def run_pod_checks(
    cluster: Cluster, cluster_config: ClusterConfig, timeout_seconds: float = PROBE_TIMEOUT_S
) -> Iterator[Check]:
    """Check the images, the object store and MLflow. Raises ApiError."""
    unique_images = dict.fromkeys(
        [
            cluster_config.pod("train").image,
            *(cluster_config.pod(name).image for name in POD_DEFAULTS),
        ]
    )

    images_by_container = {
        "main" if not image_number else f"image-{image_number}": image_name
        for image_number, image_name in enumerate(unique_images)
    }
    with run_pod(
        cluster, DOCTOR_NAME, cluster_config, images_by_container, PROBE, timeout_seconds
    ) as probe_pod:
        image_checks = list(_check_images(cluster, probe_pod, images_by_container, timeout_seconds))
        yield from image_checks

        if "terminated" in get_container_states(probe_pod).get("main", {}):
            yield from _parse_results(cluster, probe_pod, images_by_container["main"])
        else:
            skip_cause = next(
                (f"{check.name} is not available" for check in image_checks if not check.ok), ""
            )
            detail = "not checked: " + (
                skip_cause or f"the pod gave no answer within {timeout_seconds:g} s"
            )
            for check_target, remedy in REMEDIES.items():
                if skip_cause:
                    remedy = "Fix the failures above, then check again."

                yield Check(
                    f"{check_target} from a pod", False, detail, remedy, required=not skip_cause
                )


def _parse_results(cluster: Cluster, probe_pod: Object, image_name: str) -> Iterator[Check]:
    """Return the output of rekindle.doctor.probe as checks."""
    log_lines = read_log(cluster, probe_pod)

    findings = next(filter(None, map(_parse_findings, reversed(log_lines))), None)
    if findings is None:
        detail = (
            f"{image_name} cannot run python -m rekindle.doctor.probe:"
            f" {log_lines[-1].strip() if log_lines else 'no output'}"
        )
        yield Check(
            "probe",
            False,
            detail,
            "Rebuild the image with this version: rekindle images build train",
        )

    for check_target, (is_working, detail) in (findings.root if findings else {}).items():
        yield Check(
            f"{check_target} from a pod", is_working, detail, REMEDIES.get(check_target, "")
        )


def _parse_findings(log_line: str) -> Findings | None:
    """Return the results in a line of the probe's output; None for a line that does not contain
    results."""
    try:
        return parse_and_validate(Findings, log_line)
    except ValueError:
        return None


def _check_images(
    cluster: Cluster, probe_pod: Object, images_by_container: dict[str, str], timeout_seconds: float
) -> Iterator[Check]:
    """Report for each image whether it is available, is still being pulled or cannot be pulled."""
    container_states_by_name = get_container_states(probe_pod)
    if not container_states_by_name:
        pod_conditions = (probe_pod.get("status") or {}).get("conditions") or []
        pending_cause = next(
            filter(None, (pod_condition.get("message") for pod_condition in pod_conditions)),
            "no node accepted the pod",
        )
        remedy = (
            "A node must have 50m CPU and 512Mi free: kubectl describe nodes shows their free"
            " resources."
        )
        yield Check(
            "pod of the probe",
            False,
            f"not started after {timeout_seconds:g} s: {pending_cause}",
            remedy,
        )

        return

    for name, image_name in images_by_container.items():
        waiting_state = container_states_by_name.get(name, {}).get("waiting") or {}
        pending_cause = ": ".join(
            str(waiting_state[key]) for key in ("reason", "message") if waiting_state.get(key)
        )
        if not waiting_state or waiting_state.get("reason") in PULL_FAILURE_REASONS:
            remedy = (
                "Push the image to a registry of the nodes (rekindle images build ... --push), and"
                " set cluster.image."
            )
            yield Check(
                f"image {image_name}", not waiting_state, pending_cause or "available", remedy
            )
            continue

        remedy = (
            "Large images take minutes the first time: check again with --wait"
            f" {5 * max(timeout_seconds, PROBE_TIMEOUT_S):g}. To see the progress: kubectl -n"
            f" {cluster.namespace} get events --watch"
        )

        detail = f"still being pulled after {timeout_seconds:g} s ({pending_cause or 'waiting'})"
        yield Check(f"image {image_name}", False, detail, remedy, required=False)
