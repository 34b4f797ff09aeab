"""Volumes of a workflow as plain data: those that a template mounts, and the claims made of volumeClaimTemplates.

Source: Argo's addVolumeReferences, createPVCs and deletePVCs.
"""

from collections.abc import Mapping
from typing import Any

Volume = Mapping[str, Any]
CONTAINERS = ("initContainers", "sidecars")
GC = ("OnWorkflowSuccess", "OnWorkflowCompletion")


def mounts(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of all containers of a template."""
    group = (template.get("containerSet") or {}).get("containers") or []
    several = [*group, *(container for kind in CONTAINERS for container in template.get(kind) or [])]
    main = template.get("container") or template.get("script") or {}
    own = (template.get("containerSet") or {}).get("volumeMounts") or []
    return [*own, *(mount for container in (main, *several) for mount in container.get("volumeMounts") or [])]


def declared(spec: Mapping[str, Any], status: Mapping[str, Any], template: Mapping[str, Any]) -> list[Volume]:
    """The volumes that a template mounts: its own, then those of the workflow, then the claims made for it."""
    sources = template.get("volumes"), spec.get("volumes"), status.get("persistentVolumeClaims")
    known = {volume["name"]: volume for source in reversed(sources) for volume in source or []}
    return [known[name] for name in dict.fromkeys(mount["name"] for mount in mounts(template)) if name in known]


def claims(workflow: Mapping[str, Any]) -> list[Volume]:
    """What the volumeClaimTemplates of a workflow become: `status.persistentVolumeClaims`."""
    names = [claim["metadata"]["name"] for claim in workflow["spec"].get("volumeClaimTemplates") or []]
    prefix = workflow["metadata"]["name"]
    return [{"name": name, "persistentVolumeClaim": {"claimName": f"{prefix}-{name}"}} for name in names]


def kept(spec: Mapping[str, Any], phase: str) -> bool:
    """Whether the claims stay when the workflow has ended so."""
    strategy = (spec.get("volumeClaimGC") or {}).get("strategy") or GC[0]
    return strategy == GC[0] and phase != "Succeeded"
