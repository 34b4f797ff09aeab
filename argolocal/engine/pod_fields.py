"""Copy the fields of the workflow's spec that apply to all pods into a template. The values of
these fields, such as names of labels, are checked when the pod starts.

The behaviour follows Argo's createWorkflowPod, addMetadata and addSchedulingConstraints
(workflowpod.go).
"""

from collections.abc import Mapping
from typing import Any

from argolocal.engine.nodes import NodeError
from argolocal.language.substitute import Scope, substitute

# field of a template → field of the workflow's spec that contains its default value
SPEC_FIELD_OF_TEMPLATE_FIELD = {
    "nodeSelector": "nodeSelector",
    "serviceAccountName": "serviceAccountName",
    "priorityClassName": "podPriorityClassName",
    "schedulerName": "schedulerName",
}
METADATA_FIELDS = ("labels", "annotations")


def add_workflow_fields(
    template: dict[str, Any], spec: Mapping[str, Any], scope: Scope
) -> dict[str, Any]:
    """Return the template with the pod fields that the workflow's spec sets for all pods. Raises
    NodeError."""
    spec_field_names = {
        *SPEC_FIELD_OF_TEMPLATE_FIELD.values(),
        "podMetadata",
        "hostAliases",
    } & spec.keys()
    if not spec_field_names:
        return template

    pod_fields = substitute({name: spec[name] for name in spec_field_names}, scope)
    added_fields = {
        template_field: pod_fields[name]
        for template_field, name in SPEC_FIELD_OF_TEMPLATE_FIELD.items()
        if pod_fields.get(name) and not template.get(template_field)
    }

    aliases = pod_fields.get("hostAliases")
    if aliases:
        added_fields["hostAliases"] = [*aliases, *(template.get("hostAliases") or [])]

    if "podMetadata" in pod_fields:
        added_fields["metadata"] = _merge_metadata(
            pod_fields["podMetadata"] or {}, template.get("metadata") or {}
        )

    return {**template, **added_fields}


def _merge_metadata(shared_metadata: object, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a pod. Values of its template override values of the spec."""
    if not isinstance(shared_metadata, dict) or not all(
        isinstance(shared_metadata.get(metadata_field) or {}, dict)
        for metadata_field in METADATA_FIELDS
    ):
        raise NodeError("spec.podMetadata must be an object with labels and annotations")
    return {
        **metadata,
        **{
            metadata_field: {
                **(shared_metadata.get(metadata_field) or {}),
                **(metadata.get(metadata_field) or {}),
            }
            for metadata_field in METADATA_FIELDS
        },
    }
