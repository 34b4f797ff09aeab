"""Read the labels, parameters and config that show where a workflow comes from."""

from collections.abc import Mapping
from typing import Any

from rekindle.documents import InvalidDocument, parse_object
from rekindle.kubernetes_names import NAME_LABEL, PART_OF_REKINDLE


def is_rekindle_manifest(manifest: Mapping[str, Any]) -> bool:
    """Return True if Rekindle rendered the manifest."""
    return PART_OF_REKINDLE.items() <= _read_labels(manifest).items()


def pipeline_label(manifest: Mapping[str, Any]) -> str | None:
    """Return the name of the pipeline from a label that Rekindle sets on its manifests; None if the
    label is missing."""
    return _read_labels(manifest).get(NAME_LABEL)


def _read_labels(manifest: Mapping[str, Any]) -> Mapping[str, str]:
    return (manifest.get("metadata") or {}).get("labels") or {}


def read_pipeline_name(workflow: Mapping[str, Any]) -> str:
    """Return the name of a run's pipeline, from the run's label or, if the label is missing, from
    the name of the run."""
    name = workflow["metadata"]["name"]
    return pipeline_label(workflow) or name.rpartition("-")[0] or name


def read_parameter(manifest: Mapping[str, Any], parameter_name: str) -> str:
    """Return the value of a workflow parameter; "" if the parameter is missing or empty."""
    parameters = (manifest["spec"].get("arguments") or {}).get("parameters") or []
    return next(
        (
            str(parameter.get("value") or "")
            for parameter in parameters
            if parameter["name"] == parameter_name
        ),
        "",
    )


def read_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the workflow parameter `config`; {} if this parameter is missing. Raises
    InvalidDocument if the value of the parameter is not a JSON object."""
    name = (manifest.get("metadata") or {}).get("name") or "the workflow"
    return parse_object(
        read_parameter(manifest, "config") or "{}", f"the parameter `config` of {name}"
    )


def read_config_or_empty(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that a manifest records; {} if the value of its parameter `config` is not a
    config."""
    try:
        return read_config(manifest)
    except InvalidDocument:
        return {}
