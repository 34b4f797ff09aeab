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
from argolocal.manifest.patch import PATCHES

TAG_PLACEHOLDER = "tag-of-argo"  # placeholder that replaces each template tag in a manifest


def _parse_objects(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a manifest, or [] if its template tags make it invalid YAML."""
    try:
        objects = parse(TAG.sub(TAG_PLACEHOLDER, str(resource.get("manifest") or "")))
    except ConfigError:
        return []
    return [item for item in objects if isinstance(item, dict)]


def _find_kind(resource: dict[str, Any]) -> str:
    """Return the first `kind` in the text of a manifest, or ""."""
    match = re.search(
        r"^\s{0,3}[\"']?kind[\"']?:\s*[\"']?([A-Za-z]+)", resource.get("manifest") or "", re.M
    )
    if match:
        return match[1]
    return ""


def check(resource: dict[str, Any], where: str, cluster: Cluster) -> None:
    """Raise ConfigError for a resource template that is not supported here."""
    kinds = cluster.kinds.types
    kind_of_type = {
        word: kind for kind in kinds for word in (kind, kind.lower(), kind.lower() + "s")
    }

    try:
        words, selector = parse_flags(resource.get("flags") or [])
    except KubectlError as error:
        raise ConfigError(f"{where}.flags: {error}.") from None

    if selector and (resource.get("action") != "delete" or resource.get("manifest")):
        raise ConfigError(
            f"{where}.flags has a selector: only delete without a manifest supports a selector"
            " here. Name the object."
        )

    kind = _find_kind(resource) or "".join(words[:1])
    field = "manifest" if _find_kind(resource) else "flags"

    if (
        kind
        and "{{" not in kind
        and not {word.split(".")[0] for word in kind.split(",")} <= kind_of_type.keys()
    ):
        raise ConfigError(
            f"{where}.{field} is a {kind}, which the local runner does not support: use one of"
            f" {', '.join(kinds)}."
        )

    for item in _parse_objects(resource):
        name = str(item.get("kind"))
        version = str(item.get("apiVersion"))

        versions = kinds[name].api_versions if name in kinds else ()
        if (
            versions
            and "apiVersion" in item
            and TAG_PLACEHOLDER not in version
            and version not in versions
        ):
            raise ConfigError(
                f"{where}.manifest is a {name} with the apiVersion {version}, which the local"
                f" runner does not support: use {' or '.join(versions)}."
            )

    if resource.get("action") not in ACTIONS:
        raise ConfigError(
            f"{where}.action is {resource.get('action')!r}: it must be one of {', '.join(ACTIONS)}."
        )

    strategy = resource.get("mergeStrategy") or "strategic"
    if strategy not in PATCHES:
        raise ConfigError(
            f"{where}.mergeStrategy is {strategy!r}: it must be one of {', '.join(PATCHES)}."
        )

    if resource.get("failureCondition") and not resource.get("successCondition"):
        raise ConfigError(
            f"{where} has a failureCondition without a successCondition, so Argo would report"
            " success immediately: set both conditions."
        )


def check_outputs(template: dict[str, Any], where: str) -> None:
    """Raise ConfigError for an output with a JSONPath that kubectl rejects."""
    for index, parameter in enumerate((template.get("outputs") or {}).get("parameters") or []):
        source = parameter.get("valueFrom")
        if not source:
            continue

        path = source.get("jsonPath")
        field = f"{where}.outputs.parameters[{index}].valueFrom.jsonPath"
        if not path:
            raise ConfigError(f"{field} is missing: set it, for example to {{.status.phase}}.")

        try:
            kubectl_path.parse("" if "{{" in path else path)
        except kubectl_path.KubectlPathError as error:
            raise ConfigError(
                f"{field} is {path!r}: {error}. A valid path is {{.status.phase}}."
            ) from None
