"""Build the tree of a manifest's tasks, and determine whether each task will run, as far as this is
known before the run.

A path is the name of a node without the name of its run, as Argo writes it: `decide.ship.release`,
`[0].check`.
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
from argolocal.manifest.loops import expand, has_loop
from rekindle.cache.key import UnknownKey
from rekindle.cache.lookup import JSON_PATH_NAME, StepCall, parse_cached, step_call_of
from rekindle.keys import CACHED, REUSED_MODELS, cached_name

RUNS = "runs"
CACHED_RESULT = "cached"
CONDITIONAL = "conditional"
SKIPPED = "skipped"
OUTPUT = re.compile(
    r"tasks(?:\.|\[')([\w-]+)(?:'\])?\.outputs\.(?:parameters\.|artifacts\.)?([\w-]+)"
)
STEP_OUTPUT = re.compile(
    r"steps(?:\.|\[')([\w-]+)(?:'\])?\.outputs\.(?:parameters\.|artifacts\.)?([\w-]+)"
)
CACHE_CONDITION = re.compile(
    r"'\{\{=sprig\.regexFind\('[^']*', "
    rf"jsonpath\((?:workflow\.parameters\.{CACHED}|[^{{}}]*\b{REUSED_MODELS}\b[^{{}}]*), "
    r"'\$\.(\w+)\.at'\)\)\}\}' == ''"
)
LOOP_FIELDS = ("withItems", "withParam", "withSequence")
FAILURE = re.compile(r"\.(Failed|Errored|AnyFailed|AllFailed)\b")
EXIT_PATH = "onExit"  # path of the exit handler
Scope = dict[str, Any]


@dataclass
class Task:
    """A task of a DAG, a step, or the entrypoint. A task with `children` creates no pod itself."""

    path: str
    name: str
    call: Mapping[str, Any]  # the task as written in its DAG or steps template
    template: Mapping[str, Any]
    scope: Scope  # values of tags that are known before the run
    status: str = RUNS
    reason: str = ""
    items: int | None = 1  # number of loop items; None if this number is known only at run time
    children: dict[str, "Task"] = field(default_factory=dict)  # the tasks in the template, by name
    # for each child, the children that end before it starts
    needs: dict[str, list[str]] = field(default_factory=dict)
    # path of the outer task that already calls the same template, so that the children of this
    # recursive call are not planned; "" for other tasks
    repeats: str = ""

    def leaves(self) -> Iterator["Task"]:
        """Yield the tasks that create pods, in the order of the manifest."""
        if not self.children:
            yield self
        for child in self.children.values():
            yield from child.leaves()


class Tree:
    """The entrypoint of a workflow with resolved references, and its exit handler."""

    def __init__(self, workflow: Mapping[str, Any], cached: str = "") -> None:
        """Raises InvalidDocument if the parameter `cached` is malformed.

        `cached`: value of the workflow parameter `cached` (default: as in the workflow).
        """
        spec = workflow["spec"]
        self.templates = {template["name"]: template for template in spec["templates"]}
        self.templates |= workflow.get("storedTemplates") or {}
        parameters = (spec.get("arguments") or {}).get("parameters") or []
        self.scope: Scope = {
            f"workflow.parameters.{p['name']}": p["value"] for p in parameters if "value" in p
        }
        text = cached or self.scope.get(f"workflow.parameters.{CACHED}") or "{}"
        self.cached = parse_cached(str(text))
        self.root = self._task("", "", {"template": spec.get("entrypoint")}, self.scope, {})
        self.root.status = RUNS
        self.root.reason = ""
        self._classify(self.root)

        self.exit: Task | None = None
        if spec.get("onExit"):
            scope = self.scope | {"workflow.status": "Succeeded", "workflow.failures": "[]"}
            self.exit = self._task(EXIT_PATH, EXIT_PATH, {"template": spec["onExit"]}, scope, {})
            self._classify(self.exit)

    def leaves(self) -> list[Task]:
        return [*self.root.leaves(), *(self.exit.leaves() if self.exit else ())]

    def _task(
        self, path: str, name: str, call: Mapping[str, Any], scope: Scope, outer: Mapping[str, str]
    ) -> Task:
        """Return a task with its children. `outer`: path of each outer task, by its template."""
        template = call.get("inline") or self.templates.get(str(call.get("template"))) or {}
        task = Task(
            path, name, call, template, scope, repeats=outer.get(call.get("template", ""), "")
        )

        if "dag" in template:
            groups = [[t] for t in template["dag"]["tasks"]]
        else:
            groups = template.get("steps") or []

        if not groups or task.repeats:
            return task

        if "template" in call:
            outer = {**outer, call["template"]: path or "main"}

        inner_scope = self._inner_scope(call, template, scope)
        by_name = {child["name"]: child for group in groups for child in group}
        earlier: list[str] = []

        for number, group in enumerate(groups):
            for child in group:
                name = child["name"]
                if "steps" in template:
                    prefix = f"{path}[{number}]"
                    task.needs[name] = list(earlier)
                else:
                    prefix = path
                    task.needs[name] = parse_dependencies(dict(child), by_name)[0]

                child_path = f"{prefix}.{name}" if prefix else name
                task.children[name] = self._task(child_path, name, child, inner_scope, outer)

            earlier = [child["name"] for child in group]

        return task

    def _inner_scope(
        self, call: Mapping[str, Any], template: Mapping[str, Any], scope: Scope
    ) -> Scope:
        """Return the scope of the tasks in a template, with its inputs."""
        inputs = (template.get("inputs") or {}).get("parameters") or []
        if not inputs:
            return scope

        values = {p["name"]: p.get("value", p.get("default")) for p in inputs}
        arguments = {
            p["name"]: p.get("value") for p in (call.get("arguments") or {}).get("parameters") or []
        }
        values.update(self._substitute_known(arguments, scope))

        return scope | {
            f"inputs.parameters.{name}": value
            for name, value in values.items()
            if value is not None
        }

    def _substitute_known(self, value: object, scope: Scope) -> Any:
        """Replace the tags whose values are known."""
        try:
            return substitute(value, scope | self._cached_scope(value))
        except (TemplateError, ArgolocalError, ValueError):
            return value

    def _cached_scope(self, value: object) -> Scope:
        """Return the parameter `cached` with only the rows that `value` refers to, because the
        expression in each tag parses the whole text of the parameter."""
        names = set(JSON_PATH_NAME.findall(to_json(value)))
        rows = {name: self.cached[name] for name in names if name in self.cached}
        return {f"workflow.parameters.{CACHED}": to_json(rows)}

    def step_call(self, task: Task) -> StepCall | None:
        """Return the step of Rekindle that a task runs, or None."""
        try:
            return step_call_of(
                task.call,
                task.template,
                task.scope | self._cached_scope([task.call, task.template]),
            )
        except (UnknownKey, TemplateError, ArgolocalError):
            return None

    def _classify(self, task: Task) -> None:
        """Decide for each child whether it will run; the children of a task that cannot run are
        skipped, too."""
        for name, child in task.children.items():
            child.status, child.reason = self._status(task, name, child)
            if child.status == RUNS and task.status == CONDITIONAL:
                child.status = CONDITIONAL
                child.reason = task.reason

            if child.repeats and child.status in (RUNS, CONDITIONAL):
                child.reason = "; ".join(filter(None, [child.reason, f"repeats {child.repeats}"]))

            self._count_items(child)
            if child.status in (SKIPPED, CACHED_RESULT):
                child.children = {}

            self._classify(child)

    def _status(self, parent: Task, name: str, child: Task) -> tuple[str, str]:
        depends = str(child.call.get("depends") or "")
        if FAILURE.search(depends) and not re.search(
            r"[\w-]+\.(Succeeded|Skipped)|&&|(^|\s)[\w-]+(\s|$)", depends
        ):
            return SKIPPED, f"only if {' or '.join(parent.needs[name])} fails"

        for needed in parent.needs[name]:
            if parent.children[needed].reason.startswith("only if ") and "||" not in depends:
                return SKIPPED, parent.children[needed].reason

        when = str(child.call.get("when") or "")
        if not when:
            return RUNS, ""

        match = CACHE_CONDITION.fullmatch(when)
        # evaluate this without the expression parser, which would take longer than the rest of the
        # plan
        if match:
            location = self._reused_location(match[1])
            if location:
                return CACHED_RESULT, f"result of {location}"
            return RUNS, ""

        text = self._substitute_known(when, child.scope)
        outputs = unknown_outputs(text)
        if outputs:
            return CONDITIONAL, f"depends on {describe_outputs(outputs, parent)}"
        if "{{" in text:
            return CONDITIONAL, f"depends on {text}"

        try:
            runs = "{{item" in text or should_execute(text)
        except (WhenError, ArgolocalError, ValueError):
            return CONDITIONAL, f"depends on {text}"

        if runs:
            return RUNS, ""

        locations = [self._reused_location(key) for key in JSON_PATH_NAME.findall(when)]
        if any(locations):
            return CACHED_RESULT, f"result of {next(filter(None, locations))}"

        if "workflow.status" in when:
            return SKIPPED, "only if the run fails"
        return SKIPPED, f"its condition is false: {text}"

    def _count_items(self, task: Task) -> None:
        if not has_loop(task.call):
            return

        try:
            call = {
                key: self._substitute_known(task.call[key], task.scope)
                for key in LOOP_FIELDS
                if key in task.call
            }
            task.items = len(expand({"name": task.name, **call}, {}))
        except (TemplateError, ArgolocalError, ValueError):
            task.items = None

    def _reused_location(self, name: str) -> str:
        """Return the RUN/TASK whose outputs a task reuses, or ""."""
        row = self.cached.get(name)
        if isinstance(row, dict):
            return row["at"]
        return ""

    def cache_row(self, task: Task) -> Mapping[str, Any] | None:
        """Return the row of a reusable task in the parameter `cached`, or None."""
        row = self.cached.get(cached_name(task.name))
        if isinstance(row, dict) and row.get("task") == task.name:
            return row
        return None


def unknown_outputs(text: str) -> list[tuple[str, str]]:
    """Return the outputs (task, output) that the tags in `text` refer to."""
    if "{{" in text:
        return list(dict.fromkeys([*OUTPUT.findall(text), *STEP_OUTPUT.findall(text)]))
    return []


def describe_outputs(outputs: list[tuple[str, str]], parent: Task) -> str:
    """Describe outputs of tasks; a task that is not a child of `parent` is named without its
    path."""
    paths = {
        task: parent.children[task].path if task in parent.children else task for task, _ in outputs
    }
    return ", ".join(f"{output} of {paths[task]}" for task, output in outputs)
