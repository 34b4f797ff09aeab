"""Compute facts about a workflow that the rules need: its templates, the tags that have a value,
and the parameters and inputs that are used."""

import re
from functools import cached_property
from typing import Any

from argolocal.language.substitute import TAG
from argolocal.manifest import object_labels as argo_names
from argolocal.manifest import resolve, shape, tag_scope
from argolocal.manifest.tag_scope import TagSet, list_names
from argolocal.manifest.types import Manifest
from argolocal.validate.findings import Findings
from argolocal.validate.global_outputs import GlobalOutputs

# kinds that do not require an entrypoint
WORKFLOW_TEMPLATE_KINDS = ("WorkflowTemplate", "ClusterWorkflowTemplate")
# maximum length of generateName; the API server appends five characters
MAX_PREFIX_LENGTH = 58
PARAMETER_TAG = re.compile(r"workflow\.parameters\.([-\w]+)")


class WorkflowFacts:
    """Facts about one manifest and the objects that it refers to."""

    def __init__(self, manifest: Manifest, findings: Findings, find_object: resolve.Find) -> None:
        self.manifest = manifest
        self.findings = findings
        self.find = find_object
        self.add = findings.add
        self.warn = findings.warn
        # path of a referenced object's spec, as findings show it → the referenced object
        self.other_objects: dict[str, Manifest] = {}
        self.kind = str(manifest.get("kind"))
        self.root = "spec.workflowSpec" if self.kind == "CronWorkflow" else "spec"
        spec = manifest.get("spec") or {}
        self.spec: dict[str, Any] = (
            (spec.get("workflowSpec") or {}) if self.kind == "CronWorkflow" else spec
        )

    @cached_property
    def workflow_name(self) -> str:
        """Example of a name for workflows of this manifest, with the correct length."""
        metadata = self.manifest.get("metadata") or {}
        if self.kind == "Workflow":
            return (
                metadata.get("name")
                or f"{str(metadata.get('generateName', ''))[:MAX_PREFIX_LENGTH]}xxxxx"
            )
        return f"{metadata.get('name', '')}-1700000000"

    @cached_property
    def stored_templates(self) -> dict[str, dict[str, Manifest] | None]:
        """Prefix of a referenced object (see `resolve.make_template_prefix`) → the object's
        templates by name, or None if the object does not exist."""
        templates_by_prefix: dict[str, dict[str, Manifest] | None] = {}
        references: list[tuple[str, Manifest, str]] = []
        resolve.qualify_names(self.spec, "", self.root, references)

        while references:
            name_prefix, reference, _ = references.pop()
            if name_prefix not in templates_by_prefix:
                template_object = resolve.find_template(reference, self.find)
                spec = {}
                templates_by_prefix[name_prefix] = None

                if template_object and not any(shape.find_shape_errors(template_object)):
                    # the errors of another object are reported when the other object is checked
                    self.other_objects[self.object_path(name_prefix)] = template_object
                    spec = shape.remove_nulls(template_object.get("spec") or {})
                    templates_by_prefix[name_prefix] = _index_templates(spec)

                resolve.qualify_names(spec, name_prefix, f"{name_prefix}.spec", references)

        return templates_by_prefix

    def object_path(self, name_prefix: str) -> str:
        """Return the path of a referenced object's spec, as findings show it. `name_prefix`: the
        prefix of the full names of the object's templates."""
        return f"{self.root}.templateRef[{name_prefix.partition('/')[2]}]"

    @cached_property
    def templates(self) -> dict[str, Manifest]:
        """Name that callers use → template."""
        # Read `stored_templates` first, because it also replaces the template names in callers by
        # full names.
        stored_items = self.stored_templates.items()
        return _index_templates(self.spec) | {
            f"{name_prefix}/{name}": template
            for name_prefix, templates in stored_items
            for name, template in (templates or {}).items()
        }

    @cached_property
    def workflow_tags(self) -> TagSet:
        """Tags workflow.* that have a value in all templates."""
        return TagSet(tag_scope.list_workflow_tags(self.spec, self.workflow_metadata))

    @property
    def workflow_metadata(self) -> Manifest:
        """Labels and annotations of the workflow that will be created from this manifest, without
        the labels and annotations in its spec. Source: ConvertCronWorkflowToWorkflow."""
        metadata = self.manifest.get("metadata") or {}

        if self.kind in WORKFLOW_TEMPLATE_KINDS:
            # A CronWorkflow may use the template. If a CronWorkflow uses the template, the
            # scheduled time has a value.
            return {
                **metadata,
                "annotations": {
                    argo_names.SCHEDULED_TIME_ANNOTATION: "",
                    **(metadata.get("annotations") or {}),
                },
            }

        if self.kind != "CronWorkflow":
            return metadata

        own_metadata = (self.manifest.get("spec") or {}).get("workflowMetadata") or {}

        return {
            "labels": {argo_names.CRON_WORKFLOW_LABEL: "", **(own_metadata.get("labels") or {})},
            "annotations": {
                argo_names.SCHEDULED_TIME_ANNOTATION: "",
                **(own_metadata.get("annotations") or {}),
            },
        }

    @cached_property
    def global_outputs(self) -> GlobalOutputs:
        first_templates = [str(self.spec.get(field)) for field in ("entrypoint", "onExit")]
        return GlobalOutputs(
            self.templates, [*first_templates, *list_names(self.spec.get("templates"))]
        )

    @cached_property
    def ids_before_exit(self) -> set[int]:
        """Ids (`id(template)`) of the templates that run before the exit handler, so that
        workflow.failures does not have a value in these templates."""
        return {
            id(template)
            for template in self.find_called_templates([str(self.spec.get("entrypoint"))]).values()
        }

    def find_called_templates(
        self, name_queue: list[str], includes_hooks: bool = True
    ) -> dict[str, Manifest]:
        """Return the templates with the names in `name_queue`, and all templates that they call
        directly or indirectly. The value True of `includes_hooks` also follows the calls of hooks.
        The list `name_queue` is empty after the call."""
        templates: dict[str, Manifest] = {}

        while name_queue:
            template_name = name_queue.pop()
            if template_name in self.templates and template_name not in templates:
                templates[template_name] = self.templates[template_name]
                callers = resolve.list_callers({"templates": [templates[template_name]]}, "")
                name_queue += [
                    str(caller.get("template"))
                    for caller, path in callers
                    if includes_hooks or ".hooks." not in path
                ]

        return templates

    @property
    def template_defaults(self) -> Manifest:
        return self.spec.get("templateDefaults") or {}

    def find_unpassed_inputs(self, called_template: Manifest) -> set[str]:
        """Return the names of the input parameters that at least one caller of a template does not
        pass."""
        return self.unpassed_inputs.get(id(called_template), set())

    @cached_property
    def unpassed_inputs(self) -> dict[int, set[str]]:
        """Id of a template → names of the input parameters that at least one of its callers does
        not pass."""
        root_names = [
            str(self.spec.get(field)) for field in ("entrypoint", "onExit") if self.spec.get(field)
        ]
        workflow_arguments = self.spec.get("arguments") or {}
        template_arguments = [
            (self.templates.get(root_name), workflow_arguments) for root_name in root_names
        ]
        hooks = [*(self.spec.get("hooks") or {}).values()]
        root_names += [str(hook.get("template")) for hook in hooks]

        if self.kind in WORKFLOW_TEMPLATE_KINDS:
            root_names += list_names(self.spec.get("templates"))

        reached_templates = self.find_called_templates(root_names)
        callers = [
            *hooks,
            *(
                caller
                for caller, _ in resolve.list_callers(
                    {"templates": [*reached_templates.values()]}, ""
                )
            ),
        ]
        for caller in callers:
            template = caller.get("inline") or self.templates.get(str(caller.get("template")))
            template_arguments.append((template, caller.get("arguments") or {}))
            if caller.get("onExit"):
                template_arguments.append((self.templates.get(str(caller["onExit"])), {}))

        unpassed_inputs: dict[int, set[str]] = {}
        for template, passed_arguments in template_arguments:
            if template is not None:
                input_names = list_names((template.get("inputs") or {}).get("parameters"))
                unpassed_names = set(input_names).difference(
                    list_names(passed_arguments.get("parameters"))
                )
                unpassed_inputs.setdefault(id(template), set()).update(unpassed_names)

        return unpassed_inputs

    @cached_property
    def tags_while_running(self) -> TagSet:
        return TagSet(self.workflow_tags.names - {"workflow.failures", "=workflow.failures"})

    def global_tags(
        self, template: Manifest, step: Manifest | None = None
    ) -> tuple[TagSet, TagSet]:
        """Return the tags workflow.* that have a value in a template, and the global outputs that
        are known in the template or, with `step`, in this step of the template."""
        if id(template) in self.ids_before_exit:
            workflow_tags = self.tags_while_running
        else:
            workflow_tags = self.workflow_tags
        return workflow_tags, self.global_outputs.list_known_tags(
            template if step is None else step
        )

    @cached_property
    def used_parameters(self) -> set[str]:
        """Names of the workflow's parameters that a template reads."""
        used_names = set[str]()
        for _, text in tag_scope.find_strings([*self.templates.values()], ""):
            if "workflow.parameters." in text:
                used_names.update(
                    {
                        parameter_name
                        for tag in TAG.findall(text)
                        for parameter_name in PARAMETER_TAG.findall(tag)
                    }
                )
        for field in ("entrypoint", "onExit"):
            template = self.templates.get(str(self.spec.get(field))) or {}
            used_names.update(set(list_names((template.get("inputs") or {}).get("parameters"))))
        return used_names


def _index_templates(spec: Manifest) -> dict[str, Manifest]:
    return {
        str(template["name"]): template
        for template in spec.get("templates") or []
        if template.get("name")
    }


def reads_input(template: Manifest, input_name: str) -> bool:
    """Return True if a field of the template other than `inputs` may read the input parameter
    `input_name`."""
    template_fields = {key: value for key, value in template.items() if key != "inputs"}
    texts_with_inputs = [
        text
        for _, text in tag_scope.find_strings(template_fields, "")
        if "inputs.parameters" in text
    ]
    return any(
        input_name in text or "inputs.parameters}}" in text.replace(" ", "")
        for text in texts_with_inputs
    )
