"""Check a Workflow, WorkflowTemplate or CronWorkflow: its names, deadlines, templates and
arguments."""

import re
from collections import Counter
from dataclasses import replace
from functools import cached_property

from argolocal.errors import ConfigError
from argolocal.manifest import cron as crontab
from argolocal.manifest import resolve, shape, tag_scope
from argolocal.manifest.allowed_values import TEMPLATE_TYPES
from argolocal.manifest.loops import LOOP_FIELDS
from argolocal.manifest.tag_scope import LoopItemTags, NodeTags, TagScope, TagSet, list_names
from argolocal.manifest.types import Manifest
from argolocal.validate import (
    applied_objects,
    arguments,
    graph,
    pods,
    prometheus_metrics,
    spec_fields,
    tag_rules,
    unheeded,
)
from argolocal.validate.tag_rules import TextUse
from argolocal.validate.workflow_facts import WORKFLOW_TEMPLATE_KINDS, WorkflowFacts, reads_input

WORKFLOW_KINDS = ("Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
POD_GC_STRATEGIES = ("OnPodCompletion", "OnPodSuccess", "OnWorkflowCompletion", "OnWorkflowSuccess")

TEMPLATE_NAME = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
MAX_PREFIX_LENGTH = 58  # maximum length of generateName; the API server appends five characters
# the name of a CronWorkflow must be shorter, because its workflows are named NAME-UNIXTIME
MAX_NAME_LENGTHS = {"CronWorkflow": 52}
OUTPUT_TAG = re.compile(
    r"\{\{\s*(?:(?:tasks|steps)\.[^{}]*\.outputs\.|workflow\.outputs\.parameters\.)"
)


# types of templates that run a pod
POD_TYPES = ("container", "script", "containerSet", "resource", "data")
NODE_TAGS = ("outputs.result", "outputs.exitCode", "tasks.name", "steps.name")
# fields that have an effect in a DAG or steps template; all other fields apply to pods only
FIELDS_IN_USE = (
    "name",
    "outputs",
    "memoize",
    "synchronization",
    "metrics",
    "retryStrategy",
    "parallelism",
)
READ_TEXT_USE = TextUse()


class WorkflowRules(WorkflowFacts):
    """The rules for one manifest. The method `run` adds the problems it detects to `findings`."""

    def run(self) -> None:
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

        self.check_hooks(f"{self.root}.hooks", self.spec.get("hooks") or {})
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

        unheeded.check_unheeded(
            self.findings, f"{self.root}.templates", self.templates, self.spec.get("entrypoint")
        )

    def check_workflow_tags(self, workflow_arguments: Manifest) -> None:
        """Check the tags outside of templates. Argo's validation reads them only after they have
        been inserted into templates."""
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
        """Merge the workflow's spec over the spec of its WorkflowTemplate. Return False if the
        WorkflowTemplate is missing."""
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

    def check_cron(self, spec: Manifest) -> None:
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

    def warn_shell_calls(self, path: str, passed_arguments: Manifest) -> None:
        """Warn about `$(date)` in arguments, which is not expanded."""
        for parameter in passed_arguments.get("parameters") or []:
            for command in pods.SHELL_CALL.findall(str(parameter.get("value", ""))):
                self.warn(
                    f"{path}.parameters[{parameter.get('name')}]",
                    "shell",
                    pods.make_shell_message(command),
                )

    # the following methods check templates, tasks and their parts

    def check_names(self, path: str, used_names: list[str]) -> None:
        for name, name_count in Counter(used_names).items():
            if name_count > 1:
                self.add(
                    path, "name", f'"{name}" is used {name_count} times: names must be unique.'
                )
            if not TEMPLATE_NAME.fullmatch(name) or len(name) > 128:
                name_rule = (
                    "must be at most 128 letters, digits and dashes, and not begin with a dash."
                )
                self.add(path, "name", f'"{name}" {name_rule}')

    def check_retry(self, path: str, retry_strategy: Manifest | None) -> None:
        if retry_strategy is not None and "limit" not in retry_strategy:
            self.warn(
                path,
                "retry",
                "without a limit, a step is retried forever, without backoff: give a limit.",
            )

    def check_template(
        self, path: str, template: Manifest, task_scope: TagScope | None = None
    ) -> None:
        """Check a template. `task_scope`: for an inline template, the scope of the task that
        contains it; the template can also use these tags."""
        template_types = [
            template_type for template_type in TEMPLATE_TYPES if template_type in template
        ]
        if len(template_types) != 1:
            if template_types:
                actual_types_text = f"the template has {' and '.join(template_types)}"
            else:
                actual_types_text = "the type of the template is missing"

            self.add(
                path,
                "template",
                f"{actual_types_text}: it must have exactly one of"
                f" {', '.join(TEMPLATE_TYPES[:6])}.",
            )

        for direction in ("inputs", "outputs"):
            arguments.check_names(
                self.findings, f"{path}.{direction}", template.get(direction) or {}
            )

        prometheus_metrics.check_metrics(
            self.findings, f"{path}.metrics", template.get("metrics") or {}
        )
        arguments.check_outputs(
            self.findings,
            path,
            template.get("outputs") or {},
            template_types[0] if template_types else "",
        )
        self.check_retry(f"{path}.retryStrategy", template.get("retryStrategy"))

        if "memoize" in template and not TEMPLATE_NAME.fullmatch(
            tag_rules.TAG.sub("x", str(template["memoize"].get("key")))
        ):
            self.add(f"{path}.memoize.key", "name", "the key must be letters, digits and dashes.")

        input_tags = tag_scope.list_declared_tags("inputs", template)
        output_tags = tag_scope.list_declared_tags("outputs", template)

        if "dag" in template:
            self.check_dag(path, template, input_tags)
        elif "steps" in template:
            self.check_steps(path, template, input_tags)
        else:
            self.forbid(path, template, "dag or steps", "parallelism")
            if "suspend" in template:
                self.forbid(path, template, "a pod", "timeout")

            if "resource" in template:
                applied_objects.check_resource(
                    self.findings, f"{path}.resource", template["resource"], self.workflow_name
                )

            self.check_pod(path, template)
            tags = {*input_tags, *output_tags, *NODE_TAGS}
            if "suspend" not in template:
                tags.update(tag_scope.list_path_tags(template))
            if any(template_type in template for template_type in POD_TYPES):
                tags.add("pod.name")

            layers = (
                TagSet(tags),
                *(task_scope.layers if task_scope else self.global_tags(template)),
            )
            if task_scope:
                scope = replace(task_scope, layers=layers)
            else:
                scope = TagScope(layers)

            has_retries = any(
                "retryStrategy" in strategy_owner
                for strategy_owner in (template, self.spec, self.template_defaults)
            )
            template_fields = {key: value for key, value in template.items() if key != "inputs"}
            self.check_tags(path, template_fields, scope, TextUse(retries=has_retries))
            self.check_inputs(path, template, scope)

    def check_inputs(self, path: str, template: Manifest, scope: TagScope) -> None:
        """Check the tags in the inputs of a template. An argument from a caller replaces the value
        of the input, including the tags in this value.

        Source: ProcessArgs, validateLeaf.
        """
        calls_templates = "dag" in template or "steps" in template
        inputs = dict(template.get("inputs") or {})
        parameters = inputs.pop("parameters", None) or []
        self.check_tags(f"{path}.inputs", inputs, scope, TextUse(is_validated=not calls_templates))

        for parameter in parameters:
            parameter_path = f"{path}.inputs.parameters[{parameter.get('name')}]"
            name = str(parameter.get("name"))
            is_used = name in self.inputs_without_argument(template) and reads_input(template, name)

            for parameter_field, value in parameter.items():
                # In Argo's validation, the value of an argument replaces `value`, but not
                # `default`.
                is_validated = not calls_templates and parameter_field not in ("value", "valueFrom")
                self.check_tags(
                    f"{parameter_path}.{parameter_field}",
                    value,
                    scope,
                    TextUse(is_validated=is_validated, is_used=is_used),
                )

    def check_pod(self, path: str, template: Manifest) -> None:
        """Check a template's pod. Fields that the template does not set come from
        `templateDefaults` and the spec."""
        defaults = self.template_defaults
        merged_template = {**defaults, **template}

        for container_field in ("container", "script", "containerSet"):
            if container_field not in template:
                continue

            container_path = f"{path}.{container_field}"
            containers = [
                *pods.list_containers(container_path, template[container_field], "containers")
            ]
            if container_field != "containerSet":
                containers = [
                    (
                        container_path,
                        {**(defaults.get(container_field) or {}), **template[container_field]},
                    )
                ]

            if "activeDeadlineSeconds" not in merged_template and "timeout" not in merged_template:
                message = "an attempt that hangs would never be retried: give a number of seconds."
                self.warn(f"{path}.activeDeadlineSeconds", "deadline", message)

            containers = [
                *containers,
                *pods.list_containers(path, merged_template, "initContainers", "sidecars"),
            ]
            pod_spec = {
                spec_field: merged_template.get(spec_field) or self.spec.get(spec_field)
                for spec_field in ("securityContext", "hostNetwork")
            }

            pods.check_containers(
                self.findings,
                path,
                {**pod_spec, "volumes": merged_template.get("volumes") or []},
                containers,
            )

    def check_dag(self, path: str, template: Manifest, input_tags: set[str]) -> None:
        dag_path = f"{path}.dag"
        task_list = template["dag"].get("tasks") or []
        tasks = {str(task.get("name")): task for task in task_list}
        self.check_names(f"{dag_path}.tasks", list_names(task_list))
        self.forbid(path, template, "a pod", "activeDeadlineSeconds", "timeout")

        if not task_list:
            self.add(f"{dag_path}.tasks", "template", "the list is empty: a DAG must have a task.")

        predecessors = graph.check_graph(self.findings, dag_path, template["dag"], tasks)
        if predecessors is None:
            return

        nodes = NodeTags("tasks", tasks, self.templates)
        find_finished = graph.find_finished_before(predecessors)
        layers = (TagSet(input_tags), *self.global_tags(template))

        for task_name, task in tasks.items():
            for parameter in (task.get("arguments") or {}).get("parameters") or []:
                if str(parameter.get("value", "")).startswith("{{tasks.name}}"):
                    message = (
                        "Argo reads a leading {{tasks.name}} as an output: use it in the called"
                        " template instead."
                    )
                    self.add(
                        f"{dag_path}.tasks[{task_name}].arguments[{parameter.get('name')}]",
                        "tag",
                        message,
                    )

            loop_item_tags = (LoopItemTags(task),) if _has_loop(task) else ()
            self.check_task(
                f"{dag_path}.tasks[{task_name}]",
                task_name,
                task,
                TagScope((*layers, *loop_item_tags), nodes, find_finished(task_name)),
            )

        nodes = NodeTags(
            "tasks",
            tasks,
            self.templates,
            [task_name for task_name, task in tasks.items() if "hooks" not in task],
        )

        scope = TagScope(layers, nodes, lambda task_name: True)
        self.check_tags(f"{dag_path}.target", str(template["dag"].get("target") or ""), scope)
        self.check_other_fields(path, template, "dag", scope)

    def check_steps(self, path: str, template: Manifest, declared_inputs: set[str]) -> None:
        step_list = [
            (group_index, step)
            for group_index, step_group in enumerate(template["steps"])
            for step in step_group
        ]
        all_steps = {str(step.get("name")): step for _, step in step_list}
        group_index_by_step = {
            str(step.get("name")): group_index for group_index, step in step_list
        }
        self.check_names(f"{path}.steps", list_names(step for _, step in step_list))
        self.forbid(path, template, "a pod", "activeDeadlineSeconds", "timeout")
        nodes = NodeTags("steps", all_steps, self.templates)
        input_tags = TagSet(declared_inputs)
        # as in Argo, the item tags of a loop remain valid in later steps
        loop_item_tags: tuple[TagSet, ...] = ()

        for group_index, step in step_list:
            step_name = str(step.get("name"))
            loop_item_tags += (LoopItemTags(step),) if _has_loop(step) else ()
            layers = (input_tags, *self.global_tags(template, step), *loop_item_tags)
            scope = TagScope(
                layers,
                nodes,
                lambda other_step, group_index=group_index: (
                    group_index_by_step[other_step] < group_index
                ),
            )
            self.check_task(f"{path}.steps[{group_index}][{step_name}]", step_name, step, scope)

        scope = TagScope((input_tags, *self.global_tags(template)), nodes, lambda step_name: True)
        self.check_other_fields(path, template, "steps", scope)

    def check_other_fields(
        self, path: str, template: Manifest, body_field: str, scope: TagScope
    ) -> None:
        """Check the tags in the fields of a DAG or steps template, except the field
        `body_field`, which contains the tasks."""
        self.check_inputs(path, template, scope)
        for template_field, value in template.items():
            if template_field not in ("inputs", body_field):
                is_used = template_field in FIELDS_IN_USE
                self.check_tags(
                    f"{path}.{template_field}",
                    value,
                    scope,
                    TextUse(is_validated=is_used, is_used=is_used),
                )

    def forbid(
        self, path: str, template: Manifest, required_type: str, *forbidden_fields: str
    ) -> None:
        """Report each of the `forbidden_fields` that the template has, because only another type
        of template may have them."""
        for forbidden_field in filter(template.__contains__, forbidden_fields):
            message = (
                f"only a template with {required_type} may have this field: move it to one, or to"
                " the workflow."
            )
            self.add(f"{path}.{forbidden_field}", "template", message)

    def check_task(self, path: str, name: str, task: Manifest, scope: TagScope) -> None:
        passed_arguments = task.get("arguments") or {}
        self.check_reference(path, task)

        if task.get("template"):
            self.check_call(path, str(task["template"]), passed_arguments)
        elif inline_template := task.get("inline"):
            # tags in a template of a stored object are checked when the stored object is checked
            is_stored = path.startswith(tuple(self.other_objects))
            self.check_template(f"{path}.inline", inline_template, None if is_stored else scope)

            arguments.check_inputs(
                self.findings,
                f"{path}.arguments",
                "the inline template",
                inline_template,
                passed_arguments,
                allows_extra_arguments=True,
            )
        else:
            self.add(
                path, "template", "the template is missing: give template, templateRef or inline."
            )

        arguments.check_arguments(self.findings, f"{path}.arguments", passed_arguments)
        loop_fields = [
            task_field
            for task_field in LOOP_FIELDS
            if task.get(task_field) or (task_field in task and task_field == LOOP_FIELDS[2])
        ]
        if len(loop_fields) > 1:
            self.add(path, "loop", f"{' and '.join(loop_fields)} are set: keep one of them.")

        if self.kind == "CronWorkflow" and not pods.runs_shell(
            self.templates.get(str(task.get("template"))) or {}
        ):
            self.warn_shell_calls(f"{path}.arguments", passed_arguments)

        hooks = dict(task.get("hooks") or {})
        if task.get("onExit"):
            hooks["onExit"] = {"template": task["onExit"]}

        self.check_hooks(f"{path}.hooks", hooks)
        when_condition = str(task.get("when") or "")
        if (
            OUTPUT_TAG.search(when_condition)
            and re.search(r"[<>]", when_condition)
            and "{{=" not in when_condition
        ):
            remedy = "{{=asFloat(...) > ...}}"
            message = (
                "the condition compares an output as text, which fails for 5e-05 or NaN: write"
                f" {remedy}."
            )
            self.warn(f"{path}.when", "when", message)

        other_fields = {
            task_field: value
            for task_field, value in task.items()
            if task_field not in ("hooks", "inline", "depends")
        }
        other_fields["arguments"] = {**passed_arguments, "parameters": []}
        self.check_tags(path, other_fields, scope)
        template = task.get("inline") or self.templates.get(str(task.get("template")))
        input_names = list_names(((template or {}).get("inputs") or {}).get("parameters"))

        for parameter in passed_arguments.get("parameters") or []:
            # Argo validates the tags of an argument even if the template has no input for it.
            is_used = template is None or parameter.get("name") in input_names
            parameter_path = f"{path}.arguments.parameters[{parameter.get('name')}]"
            self.check_tags(parameter_path, parameter, scope, TextUse(is_used=is_used))

        self.check_tags(
            f"{path}.hooks",
            hooks,
            replace(
                scope, is_done=lambda other_task: other_task == name or scope.is_done(other_task)
            ),
        )

        self.check_step_tags(path, name, task)

    def check_step_tags(self, path: str, name: str, task: Manifest) -> None:
        """Report the tags of a step that would have a value during the run, but that Argo's
        validation rejects. Source: resolveAllVariables."""
        has_exit_hook = "onExit" in task or "exit" in (task.get("hooks") or {})

        for text_path, text in tag_scope.find_strings(task, path):
            for tag in map(str.strip, tag_rules.TAG.findall(text)):
                message = ""
                if tag.startswith("pod."):
                    message = (
                        "Argo accepts this tag only inside of templates in spec.templates: move it"
                        " to a template."
                    )
                elif (
                    not has_exit_hook
                    and ".hooks" in text_path
                    and tag.startswith((f"steps.{name}.outputs.", f"steps.{name}.exit"))
                ):
                    message = (
                        "Argo accepts this tag only with an exit hook: add one, or write"
                        f" {{{{={tag}}}}}."
                    )

                if message:
                    self.add(text_path, "tag", f"{{{{{tag}}}}}: {message}")

    def check_hooks(self, path: str, hooks: Manifest) -> None:
        for hook_name, hook in hooks.items():
            if hook_name not in ("exit", "onExit") and not hook.get("expression"):
                message = (
                    "the expression is missing: add the hook's condition, or call the hook exit."
                )
                self.add(f"{path}[{hook_name}].expression", "hook", message)
            self.check_reference(f"{path}[{hook_name}]", hook)
            self.check_call(
                f"{path}[{hook_name}]", str(hook.get("template")), hook.get("arguments") or {}
            )

    def check_reference(self, path: str, caller: Manifest) -> None:
        if "templateRef" in caller and caller.get("template") != resolve.make_qualified_name(
            caller["templateRef"]
        ):
            self.add(path, "template", "both template and templateRef are set: remove one of them.")

    def check_call(
        self, path: str, name: str, passed_arguments: Manifest, allows_extra_arguments: bool = False
    ) -> None:
        """Check that a called template exists and gets its inputs. With
        `allows_extra_arguments`, accept arguments for which the template has no input."""
        template = self.templates.get(name)
        name_prefix, _, short_name = name.rpartition("/")
        owner_text = f" of {name_prefix.partition('/')[2]}" if name_prefix else ""

        if template is None:
            if name_prefix:
                templates = self.stored_templates.get(name_prefix)
            else:
                templates = self.templates

            if templates is not None and not (name_prefix and "{{" in short_name):
                # names that contain / refer to templates of other objects
                template_names = [
                    template_name for template_name in templates if "/" not in template_name
                ]
                message = (
                    f'the template "{short_name}"{owner_text} does not'
                    f" exist.{self.findings.hint(short_name, template_names)}"
                )
                self.add(path, "template", message)

            return

        # the workflow that uses the template may pass the input
        allows_missing_values = allows_extra_arguments and self.kind in WORKFLOW_TEMPLATE_KINDS
        arguments_path = f"{path}.arguments"
        template_title = f"template {short_name}{owner_text}"
        arguments.check_inputs(
            self.findings,
            arguments_path,
            template_title,
            template,
            passed_arguments,
            allows_extra_arguments,
            allows_missing_values,
        )
        arguments.check_timeout(
            self.findings,
            arguments_path,
            template,
            passed_arguments,
            self.spec.get("arguments") or {},
        )

    def check_tags(
        self, path: str, value: object, scope: TagScope, text_use: TextUse = READ_TEXT_USE
    ) -> None:
        text_use = replace(text_use, parameters_known=self.kind not in WORKFLOW_TEMPLATE_KINDS)
        tag_rules.check(self.findings, path, value, scope, text_use)


def _has_loop(task: Manifest) -> bool:
    return any(key in task for key in LOOP_FIELDS)


def _join_workflow_tags(text: str) -> str:
    """Return the tags workflow.* in a text, without the rest of the text."""
    tags = [tag for tag in tag_rules.TAG.findall(text) if tag.strip().startswith("workflow.")]
    return " ".join(f"{{{{{tag}}}}}" for tag in tags)
