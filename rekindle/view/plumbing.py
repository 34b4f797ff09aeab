"""Distinguish the steps that a pipeline contains from the internal steps that blocks add.

Internal steps read, apply and delete objects of Kubernetes. A step that has failed or is still
running never counts as internal.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from argolocal.view.summary import Status, Step
from rekindle.blocks.manifest.workflow_origin import is_rekindle_manifest

DONE_PHASES = ("Succeeded", "Skipped", "Omitted", "Cached")
NOT_RUN_PHASES = ("Skipped", "Omitted")
# names of inputs by which the DAG that blocks.verify adds is recognized
SWITCH_INPUTS = {"server", "running"}
# names of tasks by which the DAG of blocks.deploy is recognized
DEPLOY_TASKS = {"deployment", "address"}
DELETE_TASK_PATTERN = re.compile(r"(expire|take-back|withdraw|cleanup)(-.+)?")
# conditional tasks of the DAG `promote`
REPETITION_TASK_PATTERN = re.compile(r"(next|.+-again)")
OUTPUT_REFERENCE = re.compile(
    r"tasks(?:\.([\w-]+)|\['([^']+)'\])\.outputs\.parameters(?:\.([\w-]+)|\['([^']+)'\])"
)


class InternalSteps:
    """Recognizes the internal steps of one run. `manifest`: manifest of the run's workflow."""

    def __init__(self, manifest: Mapping[str, Any], run_status: Status) -> None:
        self.is_rekindle = is_rekindle_manifest(manifest)
        self.templates = {
            workflow_template["name"]: workflow_template
            for workflow_template in manifest["spec"].get("templates") or []
        }
        self.nodes = {
            workflow_node["id"]: workflow_node
            for workflow_node in list((run_status.get("nodes") or {}).values())
        }

    def is_internal(self, step_row: Step) -> bool:
        """Return True if a block added this step, and the step neither runs nor has failed."""
        if not (self.is_rekindle and step_row.node and step_row.phase in DONE_PHASES):
            return False

        # remove "(...)" from the name, so that a loop item counts as the loop's task
        task_name = step_row.name.rpartition(".")[2].partition("(")[0]
        has_run = step_row.phase not in NOT_RUN_PHASES
        return self.is_added(
            task_name, self._find_template(step_row.node), self._find_parent(step_row), has_run
        )

    def is_added(
        self,
        task_name: str,
        task_template: Mapping[str, Any],
        parent_template: Mapping[str, Any],
        has_run: bool,
    ) -> bool:
        """Return True if a block added the task `task_name` of the DAG `parent_template`. `has_run`
        is True if the task has run."""
        if not self.is_rekindle:
            return False

        parent_task_names = _list_task_names(parent_template)
        if _list_input_names(parent_template) >= SWITCH_INPUTS or parent_task_names == DEPLOY_TASKS:
            return True

        is_secret = task_name.endswith("-secret") and "resource" in task_template
        if is_secret and task_name.removesuffix("-secret") in parent_task_names:
            return True

        resource_action = (task_template.get("resource") or {}).get("action")
        if resource_action == "delete" and DELETE_TASK_PATTERN.fullmatch(task_name):
            return True

        return bool(
            "next" in parent_task_names
            and REPETITION_TASK_PATTERN.fullmatch(task_name)
            and not has_run
        )

    def make_readable(self, step_row: Step) -> Step:
        """Return the row of a skipped step, with its condition written as in the pipeline's
        source."""
        if (
            step_row.phase != "Skipped"
            or not step_row.node
            or not step_row.message.startswith("when ")
        ):
            return step_row

        task_name = step_row.name.rpartition(".")[2].partition("(")[0]
        step_condition = _list_conditions(self._find_parent(step_row)).get(task_name)
        if step_condition:
            return replace(step_row, message=f"not true: {_simplify_condition(step_condition)}")
        return step_row

    def _find_parent(self, step_row: Step) -> Mapping[str, Any]:
        """Return the template of the DAG that contains a step."""
        return self._find_template(
            self.nodes.get((step_row.node or {}).get("boundaryID", "")) or {}
        )

    def _find_template(self, workflow_node: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.templates.get(workflow_node.get("templateName", "")) or {}


def _list_dag_tasks(dag_template: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return (dag_template.get("dag") or {}).get("tasks") or []


def _list_task_names(dag_template: Mapping[str, Any]) -> set[str]:
    return {dag_task["name"] for dag_task in _list_dag_tasks(dag_template)}


def _list_conditions(dag_template: Mapping[str, Any]) -> dict[str, str]:
    return {
        dag_task["name"]: dag_task["when"]
        for dag_task in _list_dag_tasks(dag_template)
        if dag_task.get("when")
    }


def _list_input_names(template: Mapping[str, Any]) -> set[str]:
    return {
        input_parameter["name"]
        for input_parameter in (template.get("inputs") or {}).get("parameters") or []
    }


def _simplify_condition(argo_condition: str) -> str:
    """Simplify a condition for display, for example `{{=tasks.evaluate.outputs.parameters.verdict
    == 'release'}}` to `evaluate.verdict == 'release'`."""
    condition_text = OUTPUT_REFERENCE.sub(
        lambda output_match: (
            f"{output_match[1] or output_match[2]}.{output_match[3] or output_match[4]}"
        ),
        argo_condition,
    )
    return condition_text.replace("{{=", "").replace("{{", "").replace("}}", "")
