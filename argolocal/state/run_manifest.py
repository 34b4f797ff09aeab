"""Read the manifest of a run, and check the types of all fields that later code relies on.

    workflow = parse_manifest(content)      # raises ValueError or an exception of STRUCTURE_ERRORS

Fields that this version does not know or support are accepted, because another version may have
created the run.
"""

from collections.abc import Iterator
from typing import Any

from argolocal.common.json_text import loads_finite
from argolocal.manifest.schema import check_types
from argolocal.manifest.shape import find_shape_errors
from argolocal.manifest.types import Object
from argolocal.state.journal_reader import check_time

TEXT_FIELDS = ("apiVersion", "kind")


def parse_manifest(content: bytes | str) -> dict[str, Any]:
    """Return the workflow in the manifest of a run. Raises ValueError or an exception of
    STRUCTURE_ERRORS if the manifest is malformed."""
    workflow = loads_finite(content)
    if not (
        workflow["metadata"]["name"]
        and workflow["spec"]["entrypoint"]
        and workflow["spec"]["templates"]
    ):
        raise ValueError("its name, entrypoint or templates are missing")

    problem = next(find_shape_errors(workflow), "")
    if problem:
        raise ValueError(problem)

    for field_name in TEXT_FIELDS:
        if not isinstance(workflow.get(field_name, ""), str):
            raise ValueError(f"{field_name} is {workflow[field_name]!r:.200}: it must be a text")
    check_types(workflow["metadata"], "ObjectMeta", "metadata")
    check_time(workflow["metadata"].get("creationTimestamp"), "metadata.creationTimestamp")
    check_types(workflow["spec"], "Spec", "spec")
    check_types(workflow.get("storedTemplates") or {}, "{Template}", "storedTemplates")
    if workflow.get("submittedSpec") is not None:
        check_types(workflow["submittedSpec"], "Spec", "submittedSpec")
        reference = workflow["submittedSpec"].get("workflowTemplateRef")
        check_types(reference, "Reference", "submittedSpec.workflowTemplateRef")

    for template, path in _list_templates(workflow):
        if template.get("metadata") is not None:
            check_types(template["metadata"], "Metadata", f"{path}.metadata")
    return workflow


def _list_templates(workflow: Object) -> Iterator[tuple[Object, str]]:
    """Yield the templates of a workflow, each with its path. Raises ValueError for a template
    without a name."""
    for index, template in enumerate(workflow["spec"]["templates"]):
        if not template.get("name"):
            raise ValueError(f"spec.templates[{index}].name is missing")
        yield template, f"spec.templates[{index}]"
    for key, template in (workflow.get("storedTemplates") or {}).items():
        yield template, f"storedTemplates.{key}"
