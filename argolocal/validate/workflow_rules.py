"""Check a Workflow, WorkflowTemplate or CronWorkflow: its names, deadlines, templates and
arguments."""

from argolocal.errors import ConfigError
from argolocal.manifest import cron as crontab
from argolocal.manifest import resolve, shape, tag_scope
from argolocal.manifest.tag_scope import TagScope, TagSet, list_names
from argolocal.manifest.types import Manifest
from argolocal.validate import (
    applied_objects,
    arguments,
    spec_fields,
    tag_rules,
    unheeded,
)
from argolocal.validate.tag_rules import TextUse
from argolocal.validate.template_rules import TemplateRules
from argolocal.validate.workflow_facts import MAX_PREFIX_LENGTH, WORKFLOW_TEMPLATE_KINDS

WORKFLOW_KINDS = ("Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
POD_GC_STRATEGIES = ("OnPodCompletion", "OnPodSuccess", "OnWorkflowCompletion", "OnWorkflowSuccess")

# the name of a CronWorkflow must be shorter, because its workflows are named NAME-UNIXTIME
MAX_NAME_LENGTHS = {"CronWorkflow": 52}


class WorkflowRules(TemplateRules):
    """The rules for one manifest. The method `run` of WorkflowRules adds the problems that it finds
    to `findings`."""

    def run(self) -> None:
        """Check the whole manifest."""
        self.check_metadata()
        if self.kind == "CronWorkflow":
            self.check_cron(self.manifest.get("spec") or {})

        tag_rules.find_tagged_texts(
            self.findings,
            self.root,
            {
                spec_field: value
                for spec_field, value in self.spec.items()
                if spec_field != "templates"
            },
        )
        if self.spec.get("workflowTemplateRef") and (
            self.kind in WORKFLOW_TEMPLATE_KINDS or not self.merge_template_ref()
        ):
            return

        workflow_arguments = self.spec.get("arguments") or {}
        arguments.check_arguments(
            self.findings, f"{self.root}.arguments", workflow_arguments, allows_missing_values=True
        )
        self.check_workflow_tags(workflow_arguments)

        self.check_entry_templates(workflow_arguments)
        self.check_hooks(f"{self.root}.hooks", self.spec.get("hooks") or {})
        self.check_settings()
        self.check_templates()
        unheeded.check_unheeded(
            self.findings, f"{self.root}.templates", self.templates, self.spec.get("entrypoint")
        )

    def check_entry_templates(self, workflow_arguments: Manifest) -> None:
        """Check the calls of the entrypoint and of the exit handler."""
        for field in ("entrypoint", "onExit"):
            name = self.spec.get(field)
            if name:
                self.check_call(
                    f"{self.root}.{field}",
                    str(name),
                    workflow_arguments,
                    allows_extra_arguments=True,
                )
            elif field == "entrypoint" and self.kind not in WORKFLOW_TEMPLATE_KINDS:
                message = "the entrypoint is missing: name the template that runs first."
                self.add(f"{self.root}.entrypoint", "entrypoint", message)

    def check_settings(self) -> None:
        """Check the deadline, podGC and the retry strategies of the spec."""
        if "activeDeadlineSeconds" not in self.spec:
            message = "a workflow that hangs would never end: give a number of seconds."
            self.warn(f"{self.root}.activeDeadlineSeconds", "deadline", message)

        strategy = (self.spec.get("podGC") or {}).get("strategy") or POD_GC_STRATEGIES[0]
        if strategy not in POD_GC_STRATEGIES:
            hint = self.findings.hint(str(strategy), POD_GC_STRATEGIES)
            self.add(
                f"{self.root}.podGC.strategy",
                "shape",
                f'the strategy "{strategy}" does not exist.{hint}',
            )

        for path_suffix, field_owner in (
            ("", self.spec),
            (".templateDefaults", self.spec.get("templateDefaults") or {}),
        ):
            self.check_retry(
                f"{self.root}{path_suffix}.retryStrategy", field_owner.get("retryStrategy")
            )

    def check_templates(self) -> None:
        """Check all templates of the manifest, and the templates of other objects that they
        call."""
        self.check_names(f"{self.root}.templates", list_names(self.spec.get("templates")))
        for template in self.spec.get("templates") or []:
            self.check_template(f"{self.root}.templates[{template.get('name')}]", template)

        for name, template in self.find_called_templates(
            list_names(self.spec.get("templates")), includes_hooks=False
        ).items():
            name_prefix = name.rpartition("/")[0]
            if name_prefix:
                self.check_template(
                    f"{self.object_path(name_prefix)}.templates[{template.get('name')}]", template
                )

    def check_workflow_tags(self, workflow_arguments: Manifest) -> None:
        """Check the tags in the fields of the spec other than `templates`. Argo's validation reads
        the fields of a spec other than `templates` only after they have been inserted into
        templates."""
        known_tags = (
            self.workflow_tags.names | self.global_outputs.all_names.names | {"workflow.failures"}
        )
        scope = TagScope((TagSet(known_tags),))
        spec_scopes = spec_fields.SpecScopes(self, known_tags)

        for parameter in workflow_arguments.get("parameters") or []:
            text_path = f"{self.root}.arguments.parameters[{parameter.get('name')}].value"
            text_use = TextUse(
                is_validated=False, is_used=parameter.get("name") in self.used_parameters
            )
            self.check_tags(
                text_path, _join_workflow_tags(str(parameter.get("value", ""))), scope, text_use
            )

        for spec_field, value in self.spec.items():
            if spec_field != "templates":
                for text_path, text in tag_scope.find_strings(value, f"{self.root}.{spec_field}"):
                    spec_fields.check_tags(
                        self, spec_field, text_path, text, spec_scopes.scope(spec_field)
                    )

    def merge_template_ref(self) -> bool:
        """Replace `self.spec` by the spec of the WorkflowTemplate, overridden by the workflow's own
        spec. Return False if the WorkflowTemplate does not exist or cannot be merged."""
        base_template = resolve.find_template(self.spec["workflowTemplateRef"], self.find)
        if not base_template:
            return False
        self.other_objects[self.root] = base_template
        try:
            self.spec = shape.remove_nulls(resolve.merge_template_ref(self.spec, self.find))
        except ConfigError as error:
            self.add(f"{self.root}.workflowTemplateRef", "template", str(error))
            return False
        return True

    def check_metadata(self) -> None:
        """Check the kind, name and labels of the manifest."""
        metadata = self.manifest.get("metadata") or {}
        name = str(metadata.get("name") or "")
        generated_prefix = str(metadata.get("generateName") or "")
        max_length = MAX_NAME_LENGTHS.get(self.kind, 63)

        if self.kind not in WORKFLOW_KINDS:
            hint = self.findings.suggest(self.kind, WORKFLOW_KINDS)
            self.add(
                "kind", "kind", f'"{self.kind}" must be one of {", ".join(WORKFLOW_KINDS)}.{hint}'
            )

        if not name and not generated_prefix:
            self.add(
                "metadata.name", "name", "the name is missing: give a name, or a generateName."
            )
        elif len(name) > max_length or not applied_objects.DNS_NAME.fullmatch(
            name or generated_prefix + "x"
        ):
            name_rule = f"lower-case letters, digits and dashes, at most {max_length} characters"
            field_path = "metadata." + ("name" if name else "generateName")
            self.add(field_path, "name", f'"{name or generated_prefix}" must be {name_rule}.')
        elif not name and len(generated_prefix) > MAX_PREFIX_LENGTH:
            message = f'"{generated_prefix}" is cut to {MAX_PREFIX_LENGTH} characters: shorten it.'
            self.warn("metadata.generateName", "name", message)

        applied_objects.check_labels(self.findings, "metadata.labels", metadata.get("labels") or {})

    def check_cron(self, spec: Manifest) -> None:
        """Check the schedules, time zone and arguments of a CronWorkflow."""
        if not spec.get("schedules"):
            if spec.get("schedule"):
                effect_text = "Argo 4 removed `schedule`"
            else:
                effect_text = "the workflow never runs"

            self.add(
                "spec.schedules",
                "cron",
                f"the list is missing ({effect_text}): give a list of cron expressions.",
            )

        if isinstance(spec.get("schedules"), list):
            schedules = spec["schedules"]
        else:
            schedules = []

        for schedule in [*schedules, *([spec["schedule"]] if spec.get("schedule") else [])]:
            problem = crontab.find_schedule_error(str(schedule))
            if problem:
                self.add("spec.schedules", "cron", f'"{schedule}" is not a schedule: {problem}.')

        problem = crontab.find_timezone_error(str(spec.get("timezone") or ""))
        if problem:
            self.add(
                "spec.timezone",
                "cron",
                f'"{spec["timezone"]}" is not a time zone: {problem.removesuffix(".")}'
                + ("" if problem.endswith("?") else "."),
            )

        self.warn_shell_calls(f"{self.root}.arguments", self.spec.get("arguments") or {})


def _join_workflow_tags(text: str) -> str:
    """Return a text that consists of the tags workflow.* in `text`."""
    tags = [tag for tag in tag_rules.TAG.findall(text) if tag.strip().startswith("workflow.")]
    return " ".join(f"{{{{{tag}}}}}" for tag in tags)
