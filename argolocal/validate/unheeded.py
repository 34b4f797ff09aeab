"""Warn about tasks that do not affect other tasks: a suspend that no task waits for, and outputs
that no task reads.

Argo runs such a workflow as if the task did not exist. For example, a model is then released
without the approval, or despite a failed quality check. A task of a nested template affects the
tasks that follow the caller of this template, so the check walks from the entrypoint into nested
templates.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from argolocal.manifest.tag_scope import find_strings, names
from argolocal.manifest.types import Data
from argolocal.validate import graph
from argolocal.validate.findings import Findings

TASK_TAG = re.compile(r"""\b(?:tasks|steps)\s*(?:\.\s*|\[\s*["'])([-\w]+)""")
RULE = "gate"
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
    """One use of a template in the workflow.

    `path`: the path that findings about the template's tasks show. `is_own`: True if the template
    belongs to the checked manifest; then `path` is the template's path. `is_awaited`: True if a
    later task waits until this use ends. `is_read`: True if the outputs of this use are read, or
    are outputs of the workflow."""

    template: Data
    path: str
    is_own: bool = True
    is_awaited: bool = False
    is_read: bool = True


@dataclass(frozen=True)
class Call:
    """A task or step with the template that it calls."""

    name: str
    path: str
    template: Data
    is_own: bool
    is_awaited: bool
    is_read: bool

    @property
    def is_group(self) -> bool:
        return "dag" in self.template or "steps" in self.template


def check(findings: Findings, path: str, templates: Mapping[str, Data], entrypoint: object) -> None:
    """Check the tasks that run from the entrypoint. `path` is the path of the templates.

    Without an entrypoint, the templates are used by other workflows, whose tasks may wait for any
    template.
    """
    own_roots = [str(entrypoint)] if entrypoint else _uncalled_templates(templates)
    roots = [name for name in own_roots if name in templates]
    template_uses = [
        TemplateUse(templates[name], f"{path}[{name}]", is_awaited=not entrypoint) for name in roots
    ]
    calls = [*_find_calls(template_uses, path, templates)]

    last_templates = {
        id(call.template)
        for call in calls
        if not (call.is_awaited or call.is_group or "suspend" in call.template)
    }

    for call in calls:
        if "suspend" in call.template and not (call.is_awaited or call.is_read):
            message = (
                f"nothing waits for {call.name}, so it holds nothing back: let the tasks that it"
                " should hold back"
            )
            findings.warn(call.path, RULE, f"{message} depend on it, or remove it.")
        elif not (call.is_read or call.is_group):
            _check_outputs(findings, call, bool(last_templates - {id(call.template)}))


def _check_outputs(findings: Findings, call: Call, others_end: bool) -> None:
    """Warn if no task can use an output of the call. `others_end`: True if other tasks are also
    last tasks of the workflow. If a workflow has only one last task, the task's outputs count as
    results of the workflow."""
    outputs = call.template.get("outputs") or {}

    all_outputs = [output for field in OUTPUT_FIELDS for output in outputs.get(field) or []]
    if "memoize" in call.template or any("globalName" in output for output in all_outputs):
        return

    parameters = names(outputs.get("parameters"))
    stored_artifacts = [
        artifact for artifact in outputs.get("artifacts") or [] if _is_exported(artifact)
    ]
    artifacts = names(
        artifact for artifact in outputs.get("artifacts") or [] if artifact not in stored_artifacts
    )

    # A later task may read a stored artifact by its key, without a tag.
    if call.is_awaited and parameters and not stored_artifacts:
        effect = "the tasks after it run whatever it says"
    elif not call.is_awaited and others_end and (parameters or artifacts):
        effect = "no task waits for it"
    else:
        return

    outputs_text = ", ".join([*parameters, *artifacts])
    message = f"no task reads the outputs of {call.name} ({outputs_text}), and {effect}"
    remedy = "use an output, such as in the `when` of a later task, or remove the outputs."
    findings.warn(call.path, RULE, f"{message}: {remedy}")


def _find_calls(
    template_uses: list[TemplateUse], path: str, templates: Mapping[str, Data]
) -> Iterator[Call]:
    """Yield the calls in the templates of `template_uses`, and in all templates that they call."""
    seen: set[tuple[int, str, bool, bool]] = set()

    # this loop avoids recursion, because templates may be nested deeper than Python's stack allows
    while template_uses:
        template_use = template_uses.pop()
        identity = (
            id(template_use.template),
            template_use.path,
            template_use.is_awaited,
            template_use.is_read,
        )
        if identity in seen:
            continue

        seen.add(identity)
        for call in _calls_in(template_use, templates):
            yield call
            if not call.is_group:
                continue

            # show the path of the caller, because a template of another object may be correct for
            # its other callers
            is_inline = call.template.get("name") not in templates
            if is_inline:
                own_path = f"{call.path}.inline"
            else:
                own_path = f"{path}[{call.template.get('name')}]"

            callee_path = own_path if call.is_own else call.path
            template_uses.append(
                TemplateUse(call.template, callee_path, call.is_own, call.is_awaited, call.is_read)
            )


def _calls_in(template_use: TemplateUse, templates: Mapping[str, Data]) -> Iterator[Call]:
    template = template_use.template
    tasks = [*_tasks_in(template)]
    awaited = _awaited_tasks(template)
    exported = _exported_tasks(template, template_use.is_read)
    read = {name: _tasks_named_in(task, except_for=name) for name, _, task in tasks}
    read_by_others = set[str]().union(*read.values())

    for name, path, task in tasks:
        reference = str(task.get("template"))
        called_template = task.get("inline") or templates.get(reference)
        if called_template is None:
            continue

        yield Call(
            name=name,
            path=f"{template_use.path}.{path}" if template_use.is_own else template_use.path,
            template=called_template,
            is_own=template_use.is_own and "/" not in reference,
            is_awaited=template_use.is_awaited or name in awaited or _has_exit_hook(task),
            is_read=name in read_by_others or name in exported,
        )


def _tasks_in(template: Data) -> Iterator[tuple[str, str, Data]]:
    """Yield name, path and body of each task or step."""
    for task in (template.get("dag") or {}).get("tasks") or []:
        name = str(task.get("name"))
        yield name, f"dag.tasks[{name}]", task
    for number, group in enumerate(template.get("steps") or []):
        for step in group:
            name = str(step.get("name"))
            yield name, f"steps[{number}][{name}]", step


def _awaited_tasks(template: Data) -> set[str]:
    """Return the tasks that a later task waits for: in a DAG, tasks on which another task depends;
    in steps, all steps before the last group."""
    if "dag" in template:
        tasks = template["dag"].get("tasks") or []
        return {name for task in tasks for name, _ in graph.results_awaited_by(task)}
    groups = [group for group in template.get("steps") or [] if group]
    return {str(step.get("name")) for group in groups[:-1] for step in group}


def _has_exit_hook(task: Data) -> bool:
    return "exit" in (task.get("hooks") or {}) or bool(task.get("onExit"))


def _tasks_named_in(task: Data, except_for: str) -> set[str]:
    """Return the tasks whose outputs or other values a task reads. A task's hooks may also read
    values of the task itself."""
    body = {key: value for key, value in task.items() if key not in ("hooks", "name")}
    hooks = task.get("hooks") or {}
    return (_find_task_names(body) - {except_for}) | _find_task_names(hooks)


def _exported_tasks(template: Data, is_read: bool) -> set[str]:
    """Return the tasks whose values the outputs, metrics and other fields of the template use."""
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
    return {name for _, text in find_strings(value, "") for name in TASK_TAG.findall(text)}


def _is_exported(output: Data) -> bool:
    """Return True if an output is visible outside of the workflow, because it has a globalName or a
    storage location."""
    is_artifact_with_key = "path" in output and bool(
        output.keys() - ARTIFACT_FIELDS - {"valueFrom"}
    )
    return bool(output.get("globalName")) or is_artifact_with_key


def _uncalled_templates(templates: Mapping[str, Data]) -> list[str]:
    """Return the templates of this manifest that no other template of this manifest calls."""
    called = {
        str(task.get("template"))
        for template in templates.values()
        for _, _, task in _tasks_in(template)
    }
    return [name for name in templates if name not in called and "/" not in name]
