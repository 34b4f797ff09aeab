"""Reject workflows that would not run here as they do on Argo.

    notes = check(workflow, cluster)     # raises ConfigError: the field, its path, and the remedy

schema.py checks fields and their types, and this module checks their values.
"""

import posixpath
from collections.abc import Mapping
from typing import Any

from argolocal.controllers import kubectl_check
from argolocal.engine import leaf_templates, suspend
from argolocal.engine.retry import merge_template_defaults
from argolocal.errors import ConfigError, did_you_mean
from argolocal.interfaces import Cluster
from argolocal.language import expr, gofmt, json_path
from argolocal.language.functions import BUILTINS, PREDICATES, ExprError
from argolocal.language.sprig import ARGO_FUNCTIONS, SPRIG
from argolocal.language.substitute import EXPRESSION
from argolocal.manifest import pod_patch
from argolocal.manifest.allowed_values import TEMPLATE_TYPES
from argolocal.manifest.resolve import all_templates, callers, required_objects
from argolocal.manifest.schema import walk
from argolocal.pods import artifacts, containers, filesystem, limits, pod_run, volumes
from argolocal.pods.kinds import container_set, daemon, sidecars

POD_TYPES = {*leaf_templates.KINDS} - {"http"}


def check(
    workflow: dict[str, Any], cluster: Cluster, manifest: Mapping[str, Any] | None = None
) -> list[str]:
    """Return notes for the user about ignored fields of the workflow and its manifest, and about
    rules that this machine does not enforce.

    Raises ConfigError for the first field that the local runner cannot support as Argo does.
    """
    ignored = dict.fromkeys(walk(workflow, "Workflow", ""))
    if manifest:
        ignored.update(dict.fromkeys(walk(manifest, manifest["kind"], "")))

    for parameter in (workflow["spec"].get("arguments") or {}).get("parameters") or []:
        if parameter.get("value") is None:
            name = parameter["name"]
            raise ConfigError(
                f"the parameter {name} does not have a value: pass one with -p {name}=..."
            )

    ignored.update(dict.fromkeys(_check_templates(workflow["spec"], cluster)))
    volumes.check(workflow["spec"], all_templates(workflow["spec"], "spec"))
    _check_objects(workflow["spec"], cluster)

    if ignored:
        notes = [
            f"fields that are ignored, because one machine does not need them: {', '.join(ignored)}"
        ]
    else:
        notes = []

    names = dict.fromkeys(limits.find_limit_names(workflow["spec"]))
    unenforced_limits = [name for name in names if name != "memory" or not limits.available()]
    if unenforced_limits:
        notes.append(
            f"limits of containers that are not enforced here: {', '.join(unenforced_limits)}"
        )

    if not filesystem.available():
        notes.append(
            "pods are processes of this machine with your rights, as mount namespaces are not"
            " available: a process that leaves its session and clears its environment outlives"
            " its pod"
        )

    return notes


def _check_objects(spec: dict[str, Any], cluster: Cluster) -> None:
    """Raise ConfigError if an object is missing that pods would wait for. A workflow with resource
    templates is not checked, because they may create the object."""
    if any("resource" in template for template, _ in all_templates(spec, "spec")):
        return
    for where, kind, name, key in required_objects(spec):
        if not cluster.has(kind, name, key):
            missing = f"{kind} {name!r}" + (f" with {key!r}" if key else "")
            raise ConfigError(
                f"{where}: the {missing} does not exist here, and pods would wait for it. Add it to"
                " the Workflow's file, separated by ---."
            )


def check_referenced(spec: dict[str, Any], cluster: Cluster, path: str) -> None:
    """Check the spec of a referenced WorkflowTemplate as `check` does."""
    _check_templates(spec, cluster, path)


def _check_templates(spec: dict[str, Any], cluster: Cluster, where: str = "spec") -> list[str]:
    """Check all templates of a spec. Return the ignored fields of pod spec patches."""
    ignored = pod_patch.check(spec, where)
    _check_callers(spec)
    for template, path in all_templates(spec, where):
        _check_template(
            merge_template_defaults(template, spec.get("templateDefaults")), path, cluster
        )
        ignored += pod_patch.check(template, path)
    _check_expressions(spec, where)
    return ignored


def _check_template(template: dict[str, Any], where: str, cluster: Cluster) -> None:
    template_types = [kind for kind in TEMPLATE_TYPES if kind in template]
    if len(template_types) != 1:
        raise ConfigError(
            f"{where} ({template.get('name')}) has {len(template_types)} types {template_types}: it"
            " must have exactly one type."
        )

    suspend.check(template, where)
    artifacts.check(template, where)
    _check_paths(template, where)

    if template.get("daemon") and where.endswith(".inline"):
        raise ConfigError(
            f"{where}.daemon is true, but Argo waits for the pod of an inline template to end. Move"
            " the template to spec.templates."
        )

    if "resource" in template:
        kubectl_check.check(template["resource"], f"{where}.resource", cluster)
        kubectl_check.check_outputs(template, where)

    containers.check(template, where, cluster)
    containers.check_images(template, where, cluster)

    seconds = template.get("activeDeadlineSeconds")
    if (
        template.keys() & POD_TYPES
        and seconds is not None
        and "{{" not in str(seconds)
        and int(seconds) == 0
    ):
        raise ConfigError(
            f"{where}.activeDeadlineSeconds is 0: Kubernetes rejects a pod with a deadline below 1."
        )

    if template.get("steps") == []:
        raise ConfigError(
            f"{where}.steps is empty, and Argo sees a template without a type: add a step."
        )

    if "container" in template or "script" in template:
        pod_run.check(template)
        used_names = {"init", "main", "wait"}  # container names that Argo itself uses

        for kind in sidecars.KINDS:
            for index, container in enumerate(template.get(kind) or []):
                if container["name"] in used_names:
                    raise ConfigError(
                        f"{where}.{kind}[{index}].name is {container['name']!r}, the name of"
                        " another container: Kubernetes rejects such a pod. Choose another name."
                    )

                used_names.add(container["name"])

        sidecars.check(template, where)
        daemon.check(template, where)

    if template.get("containerSet"):
        container_set.check(template, where)
        pod_run.check(template)


def _check_paths(template: dict[str, Any], where: str) -> None:
    """Raise ConfigError for an input artifact at the path of another artifact or of a volume mount.

    Source: Argo's validateLeaf.
    """
    mounts = (template.get("container") or {}).get("volumeMounts") or []
    path_owners = {
        mount["mountPath"]: f"container.volumeMounts[{index}]" for index, mount in enumerate(mounts)
    }

    if "container" in template:
        files = (template.get("inputs") or {}).get("artifacts") or []
    else:
        files = []

    for index, artifact in enumerate(files):
        path_owner = path_owners.get(path := posixpath.normpath(artifact["path"]))
        if path_owner:
            raise ConfigError(
                f"{where}.inputs.artifacts[{index}].path is {path!r}, which is also the path of"
                f" {path_owner}. Choose another path."
            )

        path_owners[path] = f"inputs.artifacts[{index}]"


def _check_callers(spec: dict[str, Any]) -> None:
    for caller, path in callers(spec, "spec"):
        is_hook = ".hooks." in path
        expression = caller.get("expression") or ""
        if is_hook and not path.endswith(".hooks.exit") and not expression:
            raise ConfigError(
                f"{path}.expression is missing: only an exit hook runs without an expression."
            )

        if expression and "{{" not in expression:
            try:
                expr.find_calls(expression)
            except ExprError as error:
                raise ConfigError(f"{path}.expression is {expression!r}: {error}.") from None

        sequence = caller.get("withSequence")
        if (
            sequence is not None
            and len([field for field in ("count", "end") if sequence.get(field) is not None]) != 1
        ):
            raise ConfigError(
                f"{path}.withSequence must have either a count or an end: set one of them."
            )

        if sequence and "{{" not in (number_format := sequence.get("format") or "%d"):
            try:
                gofmt.sprintf(number_format, 0)
            except ValueError as error:
                raise ConfigError(f"{path}.withSequence.format: {error}.") from None


def _check_expressions(value: object, where: str) -> None:
    """Raise ConfigError for a call of an unknown function. Otherwise the call would fail late, or
    would remain in the text."""
    if isinstance(value, dict):
        for key, child in value.items():
            _check_expressions(child, f"{where}.{key}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _check_expressions(child, f"{where}[{index}]")
    elif isinstance(value, str):
        if where.endswith((".expression", ".fromExpression", ".http.successCondition")):
            sources = [value]
        else:
            sources = []

        for source in [*EXPRESSION.findall(value), *sources]:
            _check_functions(source, where)


def _check_functions(source: str, where: str) -> None:
    try:
        calls = expr.find_calls(source)
    except ExprError:
        return  # as in Argo, a syntax error is reported when the expression is evaluated

    for name, arguments in calls:
        if name == "jsonpath" and isinstance(path := (arguments[1:2] or [None])[0], str):
            _check_json_path(path, where)

        if name.startswith("sprig."):
            known_functions = set(SPRIG)
        else:
            known_functions = {*ARGO_FUNCTIONS, *BUILTINS, *PREDICATES}

        function = name.removeprefix("sprig.")
        if function not in known_functions:
            hint = did_you_mean(function, known_functions)
            raise ConfigError(
                f"{where} calls {name}(), which the local runner does not know.{hint}"
            )


def _check_json_path(path: str, where: str) -> None:
    try:
        json_path.tokens(path)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from None
