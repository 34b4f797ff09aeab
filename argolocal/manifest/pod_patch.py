"""Apply podSpecPatch, a strategic merge patch of a pod. The fields env, resources, and the pod's
deadlines are supported.

    template = apply_patches(template, [spec.get("podSpecPatch"), template.get("podSpecPatch")])

Tags in the patches must be replaced before this call. Source: Argo's processPodSpecPatch and
ApplyPodSpecPatch.
"""

from collections.abc import Iterable
from typing import Any

from argolocal.errors import ConfigError
from argolocal.language.substitute import TAG
from argolocal.language.yaml_text import parse_one
from argolocal.manifest.patch import PatchError, strategic
from argolocal.manifest.schema import walk
from argolocal.manifest.types import Template

DEADLINES = ("activeDeadlineSeconds", "terminationGracePeriodSeconds")
CHECKED_FIELDS = (
    "nodeSelector",
    "serviceAccountName",
    "priorityClassName",
    "schedulerName",
    "hostAliases",
)
CONTAINER_FIELDS = ("env", "resources")
ARGO_CONTAINERS = ("wait", "init")


def apply_patches(template: Template, texts: Iterable[str | None]) -> Template:
    """Return the template with the patches applied. Raises ConfigError, PatchError."""
    for text in filter(None, texts):
        patch = _load_patch(text, "podSpecPatch")
        list(walk(patch, "PodPatch", "podSpecPatch"))
        pod_fields = {key: patch[key] for key in (*DEADLINES, *CHECKED_FIELDS) if key in patch}
        template = strategic(template, pod_fields)
        for kind in ("containers", "initContainers"):
            for container in patch.get(kind) or []:
                template = _patch_container(template, kind, container)
    return template


def _patch_container(template: Template, kind: str, patch: dict[str, Any]) -> Template:
    name = patch["name"]
    fields = {key: patch[key] for key in CONTAINER_FIELDS if key in patch}

    main = next((key for key in ("container", "script") if key in template), None)
    if kind == "containers" and main and name == "main":
        return {**template, main: strategic(template[main], fields)}

    group = template.get("containerSet") or {}
    list_field = "sidecars" if kind == "containers" else kind
    for holder, key in (
        ((group, "containers"), (template, list_field))
        if kind == "containers"
        else ((template, kind),)
    ):
        if any(container["name"] == name for container in holder.get(key) or []):
            new_list = [
                strategic(member, fields) if member["name"] == name else member
                for member in holder[key]
            ]
            if holder is group:
                return {**template, "containerSet": {**group, key: new_list}}
            return {**template, key: new_list}

    if name not in ARGO_CONTAINERS and (name != "main" or "containerSet" in template):
        raise PatchError(f"Pod is invalid: spec.{kind}: {name} has no image: Required value")

    return template


def _load_patch(text: str, where: str) -> dict[str, Any]:
    patch = parse_one(text, where)
    if not isinstance(patch, dict):
        raise ConfigError(f"{where} is {patch!r:.200}: it must be an object.")
    return patch


def check(holder: dict[str, Any], where: str) -> list[str]:
    """Return the fields of `holder`'s podSpecPatch that have no effect here. Raises ConfigError for
    an unsupported field."""
    text = holder.get("podSpecPatch")
    if not text:
        return []

    where = f"{where}.podSpecPatch"
    errors: list[ConfigError] = []
    # accept the patch if it is valid when one of these placeholders replaces its tags
    for value in ("0", "text", "{}"):
        try:
            ignored_fields = walk(_load_patch(TAG.sub(value, text), where), "PodPatch", where)
            return [f"podSpecPatch.{field}" for field in ignored_fields]
        except ConfigError as error:
            errors.append(error)

    raise errors[0]
