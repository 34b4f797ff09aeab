"""Runs a module in a pod of the namespace, with the addresses and keys that steps have; the pod is deleted again.

answers = ask(cluster, workflow, "rekindle.view.explain", ...)
"""

import json
from typing import Any

from rekindle.blocks.settings import ClusterConfig
from rekindle.cluster import pod
from rekindle.cluster.api import Cluster, Object
from rekindle.cluster.workflows import spec_of
from rekindle.errors import RekindleError

SECONDS = 180.0  # for the pod to start, run and end


def ask(cluster: Cluster, workflow: Object, module: str, *args: str) -> list[Any]:
    """The JSON objects that `python -m MODULE ARGS` prints, each a line, in the image of the run.

    Raises ApiError, RekindleError if it fails or takes longer than SECONDS.
    """
    image = _image_of(workflow)
    what = f"the pod that reads the object store, of {image}, "
    config = ClusterConfig.model_validate({"image": image})
    with pod.running(cluster, "rekindle", config, {"main": image}, ["-m", module, *args], SECONDS) as ended_pod:
        state = pod.container_states(ended_pod).get("main", {})
        ended, waiting = state.get("terminated"), state.get("waiting") or {}
        if not ended:
            why = waiting.get("message") or waiting.get("reason") or "no node has taken it"
            raise RekindleError(f"{what}has not ended in {SECONDS:g} s: {why}.")
        lines = pod.output(cluster, ended_pod)
    if ended["exitCode"]:
        raise RekindleError(f"{what}ended with code {ended['exitCode']}: {lines[-1].strip() if lines else 'no output'}")
    return [json.loads(line) for line in lines if line.startswith("{")]


def _image_of(workflow: Object) -> str:
    """The image of the first step of a run that has the engine. Raises RekindleError if it has none."""
    for template in spec_of(workflow).get("templates") or []:
        container = template.get("container") or {}
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        if words[1:4] == ["-m", "rekindle", "step"]:  # not a user's own container
            return str(container["image"])
    raise RekindleError(
        f"{workflow['metadata']['name']} has no step of Rekindle, and only the image of one can read what the run left "
        "in the object store."
    )
