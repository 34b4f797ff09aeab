"""Check the templates of a workflow: types, fields, tasks, steps, hooks, arguments and tags."""

import re
from collections import Counter
from dataclasses import replace

from argolocal.manifest import resolve, tag_scope
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
    tag_rules,
)
from argolocal.validate.tag_rules import TextUse
from argolocal.validate.workflow_facts import WORKFLOW_TEMPLATE_KINDS, WorkflowFacts, reads_input

TEMPLATE_NAME = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
OUTPUT_TAG = re.compile(
    r"\{\{\s*(?:(?:tasks|steps)\.[^{}]*\.outputs\.|workflow\.outputs\.parameters\.)"
)
# types of templates that run a pod
POD_TYPES = ("container", "script", "containerSet", "resource", "data")
NODE_TAGS = ("outputs.result", "outputs.exitCode", "tasks.name", "steps.name")
# fields of a DAG or steps template that have an effect; the other fields apply only to pods
EFFECTIVE_FIELDS = (
    "name",
    "outputs",
    "memoize",
    "synchronization",
    "metrics",
    "retryStrategy",
    "parallelism",
)
READ_TEXT_USE = TextUse()


class TemplateRules(WorkflowFacts):
    """The rules for templates. The methods of TemplateRules add the problems that they find to
    `findings`."""

    def warn_shell_calls(self, path: str, passed_arguments: Manifest) -> None:
        """Warn about `$(date)` in arguments, which is not expanded."""
        for parameter in passed_arguments.get("parameters") or []:
            for command in pods.SHELL_CALL.findall(str(parameter.get("value", ""))):
                self.warn(
                    f"{path}.parameters[{parameter.get('name')}]",
                    "shell",
                    pods.make_shell_message(command),
                )

    def check_names(self, path: str, used_names: list[str]) -> None:
        """Check that names of templates, tasks or steps are valid and unique."""
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
        """Warn about a retry strategy without a limit."""
        if retry_strategy is not None and "limit" not in retry_strategy:
            self.warn(
                path,
                "retry",
                "without a limit, a step is retried forever, without backoff: give a limit.",
            )

    def check_template(
        self, path: str, template: Manifest, task_scope: TagScope | None = None
    ) -> None:
        """Check a template. `task_scope`: for an inline template, the tags that have a value in the
        task that contains the template, and therefore also in the template."""
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
            self.check_leaf_template(path, template, {*input_tags, *output_tags}, task_scope)

    def check_leaf_template(
        self,
        path: str,
        template: Manifest,
        declared_tags: set[str],
        task_scope: TagScope | None,
    ) -> None:
        """Check a template that is neither a DAG nor steps. `declared_tags`: tags of the template's
        inputs and outputs."""
        self.forbid(path, template, "dag or steps", "parallelism")
        if "suspend" in template:
            self.forbid(path, template, "a pod", "timeout")

        if "resource" in template:
            applied_objects.check_resource(
                self.findings, f"{path}.resource", template["resource"], self.workflow_name
            )

        self.check_pod(path, template)
        tags = {*declared_tags, *NODE_TAGS}
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
        """Check the tags in the inputs of a template. Tags in the value of an input do not matter
        if all callers pass an argument for this input. Source: ProcessArgs, validateLeaf."""
        calls_templates = "dag" in template or "steps" in template
        inputs = dict(template.get("inputs") or {})
        parameters = inputs.pop("parameters", None) or []
        self.check_tags(f"{path}.inputs", inputs, scope, TextUse(is_validated=not calls_templates))

        for parameter in parameters:
            parameter_path = f"{path}.inputs.parameters[{parameter.get('name')}]"
            name = str(parameter.get("name"))
            is_used = name in self.find_unpassed_inputs(template) and reads_input(template, name)

            for parameter_field, value in parameter.items():
                # Argo's validation replaces `value` by the value of an argument, but not `default`.
                is_validated = not calls_templates and parameter_field not in ("value", "valueFrom")
                self.check_tags(
                    f"{parameter_path}.{parameter_field}",
                    value,
                    scope,
                    TextUse(is_validated=is_validated, is_used=is_used),
                )

    def check_pod(self, path: str, template: Manifest) -> None:
        """Check the pod of a template. Fields that the template does not set are read from
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
        """Check the tags in the fields of a DAG or steps template, except the tasks or steps in the
        field `body_field`."""
        self.check_inputs(path, template, scope)
        for template_field, value in template.items():
            if template_field not in ("inputs", body_field):
                is_used = template_field in EFFECTIVE_FIELDS
                self.check_tags(
                    f"{path}.{template_field}",
                    value,
                    scope,
                    TextUse(is_validated=is_used, is_used=is_used),
                )

    def forbid(
        self, path: str, template: Manifest, required_type: str, *forbidden_fields: str
    ) -> None:
        """Report each of the `forbidden_fields` in a template: only a template with `required_type`
        may have them."""
        for forbidden_field in filter(template.__contains__, forbidden_fields):
            message = (
                f"only a template with {required_type} may have this field: move it to one, or to"
                " the workflow."
            )
            self.add(f"{path}.{forbidden_field}", "template", message)

    def check_task(self, path: str, name: str, task: Manifest, scope: TagScope) -> None:
        """Check a task or step. `scope`: the tags that the task or step may use."""
        passed_arguments = task.get("arguments") or {}
        self.check_reference(path, task)

        self.check_called_template(path, task, scope)
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
        self.check_condition(f"{path}.when", str(task.get("when") or ""))
        self.check_task_tags(path, task, scope)
        self.check_tags(
            f"{path}.hooks",
            hooks,
            replace(
                scope, is_done=lambda other_task: other_task == name or scope.is_done(other_task)
            ),
        )
        self.check_step_tags(path, name, task)

    def check_called_template(self, path: str, task: Manifest, scope: TagScope) -> None:
        """Check the template that a task calls, and that the template gets its inputs."""
        passed_arguments = task.get("arguments") or {}
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

    def check_condition(self, path: str, when_condition: str) -> None:
        """Warn about a `when` that compares an output with < or >, because `when` compares texts,
        not numbers."""
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
            self.warn(path, "when", message)

    def check_task_tags(self, path: str, task: Manifest, scope: TagScope) -> None:
        """Check the tags in the fields and arguments of a task, except its hooks."""
        passed_arguments = task.get("arguments") or {}
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
            # Argo also validates the tags of an argument that is not an input of the template.
            is_used = template is None or parameter.get("name") in input_names
            parameter_path = f"{path}.arguments.parameters[{parameter.get('name')}]"
            self.check_tags(parameter_path, parameter, scope, TextUse(is_used=is_used))

    def check_step_tags(self, path: str, name: str, task: Manifest) -> None:
        """Report tags of a task or step that would have a value in the run, but that Argo's
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
        """Check the hooks of the workflow, a task or a step."""
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
        """Check that a caller does not have both `template` and `templateRef`."""
        if "templateRef" in caller and caller.get("template") != resolve.make_qualified_name(
            caller["templateRef"]
        ):
            self.add(path, "template", "both template and templateRef are set: remove one of them.")

    def check_call(
        self, path: str, name: str, passed_arguments: Manifest, allows_extra_arguments: bool = False
    ) -> None:
        """Check that a called template exists and that the call passes its inputs.
        The value True of `allows_extra_arguments` accepts arguments that are not inputs of the
        template."""
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
        text_use = replace(text_use, has_all_parameters=self.kind not in WORKFLOW_TEMPLATE_KINDS)
        tag_rules.check(self.findings, path, value, scope, text_use)


def _has_loop(task: Manifest) -> bool:
    return any(key in task for key in LOOP_FIELDS)
