"""A pipeline as plain data, its YAML, and the hash that says which manifest ran.

rekindle render configs/demo.yaml --kind template | kubectl apply -f -
rekindle render configs/demo.yaml --kind cron | kubectl apply -f -
"""

import copy
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from rekindle import project
from rekindle.blocks.manifest.provenance import OURS, PROVENANCE, SCHEDULED, git_sha, pack
from rekindle.blocks.pod import labels
from rekindle.errors import ConfigError, RekindleError

if TYPE_CHECKING:
    from rekindle.blocks.manifest.config import Config

Manifest = dict[str, Any]
Kind = Literal["workflow", "template", "cron"]

TOO_BIG = 1_200_000  # bytes; Kubernetes refuses objects of 1.5 MB, and Argo keeps its status in the same object
FIRST = ("apiVersion", "kind", "metadata", "name", "generateName")


def render_manifest(config: "Config", kind: Kind = "workflow") -> Manifest:
    """The manifest of a config: the same on every machine, apart from the git sha among its parameters."""
    made = _cron(config) if kind == "cron" else _workflow(config)
    if kind == "template":
        made["kind"] = "WorkflowTemplate"
        made["metadata"].pop("generateName", None)
        made["metadata"]["name"] = config.name
    manifest = ordered(made)
    parameters = manifest["spec"].get("arguments", {}).get("parameters", [])
    resolved = config.model_dump(mode="json")
    own = {"git_sha": git_sha(), "config": json.dumps(resolved), "config_hash": _sha256(resolved)}
    own["manifest_hash"] = manifest_sha256(manifest)
    for parameter in parameters:
        if parameter["name"] in PROVENANCE:
            parameter["value"] = own.get(parameter["name"], parameter.get("value", ""))
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "name"}
    run = manifest | {"kind": "Workflow", "metadata": {"generateName": f"{config.name}-"} | metadata}
    packed = pack(json.dumps(ordered(run), indent=1))  # with all parameters but itself
    for parameter in parameters:
        if parameter["name"] == "manifest":
            parameter["value"] = packed
    size = len(json.dumps(manifest))
    if size > TOO_BIG:
        sys.stderr.write(f"warning: the manifest has {size:,} bytes; Kubernetes refuses 1,500,000 and more.\n")
    return manifest


def _cron(config: "Config") -> Manifest:
    """The schedule of the WorkflowTemplate of the same name. Its runs are called NAME-UNIXTIME, one at a time."""
    schedule, own = config.schedule, {"labels": labels(config.name)}
    arguments = {"parameters": [{"name": SCHEDULED, "value": "{{workflow.scheduledTime}}"}]}
    spec = {
        "schedules": [schedule.cron],
        "timezone": schedule.timezone,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": 60 * schedule.deadline_minutes,
        "successfulJobsHistoryLimit": schedule.keep_succeeded,
        "failedJobsHistoryLimit": schedule.keep_failed,
        **({"suspend": True} if schedule.suspend else {}),
        "workflowMetadata": own,
        "workflowSpec": {"arguments": arguments, "workflowTemplateRef": {"name": config.name}},
    }
    namespace = {"namespace": config.cluster.namespace} if config.cluster.namespace else {}
    metadata = {"name": config.name, **own, **namespace}
    return {"apiVersion": "argoproj.io/v1alpha1", "kind": "CronWorkflow", "metadata": metadata, "spec": spec}


def _workflow(config: "Config") -> Manifest:
    from hera.workflows import Workflow

    pipeline = project.load(config.pipeline, "pipeline", ("build",))
    try:
        workflow = pipeline.build(config)
    except RekindleError:
        raise
    except Exception as error:  # a mistake in the user's code
        raise ConfigError(f"{project.describe(error)} Correct the pipeline {config.pipeline}.") from error
    if type(workflow) is not Workflow:
        raise ConfigError(
            f"{config.pipeline}.build gives {type(workflow).__name__}: it must return the Workflow of Hera; what the "
            "WorkflowTemplate and the CronWorkflow are made of is this Workflow."
        )
    return workflow.to_dict()


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """sha256 over the manifest's `spec` as JSON with sorted keys and no spaces, UTF-8.

    Left out: name and labels, so that a Workflow and the WorkflowTemplate of the same pipeline have one hash, and the
    values of the workflow parameters in `OURS`, which say where the manifest came from, and for what time it runs.
    """
    spec = copy.deepcopy(manifest["spec"])
    for parameter in (spec.get("arguments") or {}).get("parameters") or []:
        if parameter.get("name") in OURS:
            parameter.pop("value", None)
    return _sha256(spec)


def to_yaml(manifest: Mapping[str, Any]) -> str:
    """The manifest as YAML, the same text for the same data; long texts (the objects to apply) as blocks."""
    return yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, width=1000)


def check_golden(manifest: Mapping[str, Any], file: Path) -> None:
    """For tests: raise AssertionError with what differs from the manifest in `file`.

    Where a manifest came from (commit, hashes) is left out. With REGENERATE=1 in the environment the file is written.
    """
    manifest = copy.deepcopy(dict(manifest))
    for parameter in (manifest["spec"].get("arguments") or {}).get("parameters") or []:
        if parameter["name"] in PROVENANCE:
            parameter["value"] = ""
    text = to_yaml(manifest)
    if os.environ.get("REGENERATE"):
        file.write_text(text)
    known = file.read_text() if file.exists() else ""
    changes = unified_diff(known.splitlines(), text.splitlines(), str(file), "now", n=1, lineterm="")
    assert text == known, "\n".join([*changes, "if this was meant: REGENERATE=1 in the environment writes it anew"])


def ordered(value: Any) -> Any:
    """Plain data with its keys in the order people expect: identity first, the rest by alphabet."""
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda k: (FIRST.index(k) if k in FIRST else len(FIRST), k))
        return {key: ordered(value[key]) for key in keys}
    return [ordered(item) for item in value] if isinstance(value, list) else value


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class _Dumper(yaml.SafeDumper):
    """SafeDumper with indented lists and `|` for texts of several lines."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
