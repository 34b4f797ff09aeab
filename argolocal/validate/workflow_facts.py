"""Compute facts about a workflow for the rules: its templates, the tags that have a value, and the
values that are used."""

import re
from functools import cached_property
from typing import Any

from argolocal.language.substitute import TAG
from argolocal.manifest import object_labels as argo_names
from argolocal.manifest import resolve, shape, tag_scope
from argolocal.manifest.tag_scope import TagSet, names
from argolocal.manifest.types import Manifest
from argolocal.validate.findings import Findings
from argolocal.validate.global_outputs import GlobalOutputs

# kinds that do not require an entrypoint
TEMPLATE_KINDS = ("WorkflowTemplate", "ClusterWorkflowTemplate")
PARAMETER_TAG = re.compile(r"workflow\.parameters\.([-\w]+)")


class WorkflowFacts:
    """Facts about one manifest and the objects that it refers to."""

    def __init__(self, manifest: Manifest, findings: Findings, find: resolve.Find) -> None:
        self.manifest = manifest
        self.findings = findings
        self.find = find
        self.add = findings.add
        self.warn = findings.warn
        # path of a referenced object's spec, as findings show it → the object
        self.other_objects: dict[str, Manifest] = {}
        self.kind = str(manifest.get("kind"))
        self.root = "spec.workflowSpec" if self.kind == "CronWorkflow" else "spec"
        spec = manifest.get("spec") or {}
        self.spec: dict[str, Any] = (
            (spec.get("workflowSpec") or {}) if self.kind == "CronWorkflow" else spec
        )

    @cached_property
    def stored_templates(self) -> dict[str, dict[str, Manifest] | None]:
        """Maps the scope of each referenced object to the object's templates, or to None if the
        object is missing. The scope is the prefix of the templates' full names."""
        templates: dict[str, dict[str, Manifest] | None] = {}
        references: list[tuple[str, Manifest, str]] = []
        resolve.qualify_names(self.spec, "", self.root, references)

        while references:
            scope, reference, _ = references.pop()
            if scope not in templates:
                other = resolve.find_template(reference, self.find)
                spec = {}
                templates[scope] = None

                if other and not any(shape.shape_errors(other)):
                    # these errors are reported for `other` itself
                    self.other_objects[self.object_path(scope)] = other
                    spec = shape.without_nulls(other.get("spec") or {})
                    templates[scope] = _by_name(spec)

                resolve.qualify_names(spec, scope, f"{scope}.spec", references)

        return templates

    def object_path(self, scope: str) -> str:
        """Return the path of a referenced object's spec, as findings show it. `scope`: the prefix
        of the full names of its templates."""
        return f"{self.root}.templateRef[{scope.partition('/')[2]}]"

    @cached_property
    def templates(self) -> dict[str, Manifest]:
        """Maps the names that callers use to templates."""
        # call `stored_templates` first, because it also writes full template names into callers
        stored = self.stored_templates.items()
        return _by_name(self.spec) | {
            f"{scope}/{name}": template
            for scope, templates in stored
            for name, template in (templates or {}).items()
        }

    @cached_property
    def workflow_tags(self) -> TagSet:
        return TagSet(tag_scope.workflow_tags(self.spec, self.workflow_metadata))

    @property
    def workflow_metadata(self) -> Manifest:
        """Labels and annotations of the workflow that are not in its spec. Source:
        ConvertCronWorkflowToWorkflow."""
        metadata = self.manifest.get("metadata") or {}

        if self.kind in TEMPLATE_KINDS:
            # a CronWorkflow may use the template; then the tag for the scheduled time has a value
            return {
                **metadata,
                "annotations": {
                    argo_names.SCHEDULED_TIME: "",
                    **(metadata.get("annotations") or {}),
                },
            }

        if self.kind != "CronWorkflow":
            return metadata

        own_metadata = (self.manifest.get("spec") or {}).get("workflowMetadata") or {}

        return {
            "labels": {argo_names.CRON_WORKFLOW: "", **(own_metadata.get("labels") or {})},
            "annotations": {
                argo_names.SCHEDULED_TIME: "",
                **(own_metadata.get("annotations") or {}),
            },
        }

    @cached_property
    def global_outputs(self) -> GlobalOutputs:
        first_templates = [str(self.spec.get(field)) for field in ("entrypoint", "onExit")]
        return GlobalOutputs(self.templates, [*first_templates, *names(self.spec.get("templates"))])

    @cached_property
    def running_ids(self) -> set[int]:
        """Ids of the templates that run before the workflow completes, so they cannot read
        workflow.failures."""
        return {
            id(template)
            for template in self.called_templates([str(self.spec.get("entrypoint"))]).values()
        }

    def called_templates(self, queue: list[str], hooks: bool = True) -> dict[str, Manifest]:
        """Return the templates whose names are in `queue`, and all templates that they call
        directly or indirectly. With `hooks`, include the templates that the hooks of these
        templates call."""
        templates: dict[str, Manifest] = {}

        while queue:
            name = queue.pop()
            if name in self.templates and name not in templates:
                templates[name] = self.templates[name]
                callers = resolve.callers({"templates": [templates[name]]}, "")
                queue += [
                    str(caller.get("template"))
                    for caller, path in callers
                    if hooks or ".hooks." not in path
                ]

        return templates

    @property
    def template_defaults(self) -> Manifest:
        return self.spec.get("templateDefaults") or {}

    def inputs_without_argument(self, template: Manifest) -> set[str]:
        """Return the names of a template's input parameters that at least one caller in this
        workflow does not pass."""
        return self.unpassed_inputs.get(id(template), set())

    @cached_property
    def unpassed_inputs(self) -> dict[int, set[str]]:
        """Maps the id of a template to the input parameters that at least one of its callers does
        not pass."""
        roots = [
            str(self.spec.get(field)) for field in ("entrypoint", "onExit") if self.spec.get(field)
        ]
        workflow_arguments = self.spec.get("arguments") or {}
        calls = [(self.templates.get(name), workflow_arguments) for name in roots]
        hooks = [*(self.spec.get("hooks") or {}).values()]
        roots += [str(hook.get("template")) for hook in hooks]

        if self.kind in TEMPLATE_KINDS:
            roots += names(self.spec.get("templates"))

        reached = self.called_templates(roots)
        callers = [
            *hooks,
            *(caller for caller, _ in resolve.callers({"templates": [*reached.values()]}, "")),
        ]
        for caller in callers:
            template = caller.get("inline") or self.templates.get(str(caller.get("template")))
            calls.append((template, caller.get("arguments") or {}))
            if caller.get("onExit"):
                calls.append((self.templates.get(str(caller["onExit"])), {}))

        unpassed_inputs: dict[int, set[str]] = {}
        for template, passed_arguments in calls:
            if template is not None:
                input_names = names((template.get("inputs") or {}).get("parameters"))
                unpassed_names = set(input_names).difference(
                    names(passed_arguments.get("parameters"))
                )
                unpassed_inputs.setdefault(id(template), set()).update(unpassed_names)

        return unpassed_inputs

    @cached_property
    def tags_while_running(self) -> TagSet:
        return TagSet(self.workflow_tags.names - {"workflow.failures", "=workflow.failures"})

    def global_tags(
        self, template: Manifest, step: Manifest | None = None
    ) -> tuple[TagSet, TagSet]:
        """Return the tags `workflow.*` and the tags of global outputs that are known in a template
        or, if given, in its step `step`."""
        if id(template) in self.running_ids:
            workflow_tags = self.tags_while_running
        else:
            workflow_tags = self.workflow_tags
        return workflow_tags, self.global_outputs.tags_at(template if step is None else step)

    @cached_property
    def used_parameters(self) -> set[str]:
        """Names of the workflow's parameters that a template reads."""
        used_names = set[str]()
        for _, text in tag_scope.find_strings([*self.templates.values()], ""):
            if "workflow.parameters." in text:
                used_names.update(
                    {name for tag in TAG.findall(text) for name in PARAMETER_TAG.findall(tag)}
                )
        for field in ("entrypoint", "onExit"):
            template = self.templates.get(str(self.spec.get(field))) or {}
            used_names.update(set(names((template.get("inputs") or {}).get("parameters"))))
        return used_names


def _by_name(spec: Manifest) -> dict[str, Manifest]:
    return {
        str(template["name"]): template
        for template in spec.get("templates") or []
        if template.get("name")
    }


def reads_input(template: Manifest, name: str) -> bool:
    """Return True if a field of the template other than `inputs` may read the input parameter
    `name`."""
    body = {key: value for key, value in template.items() if key != "inputs"}
    texts_with_inputs = [
        text for _, text in tag_scope.find_strings(body, "") if "inputs.parameters" in text
    ]
    return any(
        name in text or "inputs.parameters}}" in text.replace(" ", "") for text in texts_with_inputs
    )
