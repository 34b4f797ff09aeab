"""Reject workflows that would not run here as on Argo.

    notes = check_workflow(workflow, cluster)    # raises ConfigError with the field and the remedy

The module schema.py checks fields and their types, and this module checks their values.
"""

import posixpath
from collections.abc import Mapping
from typing import Any

from argolocal.controllers import kubectl_check
from argolocal.engine import leaf_templates, suspend
from argolocal.engine.retry import merge_template_defaults
from argolocal.errors import ConfigError, suggest_similar
from argolocal.interfaces import Cluster
from argolocal.language import expr, gofmt, json_path
from argolocal.language.functions import BUILTINS, PREDICATES, ExprError
from argolocal.language.sprig import ARGO_FUNCTIONS, SPRIG
from argolocal.language.substitute import EXPRESSION
from argolocal.manifest import pod_patch
from argolocal.manifest.allowed_values import TEMPLATE_TYPES
from argolocal.manifest.resolve import find_required_objects, list_callers, list_templates
from argolocal.manifest.schema import find_ignored_fields
from argolocal.pods import artifacts, containers, filesystem, limits, pod_run, volumes
from argolocal.pods.kinds import container_set, daemon, sidecars

POD_TYPES = {*leaf_templates.LEAF_TEMPLATE_TYPES} - {"http"}


def check_workflow(
    workflow: dict[str, Any], cluster: Cluster, manifest: Mapping[str, Any] | None = None
) -> list[str]:
    """Return notes for the user about ignored fields of the workflow and its manifest, and about
    rules that this machine does not enforce.

    Raises ConfigError for the first field that the local runner cannot support as Argo does.
    """
    ignored_fields = dict.fromkeys(find_ignored_fields(workflow, "Workflow", ""))
    if manifest:
        ignored_fields.update(dict.fromkeys(find_ignored_fields(manifest, manifest["kind"], "")))

    for parameter in (workflow["spec"].get("arguments") or {}).get("parameters") or []:
        if parameter.get("value") is None:
            parameter_name = parameter["name"]
            raise ConfigError(
                f"the parameter {parameter_name} does not have a value: pass one with -p"
                f" {parameter_name}=..."
            )

    ignored_fields.update(dict.fromkeys(_check_templates(workflow["spec"], cluster)))
    volumes.check_volumes(workflow["spec"], list_templates(workflow["spec"], "spec"))
    _check_objects(workflow["spec"], cluster)

    if ignored_fields:
        notes = [
            "fields that are ignored, because one machine does not need them:"
            f" {', '.join(ignored_fields)}"
        ]
    else:
        notes = []

    limit_names = dict.fromkeys(limits.find_limit_names(workflow["spec"]))
    unenforced_limits = [
        limit_name
        for limit_name in limit_names
        if limit_name != "memory" or not limits.supports_memory_limits()
    ]
    if unenforced_limits:
        notes.append(
            f"limits of containers that are not enforced here: {', '.join(unenforced_limits)}"
        )

    if not filesystem.supports_namespaces():
        notes.append(
            "pods are processes of this machine with your rights, as mount namespaces are not"
            " available: a process that leaves its session and clears its environment outlives"
            " its pod"
        )

    return notes


def _check_objects(spec: dict[str, Any], cluster: Cluster) -> None:
    """Raise ConfigError if pods would wait for an object, such as a ConfigMap, that does not exist.
    A workflow with resource templates is not checked, because the templates may create the
    object."""
    if any("resource" in template for template, _ in list_templates(spec, "spec")):
        return
    for reference_path, kind, name, key in find_required_objects(spec):
        if not cluster.has(kind, name, key):
            missing_object = f"{kind} {name!r}" + (f" with {key!r}" if key else "")
            raise ConfigError(
                f"{reference_path}: the {missing_object} does not exist here, and pods would wait"
                " for it. Add it to the Workflow's file, separated by ---."
            )


def check_referenced(spec: dict[str, Any], cluster: Cluster, path: str) -> None:
    """Check the templates of a referenced WorkflowTemplate in the same way as `check_workflow`.
    Raises ConfigError."""
    _check_templates(spec, cluster, path)


def _check_templates(spec: dict[str, Any], cluster: Cluster, field_path: str = "spec") -> list[str]:
    """Check all templates of a spec. Return the ignored fields of pod spec patches. Raises
    ConfigError."""
    ignored_fields = pod_patch.check_pod_patch(spec, field_path)
    _check_callers(spec)
    for template, template_path in list_templates(spec, field_path):
        _check_template(
            merge_template_defaults(template, spec.get("templateDefaults")), template_path, cluster
        )
        ignored_fields += pod_patch.check_pod_patch(template, template_path)
    _check_expressions(spec, field_path)
    return ignored_fields


def _check_template(template: dict[str, Any], field_path: str, cluster: Cluster) -> None:
    template_types = [
        template_type for template_type in TEMPLATE_TYPES if template_type in template
    ]
    if len(template_types) != 1:
        raise ConfigError(
            f"{field_path} ({template.get('name')}) has {len(template_types)} types"
            f" {template_types}: it must have exactly one type."
        )

    suspend.check_suspend(template, field_path)
    artifacts.check_artifacts(template, field_path)
    _check_paths(template, field_path)

    if template.get("daemon") and field_path.endswith(".inline"):
        raise ConfigError(
            f"{field_path}.daemon is true, but Argo waits for the pod of an inline template to"
            " end. Move the template to spec.templates."
        )

    if "resource" in template:
        kubectl_check.check_resource_template(
            template["resource"], f"{field_path}.resource", cluster
        )
        kubectl_check.check_outputs(template, field_path)

    containers.check_containers(template, field_path, cluster)
    containers.check_images(template, field_path, cluster)

    deadline_seconds = template.get("activeDeadlineSeconds")
    if (
        template.keys() & POD_TYPES
        and deadline_seconds is not None
        and "{{" not in str(deadline_seconds)
        and int(deadline_seconds) == 0
    ):
        raise ConfigError(
            f"{field_path}.activeDeadlineSeconds is 0: Kubernetes rejects a pod with a deadline"
            " below 1."
        )

    if template.get("steps") == []:
        raise ConfigError(
            f"{field_path}.steps is empty, and Argo sees a template without a type: add a step."
        )

    if "container" in template or "script" in template:
        pod_run.check_paths(template)
        # container names that Argo itself uses
        used_names = {"init", "main", "wait"}

        for template_type in sidecars.CONTAINER_LIST_FIELDS:
            for index, container in enumerate(template.get(template_type) or []):
                if container["name"] in used_names:
                    raise ConfigError(
                        f"{field_path}.{template_type}[{index}].name is {container['name']!r}, the"
                        " name of another container: Kubernetes rejects such a pod. Choose another"
                        " name."
                    )

                used_names.add(container["name"])

        sidecars.check_sidecars(template, field_path)
        daemon.check_readiness_probe(template, field_path)

    if template.get("containerSet"):
        container_set.check_container_set(template, field_path)
        pod_run.check_paths(template)


def _check_paths(template: dict[str, Any], field_path: str) -> None:
    """Raise ConfigError for an input artifact at the path of another artifact or of a volume mount.

    Source: Argo's validateLeaf.
    """
    volume_mounts = (template.get("container") or {}).get("volumeMounts") or []
    path_owners = {
        volume_mount["mountPath"]: f"container.volumeMounts[{index}]"
        for index, volume_mount in enumerate(volume_mounts)
    }

    if "container" in template:
        input_artifacts = (template.get("inputs") or {}).get("artifacts") or []
    else:
        input_artifacts = []

    for index, artifact in enumerate(input_artifacts):
        artifact_path = posixpath.normpath(artifact["path"])
        path_owner = path_owners.get(artifact_path)
        if path_owner:
            raise ConfigError(
                f"{field_path}.inputs.artifacts[{index}].path is {artifact_path!r}, which is also"
                f" the path of {path_owner}. Choose another path."
            )

        path_owners[artifact_path] = f"inputs.artifacts[{index}]"


def _check_callers(spec: dict[str, Any]) -> None:
    """Raise ConfigError for a task, step or hook with an invalid expression or withSequence."""
    for caller, caller_path in list_callers(spec, "spec"):
        is_hook = ".hooks." in caller_path
        expression = caller.get("expression") or ""
        if is_hook and not caller_path.endswith(".hooks.exit") and not expression:
            raise ConfigError(
                f"{caller_path}.expression is missing: only an exit hook runs without an"
                " expression."
            )

        if expression and "{{" not in expression:
            try:
                expr.find_calls(expression)
            except ExprError as error:
                raise ConfigError(f"{caller_path}.expression is {expression!r}: {error}.") from None

        sequence = caller.get("withSequence")
        if sequence is None:
            continue

        if (sequence.get("count") is None) == (sequence.get("end") is None):
            raise ConfigError(
                f"{caller_path}.withSequence must have either a count or an end: set one of them."
            )

        number_format = sequence.get("format") or "%d"
        if "{{" not in number_format:
            try:
                gofmt.sprintf(number_format, 0)
            except ValueError as error:
                raise ConfigError(f"{caller_path}.withSequence.format: {error}.") from None


def _check_expressions(value: object, field_path: str) -> None:
    """Raise ConfigError for an expression that calls an unknown function. Without the check, the
    call of an unknown function would fail during the run, or remain in the text as it is."""
    if isinstance(value, dict):
        for key, child_value in value.items():
            _check_expressions(child_value, f"{field_path}.{key}")
    elif isinstance(value, list):
        for index, child_value in enumerate(value):
            _check_expressions(child_value, f"{field_path}[{index}]")
    elif isinstance(value, str):
        if field_path.endswith((".expression", ".fromExpression", ".http.successCondition")):
            expressions = [value]
        else:
            expressions = []

        for expression in [*EXPRESSION.findall(value), *expressions]:
            _check_functions(expression, field_path)


def _check_functions(expression: str, field_path: str) -> None:
    try:
        function_calls = expr.find_calls(expression)
    except ExprError:
        # as in Argo, a syntax error of an expression is reported when the expression is evaluated
        return

    for qualified_name, arguments in function_calls:
        # only a path that is a constant can be checked before the run
        if qualified_name == "jsonpath" and len(arguments) > 1 and isinstance(arguments[1], str):
            _check_json_path(arguments[1], field_path)

        if qualified_name.startswith("sprig."):
            known_functions = set(SPRIG)
        else:
            known_functions = {*ARGO_FUNCTIONS, *BUILTINS, *PREDICATES}

        function_name = qualified_name.removeprefix("sprig.")
        if function_name not in known_functions:
            hint = suggest_similar(function_name, known_functions)
            raise ConfigError(
                f"{field_path} calls {qualified_name}(), which the local runner does not"
                f" know.{hint}"
            )


def _check_json_path(path: str, field_path: str) -> None:
    try:
        json_path.parse_path(path)
    except ValueError as error:
        raise ConfigError(f"{field_path}: {error}.") from None
