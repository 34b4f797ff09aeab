"""What a pod sees of the cluster: its images, the object store and MLflow. One pod, deleted again.

for check in inside(Cluster.connect(namespace="models"), config.cluster): print(check)
"""

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any, get_args

from pipelines.blocks import pod as pods
from pipelines.blocks.cluster import ClusterConfig, PodConfig, PodName
from pipelines.cluster.api import PODS, Cluster, Object
from pipelines.doctor import Check

SECONDS = 180
NEVER = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
REMEDIES = {
    "object store": "Correct S3_ENDPOINT_URL and S3_BUCKET of the ConfigMap rekindle and the keys of the Secret "
    "rekindle-s3; the store must honour If-None-Match and If-Match (MinIO, S3), and a NetworkPolicy must let pods out.",
    "MLflow": "Correct MLFLOW_TRACKING_URI of the ConfigMap rekindle; the server must take this Host name "
    "(MLFLOW_SERVER_ALLOWED_HOSTS) and connections from this namespace.",
}


def inside(cluster: Cluster, config: ClusterConfig) -> Iterator[Check]:
    """Images, the object store and MLflow as a pod sees them."""
    images = dict.fromkeys([config.pod("train").image, *(config.pod(name).image for name in get_args(PodName))])
    names = {"main" if not number else f"image-{number}": image for number, image in enumerate(images)}
    name = f"rekindle-doctor-{uuid.uuid4().hex[:6]}"
    cluster.create(PODS, manifest(name, config, PodConfig.model_validate({"cpu": "50m", "memory": "512Mi"}), names))
    try:
        pod = _settled(cluster, name)
        yield from _pulled(pod, names)
        if "terminated" not in _states(pod).get("main", {}):
            return
        path = PODS.path(cluster.namespace, name, "log")
        lines = [line.decode(errors="replace") for line in cluster.lines(path, {"container": "main"}, 10)]
        answers = [line for line in lines if line.startswith("{")]
        if not answers:
            said = lines[-1].strip() if lines else "nothing"
            remedy = "Build the image anew from this version: rekindle images build train"
            yield Check("probe", False, f"{names['main']} cannot run python -m steps.probe: {said}", remedy)
            return
        for what, (ok, found) in json.loads(answers[-1]).items():
            yield Check(f"{what} from a pod", ok, found, REMEDIES[what])
    finally:
        cluster.delete(PODS, name, gracePeriodSeconds=0)


def _settled(cluster: Cluster, name: str) -> Object:
    """The pod when each container has ended or cannot start, or when it has had its time."""
    end = time.monotonic() + SECONDS
    while True:
        pod = cluster.get(PODS, name)
        states = _states(pod).values()
        stuck = [s for s in states if "terminated" in s or s.get("waiting", {}).get("reason") in NEVER]
        if (states and len(stuck) == len(states)) or time.monotonic() > end:
            return pod
        time.sleep(1)


def _pulled(pod: Object, names: dict[str, str]) -> Iterator[Check]:
    states = _states(pod)
    conditions = (pod.get("status") or {}).get("conditions") or []
    unscheduled = next((str(each["message"]) for each in conditions if each.get("message")), "it was not started")
    for name, image in names.items():
        waiting = states[name].get("waiting") or {} if states else {"reason": unscheduled}
        why = ": ".join(str(waiting[key]) for key in ("reason", "message") if waiting.get(key))
        remedy = "Push it where the nodes can pull it (rekindle images build ... --push), name it in cluster.image."
        yield Check(f"image {image}", not why, why or "is there", remedy)


def _states(pod: Object) -> dict[str, Any]:
    """Of each container: waiting, running or terminated, with details."""
    return {each["name"]: each.get("state") or {} for each in (pod.get("status") or {}).get("containerStatuses") or []}


def manifest(name: str, config: ClusterConfig, settings: PodConfig, images: dict[str, str]) -> Object:
    """A pod as ours are; its container `main` asks, the others show that their image is there."""
    containers = [
        pods.container(each, settings.model_copy(update={"image": image}), ["-m", "steps.probe"])
        if each == "main"
        else pods.container(each, settings.model_copy(update={"image": image}), ["-c", "pass"])
        for each, image in images.items()
    ]
    labels = {"app.kubernetes.io/part-of": "rekindle", "rekindle/client": "true"}
    spec = pods.pod_spec(settings, config.pod_account, containers, labels, restartPolicy="Never")
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
