"""Back to an earlier release: its Deployment is still there, without pods, with its image, flags and resources.

The same change of the Service that gives a new release its traffic takes it away again.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from rekindle.errors import ConfigError, RekindleError
from rekindle.serving.config import VERSION_ANNOTATION

NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"
Object = dict[str, Any]


class Objects(Protocol):
    """The Kubernetes objects of this machine, or of a namespace."""

    def find(self, kind: str, name: str) -> Object | None: ...

    def deployments(self, model: str) -> list[Object]:
        """Those whose label app.kubernetes.io/name is `model`."""
        ...

    def patch(self, kind: str, name: str, change: Object) -> None:
        """Apply a merge patch."""
        ...


def roll_back(
    objects: Objects, model: str, version: str, promote: Callable[[str, str], None], seconds: float
) -> dict[str, str]:
    """Let `version` of the model answer (empty: the one before the present), then `promote(version, deployment)`.

    Raises ConfigError if there is no such release, RekindleError if its servers are not ready after `seconds`.
    """
    service = objects.find("Service", model)
    if not service:
        raise ConfigError(f'no model called "{model}" serves here: `rekindle status` lists what does.')
    present = service["spec"]["selector"].get(INSTANCE, model)
    releases = {obj["metadata"]["annotations"].get(VERSION_ANNOTATION, ""): obj for obj in objects.deployments(model)}
    serving = next((number for number, obj in releases.items() if obj["metadata"]["name"] == present), "")
    target = version or _before(releases, serving, model)
    if target not in releases:
        kept = ", ".join(sorted(filter(None, releases), key=int)) or "none"
        raise ConfigError(
            f"version {target} of {model} has no Deployment any more: versions {kept} have (serve.keep_releases says "
            "how many stay)."
        )
    deployment = releases[target]["metadata"]["name"]
    _start(objects, model, deployment, seconds)
    objects.patch("Service", model, {"spec": {"selector": {NAME: model, INSTANCE: deployment}}})
    if objects.find("HorizontalPodAutoscaler", model):
        objects.patch("HorizontalPodAutoscaler", model, {"spec": {"scaleTargetRef": {"name": deployment}}})
    promote(target, deployment)
    if deployment != present and objects.find("Deployment", present):
        objects.patch("Deployment", present, {"spec": {"replicas": 0}})
    return {"model": model, "version": target, "deployment": deployment, "before": serving}


def _before(releases: dict[str, Object], serving: str, model: str) -> str:
    earlier = [number for number in releases if number and serving and int(number) < int(serving)]
    if not earlier:
        raise ConfigError(
            f"{model} has no release before version {serving or '?'} whose Deployment is still there: name a version."
        )
    return max(earlier, key=int)


def _start(objects: Objects, model: str, deployment: str, seconds: float) -> None:
    """Give the Deployment its pods, and wait until they are ready."""
    scale = (objects.find("HorizontalPodAutoscaler", model) or {}).get("spec") or {}
    replicas = scale.get("minReplicas", 1)
    objects.patch("Deployment", deployment, {"spec": {"replicas": replicas}})
    until = time.monotonic() + seconds
    while True:
        obj = objects.find("Deployment", deployment) or {}
        status = obj.get("status") or {}
        seen = status.get("observedGeneration", 0) >= (obj.get("metadata") or {}).get("generation", 0)
        if seen and status.get("readyReplicas", 0) >= replicas:
            return
        if time.monotonic() > until:
            ready = status.get("readyReplicas", 0)
            raise RekindleError(
                f"{deployment} has {ready} of {replicas} pods ready after {seconds:g} s: what serves now serves on. "
                "Look at the logs of its pods."
            )
        time.sleep(0.05)
