"""What a pod sees of the cluster: its images, the object store and MLflow. One pod, deleted again.

for check in inside(Cluster.connect(namespace="models"), config.cluster): print(check)
"""

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, get_args

from rekindle.blocks import pod as pods
from rekindle.blocks.settings import ClusterConfig, PodConfig, PodName
from rekindle.cluster.api import PODS, Cluster, Object
from rekindle.cluster.errors import ApiError
from rekindle.errors import Check

SECONDS = 180  # for a pod to start and to answer; an image of some gigabytes takes longer the first time
NEVER = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
REMEDIES = {
    "object store": "Correct S3_ENDPOINT_URL and S3_BUCKET of the ConfigMap rekindle and the keys of the Secret "
    "rekindle-s3; the store must honour If-None-Match and If-Match (MinIO, S3), and a NetworkPolicy must let pods out.",
    "MLflow": "Correct MLFLOW_TRACKING_URI of the ConfigMap rekindle; the server must take this Host name "
    "(MLFLOW_SERVER_ALLOWED_HOSTS) and connections from this namespace.",
}


def inside(cluster: Cluster, config: ClusterConfig, seconds: float = SECONDS) -> Iterator[Check]:
    """Images, the object store and MLflow as a pod sees them. Raises ApiError."""
    images = dict.fromkeys([config.pod("train").image, *(config.pod(name).image for name in get_args(PodName))])
    names = {"main" if not number else f"image-{number}": image for number, image in enumerate(images)}
    name = f"rekindle-doctor-{uuid.uuid4().hex[:6]}"
    _create(cluster, manifest(name, config, PodConfig.model_validate({"cpu": "50m", "memory": "512Mi"}), names))
    try:
        pod = _settled(cluster, name, seconds)
        started = list(_started(cluster, pod, names, seconds))
        yield from started
        if "terminated" in _states(pod).get("main", {}):
            yield from _answers(cluster, name, names["main"])
        else:
            wrong = next((f"{each.name} is not there yet" for each in started if not each.ok), "")
            why = wrong or f"the pod gave no answer within {seconds:g} s"
            for what, remedy in REMEDIES.items():
                remedy = "Fix what is above, then check again." if wrong else remedy
                yield Check(f"{what} from a pod", False, f"not checked: {why}", remedy, required=not wrong)
    finally:
        _delete(cluster, name)


def _create(cluster: Cluster, pod: Object) -> None:
    """Raises ApiError, and then no pod is left, whatever became of the request."""
    try:
        cluster.create(PODS, pod)
    except ApiError as error:
        if error.code == 409:  # the name is nobody else's: the answer to the first attempt was lost
            return
        if not 400 <= error.code < 500:
            with suppress(ApiError):
                _delete(cluster, pod["metadata"]["name"])
        raise


def _delete(cluster: Cluster, name: str) -> None:
    try:
        cluster.delete(PODS, name, gracePeriodSeconds=0)
    except ApiError as error:
        if error.code != 404:
            raise


def _answers(cluster: Cluster, name: str, image: str) -> Iterator[Check]:
    """What rekindle.view.probe printed."""
    path = PODS.path(cluster.namespace, name, "log")
    lines = [line.decode(errors="replace") for line in cluster.lines(path, {"container": "main"}, 10)]
    answers = [line for line in lines if line.startswith("{")]
    if not answers:
        said = lines[-1].strip() if lines else "nothing"
        remedy = "Build the image anew from this version: rekindle images build train"
        yield Check("probe", False, f"{image} cannot run python -m rekindle.view.probe: {said}", remedy)
        return
    for what, (ok, found) in json.loads(answers[-1]).items():
        yield Check(f"{what} from a pod", ok, found, REMEDIES[what])


def _settled(cluster: Cluster, name: str, seconds: float) -> Object:
    """The pod when each container has ended or cannot start, or when it has had its time."""
    end = time.monotonic() + seconds
    while True:
        pod = cluster.get(PODS, name)
        states = _states(pod).values()
        stuck = [s for s in states if "terminated" in s or s.get("waiting", {}).get("reason") in NEVER]
        if (states and len(stuck) == len(states)) or time.monotonic() > end:
            return pod
        time.sleep(min(1, seconds))


def _started(cluster: Cluster, pod: Object, names: dict[str, str], seconds: float) -> Iterator[Check]:
    """Each image, told apart: there, on its way, or nowhere."""
    states = _states(pod)
    if not states:
        conditions = (pod.get("status") or {}).get("conditions") or []
        why = next((str(each["message"]) for each in conditions if each.get("message")), "no node took it")
        remedy = "Let a node take a pod of 50m CPU and 512Mi: kubectl describe nodes says what they have left."
        yield Check("pod of the probe", False, f"not started after {seconds:g} s: {why}", remedy)
        return
    for name, image in names.items():
        waiting = states[name].get("waiting") or {}
        why = ": ".join(str(waiting[key]) for key in ("reason", "message") if waiting.get(key))
        if not waiting or waiting.get("reason") in NEVER:
            remedy = "Push it where the nodes can pull it (rekindle images build ... --push), name it in cluster.image."
            yield Check(f"image {image}", not waiting, why or "is there", remedy)
            continue
        found = f"still being pulled after {seconds:g} s ({why or 'waiting'})"
        remedy = (
            f"Large images take minutes the first time: check again with --wait {5 * max(seconds, SECONDS):g}, and see "
            f"meanwhile what the node does: kubectl -n {cluster.namespace} get events --watch"
        )
        yield Check(f"image {image}", False, found, remedy, required=False)


def _states(pod: Object) -> dict[str, Any]:
    """Of each container: waiting, running or terminated, with details."""
    return {each["name"]: each.get("state") or {} for each in (pod.get("status") or {}).get("containerStatuses") or []}


def manifest(name: str, config: ClusterConfig, settings: PodConfig, images: dict[str, str]) -> Object:
    """A pod as ours are; its container `main` asks, the others show that their image is there."""
    containers = [
        pods.container(each, settings.model_copy(update={"image": image}), ["-m", "rekindle.view.probe"])
        if each == "main"
        else pods.container(each, settings.model_copy(update={"image": image}), ["-c", "pass"])
        for each, image in images.items()
    ]
    labels = {"app.kubernetes.io/part-of": "rekindle", "rekindle/client": "true"}
    spec = pods.pod_spec(settings, config.pod_account, containers, labels, restartPolicy="Never")
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
