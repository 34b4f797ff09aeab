"""Create the manifest of a new run from an earlier run, with the same parameters."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.manifest import object_labels
from argolocal.manifest import read as manifests
from argolocal.manifest.allowed_values import API_VERSION
from argolocal.state.journal import RunFiles

# matches the random suffix of a name, see manifests.generate_suffix
RANDOM_SUFFIX = re.compile(rf"-[{manifests.SUFFIX_CHARACTERS}]{{{manifests.SUFFIX_LENGTH}}}$")
# fields of `metadata` that are specific to one run, so they are not copied
RUN_FIELDS = ("name", "uid", "creationTimestamp")


def make_name_prefix(manifest: Mapping[str, Any]) -> str:
    """Return the part that the names of all runs of a workflow have in common, with a final "-".
    The common part comes from generateName, from the name of the CronWorkflow, or from the name of
    the run without its random suffix."""
    metadata = manifest.get("metadata") or {}
    cron_workflow_name = (metadata.get("labels") or {}).get(object_labels.CRON_WORKFLOW_LABEL)
    prefix = str(metadata.get("generateName") or cron_workflow_name or "").strip("-")
    return f"{prefix or RANDOM_SUFFIX.sub('', str(metadata.get('name') or 'workflow'))}-"


def choose_name(manifest: Mapping[str, Any]) -> str:
    """Return a name for a new run of the workflow."""
    return manifests.ObjectIdentity(suffix=manifests.generate_suffix()).name(
        make_name_prefix(manifest)
    )


def list_parameters(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of the workflow parameters of a run, by name."""
    parameters = (manifest["spec"].get("arguments") or {}).get("parameters") or []
    return {parameter["name"]: str(parameter.get("value") or "") for parameter in parameters}


def read_manifest(home: Path, run_name: str, new_name: str = "") -> dict[str, Any]:
    """Return the manifest for a new run that is based on the run `run_name`. The name of the new
    run is `new_name`, or a generated name. Raises ConfigError if the run does not exist."""
    workflow = RunFiles(home, run_name).workflow()
    metadata = {
        metadata_field: value
        for metadata_field, value in workflow["metadata"].items()
        if metadata_field not in RUN_FIELDS
    }
    metadata["generateName"] = make_name_prefix(workflow)
    metadata["name"] = new_name or choose_name(workflow)
    return {
        "apiVersion": API_VERSION,
        "kind": "Workflow",
        "spec": workflow["spec"],
        "metadata": metadata,
    }
