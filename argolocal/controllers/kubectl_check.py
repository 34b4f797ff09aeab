"""Check resource templates before a run. Reject actions that the local controllers do not support
or that kubectl would reject."""

import re
from typing import Any

from argolocal.controllers.kubectl import ACTIONS, KubectlError, parse_flags
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.language import kubectl_path
from argolocal.language.substitute import TAG
from argolocal.language.yaml_text import parse
from argolocal.manifest.patch import PATCH_FUNCTIONS

# placeholder that replaces each template tag in a manifest
TAG_PLACEHOLDER = "tag-of-argo"


def _parse_objects(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a manifest, or [] if its template tags make it invalid YAML."""
    try:
        objects = parse(TAG.sub(TAG_PLACEHOLDER, str(resource.get("manifest") or "")))
    except ConfigError:
        return []
    return [object_manifest for object_manifest in objects if isinstance(object_manifest, dict)]


def _find_kind(resource: dict[str, Any]) -> str:
    """Return the first `kind` in the text of a manifest, or ""."""
    match = re.search(
        r"^\s{0,3}[\"']?kind[\"']?:\s*[\"']?([A-Za-z]+)", resource.get("manifest") or "", re.M
    )
    if match:
        return match[1]
    return ""


def check_resource_template(resource: dict[str, Any], field_path: str, cluster: Cluster) -> None:
    """Raise ConfigError for a resource template that is not supported here."""
    kinds = cluster.kinds.types
    kind_by_type_name = {
        type_name: kind for kind in kinds for type_name in (kind, kind.lower(), kind.lower() + "s")
    }

    try:
        positional_arguments, selector = parse_flags(resource.get("flags") or [])
    except KubectlError as error:
        raise ConfigError(f"{field_path}.flags: {error}.") from None

    if selector and (resource.get("action") != "delete" or resource.get("manifest")):
        raise ConfigError(
            f"{field_path}.flags has a selector: only delete without a manifest supports a selector"
            " here. Name the object."
        )

    kind = _find_kind(resource) or "".join(positional_arguments[:1])
    checked_field = "manifest" if _find_kind(resource) else "flags"

    if (
        kind
        and "{{" not in kind
        and not {type_name.split(".")[0] for type_name in kind.split(",")}
        <= kind_by_type_name.keys()
    ):
        raise ConfigError(
            f"{field_path}.{checked_field} is a {kind}, which the local runner does not support:"
            f" use one of {', '.join(kinds)}."
        )

    for object_manifest in _parse_objects(resource):
        kind_name = str(object_manifest.get("kind"))
        api_version = str(object_manifest.get("apiVersion"))

        known_api_versions = kinds[kind_name].api_versions if kind_name in kinds else ()
        if (
            known_api_versions
            and "apiVersion" in object_manifest
            and TAG_PLACEHOLDER not in api_version
            and api_version not in known_api_versions
        ):
            raise ConfigError(
                f"{field_path}.manifest is a {kind_name} with the apiVersion {api_version}, which"
                f" the local runner does not support: use {' or '.join(known_api_versions)}."
            )

    if resource.get("action") not in ACTIONS:
        raise ConfigError(
            f"{field_path}.action is {resource.get('action')!r}: it must be one of"
            f" {', '.join(ACTIONS)}."
        )

    merge_strategy = resource.get("mergeStrategy") or "strategic"
    if merge_strategy not in PATCH_FUNCTIONS:
        raise ConfigError(
            f"{field_path}.mergeStrategy is {merge_strategy!r}: it must be one of"
            f" {', '.join(PATCH_FUNCTIONS)}."
        )

    if resource.get("failureCondition") and not resource.get("successCondition"):
        raise ConfigError(
            f"{field_path} has a failureCondition without a successCondition, so Argo would report"
            " success immediately: set both conditions."
        )


def check_outputs(template: dict[str, Any], field_path: str) -> None:
    """Raise ConfigError for an output with a JSONPath that kubectl rejects."""
    for index, parameter in enumerate((template.get("outputs") or {}).get("parameters") or []):
        value_source = parameter.get("valueFrom")
        if not value_source:
            continue

        json_path = value_source.get("jsonPath")
        json_path_field = f"{field_path}.outputs.parameters[{index}].valueFrom.jsonPath"
        if not json_path:
            raise ConfigError(
                f"{json_path_field} is missing: set it, for example to {{.status.phase}}."
            )

        try:
            kubectl_path.parse("" if "{{" in json_path else json_path)
        except kubectl_path.KubectlPathError as error:
            raise ConfigError(
                f"{json_path_field} is {json_path!r}: {error}. A valid path is {{.status.phase}}."
            ) from None
