"""Substitute the tags of templates: workflow.* globals, inputs, and outputs with a globalName.

Source: the functions setGlobalParameters (operator.go), ProcessArgs and SubstituteParams
(common/util.go) of Argo.
"""

import re
from datetime import datetime
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine.nodes import NodeError
from argolocal.engine.scope import ABSENT_VALUE, POD_PATH_MARK
from argolocal.errors import ConfigError
from argolocal.language import gofmt
from argolocal.language.expr import evaluate
from argolocal.language.functions import ExprError
from argolocal.language.substitute import nest_scope, parse_result, replace
from argolocal.manifest.object_labels import SCHEDULED_TIME
from argolocal.manifest.types import Task, Template

ALL_PARAMETERS = re.compile(r"inputs\.parameters(?!\.)")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
STRFTIME_LETTERS = "BbmAadHIMSYypZzL"


class SubstitutedTemplate(dict[str, Any]):
    """A template that contains no tags any more."""


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
    """The templates of one workflow and the values of their tags. `globals` maps the tags
    workflow.* to values."""

    def __init__(self, workflow: dict[str, Any], status: dict[str, Any]) -> None:
        self.workflow = workflow
        self.spec = workflow["spec"]
        self.status = status
        self.templates = {
            template["name"]: template for template in self.spec.get("templates") or []
        }
        self.templates |= workflow.get("storedTemplates") or {}
        self.globals = self._globals()

    def arguments(self) -> dict[str, Any]:
        """Return the workflow's arguments, with their resolved values."""
        arguments = self.spec.get("arguments") or {}
        values = [
            {
                "name": parameter["name"],
                "value": self.globals[f"workflow.parameters.{parameter['name']}"],
            }
            for parameter in arguments.get("parameters") or []
        ]
        return {**arguments, "parameters": values}

    def _globals(self) -> dict[str, str]:
        metadata = self.workflow["metadata"]
        spec = self.spec
        created = datetime.fromisoformat(metadata["creationTimestamp"])
        parameters = (spec.get("arguments") or {}).get("parameters") or []

        values = {
            "name": metadata["name"],
            "namespace": metadata.get("namespace", "default"),
            "uid": metadata.get("uid", ""),
            "mainEntrypoint": spec.get("entrypoint", ""),
            "serviceAccountName": spec.get("serviceAccountName", ""),
            "creationTimestamp": metadata["creationTimestamp"],
            "creationTimestamp.s": str(int(created.timestamp())),
            "creationTimestamp.RFC3339": metadata["creationTimestamp"],
            # the workflow's phase is empty before the scheduler's first pass
            "status": self.status["phase"],
            "duration": "0.000000",
        }

        values.update(
            {
                f"creationTimestamp.{letter}": created.strftime(
                    f"%{letter}" if letter != "L" else "000"
                )
                for letter in STRFTIME_LETTERS
            }
        )

        scheduled_time = (metadata.get("annotations") or {}).get(SCHEDULED_TIME)
        if scheduled_time:
            values["scheduledTime"] = scheduled_time

        if spec.get("priority") is not None:
            values["priority"] = str(spec["priority"])

        values.update(
            {
                f"parameters.{parameter['name']}": parameter["value"]
                for parameter in parameters
                if "value" in parameter
            }
        )

        parameters_json = gofmt.dump_structs(parameters, PARAMETER_FIELDS)
        values["parameters"] = parameters_json
        values["parameters.json"] = parameters_json

        for key in ("labels", "annotations"):
            items = metadata.get(key) or {}
            values[key] = gofmt.dumps(items)
            values[f"{key}.json"] = values[key]
            values.update({f"{key}.{name}": text for name, text in items.items()})

        outputs = (self.status.get("outputs") or {}).get("parameters") or []
        values.update(
            {f"outputs.parameters.{parameter['name']}": parameter["value"] for parameter in outputs}
        )
        return {f"workflow.{key}": value for key, value in values.items()}

    def export(self, outputs: dict[str, Any]) -> None:
        """Add outputs with a globalName to the workflow's outputs and globals."""
        for kind in ("parameters", "artifacts"):
            for output in outputs.get(kind) or []:
                name = output.get("globalName")
                if not name or (kind == "parameters" and "value" not in output):
                    continue

                global_outputs = self.status.setdefault("outputs", {}).setdefault(kind, [])
                entry = {
                    key: value
                    for key, value in output.items()
                    if key not in ("globalName", "valueFrom", "path")
                }
                entry["name"] = name

                other_outputs = [item for item in global_outputs if item["name"] != name]
                global_outputs[:] = [*other_outputs, entry]

                if kind == "parameters":
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
        self, template: Template, args: dict[str, Any], local_values: dict[str, str]
    ) -> Template:
        """Return the template with its inputs bound and its tags substituted (Argo's ProcessArgs).
        Raises NodeError."""
        arguments = {parameter["name"]: parameter for parameter in args.get("parameters") or []}
        artifact_arguments = {
            artifact["name"]: artifact for artifact in args.get("artifacts") or []
        }
        inputs = template.get("inputs") or {}
        parameters = [
            self._bind_parameter(parameter, arguments.get(parameter["name"]))
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
        value = parameter.get("value", parameter.get("default"))
        if argument is not None:
            if argument.get("value") == ABSENT_VALUE:
                if value is None:
                    raise NodeError(
                        f"inputs.parameters.{parameter['name']}: argument references an absent"
                        " optional (skipped/omitted node output with no default)"
                    )
            else:
                value = argument.get("value")

        if value is None:
            raise NodeError(f"inputs.parameters.{parameter['name']} was not supplied")

        bound_parameter = {key: item for key, item in parameter.items() if key != "valueFrom"}
        return {**bound_parameter, "value": value}

    def substitute_params(self, template: Template, local_values: dict[str, str]) -> Template:
        """Substitute the global and local values first, then the inputs, because values of inputs
        may contain tags. Raises NodeError."""
        scope: dict[str, str | None] = {**self.globals, **local_values}
        inputs = template["inputs"]
        outputs = template.get("outputs") or {}
        text = replace(to_json(template), scope)

        if "{{" in repr((inputs, outputs)):
            new_template = parse_result(text)
            inputs = new_template["inputs"]
            outputs = new_template.get("outputs") or {}

        scope.update(
            {
                f"inputs.parameters.{parameter['name']}": parameter["value"]
                for parameter in inputs["parameters"]
            }
        )
        if ALL_PARAMETERS.search(text):
            scope["inputs.parameters"] = gofmt.dump_structs(inputs["parameters"], PARAMETER_FIELDS)

        for kind, artifacts in (
            ("inputs", inputs["artifacts"]),
            ("outputs", outputs.get("artifacts") or []),
        ):
            scope.update(
                {
                    f"{kind}.artifacts.{artifact['name']}.path": POD_PATH_MARK + artifact["path"]
                    for artifact in artifacts
                    if artifact.get("path")
                }
            )

        for parameter in outputs.get("parameters") or []:
            path = (parameter.get("valueFrom") or {}).get("path")
            if path:
                scope[f"outputs.parameters.{parameter['name']}.path"] = POD_PATH_MARK + path

        text = replace(text, scope)
        if "{{" in text:
            return parse_result(text)

        return SubstitutedTemplate(parse_result(text))


def add_labels(workflow: dict[str, Any]) -> dict[str, Any]:
    """Return the workflow with the labels of `workflowMetadata.labelsFrom`. Raises ConfigError.

    Source: Argo's updateWorkflowMetadata.
    """
    metadata = workflow["metadata"]

    workflow_metadata = workflow["spec"].get("workflowMetadata") or {}
    if not workflow_metadata.get("labelsFrom"):
        return workflow

    scope = nest_scope(Inputs(workflow, {"phase": "", "nodes": {}}).globals)
    labels = dict(metadata["labels"])

    for name, source in workflow_metadata["labelsFrom"].items():
        where = f"spec.workflowMetadata.labelsFrom.{name}.expression"
        try:
            value = evaluate(source["expression"], scope)
        except ExprError as error:
            raise ConfigError(f"{where} cannot be evaluated: {error}.") from None

        if not isinstance(value, str) or not LABEL_VALUE.fullmatch(value):
            rule = (
                "it must be a string of at most 63 letters, digits, -, _ and ., with a letter or"
                " digit at both ends"
            )
            raise ConfigError(f"{where} evaluates to {value!r}: {rule}.")

        labels[name] = value

    return {**workflow, "metadata": {**metadata, "labels": labels}}


def _bind_artifact(artifact: dict[str, Any], argument: dict[str, Any] | None) -> dict[str, Any]:
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
        key: artifact[key] for key in ("name", "path", "mode", "recurseMode") if key in artifact
    }


def has_location(artifact: dict[str, Any]) -> bool:
    """Return True if an artifact specifies a storage location."""
    return any(artifact.get(kind) for kind in ("s3", "raw", "http"))
