"""Check the images, the object store and MLflow from a temporary pod of the namespace.

for check in checks_from_pod(Cluster.connect(namespace="models"), config.cluster):
    print(check)
"""

from collections.abc import Iterator

from pydantic import ConfigDict, RootModel

from argolocal.manifest.types import Object
from rekindle.blocks.settings import POD_DEFAULTS, ClusterConfig
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.pod_runner import PULL_FAILURE_REASONS, container_states, read_log, run_pod
from rekindle.documents import validate
from rekindle.errors import Check
from rekindle.kubernetes_names import DOCTOR

PROBE = ("-m", "rekindle.doctor.probe")
# default time limit in seconds for the pod to start and finish, which is too short to pull an image
# of several GB
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
    """The output of rekindle.doctor.probe. For each target, it contains whether the target works,
    and a detail."""

    model_config = ConfigDict(strict=True)


def checks_from_pod(
    cluster: Cluster, config: ClusterConfig, seconds: float = PROBE_TIMEOUT_S
) -> Iterator[Check]:
    """Check the images, the object store and MLflow. Raises ApiError."""
    images = dict.fromkeys(
        [config.pod("train").image, *(config.pod(name).image for name in POD_DEFAULTS)]
    )

    containers = {
        "main" if not number else f"image-{number}": image for number, image in enumerate(images)
    }
    with run_pod(cluster, DOCTOR, config, containers, PROBE, seconds) as pod:
        image_checks = list(_image_checks(cluster, pod, containers, seconds))
        yield from image_checks

        if "terminated" in container_states(pod).get("main", {}):
            yield from _parse_results(cluster, pod, containers["main"])
        else:
            cause = next(
                (f"{check.name} is not available" for check in image_checks if not check.ok), ""
            )
            detail = "not checked: " + (cause or f"the pod gave no answer within {seconds:g} s")
            for target, remedy in REMEDIES.items():
                if cause:
                    remedy = "Fix the failures above, then check again."

                yield Check(f"{target} from a pod", False, detail, remedy, required=not cause)


def _parse_results(cluster: Cluster, pod: Object, image: str) -> Iterator[Check]:
    """Return the output of rekindle.doctor.probe as checks."""
    lines = read_log(cluster, pod)

    findings = next(filter(None, map(_parse_findings, reversed(lines))), None)
    if findings is None:
        detail = (
            f"{image} cannot run python -m rekindle.doctor.probe:"
            f" {lines[-1].strip() if lines else 'no output'}"
        )
        yield Check(
            "probe",
            False,
            detail,
            "Rebuild the image with this version: rekindle images build train",
        )

    for target, (ok, detail) in (findings.root if findings else {}).items():
        yield Check(f"{target} from a pod", ok, detail, REMEDIES.get(target, ""))


def _parse_findings(line: str) -> Findings | None:
    """Return the results in a line of the probe's output; None for another line."""
    try:
        return validate(Findings, line)
    except ValueError:
        return None


def _image_checks(
    cluster: Cluster, pod: Object, containers: dict[str, str], seconds: float
) -> Iterator[Check]:
    """Report for each image whether it is available, is still being pulled or cannot be pulled."""
    states = container_states(pod)
    if not states:
        conditions = (pod.get("status") or {}).get("conditions") or []
        cause = next(
            filter(None, (condition.get("message") for condition in conditions)),
            "no node accepted the pod",
        )
        remedy = (
            "A node must have 50m CPU and 512Mi free: kubectl describe nodes shows their free"
            " resources."
        )
        yield Check("pod of the probe", False, f"not started after {seconds:g} s: {cause}", remedy)

        return

    for name, image in containers.items():
        waiting = states.get(name, {}).get("waiting") or {}
        cause = ": ".join(str(waiting[key]) for key in ("reason", "message") if waiting.get(key))
        if not waiting or waiting.get("reason") in PULL_FAILURE_REASONS:
            remedy = (
                "Push the image to a registry of the nodes (rekindle images build ... --push), and"
                " set cluster.image."
            )
            yield Check(f"image {image}", not waiting, cause or "available", remedy)
            continue

        remedy = (
            "Large images take minutes the first time: check again with --wait"
            f" {5 * max(seconds, PROBE_TIMEOUT_S):g}. To see the progress: kubectl -n"
            f" {cluster.namespace} get events --watch"
        )

        detail = f"still being pulled after {seconds:g} s ({cause or 'waiting'})"
        yield Check(f"image {image}", False, detail, remedy, required=False)
