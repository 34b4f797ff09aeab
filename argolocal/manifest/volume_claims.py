"""Determine the volumes that a template mounts, and the PersistentVolumeClaims of
volumeClaimTemplates.

The behaviour follows Argo's addVolumeReferences, createPVCs and deletePVCs.
"""

from typing import Any

from argolocal.manifest.types import Data

CONTAINER_LIST_FIELDS = ("initContainers", "sidecars")
GC_STRATEGIES = ("OnWorkflowSuccess", "OnWorkflowCompletion")


def list_volume_mounts(template: Data) -> list[dict[str, Any]]:
    """Return the volumeMounts of all containers of a template."""
    container_set = template.get("containerSet") or {}
    containers = [
        template.get("container") or template.get("script") or {},
        *(container_set.get("containers") or []),
    ]
    containers += [
        container
        for container_list in CONTAINER_LIST_FIELDS
        for container in template.get(container_list) or []
    ]
    return [
        volume_mount
        for mount_owner in (container_set, *containers)
        for volume_mount in mount_owner.get("volumeMounts") or []
    ]


def list_mounted_volumes(spec: Data, status: Data, template: Data) -> list[Data]:
    """Return the volumes that a template mounts. A volume is defined in the template, in the
    workflow's spec, or by a claim in the workflow's status."""
    volume_lists = (
        template.get("volumes"),
        spec.get("volumes"),
        status.get("persistentVolumeClaims"),
    )
    volumes_by_name = {
        volume["name"]: volume
        for volume_list in reversed(volume_lists)
        for volume in volume_list or []
    }
    return [
        volumes_by_name[volume_name]
        for volume_name in dict.fromkeys(
            volume_mount["name"] for volume_mount in list_volume_mounts(template)
        )
        if volume_name in volumes_by_name
    ]


def list_claims(workflow: Data) -> list[Data]:
    """Return `status.persistentVolumeClaims` for the volumeClaimTemplates of a workflow."""
    claim_names = [
        claim["metadata"]["name"] for claim in workflow["spec"].get("volumeClaimTemplates") or []
    ]
    workflow_name = workflow["metadata"]["name"]
    return [
        {
            "name": claim_name,
            "persistentVolumeClaim": {"claimName": f"{workflow_name}-{claim_name}"},
        }
        for claim_name in claim_names
    ]


def keeps_volume_claims(spec: Data, phase: str) -> bool:
    """Return True if the claims of a workflow that ended in `phase` are not deleted."""
    strategy = (spec.get("volumeClaimGC") or {}).get("strategy") or GC_STRATEGIES[0]
    return strategy == GC_STRATEGIES[0] and phase != "Succeeded"
