"""Resolve templateRef and workflowTemplateRef: insert the templates of other objects before the
run.

    spec = merge_template_ref(spec, find)
    workflow = store_templates(workflow, find, check)

`find(kind, name)` returns an object or None. In the run, a template of the WorkflowTemplate T and
the templates it calls are named `namespaced/T/NAME` (`cluster/...` for a ClusterWorkflowTemplate).
Source: Argo's workflow/templateresolution and util/merge.go.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from argolocal.errors import ConfigError
from argolocal.language.gofmt import to_argo_string
from argolocal.manifest.object_labels import CONFIG_MAP_TYPE
from argolocal.manifest.patch import merge_over
from argolocal.manifest.schema import walk
from argolocal.manifest.shape import shape_errors, without_nulls
from argolocal.manifest.tag_scope import has_value
from argolocal.manifest.types import Find, Object

REFERENCE_FIELDS = {
    **dict.fromkeys(("configMapKeyRef", "configMapRef", "configMap"), ("ConfigMap", "name")),
    **dict.fromkeys(
        ("secretKeyRef", "secretRef", "accessKeySecret", "secretKeySecret"), ("Secret", "name")
    ),
    "secret": ("Secret", "secretName"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}
WORKFLOW_TEMPLATES = {
    False: ("WorkflowTemplate", "namespaced"),
    True: ("ClusterWorkflowTemplate", "cluster"),
}


def merge_template_ref(spec: Object, find: Find, late_parameters: Iterable[str] = ()) -> Object:
    """Merge the workflow's spec over the spec of its WorkflowTemplate. Raises ConfigError.

    `late_parameters`: names of the parameters whose values are set after the merge.
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

    base = _load_template(reference, "spec.workflowTemplateRef", find)
    override_spec = {key: value for key, value in spec.items() if key != "workflowTemplateRef"}
    merged_spec = merge_over(base, override_spec)

    if base.get("hooks") and override_spec.get("hooks"):
        merged_spec["hooks"] = {**base["hooks"], **override_spec["hooks"]}

    own_parameters = {
        parameter.get("name"): parameter
        for parameter in (override_spec.get("arguments") or {}).get("parameters") or []
    }
    parameters = (merged_spec.get("arguments") or {}).get("parameters") or []
    for index, parameter in enumerate(parameters):
        override = own_parameters.get(parameter.get("name"), {})
        if "value" in override:
            parameters[index] = copy.deepcopy(override)

    check_exit_handler(merged_spec, {*own_parameters, *late_parameters})
    return merged_spec


def check_exit_handler(spec: Object, passed_names: Collection[str | None]) -> None:
    """Raise ConfigError if an input of the exit handler has no value and is not in `passed_names`.

    Argo does not pass the arguments of a WorkflowTemplate to its exit handler. Source: validate.go,
    Workflow.
    """
    handler = next(
        (body for body in spec.get("templates") or [] if body.get("name") == spec.get("onExit")), {}
    )
    for parameter in (handler.get("inputs") or {}).get("parameters") or []:
        name = parameter.get("name")
        if name not in passed_names and not has_value(parameter):
            raise ConfigError(
                f"the exit handler {handler['name']} needs the input {name!r}, which Argo does not"
                " read from the arguments of a WorkflowTemplate: give the input a default, or pass"
                f" -p {name}=VALUE."
            )


def store_templates(workflow: Object, find: Find, check: Callable[[Object, str], Any]) -> Object:
    """Return the workflow with all referenced templates in `storedTemplates`. `check` is called for
    each referenced spec.

    Raises ConfigError.
    """
    workflow = copy.deepcopy(workflow)
    stored_templates = {}
    pending_references = []
    qualify_names(workflow["spec"], "", "spec", pending_references)
    seen_scopes: set[str] = set()

    while pending_references:
        scope, reference, path = pending_references.pop()
        if scope in seen_scopes:
            continue

        seen_scopes.add(scope)
        spec = _load_template(reference, path, find)

        check(
            spec,
            f"{WORKFLOW_TEMPLATES[bool(reference.get('clusterScope'))][0]} {reference['name']}:"
            " spec",
        )

        qualify_names(spec, scope, f"{scope}.spec", pending_references)
        stored_templates.update(
            {f"{scope}/{template['name']}": template for template in spec.get("templates") or []}
        )

        name = str(reference.get("template"))
        if (
            "template" in reference
            and "{{" not in name
            and f"{scope}/{name}" not in stored_templates
        ):
            raise ConfigError(
                f"{path}.template is {name!r}, which {reference['name']} does not have."
            )

    if stored_templates:
        return {**workflow, "storedTemplates": stored_templates}

    return workflow


def fill_from_config_maps(spec: Object, find: Find) -> None:
    """Set the values of parameters that are read from ConfigMaps. Raises ConfigError."""
    holders = [(spec.get("arguments") or {}, "spec.arguments")]
    holders += [
        (template.get("inputs") or {}, f"{path}.inputs")
        for template, path in all_templates(spec, "spec")
    ]
    holders += [
        (caller.get("arguments") or {}, f"{path}.arguments")
        for caller, path in callers(spec, "spec")
    ]

    for holder, path in holders:
        for index, parameter in enumerate(holder.get("parameters") or []):
            source = parameter.get("valueFrom") or {}
            reference = source.get("configMapKeyRef")
            if not reference or (
                holder is spec.get("arguments") and parameter.get("value") is not None
            ):
                continue

            where = f"{path}.parameters[{index}].valueFrom"
            name = reference.get("name")
            key = reference.get("key")
            config_map = find("ConfigMap", str(name)) or {}

            labels = (config_map.get("metadata") or {}).get("labels") or {}
            if config_map and labels.get(CONFIG_MAP_TYPE) != "Parameter":
                raise ConfigError(
                    f"{where}: the ConfigMap {name!r} needs the label {CONFIG_MAP_TYPE}: Parameter."
                )

            value = (config_map.get("data") or {}).get(key, source.get("default"))
            if value is None:
                remedy = (
                    "Put it into the same file as the Workflow, separated by ---, or give a"
                    " default."
                )
                raise ConfigError(
                    f"{where}: a ConfigMap {name!r} with {key!r} does not exist here. {remedy}"
                )

            parameter["value"] = value


def required_objects(spec: Object) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield path, kind, name and key of the objects that a spec's pods require. Objects whose names
    contain tags are skipped."""
    sources: list[tuple[object, str]] = [
        ((spec.get("arguments") or {}).get("artifacts"), "spec.arguments.artifacts"),
        (spec.get("volumes"), "spec.volumes"),
    ]

    for template, path in all_templates(spec, "spec"):
        for direction in ("inputs", "outputs"):
            sources.append(
                ((template.get(direction) or {}).get("artifacts"), f"{path}.{direction}.artifacts")
            )

        sources.append((template.get("volumes"), f"{path}.volumes"))
        group = template.get("containerSet") or {}
        for holder, holder_path in ((template, path), (group, f"{path}.containerSet")):
            for kind in ("container", "script", "containers", "initContainers", "sidecars"):
                containers = holder.get(kind) or []
                for index, container in enumerate(
                    containers if isinstance(containers, list) else [containers]
                ):
                    where = f"{holder_path}.{kind}" + (
                        f"[{index}]" if isinstance(containers, list) else ""
                    )
                    sources += [
                        (container.get("env"), f"{where}.env"),
                        (container.get("envFrom"), f"{where}.envFrom"),
                    ]

    for source, path in sources:
        yield from _referenced_objects(source, path)


def _referenced_objects(value: object, path: str) -> Iterator[tuple[str, str, str, str | None]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _referenced_objects(item, f"{path}[{index}]")
    for key, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, dict) and key in REFERENCE_FIELDS and not item.get("optional"):
            kind, field = REFERENCE_FIELDS[key]
            name = item.get(field) or item.get("name")
            if name and "{{" not in f"{name}{item.get('key')}":
                yield f"{path}.{key}", kind, str(name), item.get("key")
        else:
            yield from _referenced_objects(item, f"{path}.{key}")


def _load_template(reference: Object, path: str, find: Find) -> Object:
    kind, _ = WORKFLOW_TEMPLATES[bool(reference.get("clusterScope"))]
    name = reference.get("name")
    if "{{" in str(name):
        raise ConfigError(
            f"{path}.name is {name!r}: this name must not contain tags. Write the name itself."
        )

    template = find_template(reference, find)
    if not template:
        raise ConfigError(
            f"{path}: the {kind} {name!r} does not exist here. Put it into the file of the"
            " Workflow, separated by ---."
        )

    problem = next(shape_errors(template), "")
    if problem:
        raise ConfigError(f"{kind} {name}: {problem}.")

    list(walk(template.get("spec"), "Spec", f"{kind} {name}: spec"))
    spec = copy.deepcopy(dict(template.get("spec") or {}))
    stringify_parameters(spec)

    return spec


def stringify_parameters(value: object, parameters: bool = False) -> None:
    """Convert the values of all parameters to strings in place, as Argo does."""
    if isinstance(value, list):
        for item in value:
            if parameters and isinstance(item, dict):
                for holder in (item, item.get("valueFrom")):
                    for key in ("value", "default"):
                        if isinstance(holder, dict) and holder.get(key) is not None:
                            holder[key] = to_argo_string(holder[key])

                if isinstance(item.get("enum"), list):
                    item["enum"] = [*map(to_argo_string, item["enum"])]

            stringify_parameters(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            stringify_parameters(item, key == "parameters")


def make_finder(objects: Iterable[Mapping[str, Any]]) -> Find:
    """Return a function of type `Find` that searches these objects."""
    by_name = {
        (str(item.get("kind")), str(metadata.get("name"))): item
        for item in objects
        if isinstance(metadata := item.get("metadata"), dict)
    }
    return lambda kind, name: by_name.get((kind, name))


def find_template(reference: Mapping[str, Any], find: Find) -> Mapping[str, Any] | None:
    """Return the WorkflowTemplate of a templateRef or workflowTemplateRef; None if it is
    missing."""
    return without_nulls(
        find(WORKFLOW_TEMPLATES[bool(reference.get("clusterScope"))][0], str(reference.get("name")))
    )


def scope_of(reference: Mapping[str, Any]) -> str:
    """Return the prefix of the names that the templates of a WorkflowTemplate have in a run."""
    return f"{WORKFLOW_TEMPLATES[bool(reference.get('clusterScope'))][1]}/{reference.get('name')}"


def qualified_name(reference: Mapping[str, Any]) -> str:
    """Return the name that the template of a templateRef has in a run."""
    return f"{scope_of(reference)}/{reference.get('template')}"


def qualify_names(spec: Object, scope: str, path: str, pending_references: list[Any]) -> None:
    """Replace template names in `spec` by full names, and append its references to other objects to
    `pending_references`."""
    for holder, where in callers(spec, path):
        reference = holder.get("templateRef")
        if isinstance(reference, dict):
            # a caller with both fields is reported by lint
            holder.setdefault("template", qualified_name(reference))
            pending_references.append((scope_of(reference), reference, f"{where}.templateRef"))
        elif scope and holder.get("template"):
            holder["template"] = f"{scope}/{holder['template']}"
        if scope and holder.get("onExit"):
            holder["onExit"] = f"{scope}/{holder['onExit']}"


def callers(spec: Object, path: str) -> Iterator[tuple[Object, str]]:
    """Yield every step, task and hook with its path."""
    for name, hook in (spec.get("hooks") or {}).items():
        yield hook, f"{path}.hooks.{name}"
    for template, where in all_templates(spec, path):
        for task, task_path in _tasks(template, where):
            yield task, task_path
            yield from (
                (hook, f"{task_path}.hooks.{name}")
                for name, hook in (task.get("hooks") or {}).items()
            )


def all_templates(spec: Object, path: str) -> list[tuple[Object, str]]:
    """Return every template, including inline templates, with its path."""
    templates = [
        (template, f"{path}.templates[{i}]")
        for i, template in enumerate(spec.get("templates") or [])
    ]
    for template, where in templates:
        templates += [
            (task["inline"], f"{task_path}.inline")
            for task, task_path in _tasks(template, where)
            if task.get("inline")
        ]
    return templates


def _tasks(template: Object, path: str) -> Iterator[tuple[Object, str]]:
    for index, task in enumerate((template.get("dag") or {}).get("tasks") or []):
        yield task, f"{path}.dag.tasks[{index}]"
    for number, group in enumerate(template.get("steps") or []):
        yield from ((step, f"{path}.steps[{number}][{index}]") for index, step in enumerate(group))
