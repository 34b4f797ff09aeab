"""Distinguish the steps that a pipeline contains from the internal steps that blocks add.

Internal steps read, apply and delete objects of Kubernetes. A step that has failed or is still
running never counts as internal.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from argolocal.view.summary import Status, Step
from rekindle.blocks.manifest.workflow_origin import is_rekindle

DONE = ("Succeeded", "Skipped", "Omitted", "Cached")
NOT_RUN = ("Skipped", "Omitted")
SWITCH_INPUTS = {"server", "running"}  # marks the DAG that blocks.verify adds
DEPLOY_TASKS = {"deployment", "address"}  # marks the DAG of blocks.deploy
DELETE_TASKS = re.compile(r"(expire|take-back|withdraw|cleanup)(-.+)?")
REPETITIONS = re.compile(r"(next|.+-again)")  # conditional tasks of the DAG `promote`
OUTPUT = re.compile(
    r"tasks(?:\.([\w-]+)|\['([^']+)'\])\.outputs\.parameters(?:\.([\w-]+)|\['([^']+)'\])"
)


class InternalSteps:
    """Recognizes the internal steps of one run. `manifest`: the workflow of the run."""

    def __init__(self, manifest: Mapping[str, Any], status: Status) -> None:
        self.is_rekindle = is_rekindle(manifest)
        self.templates = {
            template["name"]: template for template in manifest["spec"].get("templates") or []
        }
        self.nodes = {node["id"]: node for node in list((status.get("nodes") or {}).values())}

    def is_internal(self, row: Step) -> bool:
        """Return True if a block added this step, and the step neither runs nor has failed."""
        if not (self.is_rekindle and row.node and row.phase in DONE):
            return False

        # cut "(...)", so that a loop item counts as the loop's task
        task = row.name.rpartition(".")[2].partition("(")[0]
        is_run = row.phase not in NOT_RUN
        return self.is_added(task, self._template(row.node), self._parent(row), is_run)

    def is_added(
        self, task: str, template: Mapping[str, Any], parent: Mapping[str, Any], is_run: bool
    ) -> bool:
        """Return True if a block added the task `task` of the DAG `parent`. `is_run`: True if the
        task has run."""
        if not self.is_rekindle:
            return False

        tasks = _task_names(parent)
        if _inputs(parent) >= SWITCH_INPUTS or tasks == DEPLOY_TASKS:
            return True

        is_secret = task.endswith("-secret") and "resource" in template
        if is_secret and task.removesuffix("-secret") in tasks:
            return True

        action = (template.get("resource") or {}).get("action")
        if action == "delete" and DELETE_TASKS.fullmatch(task):
            return True

        return bool("next" in tasks and REPETITIONS.fullmatch(task) and not is_run)

    def make_readable(self, row: Step) -> Step:
        """Return the row of a skipped step, with its condition written as in the pipeline's
        source."""
        if row.phase != "Skipped" or not row.node or not row.message.startswith("when "):
            return row

        task = row.name.rpartition(".")[2].partition("(")[0]
        condition = _conditions(self._parent(row)).get(task)
        if condition:
            return replace(row, message=f"not true: {_simplify_condition(condition)}")
        return row

    def _parent(self, row: Step) -> Mapping[str, Any]:
        """Return the template of the DAG that contains a step."""
        return self._template(self.nodes.get((row.node or {}).get("boundaryID", "")) or {})

    def _template(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.templates.get(node.get("templateName", "")) or {}


def _tasks(template: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return (template.get("dag") or {}).get("tasks") or []


def _task_names(template: Mapping[str, Any]) -> set[str]:
    return {task["name"] for task in _tasks(template)}


def _conditions(template: Mapping[str, Any]) -> dict[str, str]:
    return {task["name"]: task["when"] for task in _tasks(template) if task.get("when")}


def _inputs(template: Mapping[str, Any]) -> set[str]:
    return {
        parameter["name"] for parameter in (template.get("inputs") or {}).get("parameters") or []
    }


def _simplify_condition(condition: str) -> str:
    """Write `{{=tasks.evaluate.outputs.parameters.verdict == 'release'}}` as `evaluate.verdict ==
    'release'`."""
    text = OUTPUT.sub(lambda match: f"{match[1] or match[2]}.{match[3] or match[4]}", condition)
    return text.replace("{{=", "").replace("{{", "").replace("}}", "")
