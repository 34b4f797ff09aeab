"""Resolve templateRef and workflowTemplateRef: insert the templates of other objects before the
run.

    spec = merge_template_ref(spec, find_object)
    workflow = store_templates(workflow, find_object, check_spec)

`find_object(kind, name)` returns an object or None. In the run, the templates of the
WorkflowTemplate T are named `namespaced/T/NAME`, and the templates of a ClusterWorkflowTemplate
`cluster/T/NAME`. The behaviour follows Argo's workflow/templateresolution and util/merge.go.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from argolocal.errors import ConfigError
from argolocal.language.gofmt import to_argo_string
from argolocal.manifest.object_labels import CONFIG_MAP_TYPE_LABEL
from argolocal.manifest.patch import merge_over
from argolocal.manifest.schema import find_ignored_fields
from argolocal.manifest.shape import find_shape_errors, remove_nulls
from argolocal.manifest.tag_scope import has_value
from argolocal.manifest.types import Find, Object

# field that refers to an object → (kind of the object, field with the object's name)
REFERENCE_FIELDS = {
    **dict.fromkeys(("configMapKeyRef", "configMapRef", "configMap"), ("ConfigMap", "name")),
    **dict.fromkeys(
        ("secretKeyRef", "secretRef", "accessKeySecret", "secretKeySecret"), ("Secret", "name")
    ),
    "secret": ("Secret", "secretName"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}
# value of clusterScope → (kind of the object, prefix of its templates' names in a run)
WORKFLOW_TEMPLATE_KINDS = {
    False: ("WorkflowTemplate", "namespaced"),
    True: ("ClusterWorkflowTemplate", "cluster"),
}


def merge_template_ref(
    spec: Object, find_object: Find, late_parameters: Iterable[str] = ()
) -> Object:
    """Return the spec of the workflow's WorkflowTemplate, overridden by the workflow's own spec.
    Raises ConfigError.

    `late_parameters`: names of the parameters whose values are set after the two specs are merged.
    """
    reference = spec.get("workflowTemplateRef")
    if not reference:
        return spec

    if not isinstance(reference, dict):
        raise ConfigError(
            f"spec.workflowTemplateRef is {reference!r}: it must be an object with a name."
        )

    if spec.get("templates"):
        raise ConfigError(
            "spec has both templates and workflowTemplateRef, which Argo rejects: remove one of"
            " them."
        )

    base_spec = _load_template(reference, "spec.workflowTemplateRef", find_object)
    override_spec = {key: value for key, value in spec.items() if key != "workflowTemplateRef"}
    merged_spec = merge_over(base_spec, override_spec)

    if base_spec.get("hooks") and override_spec.get("hooks"):
        merged_spec["hooks"] = {**base_spec["hooks"], **override_spec["hooks"]}

    override_parameters = {
        parameter.get("name"): parameter
        for parameter in (override_spec.get("arguments") or {}).get("parameters") or []
    }
    parameters = (merged_spec.get("arguments") or {}).get("parameters") or []
    for index, parameter in enumerate(parameters):
        override_parameter = override_parameters.get(parameter.get("name"), {})
        if "value" in override_parameter:
            parameters[index] = copy.deepcopy(override_parameter)

    check_exit_handler(merged_spec, {*override_parameters, *late_parameters})
    return merged_spec


def check_exit_handler(spec: Object, passed_names: Collection[str | None]) -> None:
    """Raise ConfigError if an input of the exit handler lacks a value and is not in `passed_names`,
    the names of the parameters whose values the user passes.

    Argo does not pass the arguments of a WorkflowTemplate to its exit handler. Source: validate.go,
    Workflow.
    """
    exit_handler = next(
        (
            template
            for template in spec.get("templates") or []
            if template.get("name") == spec.get("onExit")
        ),
        {},
    )
    for parameter in (exit_handler.get("inputs") or {}).get("parameters") or []:
        input_name = parameter.get("name")
        if input_name not in passed_names and not has_value(parameter):
            raise ConfigError(
                f"the exit handler {exit_handler['name']} needs the input {input_name!r}, which"
                " Argo does not read from the arguments of a WorkflowTemplate: give the input a"
                f" default, or pass -p {input_name}=VALUE."
            )


def store_templates(
    workflow: Object, find_object: Find, check_spec: Callable[[Object, str], Any]
) -> Object:
    """Return the workflow with the templates of all referenced WorkflowTemplates in the field
    `storedTemplates`. Raises ConfigError.

    `check_spec(spec, path)` is called for the spec of each referenced WorkflowTemplate.
    """
    workflow = copy.deepcopy(workflow)
    stored_templates = {}
    pending_references = []
    qualify_names(workflow["spec"], "", "spec", pending_references)
    seen_scopes: set[str] = set()

    while pending_references:
        template_prefix, reference, reference_path = pending_references.pop()
        if template_prefix in seen_scopes:
            continue

        seen_scopes.add(template_prefix)
        spec = _load_template(reference, reference_path, find_object)

        check_spec(
            spec,
            f"{WORKFLOW_TEMPLATE_KINDS[bool(reference.get('clusterScope'))][0]}"
            f" {reference['name']}: spec",
        )

        qualify_names(spec, template_prefix, f"{template_prefix}.spec", pending_references)
        stored_templates.update(
            {
                f"{template_prefix}/{template['name']}": template
                for template in spec.get("templates") or []
            }
        )

        template_name = str(reference.get("template"))
        if (
            "template" in reference
            and "{{" not in template_name
            and f"{template_prefix}/{template_name}" not in stored_templates
        ):
            raise ConfigError(
                f"{reference_path}.template is {template_name!r}, which {reference['name']} does"
                " not have."
            )

    if stored_templates:
        return {**workflow, "storedTemplates": stored_templates}

    return workflow


def fill_from_config_maps(spec: Object, find_object: Find) -> None:
    """Set the value of each parameter with a `configMapKeyRef`. Raises ConfigError."""
    parameter_owners = [(spec.get("arguments") or {}, "spec.arguments")]
    parameter_owners += [
        (template.get("inputs") or {}, f"{owner_path}.inputs")
        for template, owner_path in list_templates(spec, "spec")
    ]
    parameter_owners += [
        (caller.get("arguments") or {}, f"{owner_path}.arguments")
        for caller, owner_path in list_callers(spec, "spec")
    ]

    for field_owner, owner_path in parameter_owners:
        for index, parameter in enumerate(field_owner.get("parameters") or []):
            value_source = parameter.get("valueFrom") or {}
            config_map_reference = value_source.get("configMapKeyRef")
            if not config_map_reference or (
                field_owner is spec.get("arguments") and parameter.get("value") is not None
            ):
                continue

            value_path = f"{owner_path}.parameters[{index}].valueFrom"
            config_map_name = config_map_reference.get("name")
            data_key = config_map_reference.get("key")
            config_map = find_object("ConfigMap", str(config_map_name)) or {}

            labels = (config_map.get("metadata") or {}).get("labels") or {}
            if config_map and labels.get(CONFIG_MAP_TYPE_LABEL) != "Parameter":
                raise ConfigError(
                    f"{value_path}: the ConfigMap {config_map_name!r} needs the label"
                    f" {CONFIG_MAP_TYPE_LABEL}: Parameter."
                )

            value = (config_map.get("data") or {}).get(data_key, value_source.get("default"))
            if value is None:
                remedy = (
                    "Put it into the same file as the Workflow, separated by ---, or give a"
                    " default."
                )
                raise ConfigError(
                    f"{value_path}: a ConfigMap {config_map_name!r} with {data_key!r} does not"
                    f" exist here. {remedy}"
                )

            parameter["value"] = value


def find_required_objects(spec: Object) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield (path of the reference, kind, name, key) of each object that a spec's pods require; the
    key is None if the whole object is required. Names that contain tags are skipped."""
    reference_sources: list[tuple[object, str]] = [
        ((spec.get("arguments") or {}).get("artifacts"), "spec.arguments.artifacts"),
        (spec.get("volumes"), "spec.volumes"),
    ]

    for template, path in list_templates(spec, "spec"):
        for direction in ("inputs", "outputs"):
            reference_sources.append(
                ((template.get(direction) or {}).get("artifacts"), f"{path}.{direction}.artifacts")
            )

        reference_sources.append((template.get("volumes"), f"{path}.volumes"))
        container_set = template.get("containerSet") or {}
        for container_owner, owner_path in (
            (template, path),
            (container_set, f"{path}.containerSet"),
        ):
            for container_field in (
                "container",
                "script",
                "containers",
                "initContainers",
                "sidecars",
            ):
                containers = container_owner.get(container_field) or []
                for index, container in enumerate(
                    containers if isinstance(containers, list) else [containers]
                ):
                    container_path = f"{owner_path}.{container_field}" + (
                        f"[{index}]" if isinstance(containers, list) else ""
                    )
                    reference_sources += [
                        (container.get("env"), f"{container_path}.env"),
                        (container.get("envFrom"), f"{container_path}.envFrom"),
                    ]

    for reference_source, path in reference_sources:
        yield from _find_referenced_objects(reference_source, path)


def _find_referenced_objects(
    value: object, path: str
) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield the objects to which the fields of a value refer, as `find_required_objects` does."""
    if isinstance(value, list):
        for index, child_value in enumerate(value):
            yield from _find_referenced_objects(child_value, f"{path}[{index}]")
    for key, child_value in value.items() if isinstance(value, dict) else ():
        if (
            isinstance(child_value, dict)
            and key in REFERENCE_FIELDS
            and not child_value.get("optional")
        ):
            object_kind, name_field = REFERENCE_FIELDS[key]
            name = child_value.get(name_field) or child_value.get("name")
            if name and "{{" not in f"{name}{child_value.get('key')}":
                yield f"{path}.{key}", object_kind, str(name), child_value.get("key")
        else:
            yield from _find_referenced_objects(child_value, f"{path}.{key}")


def _load_template(reference: Object, path: str, find_object: Find) -> Object:
    """Return a copy of the spec of a referenced WorkflowTemplate. Raises ConfigError if the object
    does not exist or is invalid."""
    kind, _ = WORKFLOW_TEMPLATE_KINDS[bool(reference.get("clusterScope"))]
    template_name = reference.get("name")
    if "{{" in str(template_name):
        raise ConfigError(
            f"{path}.name is {template_name!r}: this name must not contain tags. Write the name"
            " itself."
        )

    template = find_template(reference, find_object)
    if not template:
        raise ConfigError(
            f"{path}: the {kind} {template_name!r} does not exist here. Put it into the file of the"
            " Workflow, separated by ---."
        )

    problem = next(find_shape_errors(template), "")
    if problem:
        raise ConfigError(f"{kind} {template_name}: {problem}.")

    list(find_ignored_fields(template.get("spec"), "Spec", f"{kind} {template_name}: spec"))
    spec = copy.deepcopy(dict(template.get("spec") or {}))
    stringify_parameters(spec)

    return spec


def stringify_parameters(value: object, is_parameter_list: bool = False) -> None:
    """Convert the values of all parameters to strings in place, as Argo does."""
    if isinstance(value, list):
        for child_value in value:
            if is_parameter_list and isinstance(child_value, dict):
                for field_owner in (child_value, child_value.get("valueFrom")):
                    for value_field in ("value", "default"):
                        if (
                            isinstance(field_owner, dict)
                            and field_owner.get(value_field) is not None
                        ):
                            field_owner[value_field] = to_argo_string(field_owner[value_field])

                if isinstance(child_value.get("enum"), list):
                    child_value["enum"] = [*map(to_argo_string, child_value["enum"])]

            stringify_parameters(child_value)
    elif isinstance(value, dict):
        for value_field, child_value in value.items():
            stringify_parameters(child_value, value_field == "parameters")


def make_finder(objects: Iterable[Mapping[str, Any]]) -> Find:
    """Return a function that returns the object with a given kind and name, or None."""
    objects_by_name = {
        (str(manifest_object.get("kind")), str(metadata.get("name"))): manifest_object
        for manifest_object in objects
        if isinstance(metadata := manifest_object.get("metadata"), dict)
    }
    return lambda kind, name: objects_by_name.get((kind, name))


def find_template(reference: Mapping[str, Any], find_object: Find) -> Mapping[str, Any] | None:
    """Return the WorkflowTemplate or ClusterWorkflowTemplate of a templateRef or
    workflowTemplateRef; None if it does not exist."""
    return remove_nulls(
        find_object(
            WORKFLOW_TEMPLATE_KINDS[bool(reference.get("clusterScope"))][0],
            str(reference.get("name")),
        )
    )


def make_template_prefix(reference: Mapping[str, Any]) -> str:
    """Return the prefix of the names that the templates of a WorkflowTemplate have in a run."""
    return (
        f"{WORKFLOW_TEMPLATE_KINDS[bool(reference.get('clusterScope'))][1]}/{reference.get('name')}"
    )


def make_qualified_name(reference: Mapping[str, Any]) -> str:
    """Return the name that the template of a templateRef has in a run."""
    return f"{make_template_prefix(reference)}/{reference.get('template')}"


def qualify_names(
    spec: Object, template_prefix: str, path: str, pending_references: list[Any]
) -> None:
    """Replace the template names in `spec` by the names that the templates have in a run.
    `template_prefix`: prefix of the spec's own templates; "" for the workflow itself.

    Each reference to another object is appended to `pending_references`, as (prefix of the object's
    templates, reference, path of the reference).
    """
    for field_owner, caller_path in list_callers(spec, path):
        reference = field_owner.get("templateRef")
        if isinstance(reference, dict):
            # a caller that has both a `template` and a `templateRef` is reported by lint
            field_owner.setdefault("template", make_qualified_name(reference))
            pending_references.append(
                (make_template_prefix(reference), reference, f"{caller_path}.templateRef")
            )
        elif template_prefix and field_owner.get("template"):
            field_owner["template"] = f"{template_prefix}/{field_owner['template']}"
        if template_prefix and field_owner.get("onExit"):
            field_owner["onExit"] = f"{template_prefix}/{field_owner['onExit']}"


def list_callers(spec: Object, path: str) -> Iterator[tuple[Object, str]]:
    """Yield every step, task and hook with its path."""
    for hook_name, hook in (spec.get("hooks") or {}).items():
        yield hook, f"{path}.hooks.{hook_name}"
    for template, template_path in list_templates(spec, path):
        for task, task_path in _list_tasks(template, template_path):
            yield task, task_path
            yield from (
                (hook, f"{task_path}.hooks.{hook_name}")
                for hook_name, hook in (task.get("hooks") or {}).items()
            )


def list_templates(spec: Object, path: str) -> list[tuple[Object, str]]:
    """Return every template, including inline templates, with its path."""
    templates = [
        (template, f"{path}.templates[{index}]")
        for index, template in enumerate(spec.get("templates") or [])
    ]
    for template, template_path in templates:
        templates += [
            (task["inline"], f"{task_path}.inline")
            for task, task_path in _list_tasks(template, template_path)
            if task.get("inline")
        ]
    return templates


def _list_tasks(template: Object, path: str) -> Iterator[tuple[Object, str]]:
    """Yield the tasks or steps of a template with their paths."""
    for index, task in enumerate((template.get("dag") or {}).get("tasks") or []):
        yield task, f"{path}.dag.tasks[{index}]"
    for group_index, step_group in enumerate(template.get("steps") or []):
        yield from (
            (step, f"{path}.steps[{group_index}][{index}]") for index, step in enumerate(step_group)
        )
