"""Build the tree of a manifest's tasks, and determine whether each task will run, as far as this is
known before the run.

The path of a task is the name of its node in Argo, without the name of the run:
`decide.ship.release`, `[0].check`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine.order import parse_dependencies
from argolocal.errors import ArgolocalError
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.substitute import TemplateError, substitute
from argolocal.manifest.loops import expand_loop, has_loop
from rekindle.cache.key import UnknownKey
from rekindle.cache.lookup import JSON_PATH_NAME, StepCall, parse_cached, parse_step_call
from rekindle.keys import CACHED_PARAMETER, REUSED_MODELS, cached_name

RUNS_STATUS = "runs"
CACHED_STATUS = "cached"
CONDITIONAL_STATUS = "conditional"
SKIPPED_STATUS = "skipped"
TASK_OUTPUT_PATTERN = re.compile(
    r"tasks(?:\.|\[')([\w-]+)(?:'\])?\.outputs\.(?:parameters\.|artifacts\.)?([\w-]+)"
)
STEP_OUTPUT_PATTERN = re.compile(
    r"steps(?:\.|\[')([\w-]+)(?:'\])?\.outputs\.(?:parameters\.|artifacts\.)?([\w-]+)"
)
# matches the condition `when` of a task that runs unless the task is cached
CACHE_CONDITION_PATTERN = re.compile(
    r"'\{\{=sprig\.regexFind\('[^']*', "
    rf"jsonpath\((?:workflow\.parameters\.{CACHED_PARAMETER}|[^{{}}]*\b{REUSED_MODELS}\b[^{{}}]*), "
    r"'\$\.(\w+)\.at'\)\)\}\}' == ''"
)
LOOP_FIELDS = ("withItems", "withParam", "withSequence")
# matches the part of an expression in `depends` that is true only if a task fails
FAILURE_PATTERN = re.compile(r"\.(Failed|Errored|AnyFailed|AllFailed)\b")
# path of the exit handler's task
EXIT_PATH = "onExit"
Scope = dict[str, Any]


@dataclass
class Task:
    """A task of a DAG, a step, or the entrypoint. A task with `children` creates no pod itself."""

    path: str
    name: str
    # the task as written in its DAG or steps template
    call: Mapping[str, Any]
    template: Mapping[str, Any]
    # values of tags that are known before the run
    scope: Scope
    status: str = RUNS_STATUS
    reason: str = ""
    # number of loop items; None if this number is known only at run time
    items: int | None = 1
    # the tasks in the template of this task, by name
    children: dict[str, "Task"] = field(default_factory=dict)
    # for each child, the children that end before it starts
    needs: dict[str, list[str]] = field(default_factory=dict)
    # path of the outer task that already calls the same template, so that the children of this
    # recursive call are not planned; "" for other tasks
    repeats: str = ""

    def leaves(self) -> Iterator["Task"]:
        """Yield the tasks that create pods, in the order of the manifest."""
        if not self.children:
            yield self
        for child_task in self.children.values():
            yield from child_task.leaves()


class TaskTree:
    """The entrypoint of a workflow with resolved references, and its exit handler."""

    def __init__(self, workflow: Mapping[str, Any], given_cached_json: str = "") -> None:
        """`given_cached_json`: value of the workflow parameter `cached`; "" for its value in the
        workflow. Raises InvalidDocument if `given_cached_json` is malformed."""
        workflow_spec = workflow["spec"]
        self.templates = {
            workflow_template["name"]: workflow_template
            for workflow_template in workflow_spec["templates"]
        }
        self.templates |= workflow.get("storedTemplates") or {}
        workflow_parameters = (workflow_spec.get("arguments") or {}).get("parameters") or []
        self.scope: Scope = {
            f"workflow.parameters.{parameter['name']}": parameter["value"]
            for parameter in workflow_parameters
            if "value" in parameter
        }
        cached_json = (
            given_cached_json or self.scope.get(f"workflow.parameters.{CACHED_PARAMETER}") or "{}"
        )
        self.cached = parse_cached(str(cached_json))
        self.root = self._build_task(
            "", "", {"template": workflow_spec.get("entrypoint")}, self.scope, {}
        )
        self.root.status = RUNS_STATUS
        self.root.reason = ""
        self._classify(self.root)

        self.exit: Task | None = None
        if workflow_spec.get("onExit"):
            exit_scope = self.scope | {"workflow.status": "Succeeded", "workflow.failures": "[]"}
            self.exit = self._build_task(
                EXIT_PATH, EXIT_PATH, {"template": workflow_spec["onExit"]}, exit_scope, {}
            )
            self._classify(self.exit)

    def leaves(self) -> list[Task]:
        return [*self.root.leaves(), *(self.exit.leaves() if self.exit else ())]

    def _build_task(
        self,
        task_path: str,
        task_name: str,
        task_call: Mapping[str, Any],
        scope: Scope,
        outer_paths: Mapping[str, str],
    ) -> Task:
        """Build a task with its children. `outer_paths`: path of each enclosing task, by the name
        of its template."""
        template = (
            task_call.get("inline") or self.templates.get(str(task_call.get("template"))) or {}
        )
        task = Task(
            task_path,
            task_name,
            task_call,
            template,
            scope,
            repeats=outer_paths.get(task_call.get("template", ""), ""),
        )

        if "dag" in template:
            task_groups = [[dag_task] for dag_task in template["dag"]["tasks"]]
        else:
            task_groups = template.get("steps") or []

        if not task_groups or task.repeats:
            return task

        if "template" in task_call:
            outer_paths = {**outer_paths, task_call["template"]: task_path or "main"}

        inner_scope = self._make_inner_scope(task_call, template, scope)
        calls_by_name = {
            child_call["name"]: child_call
            for task_group in task_groups
            for child_call in task_group
        }
        earlier_names: list[str] = []

        for group_number, task_group in enumerate(task_groups):
            for child_call in task_group:
                child_name = child_call["name"]
                if "steps" in template:
                    group_path = f"{task_path}[{group_number}]"
                    task.needs[child_name] = list(earlier_names)
                else:
                    group_path = task_path
                    task.needs[child_name] = parse_dependencies(dict(child_call), calls_by_name)[0]

                child_path = f"{group_path}.{child_name}" if group_path else child_name
                task.children[child_name] = self._build_task(
                    child_path, child_name, child_call, inner_scope, outer_paths
                )

            earlier_names = [child_call["name"] for child_call in task_group]

        return task

    def _make_inner_scope(
        self, task_call: Mapping[str, Any], template: Mapping[str, Any], scope: Scope
    ) -> Scope:
        """Return the scope (values of template tags) of the tasks in a template, with the inputs of
        the template."""
        input_parameters = (template.get("inputs") or {}).get("parameters") or []
        if not input_parameters:
            return scope

        input_values = {
            parameter["name"]: parameter.get("value", parameter.get("default"))
            for parameter in input_parameters
        }
        argument_values = {
            parameter["name"]: parameter.get("value")
            for parameter in (task_call.get("arguments") or {}).get("parameters") or []
        }
        input_values.update(self._substitute_known_tags(argument_values, scope))

        return scope | {
            f"inputs.parameters.{name}": value
            for name, value in input_values.items()
            if value is not None
        }

    def _substitute_known_tags(self, manifest_value: object, scope: Scope) -> Any:
        """Replace the template tags whose values are known before the run."""
        try:
            return substitute(manifest_value, scope | self._make_cached_scope(manifest_value))
        except (TemplateError, ArgolocalError, ValueError):
            return manifest_value

    def _make_cached_scope(self, manifest_value: object) -> Scope:
        """Return the parameter `cached` with only the rows that `manifest_value` refers to,
        because the expression in each tag parses the whole text of the parameter."""
        cached_names = set(JSON_PATH_NAME.findall(to_json(manifest_value)))
        cached_rows = {name: self.cached[name] for name in cached_names if name in self.cached}
        return {f"workflow.parameters.{CACHED_PARAMETER}": to_json(cached_rows)}

    def parse_step_call(self, task: Task) -> StepCall | None:
        """Return the step of Rekindle that a task runs, or None."""
        try:
            return parse_step_call(
                task.call,
                task.template,
                task.scope | self._make_cached_scope([task.call, task.template]),
            )
        except (UnknownKey, TemplateError, ArgolocalError):
            return None

    def _classify(self, task: Task) -> None:
        """Decide for each child whether it will run; the children of a task that cannot run are
        skipped, too."""
        for name, child_task in task.children.items():
            child_task.status, child_task.reason = self._decide_status(task, name, child_task)
            if child_task.status == RUNS_STATUS and task.status == CONDITIONAL_STATUS:
                child_task.status = CONDITIONAL_STATUS
                child_task.reason = task.reason

            if child_task.repeats and child_task.status in (RUNS_STATUS, CONDITIONAL_STATUS):
                child_task.reason = "; ".join(
                    filter(None, [child_task.reason, f"repeats {child_task.repeats}"])
                )

            self._set_item_count(child_task)
            if child_task.status in (SKIPPED_STATUS, CACHED_STATUS):
                child_task.children = {}

            self._classify(child_task)

    def _decide_status(
        self, parent_task: Task, child_name: str, child_task: Task
    ) -> tuple[str, str]:
        depends_expression = str(child_task.call.get("depends") or "")
        if FAILURE_PATTERN.search(depends_expression) and not re.search(
            r"[\w-]+\.(Succeeded|Skipped)|&&|(^|\s)[\w-]+(\s|$)", depends_expression
        ):
            return SKIPPED_STATUS, f"only if {' or '.join(parent_task.needs[child_name])} fails"

        for dependency_name in parent_task.needs[child_name]:
            if (
                parent_task.children[dependency_name].reason.startswith("only if ")
                and "||" not in depends_expression
            ):
                return SKIPPED_STATUS, parent_task.children[dependency_name].reason

        when_expression = str(child_task.call.get("when") or "")
        if not when_expression:
            return RUNS_STATUS, ""

        cache_match = CACHE_CONDITION_PATTERN.fullmatch(when_expression)
        # evaluate this condition without the expression parser, which would take longer than the
        # rest of the plan
        if cache_match:
            reused_location = self._find_reused_location(cache_match[1])
            if reused_location:
                return CACHED_STATUS, f"result of {reused_location}"
            return RUNS_STATUS, ""

        known_when = self._substitute_known_tags(when_expression, child_task.scope)
        missing_outputs = find_unknown_outputs(known_when)
        if missing_outputs:
            return (
                CONDITIONAL_STATUS,
                f"depends on {describe_outputs(missing_outputs, parent_task)}",
            )
        if "{{" in known_when:
            return CONDITIONAL_STATUS, f"depends on {known_when}"

        try:
            should_run = "{{item" in known_when or should_execute(known_when)
        except (WhenError, ArgolocalError, ValueError):
            return CONDITIONAL_STATUS, f"depends on {known_when}"

        if should_run:
            return RUNS_STATUS, ""

        reused_locations = [
            self._find_reused_location(key) for key in JSON_PATH_NAME.findall(when_expression)
        ]
        if any(reused_locations):
            return CACHED_STATUS, f"result of {next(filter(None, reused_locations))}"

        if "workflow.status" in when_expression:
            return SKIPPED_STATUS, "only if the run fails"
        return SKIPPED_STATUS, f"its condition is false: {known_when}"

    def _set_item_count(self, task: Task) -> None:
        if not has_loop(task.call):
            return

        try:
            loop_call = {
                key: self._substitute_known_tags(task.call[key], task.scope)
                for key in LOOP_FIELDS
                if key in task.call
            }
            task.items = len(expand_loop({"name": task.name, **loop_call}, {}))
        except (TemplateError, ArgolocalError, ValueError):
            task.items = None

    def _find_reused_location(self, cached_row_name: str) -> str:
        """Return the RUN/TASK whose outputs a task reuses, or ""."""
        cached_row = self.cached.get(cached_row_name)
        if isinstance(cached_row, dict):
            return cached_row["at"]
        return ""

    def find_cached_row(self, task: Task) -> Mapping[str, Any] | None:
        """Return the row of a reusable task in the parameter `cached`, or None."""
        cached_row = self.cached.get(cached_name(task.name))
        if isinstance(cached_row, dict) and cached_row.get("task") == task.name:
            return cached_row
        return None


def find_unknown_outputs(value_text: str) -> list[tuple[str, str]]:
    """Return the outputs (task, output) that the tags in `value_text` refer to."""
    if "{{" in value_text:
        return list(
            dict.fromkeys(
                [*TASK_OUTPUT_PATTERN.findall(value_text), *STEP_OUTPUT_PATTERN.findall(value_text)]
            )
        )
    return []


def describe_outputs(task_outputs: list[tuple[str, str]], parent_task: Task) -> str:
    """Describe outputs of tasks; a task that is not a child of `parent_task` is named without its
    path."""
    task_paths = {
        task_name: parent_task.children[task_name].path
        if task_name in parent_task.children
        else task_name
        for task_name, _ in task_outputs
    }
    return ", ".join(
        f"{output_name} of {task_paths[task_name]}" for task_name, output_name in task_outputs
    )
