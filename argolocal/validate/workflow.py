"""A Workflow, WorkflowTemplate or CronWorkflow: its names, deadlines, templates and arguments."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from argolocal.errors import ConfigError
from argolocal.manifest import cron as crontab
from argolocal.manifest import resolve, shape, tag_scope
from argolocal.manifest.kinds import TEMPLATE_TYPES
from argolocal.manifest.loops import LOOPS
from argolocal.manifest.tag_scope import Items, Names, Nodes, Scope, names
from argolocal.validate import arguments, graph, metrics, objects, pods, tag_rules
from argolocal.validate.exported import Exported
from argolocal.validate.findings import Findings

Manifest = Mapping[str, Any]

KINDS = ("Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
REUSED = ("WorkflowTemplate", "ClusterWorkflowTemplate")  # may omit the entrypoint
POD_GC = ("OnPodCompletion", "OnPodSuccess", "OnWorkflowCompletion", "OnWorkflowSuccess")

NAME = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
PREFIX = 58  # of a generated name; five characters follow
LENGTHS = {"CronWorkflow": 52}  # its workflows are called NAME-UNIXTIME
METRIC = re.compile(r"\{\{\s*(?:(?:tasks|steps)\.[^{}]*\.outputs\.|workflow\.outputs\.parameters\.)")


class WorkflowRules:
    """All rules for one manifest; `run` fills `findings`."""

    def __init__(self, manifest: Manifest, findings: Findings, find: resolve.Find) -> None:
        self.manifest, self.findings, self.find = manifest, findings, find
        self.add, self.warn = findings.add, findings.warn
        self.others: dict[str, Manifest] = {}  # referenced objects by the paths of their specs in findings
        self.kind = str(manifest.get("kind"))
        self.root = "spec.workflowSpec" if self.kind == "CronWorkflow" else "spec"
        spec = manifest.get("spec") or {}
        self.spec: dict[str, Any] = (spec.get("workflowSpec") or {}) if self.kind == "CronWorkflow" else spec

    @cached_property
    def stored(self) -> dict[str, dict[str, Manifest] | None]:
        """The templates of each referenced object by scope; None: the object is missing."""
        templates: dict[str, dict[str, Manifest] | None] = {}
        waiting: list[tuple[str, Manifest, str]] = []
        resolve.qualify(self.spec, "", self.root, waiting)
        while waiting:
            scope, reference, _ = waiting.pop()
            if scope not in templates:
                other = resolve.referred(reference, self.find)
                spec, templates[scope] = {}, None
                if other and not any(shape.shape_errors(other)):  # shape errors are reported elsewhere
                    self.others[self.away(scope)] = other
                    spec = shape.without_nulls(other.get("spec") or {})
                    templates[scope] = _named(spec)
                resolve.qualify(spec, scope, f"{scope}.spec", waiting)
        return templates

    def away(self, scope: str) -> str:
        """The path of the spec of another object."""
        return f"{self.root}.templateRef[{scope.partition('/')[2]}]"

    @cached_property
    def templates(self) -> dict[str, Manifest]:
        """Templates by the names that callers use."""
        stored = self.stored.items()  # also gives callers their full names
        return _named(self.spec) | {
            f"{scope}/{name}": t for scope, templates in stored for name, t in (templates or {}).items()
        }

    @cached_property
    def everywhere(self) -> Names:
        return Names(tag_scope.workflow(self.spec))

    @cached_property
    def exported(self) -> Exported:
        first = [str(self.spec.get(field)) for field in ("entrypoint", "onExit")]
        return Exported(self.templates, [*first, *names(self.spec.get("templates"))])

    @cached_property
    def reached(self) -> set[int]:
        """Ids of templates that run before the workflow completes, where workflow.failures is unknown."""
        return {id(template) for template in self.called([str(self.spec.get("entrypoint"))]).values()}

    def called(self, waiting: list[str], hooks: bool = True) -> dict[str, Manifest]:
        """The templates named by `waiting` and all that they call, with or without `hooks`."""
        templates: dict[str, Manifest] = {}
        while waiting:
            if (name := waiting.pop()) in self.templates and name not in templates:
                templates[name] = self.templates[name]
                callers = resolve.holders({"templates": [templates[name]]}, "")
                waiting += [str(caller.get("template")) for caller, at in callers if hooks or ".hooks." not in at]
        return templates

    @cached_property
    def running(self) -> Names:
        return Names(self.everywhere.names - {"workflow.failures", "=workflow.failures"})

    def known(self, template: Manifest, step: Manifest | None = None) -> tuple[Names, Names]:
        """Global tags known in a template, or at one of its steps."""
        everywhere = self.running if id(template) in self.reached else self.everywhere
        return everywhere, self.exported.at(template if step is None else step)

    def run(self) -> None:
        self.metadata()
        if self.kind == "CronWorkflow":
            self.cron(self.manifest.get("spec") or {})
        tag_rules.closed(
            self.findings, self.root, {key: value for key, value in self.spec.items() if key != "templates"}
        )
        if self.spec.get("workflowTemplateRef") and (self.kind in REUSED or not self.joined()):
            return
        given = self.spec.get("arguments") or {}
        arguments.check(self.findings, f"{self.root}.arguments", given, later=True)
        for field in ("entrypoint", "onExit"):
            if name := self.spec.get(field):
                self.target(f"{self.root}.{field}", str(name), given, loose=True)
            elif field == "entrypoint" and self.kind not in REUSED:
                self.add(f"{self.root}.entrypoint", "entrypoint", "it is missing: name the template to begin with.")
        self.hooks(f"{self.root}.hooks", self.spec.get("hooks") or {})
        if "activeDeadlineSeconds" not in self.spec:
            why = "nothing ends a workflow that hangs: give a number of seconds."
            self.warn(f"{self.root}.activeDeadlineSeconds", "deadline", why)
        if (strategy := (self.spec.get("podGC") or {}).get("strategy") or POD_GC[0]) not in POD_GC:
            hint = self.findings.hint(str(strategy), POD_GC)
            self.add(f"{self.root}.podGC.strategy", "shape", f'"{strategy}" is no strategy.{hint}')
        for path, holder in (("", self.spec), (".templateDefaults", self.spec.get("templateDefaults") or {})):
            self.retry(f"{self.root}{path}.retryStrategy", holder.get("retryStrategy"))
        self.unique(f"{self.root}.templates", names(self.spec.get("templates")))
        for template in self.spec.get("templates") or []:
            self.template(f"{self.root}.templates[{template.get('name')}]", template)
        for name, template in self.called(names(self.spec.get("templates")), hooks=False).items():
            if scope := name.rpartition("/")[0]:
                self.template(f"{self.away(scope)}.templates[{template.get('name')}]", template)

    def joined(self) -> bool:
        """Merge our spec over that of the WorkflowTemplate; False if it is missing."""
        base = resolve.referred(self.spec["workflowTemplateRef"], self.find)
        if not base:
            return False
        self.others[self.root] = base
        try:
            self.spec = shape.without_nulls(resolve.joined(self.spec, self.find))
        except ConfigError as error:
            self.add(f"{self.root}.workflowTemplateRef", "template", str(error))
            return False
        return True

    def metadata(self) -> None:
        metadata = self.manifest.get("metadata") or {}
        name, prefix = str(metadata.get("name") or ""), str(metadata.get("generateName") or "")
        longest = LENGTHS.get(self.kind, 63)
        if self.kind not in KINDS:
            hint = self.findings.near(self.kind, KINDS)
            self.add("kind", "kind", f'"{self.kind}" must be {", ".join(KINDS)}.{hint}')
        if not name and not prefix:
            self.add("metadata.name", "name", "it is missing: give a name, or a generateName.")
        elif len(name) > longest or not objects.DNS_NAME.fullmatch(name or prefix + "x"):
            rule = f"lower-case letters, digits and dashes, at most {longest} characters"
            where = "metadata." + ("name" if name else "generateName")
            self.add(where, "name", f'"{name or prefix}" must be {rule}.')
        elif not name and len(prefix) > PREFIX:
            self.warn("metadata.generateName", "name", f'only {PREFIX} characters of "{prefix}" stay: shorten it.')
        objects.labels(self.findings, "metadata.labels", metadata.get("labels") or {})

    @cached_property
    def workflow_name(self) -> str:
        """A name as long as the names of this manifest's workflows."""
        metadata = self.manifest.get("metadata") or {}
        if self.kind == "Workflow":
            return metadata.get("name") or f"{str(metadata.get('generateName', ''))[:PREFIX]}xxxxx"
        return f"{metadata.get('name', '')}-1700000000"

    def cron(self, spec: Manifest) -> None:
        if not spec.get("schedules"):
            old = "`schedule` is gone in Argo 4" if spec.get("schedule") else "it never runs"
            self.add("spec.schedules", "cron", f"it is missing, so {old}: give a list of cron expressions.")
        schedules = spec["schedules"] if isinstance(spec.get("schedules"), list) else []
        for schedule in [*schedules, *([spec["schedule"]] if spec.get("schedule") else [])]:
            if why := crontab.schedule_error(str(schedule)):
                self.add("spec.schedules", "cron", f'"{schedule}" is no schedule: {why}.')
        if why := crontab.timezone_error(str(spec.get("timezone") or "")):
            self.add("spec.timezone", "cron", f'"{spec["timezone"]}" is no time zone: {why.rstrip(".")}.')
        self.calls(f"{self.root}.arguments", self.spec.get("arguments") or {})

    def calls(self, path: str, given: Manifest) -> None:
        """Warn about `$(date)` in arguments, which no shell expands."""
        for parameter in given.get("parameters") or []:
            for inside in pods.CALL.findall(str(parameter.get("value", ""))):
                self.warn(f"{path}.parameters[{parameter.get('name')}]", "shell", pods.call(inside))

    # parts of templates and tasks

    def unique(self, path: str, there: list[str]) -> None:
        for name, count in Counter(there).items():
            if count > 1:
                self.add(path, "name", f'"{name}" is there {count} times: names must be unique.')
            if not NAME.fullmatch(name) or len(name) > 128:
                why = "must be at most 128 letters, digits and dashes, beginning with no dash."
                self.add(path, "name", f'"{name}" {why}')

    def retry(self, path: str, retry: Manifest | None) -> None:
        if retry is not None and "limit" not in retry:
            self.warn(path, "retry", "without a limit it retries for ever, and without backoff: give one.")

    def template(self, path: str, template: Manifest, around: Scope | None = None) -> None:
        """`around`: the scope of the task, which an inline template sees as well."""
        types = [kind for kind in TEMPLATE_TYPES if kind in template]
        if len(types) != 1:
            actual = f"it is {' and '.join(types)}" if types else "it does nothing"
            self.add(path, "template", f"{actual}: it must have exactly one of {', '.join(TEMPLATE_TYPES[:6])}.")
        for direction in ("inputs", "outputs"):
            arguments.unique(self.findings, f"{path}.{direction}", template.get(direction) or {})
        metrics.check(self.findings, f"{path}.metrics", template.get("metrics") or {})
        arguments.outputs(self.findings, path, template.get("outputs") or {}, types[0] if types else "")
        self.retry(f"{path}.retryStrategy", template.get("retryStrategy"))
        if "memoize" in template and not NAME.fullmatch(tag_rules.TAG.sub("x", str(template["memoize"].get("key")))):
            self.add(f"{path}.memoize.key", "name", "the key must be letters, digits and dashes.")
        inputs, outputs = tag_scope.declared("inputs", template), tag_scope.declared("outputs", template)
        if "dag" in template:
            self.dag(path, template, inputs)
        elif "steps" in template:
            self.steps(path, template, inputs)
        else:
            self.only(path, template, "dag or steps", "parallelism")
            if "suspend" in template:
                self.only(path, template, "a pod", "timeout")
            if "resource" in template:
                objects.resource(self.findings, f"{path}.resource", template["resource"], self.workflow_name)
            self.pod(path, template)
            own = {f"{name}.path" for name in inputs | outputs}
            here = Names({*inputs, *outputs, *own, "outputs.result", "outputs.exitCode", "tasks.name", "steps.name"})
            own_scope = Scope((here, *self.known(template)))
            if around:
                own_scope = replace(around, layers=(here, *around.layers))
            self.tags(path, template, own_scope)

    def pod(self, path: str, template: Manifest) -> None:
        """Rules for pods; `templateDefaults` and the spec supply what the template lacks."""
        defaults = self.spec.get("templateDefaults") or {}
        given = {**defaults, **template}
        for kind in ("container", "script", "containerSet"):
            if kind not in template:
                continue
            where = f"{path}.{kind}"
            containers = [*pods.named(where, template[kind], "containers")]
            if kind != "containerSet":
                containers = [(where, {**(defaults.get(kind) or {}), **template[kind]})]
            if "activeDeadlineSeconds" not in given and "timeout" not in given:
                why = "an attempt that hangs is never tried again: give a number of seconds."
                self.warn(f"{path}.activeDeadlineSeconds", "deadline", why)
            containers = [*containers, *pods.named(path, given, "initContainers", "sidecars")]
            spec = {key: given.get(key) or self.spec.get(key) for key in ("securityContext", "hostNetwork")}
            pods.check(self.findings, path, {**spec, "volumes": given.get("volumes") or []}, containers)

    def dag(self, path: str, template: Manifest, inputs: set[str]) -> None:
        at, listed = f"{path}.dag", template["dag"].get("tasks") or []
        tasks = {str(task.get("name")): task for task in listed}
        self.unique(f"{at}.tasks", names(listed))
        self.only(path, template, "a pod", "activeDeadlineSeconds", "timeout")
        if not listed:
            self.add(f"{at}.tasks", "template", "it is empty: a DAG must have a task.")
        before = graph.check(self.findings, at, template["dag"], tasks)
        if before is None:
            return
        nodes, finished = Nodes("tasks", tasks, self.templates), graph.finished(before)
        layers = (Names(inputs), *self.known(template))
        for name, task in tasks.items():
            for parameter in (task.get("arguments") or {}).get("parameters") or []:
                if str(parameter.get("value", "")).startswith("{{tasks.name}}"):
                    why = "Argo takes what begins with {{tasks.name}} for the output of a task: use it in the template."
                    self.add(f"{at}.tasks[{name}].arguments[{parameter.get('name')}]", "tag", why)
            items = (Items(task),) if _loops(task) else ()
            self.task(f"{at}.tasks[{name}]", name, task, Scope((*layers, *items), nodes, finished(name)))
        rest = {key: value for key, value in template.items() if key != "dag"}
        nodes = Nodes("tasks", tasks, self.templates, [name for name, task in tasks.items() if "hooks" not in task])
        self.tags(path, rest, Scope(layers, nodes, lambda name: True))

    def steps(self, path: str, template: Manifest, inputs: set[str]) -> None:
        listed = [(number, step) for number, group in enumerate(template["steps"]) for step in group]
        everything = {str(step.get("name")): step for _, step in listed}
        group_of = {str(step.get("name")): number for number, step in listed}
        self.unique(f"{path}.steps", names(step for _, step in listed))
        self.only(path, template, "a pod", "activeDeadlineSeconds", "timeout")
        nodes, own = Nodes("steps", everything, self.templates), Names(inputs)
        items: tuple[Names, ...] = ()  # Argo keeps the items of earlier steps in scope
        for number, step in listed:
            name = str(step.get("name"))
            items += (Items(step),) if _loops(step) else ()
            layers = (own, *self.known(template, step), *items)
            scope = Scope(layers, nodes, lambda other, number=number: group_of[other] < number)
            self.task(f"{path}.steps[{number}][{name}]", name, step, scope)
        rest = {key: value for key, value in template.items() if key != "steps"}
        self.tags(path, rest, Scope((own, *self.known(template)), nodes, lambda name: True))

    def only(self, path: str, template: Manifest, kind: str, *fields: str) -> None:
        """`fields` are only allowed in another type of template."""
        for field in filter(template.__contains__, fields):
            why = f"only a template with {kind} may have it: put it there, or on the whole workflow."
            self.add(f"{path}.{field}", "template", why)

    def task(self, path: str, name: str, task: Manifest, scope: Scope) -> None:
        given = task.get("arguments") or {}
        self.reference(path, task)
        if task.get("template"):
            self.target(path, str(task["template"]), given)
        elif inline := task.get("inline"):
            stored = path.startswith(tuple(self.others))  # its own scope is used there
            self.template(f"{path}.inline", inline, None if stored else scope)
            arguments.supplied(self.findings, f"{path}.arguments", "the inline template", inline, given, loose=True)
        else:
            self.add(path, "template", "it names no template: give template, templateRef or inline.")
        arguments.check(self.findings, f"{path}.arguments", given)
        if len(over := [key for key in LOOPS if task.get(key) or (key in task and key == LOOPS[2])]) > 1:
            self.add(path, "loop", f"it has {' and '.join(over)}: one of them is all that Argo takes.")
        if self.kind == "CronWorkflow" and not pods.shell(self.templates.get(str(task.get("template"))) or {}):
            self.calls(f"{path}.arguments", given)
        hooks = dict(task.get("hooks") or {})
        if task.get("onExit"):
            hooks["onExit"] = {"template": task["onExit"]}
        self.hooks(f"{path}.hooks", hooks)
        when = str(task.get("when") or "")
        if METRIC.search(when) and re.search(r"[<>]", when) and "{{=" not in when:
            way = "{{=asFloat(...) > ...}}"
            why = f"it compares an output as text, and fails for 5e-05 or NaN: write {way}."
            self.warn(f"{path}.when", "when", why)
        plain = {key: value for key, value in task.items() if key not in ("hooks", "inline", "depends")}
        self.tags(path, plain, scope)
        self.tags(f"{path}.hooks", hooks, replace(scope, done=lambda other: other == name or scope.done(other)))
        self.early(path, name, task)

    def early(self, path: str, name: str, task: Manifest) -> None:
        """Tags unknown to Argo's check of a step, although set at run time. Source: resolveAllVariables."""
        exits = "onExit" in task or "exit" in (task.get("hooks") or {})
        for where, text in tag_scope.texts(task, path):
            for tag in map(str.strip, tag_rules.TAG.findall(text)):
                why = ""
                if tag.startswith("pod."):
                    why = "Argo knows it only in a template that is called by its name: put it with the others."
                elif (
                    not exits and ".hooks" in where and tag.startswith((f"steps.{name}.outputs.", f"steps.{name}.exit"))
                ):
                    why = f"Argo knows it only beside an exit hook: write {{{{={tag}}}}}."
                if why:
                    self.add(where, "tag", f"{{{{{tag}}}}}: {why}")

    def hooks(self, path: str, hooks: Manifest) -> None:
        for name, hook in hooks.items():
            if name not in ("exit", "onExit") and not hook.get("expression"):
                why = "it has no expression, and Argo refuses it: say when it runs, or call it exit."
                self.add(f"{path}[{name}].expression", "hook", why)
            self.reference(f"{path}[{name}]", hook)
            self.target(f"{path}[{name}]", str(hook.get("template")), hook.get("arguments") or {})

    def reference(self, path: str, caller: Manifest) -> None:
        if "templateRef" in caller and caller.get("template") != resolve.called(caller["templateRef"]):
            self.add(path, "template", "it has a template beside its templateRef: take one of them out.")

    def target(self, path: str, name: str, given: Manifest, loose: bool = False) -> None:
        """A template must exist and get its inputs; `loose`: extra arguments are allowed."""
        template, (scope, _, short) = self.templates.get(name), name.rpartition("/")
        of = f" of {scope.partition('/')[2]}" if scope else ""
        if template is None:
            there = self.stored.get(scope) if scope else self.templates
            if there is not None and not (scope and "{{" in short):
                known = [key for key in there if "/" not in key]  # not those of other objects
                self.add(path, "template", f'"{short}" is no template{of}.{self.findings.hint(short, known)}')
            return
        brought = loose and self.kind in REUSED  # the workflow that uses the template may supply it
        where, called = f"{path}.arguments", f"template {short}{of}"
        arguments.supplied(self.findings, where, called, template, given, loose, brought)
        arguments.timeout(self.findings, where, template, given, self.spec.get("arguments") or {})

    def tags(self, path: str, value: Any, scope: Scope) -> None:
        tag_rules.check(self.findings, path, value, scope, whole=self.kind not in REUSED)


def _named(spec: Manifest) -> dict[str, Manifest]:
    return {str(template["name"]): template for template in spec.get("templates") or [] if template.get("name")}


def _loops(task: Manifest) -> bool:
    return any(key in task for key in LOOPS)
