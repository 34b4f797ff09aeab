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
from argolocal.language.yaml_text import (
    FLOAT,
    INTEGER,
    NUMBER_START_CHARACTERS,
    SHORT_BOOLEAN_PATTERN,
)
from argolocal.manifest.allowed_values import API_VERSION
from rekindle import project
from rekindle.blocks.manifest.provenance import (
    PROVENANCE_PARAMETERS,
    RESERVED_PARAMETERS,
    SCHEDULED_TIME,
    SCHEDULED_TIME_TAG,
    hash_lock_file,
    read_git_sha,
)
from rekindle.blocks.pod_settings import Manifest, workflow_labels
from rekindle.errors import ConfigError, RekindleError
from rekindle.project import user_exceptions
from rekindle.step import encode_parameter
from rekindle.training.cost.pod_requests import list_manifest_pods
from rekindle.training.cost.prices import PRICES_ANNOTATION, Prices

if TYPE_CHECKING:
    from rekindle.blocks.manifest.config import Config

Kind = Literal["workflow", "template", "cron"]

# Kubernetes rejects objects above 1.5 MB, and Argo later adds the status to the same object
MAX_BYTES = 1_200_000
FIRST_KEYS = ("apiVersion", "kind", "metadata", "name", "generateName")


def render_manifest(config: "Config", kind: Kind = "workflow") -> Manifest:
    """Return the manifest of a config. The manifest is identical on every machine, except for its
    provenance parameters."""
    manifest = _render_cron(config) if kind == "cron" else _build_workflow(config)
    if kind == "template":
        manifest["kind"] = "WorkflowTemplate"
        manifest["metadata"].pop("generateName", None)
        manifest["metadata"]["name"] = config.name

    manifest = sort_keys_for_reading(manifest)
    workflow_parameters = manifest["spec"].get("arguments", {}).get("parameters", [])
    config_values = config.model_dump(mode="json")

    provenance = {
        "git_sha": read_git_sha(),
        "config": to_json(config_values),
        "config_hash": _hash_json(config_values),
        "lock_hash": hash_lock_file(),
        "manifest_hash": manifest_sha256(manifest),
    }

    for workflow_parameter in workflow_parameters:
        if workflow_parameter["name"] in PROVENANCE_PARAMETERS:
            workflow_parameter["value"] = provenance.get(
                workflow_parameter["name"], workflow_parameter.get("value", "")
            )

    metadata = {name: value for name, value in manifest["metadata"].items() if name != "name"}
    # add the prices only to the recorded manifest, because the applied manifest must not depend on
    # prices
    project_prices = Prices.load(project.current_root())
    if project_prices:
        project_prices.check_pods(list_manifest_pods(manifest))
        metadata["annotations"] = metadata.get("annotations", {}) | {
            PRICES_ANNOTATION: project_prices.model_dump_json()
        }

    run_manifest = manifest | {
        "kind": "Workflow",
        "metadata": {"generateName": f"{config.name}-"} | metadata,
    }
    # the recorded manifest contains all parameters except `manifest` itself
    packed_manifest = encode_parameter(to_json(sort_keys_for_reading(run_manifest), indent=1))
    for workflow_parameter in workflow_parameters:
        if workflow_parameter["name"] == "manifest":
            workflow_parameter["value"] = packed_manifest

    size_bytes = len(to_json(manifest))
    if size_bytes > MAX_BYTES:
        sys.stderr.write(
            f"warning: the manifest of {config.name} has {size_bytes:,} bytes; Kubernetes rejects"
            " 1,500,000 and more.\n"
        )

    return manifest


def _render_cron(config: "Config") -> Manifest:
    """Return the CronWorkflow that runs the WorkflowTemplate `config.name`, one run at a time.
    Argo names the runs NAME-UNIXTIME."""
    schedule_config = config.schedule
    run_metadata = {"labels": workflow_labels(config.name)}
    workflow_arguments = {"parameters": [{"name": SCHEDULED_TIME, "value": SCHEDULED_TIME_TAG}]}

    cron_spec = {
        "schedules": [schedule_config.cron],
        "timezone": schedule_config.timezone,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": 60 * schedule_config.deadline_minutes,
        "successfulJobsHistoryLimit": schedule_config.keep_succeeded,
        "failedJobsHistoryLimit": schedule_config.keep_failed,
        **({"suspend": True} if schedule_config.suspend else {}),
        "workflowMetadata": run_metadata,
        "workflowSpec": {
            "arguments": workflow_arguments,
            "workflowTemplateRef": {"name": config.name},
        },
    }

    if config.cluster.namespace:
        namespace_field = {"namespace": config.cluster.namespace}
    else:
        namespace_field = {}

    cron_metadata = {"name": config.name, **run_metadata, **namespace_field}

    return {
        "apiVersion": API_VERSION,
        "kind": "CronWorkflow",
        "metadata": cron_metadata,
        "spec": cron_spec,
    }


def _build_workflow(config: "Config") -> Manifest:
    from hera.workflows import Workflow

    pipeline_module = project.load_module(config.pipeline, "pipeline", ("build",))
    pipeline_file = str(pipeline_module.__file__)

    build_function = pipeline_module.build
    if inspect.isfunction(build_function):
        build_code = inspect.unwrap(build_function).__code__
        pipeline_file = f"{build_code.co_filename}:{build_code.co_firstlineno}"

    try:
        inspect.signature(build_function).bind(config)
    except TypeError as error:
        raise ConfigError(
            f"{pipeline_file}: build must be a function of the config: def build(config). ({error})"
        ) from error

    try:
        hera_workflow = build_function(config)
        if type(hera_workflow) is Workflow:
            return hera_workflow.to_dict()
    except RekindleError:
        raise
    # an exception of any other class is an error in the user's pipeline
    except Exception as error:
        raise ConfigError(
            f"{user_exceptions.describe_exception(error)} Correct the pipeline {config.pipeline}."
        ) from error

    raise ConfigError(
        f"{pipeline_file}: build returns {type(hera_workflow).__name__}: it must end with `return"
        " workflow`, a Workflow of Hera, also for a WorkflowTemplate and a CronWorkflow."
    )


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of the manifest's `spec`, as JSON in UTF-8 with sorted keys and
    without spaces.

    A Workflow and the WorkflowTemplate of the same pipeline have the same hash, because the hash
    excludes the metadata and the workflow parameters that Rekindle sets (provenance, and the
    scheduled time of a run).
    """
    spec_copy = copy.deepcopy(manifest["spec"])
    for workflow_parameter in (spec_copy.get("arguments") or {}).get("parameters") or []:
        if workflow_parameter.get("name") in RESERVED_PARAMETERS:
            workflow_parameter.pop("value", None)
    return _hash_json(spec_copy)


def to_yaml(manifest: Mapping[str, Any]) -> str:
    """Return the manifest as YAML; multi-line texts, such as objects to apply, become block
    scalars."""
    return yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, width=1000)


def check_golden(manifest: Mapping[str, Any], file: Path) -> None:
    """Raise AssertionError with the differences if `manifest` differs from the manifest in `file`;
    for tests.

    The comparison ignores the values of provenance parameters (commit, hashes). If the environment
    variable REGENERATE is set, write the manifest to `file` first.
    """
    manifest = copy.deepcopy(dict(manifest))
    for workflow_parameter in (manifest["spec"].get("arguments") or {}).get("parameters") or []:
        if workflow_parameter["name"] in PROVENANCE_PARAMETERS:
            workflow_parameter["value"] = ""

    text = to_yaml(manifest)
    if os.environ.get("REGENERATE"):
        file.write_text(text)

    golden_text = file.read_text() if file.exists() else ""
    diff_lines = unified_diff(
        golden_text.splitlines(), text.splitlines(), str(file), "now", n=1, lineterm=""
    )
    assert text == golden_text, "\n".join(
        [*diff_lines, "if the change is intended, set REGENERATE=1 to update the file"]
    )


def sort_keys_for_reading(manifest_value: object) -> Any:
    """Return `manifest_value` with its keys sorted: first the identifying keys (kind, name, ...),
    then the others by name."""
    if isinstance(manifest_value, Mapping):
        sorted_keys = sorted(
            manifest_value,
            key=lambda mapping_key: (
                FIRST_KEYS.index(mapping_key) if mapping_key in FIRST_KEYS else len(FIRST_KEYS),
                mapping_key,
            ),
        )
        return {key: sort_keys_for_reading(manifest_value[key]) for key in sorted_keys}
    if isinstance(manifest_value, list):
        return [sort_keys_for_reading(list_item) for list_item in manifest_value]
    return manifest_value


def _hash_json(json_value: object) -> str:
    json_text = to_json(json_value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(json_text.encode()).hexdigest()


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that indents lists, and writes multi-line texts as block scalars (`|`)."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, yaml_text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", yaml_text, style="|" if "\n" in yaml_text else None
    )


_Dumper.add_representer(str, _represent_text)
# quote texts such as 1e-05, which Go's YAML parser, unlike PyYAML, reads as numbers or booleans
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", INTEGER, NUMBER_START_CHARACTERS)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, NUMBER_START_CHARACTERS)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", SHORT_BOOLEAN_PATTERN, list("yYnN"))
