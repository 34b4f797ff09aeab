"""Apply podSpecPatch, a strategic merge patch of a pod. Only the fields env, resources, and the
pod's deadlines of a patch have an effect here.

    template = apply_patches(template, [spec.get("podSpecPatch"), template.get("podSpecPatch")])

Tags in the patches must be replaced before this call. The behaviour follows Argo's
processPodSpecPatch and ApplyPodSpecPatch.
"""

from collections.abc import Iterable
from typing import Any

from argolocal.errors import ConfigError
from argolocal.language.substitute import TAG
from argolocal.language.yaml_text import parse_one
from argolocal.manifest.patch import PatchError, apply_strategic_patch
from argolocal.manifest.schema import find_ignored_fields
from argolocal.manifest.types import Template

DEADLINE_FIELDS = ("activeDeadlineSeconds", "terminationGracePeriodSeconds")
# fields without an effect here, whose values are checked when the pod starts
CHECKED_FIELDS = (
    "nodeSelector",
    "serviceAccountName",
    "priorityClassName",
    "schedulerName",
    "hostAliases",
)
CONTAINER_FIELDS = ("env", "resources")
# containers that Argo adds to each pod
ARGO_CONTAINER_NAMES = ("wait", "init")


def apply_patches(template: Template, patch_texts: Iterable[str | None]) -> Template:
    """Return the template with the patches applied. Raises ConfigError for an invalid patch, and
    PatchError if it cannot be applied."""
    for patch_text in filter(None, patch_texts):
        patch = _load_patch(patch_text, "podSpecPatch")
        list(find_ignored_fields(patch, "PodPatch", "podSpecPatch"))
        pod_fields = {
            key: patch[key] for key in (*DEADLINE_FIELDS, *CHECKED_FIELDS) if key in patch
        }
        template = apply_strategic_patch(template, pod_fields)
        for container_list in ("containers", "initContainers"):
            for container in patch.get(container_list) or []:
                template = _patch_container(template, container_list, container)
    return template


def _patch_container(template: Template, container_list: str, patch: dict[str, Any]) -> Template:
    """Return the template with the patch of one container applied. `container_list`: field of the
    pod that contains the container. Raises PatchError if the container does not exist."""
    container_name = patch["name"]
    patched_fields = {
        field_name: patch[field_name] for field_name in CONTAINER_FIELDS if field_name in patch
    }

    main_field = next(
        (field_name for field_name in ("container", "script") if field_name in template), None
    )
    if container_list == "containers" and main_field and container_name == "main":
        return {**template, main_field: apply_strategic_patch(template[main_field], patched_fields)}

    container_set = template.get("containerSet") or {}
    list_field = "sidecars" if container_list == "containers" else container_list
    for field_owner, field_name in (
        ((container_set, "containers"), (template, list_field))
        if container_list == "containers"
        else ((template, container_list),)
    ):
        if any(
            container["name"] == container_name for container in field_owner.get(field_name) or []
        ):
            patched_containers = [
                apply_strategic_patch(list_container, patched_fields)
                if list_container["name"] == container_name
                else list_container
                for list_container in field_owner[field_name]
            ]
            if field_owner is container_set:
                return {
                    **template,
                    "containerSet": {**container_set, field_name: patched_containers},
                }
            return {**template, field_name: patched_containers}

    if container_name not in ARGO_CONTAINER_NAMES and (
        container_name != "main" or "containerSet" in template
    ):
        raise PatchError(
            f"Pod is invalid: spec.{container_list}: {container_name} has no image: Required value"
        )

    return template


def _load_patch(patch_text: str, field_path: str) -> dict[str, Any]:
    """Parse a patch. Raises ConfigError if the patch is not a YAML object."""
    patch = parse_one(patch_text, field_path)
    if not isinstance(patch, dict):
        raise ConfigError(f"{field_path} is {patch!r:.200}: it must be an object.")
    return patch


def check_pod_patch(patch_owner: dict[str, Any], field_path: str) -> list[str]:
    """Return the fields in the podSpecPatch of a workflow's spec or a template that are ignored
    here. Raises ConfigError for an invalid patch and for an unsupported field."""
    patch_text = patch_owner.get("podSpecPatch")
    if not patch_text:
        return []

    field_path = f"{field_path}.podSpecPatch"
    parse_errors: list[ConfigError] = []
    # accept the patch if it is valid when one of these placeholders replaces its tags
    for placeholder in ("0", "text", "{}"):
        try:
            ignored_fields = find_ignored_fields(
                _load_patch(TAG.sub(placeholder, patch_text), field_path), "PodPatch", field_path
            )
            return [f"podSpecPatch.{ignored_field}" for ignored_field in ignored_fields]
        except ConfigError as error:
            parse_errors.append(error)

    raise parse_errors[0]
