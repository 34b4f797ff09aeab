"""The values of suspended steps, which `rekindle resume -p NAME=VALUE` gave to the run of the
release."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from argolocal.manifest.resolve import list_templates
from argolocal.state.journal import RunFiles
from rekindle import tracking
from rekindle.blocks.pod_settings import Manifest
from rekindle.errors import ConfigError, TrackingError, suggest_similar
from rekindle.operations.plan.tasks import RUNS_STATUS, SKIPPED_STATUS, TaskTree
from rekindle.operations.reproduce.known_differences import Finding
from rekindle.release.origin import Origin

ValuesByName = Mapping[str, str]


def read_recorded_values(home_folder: Path, origin: Origin) -> dict[str, str]:
    """Return the values that the suspended steps of the release's run got, by name; {} if this run
    is not in `home_folder`. A name to which the suspended steps gave several values is left out."""
    run_name = ""
    # the MLflow run may have been deleted
    with suppress(TrackingError):
        if origin.run_id:
            run_name = tracking.read_tags(origin.run_id).get(tracking.WORKFLOW, "")

    if not run_name:
        return {}

    values_by_name: dict[str, set[str]] = defaultdict(set)
    for workflow_node in RunFiles(home_folder, run_name).load()[0]["nodes"].values():
        for output_parameter in (workflow_node.get("outputs") or {}).get("parameters") or []:
            if workflow_node["type"] == "Suspend" and "value" in output_parameter:
                values_by_name[output_parameter["name"]].add(output_parameter["value"])

    return {
        name: recorded_choices.pop()
        for name, recorded_choices in values_by_name.items()
        if len(recorded_choices) == 1
    }


def find_missing_values(
    manifest: Manifest,
    workflow_parameters: ValuesByName,
    given_values: ValuesByName,
    recorded_step_values: ValuesByName,
) -> Iterator[Finding]:
    """Yield a finding for each output of a suspended step whose value was neither given by the user
    nor recorded by the run of the release.

    `workflow_parameters`: workflow parameters of the run. Raises ConfigError if a given value is
    not an output of a suspended step.
    """
    declared_parameters = manifest["spec"]["arguments"]["parameters"]
    parameter_values = [
        parameter
        | (
            {"value": workflow_parameters[parameter["name"]]}
            if parameter["name"] in workflow_parameters
            else {}
        )
        for parameter in declared_parameters
    ]

    task_tree = TaskTree(
        manifest | {"spec": manifest["spec"] | {"arguments": {"parameters": parameter_values}}}
    )
    suspended_tasks = [
        suspended_task
        for suspended_task in task_tree.leaves()
        if "suspend" in suspended_task.template and suspended_task.status != SKIPPED_STATUS
    ]
    outputs_by_name = {
        output_name: (suspended_task, default_value)
        for suspended_task in suspended_tasks
        for output_name, default_value in _read_output_defaults(suspended_task.template).items()
    }

    for output_name in given_values.keys() - outputs_by_name.keys():
        raise ConfigError(
            f"-p {output_name}: a suspended step does not have this"
            f" output.{suggest_similar(output_name, set(outputs_by_name))}"
        )

    for output_name, (suspended_task, default_value) in outputs_by_name.items():
        if output_name in given_values or output_name in recorded_step_values:
            continue

        finding_text = (
            f'the value "{output_name}" of the suspended step {suspended_task.path} is not'
            " recorded on this machine"
        )
        if default_value is not None:
            finding_text += f", so its default {default_value!r} is used"
        finding_text += f": give the value of the release's run with -p {output_name}=VALUE"
        yield Finding(
            "value", finding_text, default_value is None and suspended_task.status == RUNS_STATUS
        )


def resume_at_once(manifest: Manifest, output_values: ValuesByName) -> None:
    """Let the suspended steps of a manifest end at once, with the given values as outputs."""
    for workflow_template, _ in list_templates(manifest["spec"], "spec"):
        if "suspend" not in workflow_template:
            continue

        # do not wait for an approval, because the run releases nothing
        workflow_template["suspend"] = {"duration": "0"}
        for output_parameter in (workflow_template.get("outputs") or {}).get("parameters") or []:
            if output_parameter["name"] in output_values:
                output_parameter["valueFrom"] = {
                    "supplied": {},
                    "default": output_values[output_parameter["name"]],
                }


def _read_output_defaults(template: Mapping[str, Any]) -> dict[str, str | None]:
    """Map the outputs of a suspend template to their defaults."""
    input_defaults = {
        input_parameter["name"]: input_parameter.get("default")
        for input_parameter in (template.get("inputs") or {}).get("parameters") or []
    }
    output_parameters = (template.get("outputs") or {}).get("parameters") or []
    return {
        output_parameter["name"]: output_parameter["valueFrom"].get(
            "default", input_defaults.get(output_parameter["name"])
        )
        for output_parameter in output_parameters
    }
