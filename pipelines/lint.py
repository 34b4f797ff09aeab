"""What Argo would refuse, or worse, accept: checks of a manifest as plain data, before anything runs.

    rekindle lint configs/demo.yaml
    rekindle lint --manifest workflow.yaml

Hera compiles an unknown entrypoint, a misspelt argument or a tag that nothing fills without a word, and some of
these Argo runs as well. Needs no cluster, no network and no Hera.
"""

import ast
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipelines import scopes
from pipelines.local import expr, selector
from pipelines.local.functions import ExprError
from pipelines.scopes import names
from steps.errors import ConfigError, did_you_mean

Manifest = Mapping[str, Any]

KINDS = ("Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
TYPES = ("container", "script", "resource", "dag", "steps", "suspend", "http", "data", "containerSet", "plugin")
LOCATIONS = ("s3", "gcs", "http", "git", "raw", "hdfs", "oss", "azure", "artifactory", "plugin")
SUPPLIED = (*LOCATIONS, "from", "fromExpression")
ACTIONS = ("get", "create", "apply", "delete", "replace", "patch")
RESULTS = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned", "AnySucceeded", "AllFailed")
PREFIXES = {"inputs", "outputs", "tasks", "steps", "workflow", "item"}

NAME = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
PARAMETER = re.compile(r"[-a-zA-Z0-9_]+")
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
JOB_LENGTH = 53  # its pods are called NAME-worker-NN, in at most 63 characters
LENGTHS = {"CronWorkflow": 52}  # its workflows are called NAME-UNIXTIME
TASK = re.compile(r"([A-Za-z0-9_][-A-Za-z0-9_]*)(?:\.([A-Za-z]+))?")
TAG = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
METRIC = re.compile(r"\{\{\s*(?:tasks|steps)\.[^}]*\.outputs\.")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, by which rule, and the way out. What is not `fatal` runs, but seldom as meant."""

    path: str
    rule: str
    message: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {self.message} [{self.rule}]"


def check(manifest: Manifest) -> None:
    """Raises ConfigError with all that is fatal, one line each."""
    if wrong := [str(finding) for finding in lint(manifest) if finding.fatal]:
        raise ConfigError("\n".join(["the manifest cannot run:", *wrong]))


def lint(manifest: Manifest) -> list[Finding]:
    """All findings of a Workflow, WorkflowTemplate or CronWorkflow, in the order of the manifest."""
    if wrong := list(scopes.misshapen(manifest)):
        return [Finding(each.split()[0], "shape", each.partition(" ")[2] + ".") for each in wrong]
    linter = _Linter(scopes.present(manifest))
    linter.run()
    return list(dict.fromkeys(linter.findings))


class _Linter:
    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.kind = str(manifest.get("kind"))
        self.root = "spec.workflowSpec" if self.kind == "CronWorkflow" else "spec"
        spec = manifest.get("spec") or {}
        self.spec: Manifest = (spec.get("workflowSpec") or {}) if self.kind == "CronWorkflow" else spec
        self.templates = {t["name"]: t for t in self.spec.get("templates") or [] if t.get("name")}
        self.findings: list[Finding] = []

    def add(self, path: str, rule: str, message: str, fatal: bool = True) -> None:
        self.findings.append(Finding(path, rule, message, fatal))

    def run(self) -> None:
        self.metadata()
        if self.spec.get("workflowTemplateRef"):
            return
        arguments = self.spec.get("arguments") or {}
        for field in ("entrypoint", "onExit"):
            if name := self.spec.get(field):
                self.target(f"{self.root}.{field}", str(name), arguments, loose=True)
            elif field == "entrypoint" and self.kind != "WorkflowTemplate":
                self.add(f"{self.root}.entrypoint", "entrypoint", "it is missing: name the template to begin with.")
        for name, hook in (self.spec.get("hooks") or {}).items():
            self.target(f"{self.root}.hooks[{name}]", str(hook.get("template")), hook.get("arguments") or {})
        self.unique(f"{self.root}.templates", names(self.spec.get("templates")))
        for template in self.spec.get("templates") or []:
            self.template(f"{self.root}.templates[{template.get('name')}]", template)

    def metadata(self) -> None:
        metadata = self.manifest.get("metadata") or {}
        name, prefix = str(metadata.get("name") or ""), str(metadata.get("generateName") or "")
        longest = LENGTHS.get(self.kind, 63)
        if self.kind not in KINDS:
            self.add("kind", "kind", f'"{self.kind}" must be {", ".join(KINDS)}.{did_you_mean(self.kind, set(KINDS))}')
        if not name and not prefix:
            self.add("metadata.name", "name", "it is missing: give a name, or a generateName.")
        elif len(full := name or prefix + "xxxxx") > longest or not DNS_NAME.fullmatch(full):
            rule = f"lower-case letters, digits and dashes, at most {longest if name else longest - 5} characters"
            self.add("metadata." + ("name" if name else "generateName"), "name", f'"{name or prefix}" must be {rule}.')

    @cached_property
    def workflow_name(self) -> str:
        """A name as long as those of the workflows that this manifest makes."""
        metadata = self.manifest.get("metadata") or {}
        if self.kind == "Workflow":
            return metadata.get("name") or f"{metadata.get('generateName', '')}xxxxx"
        return f"{metadata.get('name', '')}-1700000000"

    # what a template or task is made of

    def unique(self, path: str, there: list[str]) -> None:
        for name in dict.fromkeys(there):
            if there.count(name) > 1:
                self.add(path, "name", f'"{name}" is there {there.count(name)} times: names must be unique.')
            if not NAME.fullmatch(name) or len(name) > 128:
                self.add(path, "name", f'"{name}" must be letters, digits and dashes, beginning with no dash.')

    def template(self, path: str, template: Manifest) -> None:
        types = [each for each in TYPES if each in template]
        if len(types) != 1:
            found = f"it is {' and '.join(types)}" if types else "it does nothing"
            self.add(path, "template", f"{found}: it must have exactly one of {', '.join(TYPES[:6])}.")
        for direction in ("inputs", "outputs"):
            for kind in ("parameters", "artifacts"):
                there = names((template.get(direction) or {}).get(kind))
                for name in there:
                    if not PARAMETER.fullmatch(name) or there.count(name) > 1:
                        rule = "must be letters, digits, - and _, and there once"
                        self.add(f"{path}.{direction}.{kind}", "name", f'"{name}" {rule}.')
        retry = template.get("retryStrategy")
        if retry is not None and "limit" not in retry:
            why = "without a limit it retries for ever, and without backoff: give one."
            self.add(f"{path}.retryStrategy", "retry", why, fatal=False)
        if "memoize" in template and not NAME.fullmatch(TAG.sub("x", str(template["memoize"].get("key")))):
            self.add(f"{path}.memoize.key", "name", "the key must be letters, digits and dashes.")
        known = self.globals | scopes.declared("inputs", template)
        if "dag" in template:
            self.dag(path, template, known)
        elif "steps" in template:
            self.steps(path, template, known)
        else:
            if "resource" in template:
                self.resource(f"{path}.resource", template["resource"])
            self.tags(path, template, known | scopes.declared("outputs", template) | {"tasks.name", "steps.name"})

    def dag(self, path: str, template: Manifest, known: set[str]) -> None:
        tasks = {str(t.get("name")): t for t in template["dag"].get("tasks") or []}
        at = f"{path}.dag"
        self.unique(f"{at}.tasks", names(template["dag"].get("tasks")))
        for name in str(template["dag"].get("target") or "").split():
            if name not in tasks:
                self.add(f"{at}.target", "depends", f'"{name}" is no task.{did_you_mean(name, set(tasks))}')
        if any("depends" in t for t in tasks.values()) and any("dependencies" in t for t in tasks.values()):
            self.add(at, "depends", "it has both depends and dependencies: a DAG must use one of them.")
        before = {name: self.depends(f"{at}.tasks[{name}].depends", task, tasks) for name, task in tasks.items()}
        if cycle := _cycle(before):
            self.add(at, "depends", f"{' → '.join(cycle)} is a cycle: take one of these out of `depends`.")
            return
        for name, task in tasks.items():
            seen = _ancestors(name, before)
            self.task(f"{at}.tasks[{name}]", task, "tasks", known | scopes.nodes("tasks", seen, tasks, self.templates))
        rest = {key: value for key, value in template.items() if key != "dag"}
        self.tags(path, rest, known | scopes.nodes("tasks", tasks.keys(), tasks, self.templates))

    def depends(self, path: str, task: Manifest, tasks: Collection[str]) -> set[str]:
        """The tasks that `task` waits for."""
        text = str(task.get("depends") or "")
        found = [(name, result) for name, result in TASK.findall(text)]
        found += [(str(name), "") for name in task.get("dependencies") or []]
        for name, result in found:
            if name not in tasks:
                self.add(path, "depends", f'"{name}" is no task of this DAG.{did_you_mean(name, set(tasks))}')
            if result and result not in RESULTS:
                self.add(path, "depends", f'"{result}" is no result of a task.{did_you_mean(result, set(RESULTS))}')
        try:
            python = TASK.sub("a", text).replace("&&", " and ").replace("||", " or ").replace("!", " not ")
            ast.parse(python.strip() or "a", mode="eval")
        except SyntaxError:
            self.add(path, "depends", f'"{text}" cannot be read: it must be tasks with &&, ||, ! and parentheses.')
        return {name for name, _ in found if name in tasks}

    def steps(self, path: str, template: Manifest, known: set[str]) -> None:
        groups = template["steps"] or []
        everything = {str(step.get("name")): step for group in groups for step in group}
        self.unique(f"{path}.steps", names(step for group in groups for step in group))
        seen: set[str] = set()
        for number, group in enumerate(groups):
            for step in group:
                scope = known | scopes.nodes("steps", seen, everything, self.templates)
                self.task(f"{path}.steps[{number}][{step.get('name')}]", step, "steps", scope)
            seen |= set(names(group))
        rest = {key: value for key, value in template.items() if key != "steps"}
        self.tags(path, rest, known | scopes.nodes("steps", seen, everything, self.templates))

    def task(self, path: str, task: Manifest, kind: str, known: set[str]) -> None:
        arguments = task.get("arguments") or {}
        if task.get("template"):
            self.target(path, str(task["template"]), arguments)
        elif task.get("inline"):
            self.template(f"{path}.inline", task["inline"])
        elif not task.get("templateRef"):
            self.add(path, "template", "it names no template: give template, templateRef or inline.")
        hooks = dict(task.get("hooks") or {})
        if task.get("onExit"):
            hooks["onExit"] = {"template": task["onExit"]}
        for hook, value in hooks.items():
            self.target(f"{path}.hooks[{hook}]", str(value.get("template")), value.get("arguments") or {})
        when = str(task.get("when") or "")
        if METRIC.search(when) and re.search(r"[<>]", when) and "{{=" not in when:
            way = "{{=asFloat(...) > ...}}"
            why = f"it compares an output as text, and fails for 5e-05 or NaN: write {way}."
            self.add(f"{path}.when", "when", why, fatal=False)
        looped = {"item"} if any(key in task for key in ("withItems", "withParam", "withSequence")) else set()
        name = str(task.get("name"))
        own = scopes.nodes(kind, {name}, {name: task}, self.templates)
        plain = {key: value for key, value in task.items() if key not in ("hooks", "inline", "depends")}
        self.tags(path, plain, known | looped)
        self.tags(f"{path}.hooks", hooks, known | looped | own)

    def target(self, path: str, name: str, arguments: Manifest, loose: bool = False) -> None:
        """That a template exists and gets what it needs; `loose`: it may be given more than it takes."""
        template = self.templates.get(name)
        if template is None:
            self.add(path, "template", f'"{name}" is no template.{did_you_mean(name, set(self.templates))}')
            return
        for kind in ("parameters", "artifacts"):
            inputs = (template.get("inputs") or {}).get(kind) or []
            given, taken = names(arguments.get(kind)), names(inputs)
            if not loose:
                for extra in [each for each in given if each not in taken]:
                    near = did_you_mean(extra, set(taken))  # without one it is only superfluous
                    why = f'template {name} has no input "{extra}".{near or " Take it out."}'
                    self.add(f"{path}.arguments", "argument", why, fatal=bool(near))
            for each in inputs:
                if _required(each, kind) and each.get("name") not in given:
                    why = f'template {name} needs the input "{each.get("name")}", which is not supplied.'
                    self.add(f"{path}.arguments", "input", why + did_you_mean(str(each.get("name")), set(given)))

    def resource(self, path: str, resource: Manifest) -> None:
        action = str(resource.get("action"))
        if action not in ACTIONS:
            self.add(f"{path}.action", "resource", f'"{action}" is no action.{did_you_mean(action, set(ACTIONS))}')
        success, failure = resource.get("successCondition"), resource.get("failureCondition")
        if failure and not success:
            rule = "without a successCondition it succeeds at the first look: give one."
            self.add(f"{path}.failureCondition", "condition", rule)
        if action == "delete" and (success or failure):
            self.add(path, "condition", "a delete has nothing to wait for: take its conditions out.")
        for field, condition in (("successCondition", success), ("failureCondition", failure)):
            try:
                selector.parse(TAG.sub("x", str(condition or "")))
            except selector.SelectorError as error:
                self.add(f"{path}.{field}", "condition", f'"{condition}" is no label selector: {error}.')
        if resource.get("manifest"):
            self.object(f"{path}.manifest", str(resource["manifest"]))
        elif not resource.get("manifestFrom") and not resource.get("flags"):
            self.add(f"{path}.manifest", "resource", "it is missing: give a manifest, or flags.")

    def object(self, path: str, text: str) -> None:
        """The name of a training job must leave room for those of its pods."""
        if "PyTorchJob" not in text:
            return
        filled = TAG.sub("1", re.sub(r"\{\{\s*workflow\.name\s*\}\}", self.workflow_name, text))
        try:
            found = json.loads(filled)
        except json.JSONDecodeError:
            import yaml

            try:
                found = yaml.safe_load(filled)
            except yaml.YAMLError as error:
                self.add(path, "resource", f"it is not YAML: {error}", fatal=False)
                return
        name = str((found.get("metadata") or {}).get("name", "")) if isinstance(found, dict) else ""
        if name and (not JOB_NAME.fullmatch(name) or len(name) > JOB_LENGTH):
            rule = f"must begin with a letter and have at most {JOB_LENGTH} lower-case letters, digits and dashes"
            self.add(path, "name", f'the job\'s name will be "{name}" ({len(name)} characters): it {rule}.')

    # tags

    @cached_property
    def globals(self) -> set[str]:
        return scopes.workflow(self.spec)

    def tags(self, path: str, value: Any, known: set[str]) -> None:
        """That every tag below `value` is one of `known`."""
        for where, text in scopes.texts(value, path):
            if "{{" not in text:
                continue
            if "{{" in TAG.sub("", text):
                self.add(where, "tag", f'"{_short(text)}" has a {{{{ without }}}}: close the tag.')
            for tag in TAG.findall(text):
                for name in self.read(where, tag):
                    if name.split(".")[0] in PREFIXES and not scopes.resolves(name, known):
                        fatal = self.kind == "Workflow" or not name.startswith("workflow.")
                        same = {each for each in known if each.split(".")[0] == name.split(".")[0]}
                        rule = f"{{{{{_short(tag)}}}}}: nothing gives a value to {name} here."
                        self.add(where, "tag", rule + did_you_mean(name, same), fatal)

    def read(self, path: str, tag: str) -> tuple[str, ...]:
        """The names that a tag reads."""
        if not tag.startswith("="):
            return (tag.strip(),)
        try:
            return expr.identifiers(tag[1:])
        except ExprError as error:
            self.add(path, "tag", f"{{{{{_short(tag)}}}}} cannot be read: {error}.", fatal=False)
            return ()


def _required(item: Manifest, kind: str) -> bool:
    if kind == "parameters":
        return not any(key in item for key in ("value", "default", "valueFrom"))
    return not item.get("optional") and not any(key in item for key in SUPPLIED)


def _cycle(before: Mapping[str, set[str]]) -> list[str]:
    """The names along one cycle, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            done.add(name)
            for each in sorted(before[name]):
                if found := visit(each, [*path, name]):
                    return found
        return []

    return next((found for name in before if (found := visit(name, []))), [])


def _ancestors(name: str, before: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(before[name])
    while waiting:
        if (each := waiting.pop()) not in found:
            found.add(each)
            waiting += before[each]
    return found


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
