"""Warn about tasks that hold nothing back: a suspend that nothing waits for, and outputs that no
task reads.

Argo runs such a workflow as if the task were not there: the model of a pipeline is released without
the approval, or in spite of the result of a quality check. A task of a nested template holds back
whatever follows the caller of this template, so the check walks from the entrypoint into the nested
templates.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from argolocal.manifest.tag_scope import names, texts
from argolocal.manifest.types import Data
from argolocal.validate import graph
from argolocal.validate.findings import Findings

TASK_TAG = re.compile(r"""\b(?:tasks|steps)\s*(?:\.\s*|\[\s*["'])([-\w]+)""")
RULE = "gate"
OUTPUT_FIELDS = ("parameters", "artifacts")
# fields of an artifact that say nothing about where it is stored
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
class Site:
    """A template, and where it runs.

    `path`: where findings report its tasks; `is_own`: it belongs to the checked manifest, and
    `path` is its own. `is_awaited`: something runs after it. `is_read`: its outputs are read, or
    are outputs of the workflow.
    """

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


def check(findings: Findings, path: str, templates: Mapping[str, Data], entrypoint: Any) -> None:
    """Check the tasks that run from the entrypoint; `path` is the path of the templates.

    Without an entrypoint, other workflows use the templates, and may wait for the whole of each
    template.
    """
    own_roots = [str(entrypoint)] if entrypoint else _uncalled(templates)
    roots = [name for name in own_roots if name in templates]
    sites = [Site(templates[name], f"{path}[{name}]", is_awaited=not entrypoint) for name in roots]
    calls = [*_calls(sites, path, templates)]

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
    """Warn if nobody can use an output of the call; `others_end`: the workflow has another last
    task.

    The outputs of the only last task are the results of the workflow.
    """
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


def _calls(sites: list[Site], path: str, templates: Mapping[str, Data]) -> Iterator[Call]:
    """Yield the calls at these sites, and in the templates that they call."""
    seen: set[tuple[int, str, bool, bool]] = set()

    while sites:  # a recursion would fail, as templates may be nested deeper than Python's stack
        site = sites.pop()
        identity = (id(site.template), site.path, site.is_awaited, site.is_read)
        if identity in seen:
            continue

        seen.add(identity)
        for call in _calls_in(site, templates):
            yield call
            if not call.is_group:
                continue

            # A template of another object may be right for other callers, so its caller is
            # reported.
            is_inline = call.template.get("name") not in templates
            if is_inline:
                own_path = f"{call.path}.inline"
            else:
                own_path = f"{path}[{call.template.get('name')}]"

            callee_path = own_path if call.is_own else call.path
            sites.append(
                Site(call.template, callee_path, call.is_own, call.is_awaited, call.is_read)
            )


def _calls_in(site: Site, templates: Mapping[str, Data]) -> Iterator[Call]:
    template = site.template
    tasks = [*_tasks_in(template)]
    awaited = _awaited(template)
    exported = _exported_tasks(template, site.is_read)
    read = {name: _tasks_named_in(task, except_for=name) for name, _, task in tasks}
    read_by_others = set[str]().union(*read.values())

    for name, path, task in tasks:
        reference = str(task.get("template"))
        called_template = task.get("inline") or templates.get(reference)
        if called_template is None:
            continue

        yield Call(
            name=name,
            path=f"{site.path}.{path}" if site.is_own else site.path,
            template=called_template,
            is_own=site.is_own and "/" not in reference,
            is_awaited=site.is_awaited or name in awaited or _has_exit_hook(task),
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


def _awaited(template: Data) -> set[str]:
    """Return the tasks of a DAG on which another task depends, or the steps that are not in the
    last group."""
    if "dag" in template:
        tasks = template["dag"].get("tasks") or []
        return {name for task in tasks for name, _ in graph.results_awaited_by(task)}
    groups = [group for group in template.get("steps") or [] if group]
    return {str(step.get("name")) for group in groups[:-1] for step in group}


def _has_exit_hook(task: Data) -> bool:
    return "exit" in (task.get("hooks") or {}) or bool(task.get("onExit"))


def _tasks_named_in(task: Data, except_for: str) -> set[str]:
    """Return the tasks that a task reads, in its hooks also itself."""
    body = {key: value for key, value in task.items() if key not in ("hooks", "name")}
    hooks = task.get("hooks") or {}
    return (_named_in(body) - {except_for}) | _named_in(hooks)


def _exported_tasks(template: Data, is_read: bool) -> set[str]:
    """Return the tasks whose values leave the template by its outputs, metrics and other fields."""
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
    return _named_in([used_outputs, other_fields])


def _named_in(value: Any) -> set[str]:
    return {name for _, text in texts(value, "") for name in TASK_TAG.findall(text)}


def _is_exported(output: Data) -> bool:
    """Return True if an output leaves the workflow: by a global name, or to a place of its own."""
    is_artifact_with_key = "path" in output and bool(
        output.keys() - ARTIFACT_FIELDS - {"valueFrom"}
    )
    return bool(output.get("globalName")) or is_artifact_with_key


def _uncalled(templates: Mapping[str, Data]) -> list[str]:
    """Return the own templates that no other own template calls."""
    called = {
        str(task.get("template"))
        for template in templates.values()
        for _, _, task in _tasks_in(template)
    }
    return [name for name in templates if name not in called and "/" not in name]
