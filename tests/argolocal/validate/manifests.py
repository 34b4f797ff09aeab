"""Changes of the manifest VALID_WORKFLOW that the tests of lint share."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.validate import check, lint
from tests.argolocal.validate.objects import VALID_WORKFLOW, find_container, find_template


def find_task(manifest: Any, name: str) -> Any:
    return next(t for t in find_template(manifest, "main")["dag"]["tasks"] if t["name"] == name)


def find_step(manifest: Any, name: str) -> Any:
    return next(
        s
        for parallel_steps in find_template(manifest, "stages")["steps"]
        for s in parallel_steps
        if s["name"] == name
    )


def run_in_exit_hook(manifest: Any, text: str, **spec: Any) -> None:
    """Return VALID_WORKFLOW with an exit hook that runs a container with the argument `text`."""
    body = {"container": {**find_template(manifest, "finish")["container"], "args": [text]}}
    del manifest["spec"]["onExit"]
    manifest["spec"].update({"hooks": {"exit": {"template": "late"}}, **spec})
    manifest["spec"]["templates"].append({"name": "late", **body})


def make_arguments(**values: str) -> Any:
    return {"parameters": [{"name": name, "value": value} for name, value in values.items()]}


def make_cron_workflow(name: str) -> Any:
    spec = {
        "schedules": ["0 3 * * *"],
        "workflowSpec": copy.deepcopy(VALID_WORKFLOW["spec"]),
        "workflowMetadata": {"annotations": {"team": "fraud"}},
    }
    return {"kind": "CronWorkflow", "metadata": {"name": name}, "spec": spec}


def set_output(manifest: Any, **output: Any) -> None:
    find_template(manifest, "score")["outputs"]["parameters"][0] = {"name": "auc", **output}


def pass_artifact(manifest: Any, **source: Any) -> None:
    find_task(manifest, "score")["arguments"]["artifacts"] = [{"name": "data", **source}]


def set_metric(manifest: Any, **fields: Any) -> None:
    find_template(manifest, "score")["metrics"] = {"prometheus": [fields]}


def make_output_template(manifest: Any) -> Any:
    """Return a template with the global output `late`."""
    outputs = {"parameters": [{"name": "p", "globalName": "late", "valueFrom": {"path": "/tmp/p"}}]}
    return {
        "outputs": outputs,
        "container": find_template(manifest, "score")["container"] | {"args": []},
    }


def pass_global_output(manifest: Any, by: str, to: str) -> None:
    """Let the step `to` read a global output of the step `by`."""
    manifest["spec"]["templates"].append({"name": "gives", **make_output_template(manifest)})
    find_step(manifest, by)["template"] = "gives"
    find_step(manifest, to)["arguments"] = make_arguments(
        note="{{workflow.outputs.parameters.late}}"
    )


def set_parameter(manifest: Any, value: str) -> None:
    """Set a parameter of the workflow that a container reads."""
    manifest["spec"]["arguments"]["parameters"][1]["value"] = value
    find_container(manifest).update(args=["{{workflow.parameters.unused}}"])


def list_finish_callers(manifest: Any) -> list[Any]:
    """Return the tasks and hooks of the DAG that call `finish`."""
    tasks = find_template(manifest, "main")["dag"]["tasks"]
    return [
        *(each for each in tasks if each.get("template") == "finish"),
        find_task(manifest, "score")["hooks"]["exit"],
    ]


def assert_mistake_is_found(change: Callable[[Any], Any], rule: str, message: str) -> None:
    """Check that a change of VALID_WORKFLOW prevents the run. `message`: pattern of the finding."""
    manifest = copy.deepcopy(VALID_WORKFLOW)
    change(manifest)
    findings = lint(manifest)
    assert [f for f in findings if f.rule == rule and f.fatal and re.search(message, str(f))], (
        findings
    )
    with pytest.raises(ConfigError, match="cannot run"):
        check(manifest)
