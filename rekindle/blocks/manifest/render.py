"""Render the manifest of a config, as plain data or YAML, with a hash that identifies it."""

import copy
import hashlib
import inspect
import os
import sys
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from argolocal.common.json_text import to_json
from argolocal.language.yaml_text import FLOAT, INTEGER, NUMBER_START_CHARACTERS, SHORT_BOOLEAN
from argolocal.manifest.allowed_values import API_VERSION
from rekindle import project
from rekindle.blocks.manifest.provenance import (
    PROVENANCE_PARAMETERS,
    RESERVED_PARAMETERS,
    SCHEDULED_TIME,
    hash_lock_file,
    read_git_sha,
)
from rekindle.blocks.pod_settings import Manifest, workflow_labels
from rekindle.errors import ConfigError, RekindleError
from rekindle.project import user_exceptions
from rekindle.step import encode_parameter
from rekindle.training.cost.pod_requests import list_manifest_pods
from rekindle.training.cost.prices import ANNOTATION, Prices

if TYPE_CHECKING:
    from rekindle.blocks.manifest.config import Config

Kind = Literal["workflow", "template", "cron"]

# Kubernetes rejects objects above 1.5 MB, and Argo later adds the status to the same object
MAX_BYTES = 1_200_000
FIRST_KEYS = ("apiVersion", "kind", "metadata", "name", "generateName")


def render_manifest(config: "Config", kind: Kind = "workflow") -> Manifest:
    """Return the manifest of a config. It is identical on every machine, except for its provenance
    parameters."""
    manifest = _render_cron(config) if kind == "cron" else _build_workflow(config)
    if kind == "template":
        manifest["kind"] = "WorkflowTemplate"
        manifest["metadata"].pop("generateName", None)
        manifest["metadata"]["name"] = config.name

    manifest = order_keys(manifest)
    parameters = manifest["spec"].get("arguments", {}).get("parameters", [])
    config_values = config.model_dump(mode="json")

    provenance = {
        "git_sha": read_git_sha(),
        "config": to_json(config_values),
        "config_hash": _sha256(config_values),
        "lock_hash": hash_lock_file(),
        "manifest_hash": manifest_sha256(manifest),
    }

    for parameter in parameters:
        if parameter["name"] in PROVENANCE_PARAMETERS:
            parameter["value"] = provenance.get(parameter["name"], parameter.get("value", ""))

    metadata = {name: value for name, value in manifest["metadata"].items() if name != "name"}
    # prices are added only to the recorded manifest, because the manifest itself must not depend on
    # them
    prices = Prices.load(project.root())
    if prices:
        prices.check_pods(list_manifest_pods(manifest))
        metadata["annotations"] = metadata.get("annotations", {}) | {
            ANNOTATION: prices.model_dump_json()
        }

    run = manifest | {
        "kind": "Workflow",
        "metadata": {"generateName": f"{config.name}-"} | metadata,
    }
    # the recorded manifest contains all parameters except `manifest` itself
    packed_manifest = encode_parameter(to_json(order_keys(run), indent=1))
    for parameter in parameters:
        if parameter["name"] == "manifest":
            parameter["value"] = packed_manifest

    size = len(to_json(manifest))
    if size > MAX_BYTES:
        sys.stderr.write(
            f"warning: the manifest of {config.name} has {size:,} bytes; Kubernetes rejects"
            " 1,500,000 and more.\n"
        )

    return manifest


def _render_cron(config: "Config") -> Manifest:
    """Return the CronWorkflow that runs the WorkflowTemplate `config.name`, one run at a time.
    Argo names the runs NAME-UNIXTIME."""
    schedule = config.schedule
    run_metadata = {"labels": workflow_labels(config.name)}
    arguments = {"parameters": [{"name": SCHEDULED_TIME, "value": "{{workflow.scheduledTime}}"}]}

    spec = {
        "schedules": [schedule.cron],
        "timezone": schedule.timezone,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": 60 * schedule.deadline_minutes,
        "successfulJobsHistoryLimit": schedule.keep_succeeded,
        "failedJobsHistoryLimit": schedule.keep_failed,
        **({"suspend": True} if schedule.suspend else {}),
        "workflowMetadata": run_metadata,
        "workflowSpec": {"arguments": arguments, "workflowTemplateRef": {"name": config.name}},
    }

    if config.cluster.namespace:
        namespace = {"namespace": config.cluster.namespace}
    else:
        namespace = {}

    metadata = {"name": config.name, **run_metadata, **namespace}

    return {
        "apiVersion": API_VERSION,
        "kind": "CronWorkflow",
        "metadata": metadata,
        "spec": spec,
    }


def _build_workflow(config: "Config") -> Manifest:
    from hera.workflows import Workflow

    pipeline = project.load(config.pipeline, "pipeline", ("build",))
    location = str(pipeline.__file__)

    build = pipeline.build
    if inspect.isfunction(build):
        code = inspect.unwrap(build).__code__
        location = f"{code.co_filename}:{code.co_firstlineno}"

    try:
        inspect.signature(build).bind(config)
    except TypeError as error:
        raise ConfigError(
            f"{location}: build must be a function of the config: def build(config). ({error})"
        ) from error

    try:
        workflow = build(config)
        if type(workflow) is Workflow:
            return workflow.to_dict()
    except RekindleError:
        raise
    # any other exception is an error in the user's pipeline
    except Exception as error:
        raise ConfigError(
            f"{user_exceptions.describe(error)} Correct the pipeline {config.pipeline}."
        ) from error

    raise ConfigError(
        f"{location}: build returns {type(workflow).__name__}: it must end with `return workflow`,"
        " a Workflow of Hera, also for a WorkflowTemplate and a CronWorkflow."
    )


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of the manifest's `spec`, as JSON in UTF-8 with sorted keys and without
    spaces.

    A Workflow and the WorkflowTemplate of the same pipeline have the same hash, because it excludes
    the metadata and the workflow parameters that Rekindle sets (provenance, and the scheduled time
    of a run).
    """
    spec = copy.deepcopy(manifest["spec"])
    for parameter in (spec.get("arguments") or {}).get("parameters") or []:
        if parameter.get("name") in RESERVED_PARAMETERS:
            parameter.pop("value", None)
    return _sha256(spec)


def to_yaml(manifest: Mapping[str, Any]) -> str:
    """Return the manifest as YAML; multi-line texts, such as objects to apply, become block
    scalars."""
    return yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, width=1000)


def check_golden(manifest: Mapping[str, Any], file: Path) -> None:
    """Raise AssertionError with the differences if `manifest` is not equal to the manifest in
    `file`; for tests.

    The comparison ignores the values of provenance parameters (commit, hashes). With REGENERATE=1
    in the environment, write the file instead.
    """
    manifest = copy.deepcopy(dict(manifest))
    for parameter in (manifest["spec"].get("arguments") or {}).get("parameters") or []:
        if parameter["name"] in PROVENANCE_PARAMETERS:
            parameter["value"] = ""

    text = to_yaml(manifest)
    if os.environ.get("REGENERATE"):
        file.write_text(text)

    golden = file.read_text() if file.exists() else ""
    changes = unified_diff(
        golden.splitlines(), text.splitlines(), str(file), "now", n=1, lineterm=""
    )
    assert text == golden, "\n".join(
        [*changes, "if the change is intended, set REGENERATE=1 to update the file"]
    )


def order_keys(value: object) -> Any:
    """Return `value` with its keys sorted: first the identifying keys (kind, name, ...), then the
    others by name."""
    if isinstance(value, Mapping):
        keys = sorted(
            value, key=lambda k: (FIRST_KEYS.index(k) if k in FIRST_KEYS else len(FIRST_KEYS), k)
        )
        return {key: order_keys(value[key]) for key in keys}
    if isinstance(value, list):
        return [order_keys(item) for item in value]
    return value


def _sha256(value: object) -> str:
    text = to_json(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that indents lists, and writes multi-line texts as block scalars (`|`)."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _represent_text)
# quote texts such as 1e-05, which Go's YAML parser, unlike PyYAML, reads as numbers or booleans
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", INTEGER, NUMBER_START_CHARACTERS)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, NUMBER_START_CHARACTERS)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", SHORT_BOOLEAN, list("yYnN"))
