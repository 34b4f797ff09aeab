"""Warn about tasks that do not affect other tasks: a suspend that no task waits for, and outputs
that no task reads.

No other task waits for a task without an effect. For example, a model is released without an
approval if no task waits for the approval's suspend. A task of a nested template affects the tasks
that run after the caller of this template. To find such tasks, the check walks from the entrypoint
into nested templates.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from argolocal.manifest.tag_scope import find_strings, list_names
from argolocal.manifest.types import Data
from argolocal.validate import graph
from argolocal.validate.findings import Findings

TASK_TAG = re.compile(r"""\b(?:tasks|steps)\s*(?:\.\s*|\[\s*["'])([-\w]+)""")
# rule of the findings of this module
GATE_RULE = "gate"
OUTPUT_FIELDS = ("parameters", "artifacts")
# fields of an artifact that are not its storage location
ARTIFACT_FIELDS = {
    "name",
    "path",
    "from",
    "fromExpression",
    "archive",
    "archiveLogs",
    "artifactGC",
    "deleted",
    "globalName",
    "mode",
    "optional",
    "recurseMode",
    "subPath",
}


@dataclass(frozen=True)
class TemplateUse:
    """A template that is called, or that is the entrypoint. `is_own` is True if the template is in
    the checked manifest.

    `path`: path of the template or, for a template of another object, of its caller. `is_awaited`
    is True if a later task waits until the call ends. `is_read` is True if the outputs of the call
    are read, or are outputs of the workflow."""

    template: Data
    path: str
    is_own: bool = True
    is_awaited: bool = False
    is_read: bool = True


@dataclass(frozen=True)
class TemplateCall:
    """A task or step with the template that it calls. The last three fields of a TemplateCall are
    the same as in TemplateUse."""

    name: str
    path: str
    template: Data
    is_own: bool
    is_awaited: bool
    is_read: bool

    @property
    def is_group(self) -> bool:
        """True if the called template calls other templates."""
        return "dag" in self.template or "steps" in self.template


def check_unheeded(
    findings: Findings, path: str, templates: Mapping[str, Data], entrypoint: object
) -> None:
    """Check all tasks that the entrypoint calls directly or indirectly. `path`: path of the
    templates.

    Without an entrypoint, the templates are used by other workflows, whose tasks may wait for any
    template.
    """
    own_roots = [str(entrypoint)] if entrypoint else _list_uncalled_templates(templates)
    root_names = [name for name in own_roots if name in templates]
    template_uses = [
        TemplateUse(templates[name], f"{path}[{name}]", is_awaited=not entrypoint)
        for name in root_names
    ]
    calls = [*_find_calls(template_uses, path, templates)]

    last_templates = {
        id(template_call.template)
        for template_call in calls
        if not (
            template_call.is_awaited
            or template_call.is_group
            or "suspend" in template_call.template
        )
    }

    for template_call in calls:
        if "suspend" in template_call.template and not (
            template_call.is_awaited or template_call.is_read
        ):
            message = (
                f"nothing waits for {template_call.name}, so it holds nothing back: let the tasks"
                " that it should hold back"
            )
            findings.warn(template_call.path, GATE_RULE, f"{message} depend on it, or remove it.")
        elif not (template_call.is_read or template_call.is_group):
            _check_outputs(
                findings, template_call, bool(last_templates - {id(template_call.template)})
            )


def _check_outputs(
    findings: Findings, template_call: TemplateCall, has_other_last_task: bool
) -> None:
    """Warn if a task has outputs, but no task can use them. `has_other_last_task` is True if no
    task waits for this task, but other tasks without a waiting task exist, too. If only one task is
    last, its outputs are accepted as the results of the workflow."""
    outputs = template_call.template.get("outputs") or {}

    all_outputs = [output for field in OUTPUT_FIELDS for output in outputs.get(field) or []]
    if "memoize" in template_call.template or any("globalName" in output for output in all_outputs):
        return

    parameters = list_names(outputs.get("parameters"))
    stored_artifacts = [
        artifact for artifact in outputs.get("artifacts") or [] if _is_exported(artifact)
    ]
    artifacts = list_names(
        artifact for artifact in outputs.get("artifacts") or [] if artifact not in stored_artifacts
    )

    # A later task may read a stored artifact by its key, without a tag.
    if template_call.is_awaited and parameters and not stored_artifacts:
        effect_text = "the tasks after it run whatever it says"
    elif not template_call.is_awaited and has_other_last_task and (parameters or artifacts):
        effect_text = "no task waits for it"
    else:
        return

    outputs_text = ", ".join([*parameters, *artifacts])
    message = (
        f"no task reads the outputs of {template_call.name} ({outputs_text}), and {effect_text}"
    )
    remedy = "use an output, such as in the `when` of a later task, or remove the outputs."
    findings.warn(template_call.path, GATE_RULE, f"{message}: {remedy}")


def _find_calls(
    template_uses: list[TemplateUse], templates_path: str, templates: Mapping[str, Data]
) -> Iterator[TemplateCall]:
    """Yield the calls in the templates of `template_uses`, and in all templates that they call."""
    seen_uses: set[tuple[int, str, bool, bool]] = set()

    # a loop instead of recursion, because templates may be nested deeper than Python's stack allows
    while template_uses:
        template_use = template_uses.pop()
        use_identity = (
            id(template_use.template),
            template_use.path,
            template_use.is_awaited,
            template_use.is_read,
        )
        if use_identity in seen_uses:
            continue

        seen_uses.add(use_identity)
        for template_call in _list_calls(template_use, templates):
            yield template_call
            if not template_call.is_group:
                continue

            # A finding about a template of another object shows the path of the caller, because the
            # template may be correct for its other callers.
            is_inline = template_call.template.get("name") not in templates
            if is_inline:
                own_path = f"{template_call.path}.inline"
            else:
                own_path = f"{templates_path}[{template_call.template.get('name')}]"

            callee_path = own_path if template_call.is_own else template_call.path
            template_uses.append(
                TemplateUse(
                    template_call.template,
                    callee_path,
                    template_call.is_own,
                    template_call.is_awaited,
                    template_call.is_read,
                )
            )


def _list_calls(template_use: TemplateUse, templates: Mapping[str, Data]) -> Iterator[TemplateCall]:
    """Yield the calls in one template."""
    template = template_use.template
    tasks = [*_list_tasks(template)]
    awaited_tasks = _list_awaited_tasks(template)
    exported_tasks = _list_exported_tasks(template, template_use.is_read)
    tasks_read_by_task = {
        task_name: _find_tasks_read(task, excluded_task=task_name) for task_name, _, task in tasks
    }
    tasks_read_by_others = set[str]().union(*tasks_read_by_task.values())

    for task_name, task_path, task in tasks:
        template_name = str(task.get("template"))
        called_template = task.get("inline") or templates.get(template_name)
        if called_template is None:
            continue

        yield TemplateCall(
            name=task_name,
            path=f"{template_use.path}.{task_path}" if template_use.is_own else template_use.path,
            template=called_template,
            is_own=template_use.is_own and "/" not in template_name,
            is_awaited=template_use.is_awaited
            or task_name in awaited_tasks
            or _has_exit_hook(task),
            is_read=task_name in tasks_read_by_others or task_name in exported_tasks,
        )


def _list_tasks(template: Data) -> Iterator[tuple[str, str, Data]]:
    """Yield name, path and body of each task or step."""
    for task in (template.get("dag") or {}).get("tasks") or []:
        task_name = str(task.get("name"))
        yield task_name, f"dag.tasks[{task_name}]", task
    for group_index, step_group in enumerate(template.get("steps") or []):
        for step in step_group:
            task_name = str(step.get("name"))
            yield task_name, f"steps[{group_index}][{task_name}]", step


def _list_awaited_tasks(template: Data) -> set[str]:
    """Return the names of the tasks that a later task waits for: in a DAG, the dependencies of all
    tasks; in steps, all steps before the last group."""
    if "dag" in template:
        tasks = template["dag"].get("tasks") or []
        return {task_name for task in tasks for task_name, _ in graph.list_awaited_results(task)}
    step_groups = [step_group for step_group in template.get("steps") or [] if step_group]
    return {str(step.get("name")) for step_group in step_groups[:-1] for step in step_group}


def _has_exit_hook(task: Data) -> bool:
    return "exit" in (task.get("hooks") or {}) or bool(task.get("onExit"))


def _find_tasks_read(task: Data, excluded_task: str) -> set[str]:
    """Return the names of the tasks whose outputs `task` uses in its tags. Tags that contain the
    name of `task` itself count only in its hooks."""
    task_fields = {key: value for key, value in task.items() if key not in ("hooks", "name")}
    hooks = task.get("hooks") or {}
    return (_find_task_names(task_fields) - {excluded_task}) | _find_task_names(hooks)


def _list_exported_tasks(template: Data, is_read: bool) -> set[str]:
    """Return the names of the tasks whose tags the template contains outside its tasks, for example
    in its outputs. `is_read` is True if the template's own outputs are read."""
    outputs = template.get("outputs") or {}
    used_outputs = [
        output
        for field in OUTPUT_FIELDS
        for output in outputs.get(field) or []
        if is_read or _is_exported(output)
    ]
    other_fields = {
        key: value for key, value in template.items() if key not in ("dag", "steps", "outputs")
    }
    return _find_task_names([used_outputs, other_fields])


def _find_task_names(value: object) -> set[str]:
    """Return the names of the tasks and steps in the tags of all strings in `value`."""
    return {
        task_name for _, text in find_strings(value, "") for task_name in TASK_TAG.findall(text)
    }


def _is_exported(output: Data) -> bool:
    """Return True if an output is visible outside of the workflow, because it has a globalName or a
    storage location."""
    is_artifact_with_key = "path" in output and bool(
        output.keys() - ARTIFACT_FIELDS - {"valueFrom"}
    )
    return bool(output.get("globalName")) or is_artifact_with_key


def _list_uncalled_templates(templates: Mapping[str, Data]) -> list[str]:
    """Return the templates of this manifest that no other template of this manifest calls."""
    called_names = {
        str(task.get("template"))
        for template in templates.values()
        for _, _, task in _list_tasks(template)
    }
    return [name for name in templates if name not in called_names and "/" not in name]
