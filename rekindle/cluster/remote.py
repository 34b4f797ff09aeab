"""Runs a module in a pod of the namespace, with the addresses and keys that steps have; the pod is deleted again.

text = output_of(cluster, image, ["-m", "rekindle.view.explain", ...])
"""

import uuid

from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.cluster import pod
from rekindle.cluster.api import PODS, Cluster, Object
from rekindle.errors import RekindleError

SECONDS = 180.0  # for the pod to start, run and end


def output_of(cluster: Cluster, image: str, args: list[str], seconds: float = SECONDS) -> str:
    """What `python ARGS` prints. Raises ApiError, RekindleError if it fails or takes longer than `seconds`."""
    what = f"the pod that reads the object store, of {image}"
    name = f"rekindle-{uuid.uuid4().hex[:6]}"
    config = ClusterConfig.model_validate({"image": image})
    settings = PodConfig.model_validate({"cpu": "50m", "memory": "512Mi", "image": image})
    pod.create(cluster, pod.manifest(name, config, settings, {"main": image}, args))
    try:
        state = pod.container_states(pod.wait_for_pod(cluster, name, seconds)).get("main", {})
        ended, waiting = state.get("terminated"), state.get("waiting") or {}
        if not ended:
            why = waiting.get("message") or waiting.get("reason") or "no node has taken it"
            raise RekindleError(
                f"the pod that reads the object store, of {image}, has not ended in {seconds:g} s: {why}."
            )
        lines = [line.decode(errors="replace") for line in cluster.log(name, "main")]
        if ended["exitCode"]:
            last = lines[-1].strip() if lines else "no output"
            raise RekindleError(f"{what}, ended with code {ended['exitCode']}: {last}")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
    finally:
        cluster.delete(PODS, name, gracePeriodSeconds=0)


def image_of(workflow: Object) -> str:
    """The image of the first step of a run that has the engine. Raises RekindleError if it has none."""
    spec = (workflow.get("status") or {}).get("storedWorkflowTemplateSpec") or workflow["spec"]
    for template in spec.get("templates") or []:
        container = template.get("container") or {}
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        if words[1:4] == ["-m", "rekindle", "step"]:  # not a user's own container
            return str(container["image"])
    raise RekindleError(
        f"{workflow['metadata']['name']} has no step of Rekindle, and only the image of one can read what the run left "
        "in the object store."
    )
