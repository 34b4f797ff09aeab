"""Determine the volumes that a template mounts, and the PersistentVolumeClaims of
volumeClaimTemplates.

Source: Argo's addVolumeReferences, createPVCs and deletePVCs.
"""

from typing import Any

from argolocal.manifest.types import Data

CONTAINERS = ("initContainers", "sidecars")
GC_STRATEGIES = ("OnWorkflowSuccess", "OnWorkflowCompletion")


def mounts(template: Data) -> list[dict[str, Any]]:
    """Return the volumeMounts of all containers of a template."""
    group = template.get("containerSet") or {}
    containers = [
        template.get("container") or template.get("script") or {},
        *(group.get("containers") or []),
    ]
    containers += [container for kind in CONTAINERS for container in template.get(kind) or []]
    return [mount for holder in (group, *containers) for mount in holder.get("volumeMounts") or []]


def mounted_volumes(spec: Data, status: Data, template: Data) -> list[Data]:
    """Return the volumes that a template mounts. They come from the template, the workflow and the
    workflow's volume claims."""
    sources = template.get("volumes"), spec.get("volumes"), status.get("persistentVolumeClaims")
    volumes = {volume["name"]: volume for source in reversed(sources) for volume in source or []}
    return [
        volumes[name]
        for name in dict.fromkeys(mount["name"] for mount in mounts(template))
        if name in volumes
    ]


def claims(workflow: Data) -> list[Data]:
    """Return `status.persistentVolumeClaims` for the volumeClaimTemplates of a workflow."""
    names = [
        claim["metadata"]["name"] for claim in workflow["spec"].get("volumeClaimTemplates") or []
    ]
    prefix = workflow["metadata"]["name"]
    return [
        {"name": name, "persistentVolumeClaim": {"claimName": f"{prefix}-{name}"}} for name in names
    ]


def keeps_volume_claims(spec: Data, phase: str) -> bool:
    """Return True if a workflow that ended in `phase` keeps its claims."""
    strategy = (spec.get("volumeClaimGC") or {}).get("strategy") or GC_STRATEGIES[0]
    return strategy == GC_STRATEGIES[0] and phase != "Succeeded"
