"""The values of suspended steps, which `rekindle resume -p NAME=VALUE` gave to the run of the
release."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from argolocal.manifest.resolve import all_templates
from argolocal.state.journal import RunFiles
from rekindle import tracking
from rekindle.blocks.pod_settings import Manifest
from rekindle.errors import ConfigError, TrackingError, did_you_mean
from rekindle.operations.plan.tasks import RUNS, SKIPPED, Tree
from rekindle.operations.reproduce.known_differences import Finding
from rekindle.release.origin import Origin

Values = Mapping[str, str]


def recorded_values(home: Path, origin: Origin) -> dict[str, str]:
    """Return the values in the run of the release, if the run is in `home`; a name with several
    values is left out."""
    run = ""
    # the MLflow run may have been deleted
    with suppress(TrackingError):
        if origin.run_id:
            run = tracking.read_tags(origin.run_id).get(tracking.WORKFLOW, "")

    if not run:
        return {}

    values: dict[str, set[str]] = defaultdict(set)
    for node in RunFiles(home, run).load()[0]["nodes"].values():
        for parameter in (node.get("outputs") or {}).get("parameters") or []:
            if node["type"] == "Suspend" and "value" in parameter:
                values[parameter["name"]].add(parameter["value"])

    return {name: choices.pop() for name, choices in values.items() if len(choices) == 1}


def suspended_findings(
    manifest: Manifest, parameters: Values, values_given: Values, values_recorded: Values
) -> Iterator[Finding]:
    """Yield a finding for each value of a suspended step that neither the user has given nor the
    run of the release has recorded.

    `parameters`: workflow parameters of the run. Raises ConfigError if a given value is not an
    output of a suspended step.
    """
    declared = manifest["spec"]["arguments"]["parameters"]
    values = [
        item | ({"value": parameters[item["name"]]} if item["name"] in parameters else {})
        for item in declared
    ]

    tree = Tree(manifest | {"spec": manifest["spec"] | {"arguments": {"parameters": values}}})
    tasks = [
        task for task in tree.leaves() if "suspend" in task.template and task.status != SKIPPED
    ]
    outputs = {
        name: (task, default)
        for task in tasks
        for name, default in _output_defaults(task.template).items()
    }

    for name in values_given.keys() - outputs.keys():
        raise ConfigError(
            f"-p {name}: a suspended step does not have this"
            f" output.{did_you_mean(name, set(outputs))}"
        )

    for name, (task, default) in outputs.items():
        if name in values_given or name in values_recorded:
            continue

        text = (
            f'the value "{name}" of the suspended step {task.path} is not recorded on this machine'
        )
        if default is not None:
            text += f", so its default {default!r} is used"
        text += f": give the value of the release's run with -p {name}=VALUE"
        yield Finding("value", text, default is None and task.status == RUNS)


def resume_at_once(manifest: Manifest, values: Values) -> None:
    """Let the suspended steps of a manifest end at once, with these values as outputs."""
    for template, _ in all_templates(manifest["spec"], "spec"):
        if "suspend" not in template:
            continue

        # do not wait for an approval, because the run releases nothing
        template["suspend"] = {"duration": "0"}
        for parameter in (template.get("outputs") or {}).get("parameters") or []:
            if parameter["name"] in values:
                parameter["valueFrom"] = {"supplied": {}, "default": values[parameter["name"]]}


def _output_defaults(template: Mapping[str, Any]) -> dict[str, str | None]:
    """Map the outputs of a suspend template to their defaults."""
    inputs = {
        item["name"]: item.get("default")
        for item in (template.get("inputs") or {}).get("parameters") or []
    }
    outputs = (template.get("outputs") or {}).get("parameters") or []
    return {
        item["name"]: item["valueFrom"].get("default", inputs.get(item["name"])) for item in outputs
    }
