"""Substitute the tags of templates: workflow.* values, inputs, and outputs with a globalName.

Source: the functions setGlobalParameters (operator.go), ProcessArgs and SubstituteParams
(common/util.go) of Argo.
"""

import re
from datetime import datetime
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine.nodes import NodeError
from argolocal.engine.scope import ABSENT_VALUE_MARK, POD_PATH_MARK
from argolocal.errors import ConfigError
from argolocal.language import gofmt
from argolocal.language.expr import evaluate
from argolocal.language.functions import ExprError
from argolocal.language.substitute import nest_scope, parse_result, replace_tags
from argolocal.manifest.object_labels import SCHEDULED_TIME_ANNOTATION
from argolocal.manifest.types import Task, Template

ALL_PARAMETERS = re.compile(r"inputs\.parameters(?!\.)")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
STRFTIME_LETTERS = "BbmAadHIMSYypZzL"


class SubstitutedTemplate(dict[str, Any]):
    """A template without tags, because all its tags were substituted."""


# the fields of a parameter, in the order of Argo's Go struct
PARAMETER_FIELDS = (
    "name",
    "default",
    "value",
    "valueFrom",
    "globalName",
    "enum",
    "description",
)


class Inputs:
    """The templates of one workflow and the values of their tags. `globals` maps each tag
    workflow.* to its value."""

    def __init__(self, workflow: dict[str, Any], status: dict[str, Any]) -> None:
        self.workflow = workflow
        self.spec = workflow["spec"]
        self.status = status
        self.templates = {
            template["name"]: template for template in self.spec.get("templates") or []
        }
        self.templates |= workflow.get("storedTemplates") or {}
        self.globals = self._compute_globals()

    def arguments(self) -> dict[str, Any]:
        """Return the workflow's arguments, with their resolved values."""
        arguments = self.spec.get("arguments") or {}
        resolved_parameters = [
            {
                "name": parameter["name"],
                "value": self.globals[f"workflow.parameters.{parameter['name']}"],
            }
            for parameter in arguments.get("parameters") or []
        ]
        return {**arguments, "parameters": resolved_parameters}

    def _compute_globals(self) -> dict[str, str]:
        """Return the values of the tags workflow.* at the start of the run, and the outputs that
        were exported so far."""
        metadata = self.workflow["metadata"]
        spec = self.spec
        creation_time = datetime.fromisoformat(metadata["creationTimestamp"])
        parameters = (spec.get("arguments") or {}).get("parameters") or []

        tag_values = {
            "name": metadata["name"],
            "namespace": metadata.get("namespace", "default"),
            "uid": metadata.get("uid", ""),
            "mainEntrypoint": spec.get("entrypoint", ""),
            "serviceAccountName": spec.get("serviceAccountName", ""),
            "creationTimestamp": metadata["creationTimestamp"],
            "creationTimestamp.s": str(int(creation_time.timestamp())),
            "creationTimestamp.RFC3339": metadata["creationTimestamp"],
            # the workflow's phase is empty before the scheduler's first pass
            "status": self.status["phase"],
            "duration": "0.000000",
        }

        tag_values.update(
            {
                f"creationTimestamp.{letter}": creation_time.strftime(
                    f"%{letter}" if letter != "L" else "000"
                )
                for letter in STRFTIME_LETTERS
            }
        )

        scheduled_time = (metadata.get("annotations") or {}).get(SCHEDULED_TIME_ANNOTATION)
        if scheduled_time:
            tag_values["scheduledTime"] = scheduled_time

        if spec.get("priority") is not None:
            tag_values["priority"] = str(spec["priority"])

        tag_values.update(
            {
                f"parameters.{parameter['name']}": parameter["value"]
                for parameter in parameters
                if "value" in parameter
            }
        )

        parameters_json = gofmt.dump_structs(parameters, PARAMETER_FIELDS)
        tag_values["parameters"] = parameters_json
        tag_values["parameters.json"] = parameters_json

        for metadata_field in ("labels", "annotations"):
            metadata_values = metadata.get(metadata_field) or {}
            tag_values[metadata_field] = gofmt.dumps(metadata_values)
            tag_values[f"{metadata_field}.json"] = tag_values[metadata_field]
            tag_values.update(
                {
                    f"{metadata_field}.{name}": metadata_text
                    for name, metadata_text in metadata_values.items()
                }
            )

        outputs = (self.status.get("outputs") or {}).get("parameters") or []
        tag_values.update(
            {f"outputs.parameters.{parameter['name']}": parameter["value"] for parameter in outputs}
        )
        return {f"workflow.{tag}": value for tag, value in tag_values.items()}

    def export(self, outputs: dict[str, Any]) -> None:
        """Add the outputs that have a globalName to the workflow's outputs and to `globals`."""
        for output_kind in ("parameters", "artifacts"):
            for output in outputs.get(output_kind) or []:
                name = output.get("globalName")
                if not name or (output_kind == "parameters" and "value" not in output):
                    continue

                global_outputs = self.status.setdefault("outputs", {}).setdefault(output_kind, [])
                exported_output = {
                    key: value
                    for key, value in output.items()
                    if key not in ("globalName", "valueFrom", "path")
                }
                exported_output["name"] = name

                other_outputs = [
                    global_output
                    for global_output in global_outputs
                    if global_output["name"] != name
                ]
                global_outputs[:] = [*other_outputs, exported_output]

                if output_kind == "parameters":
                    self.globals[f"workflow.outputs.parameters.{name}"] = output["value"]

    def template(self, caller: Task) -> Template:
        """Return the template that a step, task or hook calls. Raises NodeError."""
        if caller.get("inline"):
            return {"name": "", **caller["inline"]}
        template = self.templates.get(caller.get("template", ""))
        if not template:
            raise NodeError(f"template {caller.get('template')} not template in workflow template")
        return template

    def process_args(
        self, template: Template, passed_arguments: dict[str, Any], local_values: dict[str, str]
    ) -> Template:
        """Return the template with the values of its inputs, and with its tags substituted (Argo's
        ProcessArgs). `local_values`: values of tags that exist only in this template, such as
        pod.name. Raises NodeError."""
        arguments_by_name = {
            parameter["name"]: parameter for parameter in passed_arguments.get("parameters") or []
        }
        artifact_arguments = {
            artifact["name"]: artifact for artifact in passed_arguments.get("artifacts") or []
        }
        inputs = template.get("inputs") or {}
        parameters = [
            self._bind_parameter(parameter, arguments_by_name.get(parameter["name"]))
            for parameter in inputs.get("parameters") or []
        ]
        artifacts = [
            _bind_artifact(artifact, artifact_arguments.get(artifact["name"]))
            for artifact in inputs.get("artifacts") or []
        ]
        bound_template: Template = {
            **template,
            "inputs": {"parameters": parameters, "artifacts": artifacts},
        }

        return self.substitute_params(bound_template, local_values)

    def _bind_parameter(
        self, parameter: dict[str, Any], argument: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return an input parameter with its value: the argument's, or else the input's own value
        or default. Raises NodeError if the input has none of these values."""
        value = parameter.get("value", parameter.get("default"))
        if argument is not None:
            if argument.get("value") == ABSENT_VALUE_MARK:
                if value is None:
                    raise NodeError(
                        f"inputs.parameters.{parameter['name']}: argument references an absent"
                        " optional (skipped/omitted node output with no default)"
                    )
            else:
                value = argument.get("value")

        if value is None:
            raise NodeError(f"inputs.parameters.{parameter['name']} was not supplied")

        bound_parameter = {
            key: field_value for key, field_value in parameter.items() if key != "valueFrom"
        }
        return {**bound_parameter, "value": value}

    def substitute_params(self, template: Template, local_values: dict[str, str]) -> Template:
        """Return the template with its tags substituted: first the tags workflow.* and the local
        tags, then the inputs, whose values may contain such tags. Raises NodeError."""
        tag_values: dict[str, str | None] = {**self.globals, **local_values}
        inputs = template["inputs"]
        outputs = template.get("outputs") or {}
        template_json = replace_tags(to_json(template), tag_values)

        if "{{" in repr((inputs, outputs)):
            new_template = parse_result(template_json)
            inputs = new_template["inputs"]
            outputs = new_template.get("outputs") or {}

        tag_values.update(
            {
                f"inputs.parameters.{parameter['name']}": parameter["value"]
                for parameter in inputs["parameters"]
            }
        )
        if ALL_PARAMETERS.search(template_json):
            tag_values["inputs.parameters"] = gofmt.dump_structs(
                inputs["parameters"], PARAMETER_FIELDS
            )

        for direction, artifacts in (
            ("inputs", inputs["artifacts"]),
            ("outputs", outputs.get("artifacts") or []),
        ):
            tag_values.update(
                {
                    f"{direction}.artifacts.{artifact['name']}.path": POD_PATH_MARK
                    + artifact["path"]
                    for artifact in artifacts
                    if artifact.get("path")
                }
            )

        for parameter in outputs.get("parameters") or []:
            parameter_path = (parameter.get("valueFrom") or {}).get("path")
            if parameter_path:
                tag_values[f"outputs.parameters.{parameter['name']}.path"] = (
                    POD_PATH_MARK + parameter_path
                )

        template_json = replace_tags(template_json, tag_values)
        if "{{" in template_json:
            return parse_result(template_json)

        return SubstitutedTemplate(parse_result(template_json))


def add_labels(workflow: dict[str, Any]) -> dict[str, Any]:
    """Return the workflow with the labels that `workflowMetadata.labelsFrom` computes. Raises
    ConfigError.

    Source: Argo's updateWorkflowMetadata.
    """
    metadata = workflow["metadata"]

    workflow_metadata = workflow["spec"].get("workflowMetadata") or {}
    if not workflow_metadata.get("labelsFrom"):
        return workflow

    expression_scope = nest_scope(Inputs(workflow, {"phase": "", "nodes": {}}).globals)
    labels = dict(metadata["labels"])

    for name, label_source in workflow_metadata["labelsFrom"].items():
        field_path = f"spec.workflowMetadata.labelsFrom.{name}.expression"
        try:
            value = evaluate(label_source["expression"], expression_scope)
        except ExprError as error:
            raise ConfigError(f"{field_path} cannot be evaluated: {error}.") from None

        if not isinstance(value, str) or not LABEL_VALUE.fullmatch(value):
            label_rule = (
                "it must be a string of at most 63 letters, digits, -, _ and ., with a letter or"
                " digit at both ends"
            )
            raise ConfigError(f"{field_path} evaluates to {value!r}: {label_rule}.")

        labels[name] = value

    return {**workflow, "metadata": {**metadata, "labels": labels}}


def _bind_artifact(artifact: dict[str, Any], argument: dict[str, Any] | None) -> dict[str, Any]:
    """Return an input artifact with the location of the argument. Raises NodeError if neither the
    input nor the argument has a location, unless the input is optional."""
    has_default = has_location(artifact)
    if not artifact.get("optional") and not has_default:
        if argument is None:
            raise NodeError(f"inputs.artifacts.{artifact['name']} was not supplied")
        if not has_location(argument):
            raise NodeError(f"inputs.artifacts.{artifact['name']} missing location information")
    if argument is None:
        return artifact
    # as in Argo, all fields except these come from the argument, even `archive` and `optional`
    return {**argument} | {
        artifact_field: artifact[artifact_field]
        for artifact_field in ("name", "path", "mode", "recurseMode")
        if artifact_field in artifact
    }


def has_location(artifact: dict[str, Any]) -> bool:
    """Return True if an artifact specifies a storage location."""
    return any(artifact.get(location_kind) for location_kind in ("s3", "raw", "http"))
