"""Create the manifest of a new run from an earlier run, with the same parameters."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.manifest import object_labels
from argolocal.manifest import read as manifests
from argolocal.state.journal import RunFiles

# a random suffix, see manifests.generate_suffix
SUFFIX = re.compile(rf"-[{manifests.SUFFIX_CHARACTERS}]{{{manifests.SUFFIX_LENGTH}}}$")
# fields of `metadata` that are specific to one run, so they are not copied
RUN_FIELDS = ("name", "uid", "creationTimestamp")


def name_prefix(manifest: Mapping[str, Any]) -> str:
    """Return the prefix of a workflow's run names, which ends with "-": the generateName, the name
    of the CronWorkflow, or the run's name without its random suffix."""
    metadata = manifest.get("metadata") or {}
    schedule = (metadata.get("labels") or {}).get(object_labels.CRON_WORKFLOW)
    prefix = str(metadata.get("generateName") or schedule or "").strip("-")
    return f"{prefix or SUFFIX.sub('', str(metadata.get('name') or 'workflow'))}-"


def choose_name(manifest: Mapping[str, Any]) -> str:
    """Return a name for a new run of the workflow."""
    return manifests.Identity(suffix=manifests.generate_suffix()).name(name_prefix(manifest))


def list_parameters(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of the workflow parameters of a run, by name."""
    parameters = (manifest["spec"].get("arguments") or {}).get("parameters") or []
    return {item["name"]: str(item.get("value") or "") for item in parameters}


def read_manifest(home: Path, run: str, new_name: str = "") -> dict[str, Any]:
    """Return the manifest of a run, changed into the manifest of a new run with the name `new_name`
    or a generated name. Raises ConfigError if the run does not exist."""
    workflow = RunFiles(home, run).workflow()
    metadata = {key: value for key, value in workflow["metadata"].items() if key not in RUN_FIELDS}
    metadata["generateName"] = name_prefix(workflow)
    metadata["name"] = new_name or choose_name(workflow)
    return {key: workflow[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": metadata}
