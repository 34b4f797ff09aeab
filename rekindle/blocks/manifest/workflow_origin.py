"""Read the origin of a workflow: its labels, parameters and config."""

from collections.abc import Mapping
from typing import Any

from rekindle.documents import InvalidDocument, parse_object


def is_rekindle(manifest: Mapping[str, Any]) -> bool:
    """Return True if Rekindle rendered the manifest."""
    return label(manifest, "part-of") == "rekindle"


def label(manifest: Mapping[str, Any], name: str) -> str | None:
    """Return a label that Rekindle sets on its manifests, such as the name of the pipeline."""
    return ((manifest.get("metadata") or {}).get("labels") or {}).get(f"app.kubernetes.io/{name}")


def pipeline(workflow: Mapping[str, Any]) -> str:
    """Return the pipeline of a run; without a label, the name of the run without its last part."""
    name = workflow["metadata"]["name"]
    return label(workflow, "name") or name.rpartition("-")[0] or name


def parameter(manifest: Mapping[str, Any], name: str) -> str:
    """Return the value of a workflow parameter; "" if it is missing or empty."""
    parameters = (manifest["spec"].get("arguments") or {}).get("parameters") or []
    return next((str(item.get("value") or "") for item in parameters if item["name"] == name), "")


def config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the workflow parameter `config`; {} without the parameter. Raises
    InvalidDocument."""
    name = (manifest.get("metadata") or {}).get("name") or "the workflow"
    return parse_object(parameter(manifest, "config") or "{}", f"the parameter `config` of {name}")


def config_or_empty(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a manifest; {} if Rekindle has not rendered the manifest."""
    try:
        return config(manifest)
    except InvalidDocument:
        return {}
