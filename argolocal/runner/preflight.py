"""The supported subset of the Argo API: anything the local runner cannot do as Argo does is refused before the start.

    notes = check(workflow, cluster)     # raises ConfigError: the field, its path, and what to do

Fields and their types are checked by schema.py; this module checks their values.
"""

import posixpath
from collections.abc import Mapping
from typing import Any

from argolocal.controllers import kubectl
from argolocal.engine import leaf_templates, suspend
from argolocal.engine.retry import with_defaults
from argolocal.errors import ConfigError, did_you_mean
from argolocal.language import expr, gofmt, json_path
from argolocal.language.functions import BUILTINS, PREDICATES, ExprError
from argolocal.language.sprig import ARGO, SPRIG
from argolocal.language.substitute import EXPRESSION
from argolocal.manifest import pod_patch
from argolocal.manifest.kinds import TEMPLATE_TYPES
from argolocal.manifest.resolve import all_templates, callers, required_objects
from argolocal.manifest.schema import walk
from argolocal.pods import artifacts, containers, filesystem, limits, pod_run, volumes
from argolocal.pods.kinds import container_set, daemon, sidecars

PODS = {*leaf_templates.KINDS} - {"http"}


def check(workflow: dict[str, Any], cluster: Any, manifest: Mapping[str, Any] | None = None) -> list[str]:
    """Returns notes on ignored fields of a workflow and of the manifest that it comes from.

    Raises ConfigError for the first field that the local runner cannot support as Argo does.
    """
    ignored = dict.fromkeys(walk(workflow, "Workflow", ""))
    if manifest:
        ignored |= dict.fromkeys(walk(manifest, manifest["kind"], ""))
    for parameter in (workflow["spec"].get("arguments") or {}).get("parameters") or []:
        if parameter.get("value") is None:
            raise ConfigError(
                f"the parameter {parameter['name']} has no value: give one, as with -p {parameter['name']}=..."
            )
    ignored |= dict.fromkeys(_bodies(workflow["spec"], cluster))
    volumes.check(workflow["spec"], all_templates(workflow["spec"], "spec"))
    _objects(workflow["spec"], cluster)
    notes = [f"ignored here, as one machine has no use for it: {', '.join(ignored)}"] if ignored else []
    named = dict.fromkeys(limits.limit_names(workflow["spec"]))
    if beyond := [name for name in named if name != "memory" or not limits.available()]:
        notes.append(
            f"containers may use more {', '.join(beyond)} than their limits say: nothing here holds them to it"
        )
    if not filesystem.available():
        notes.append(
            "pods are processes of this machine with your rights, as it gives no mount namespaces: what leaves its "
            "session and clears its environment there outlives them"
        )
    return notes


def _objects(spec: dict[str, Any], cluster: Any) -> None:
    """Reports missing objects before pods wait for them, unless a resource template may create them during the run."""
    if any("resource" in template for template, _ in all_templates(spec, "spec")):
        return
    for where, kind, name, key in required_objects(spec):
        if not cluster.has(kind, name, key):
            what = f"{kind} {name!r}" + (f" with {key!r}" if key else "")
            raise ConfigError(
                f"{where}: there is no {what} here, and its pods would wait for it. Put it into the file of the "
                "Workflow, separated by ---."
            )


def templates(spec: dict[str, Any], cluster: Any, path: str) -> None:
    """The same checks for the spec of a referenced WorkflowTemplate."""
    _bodies(spec, cluster, path)


def _bodies(spec: dict[str, Any], cluster: Any, where: str = "spec") -> list[str]:
    """Checks all templates; returns the ignored fields of pod spec patches."""
    ignored = pod_patch.check(spec, where)
    _holders(spec)
    for template, path in all_templates(spec, where):
        _template(with_defaults(template, spec.get("templateDefaults")), path, cluster)
        ignored += pod_patch.check(template, path)
    _expressions(spec, where)
    return ignored


def _template(template: dict[str, Any], where: str, cluster: Any) -> None:
    types = [kind for kind in TEMPLATE_TYPES if kind in template]
    if len(types) != 1:
        raise ConfigError(f"{where} ({template.get('name')}) has {len(types)} types {types}: it must have exactly one.")
    suspend.check(template, where)
    artifacts.check(template, where)
    _paths(template, where)
    if template.get("daemon") and where.endswith(".inline"):
        raise ConfigError(
            f"{where}.daemon is true, but Argo does not find an inline template again, and waits for its pod to end. "
            "Put it with the other templates."
        )
    if "resource" in template:
        kubectl.check(template["resource"], f"{where}.resource", cluster)
        kubectl.check_outputs(template, where)
    containers.check(template, where, cluster)
    containers.check_images(template, where, cluster)
    _deadline(template, where)
    if template.get("steps") == []:
        raise ConfigError(f"{where}.steps is empty, which to Argo is a template of no type: give a step.")
    if "container" in template or "script" in template:
        pod_run.check(template)
        names = {"init", "main", "wait"}  # Argo's own
        for kind in sidecars.KINDS:
            for index, container in enumerate(template.get(kind) or []):
                if container["name"] in names:
                    raise ConfigError(
                        f"{where}.{kind}[{index}].name is {container['name']!r}, as another container of the pod is "
                        "called, and Kubernetes refuses that. Give it a name of its own."
                    )
                names.add(container["name"])
        sidecars.check(template, where)
        daemon.check(template, where)
    if template.get("containerSet"):
        container_set.check(template, where)
        pod_run.check(template)


def _deadline(template: dict[str, Any], where: str) -> None:
    seconds = template.get("activeDeadlineSeconds")
    if template.keys() & PODS and seconds is not None and "{{" not in str(seconds) and int(seconds) == 0:
        raise ConfigError(
            f"{where}.activeDeadlineSeconds is 0: Kubernetes refuses a pod whose deadline is not at least 1."
        )


def _paths(template: dict[str, Any], where: str) -> None:
    """Input artifacts must not share a path, with each other or with a volume mount. Source: Argo's validateLeaf."""
    mounts = (template.get("container") or {}).get("volumeMounts") or []
    taken = {mount["mountPath"]: f"container.volumeMounts[{index}]" for index, mount in enumerate(mounts)}
    files = (template.get("inputs") or {}).get("artifacts") or [] if "container" in template else []
    for index, artifact in enumerate(files):
        if other := taken.get(path := posixpath.normpath(artifact["path"])):
            raise ConfigError(
                f"{where}.inputs.artifacts[{index}].path is {path!r}, where {other} lies. Give it a path of its own."
            )
        taken[path] = f"inputs.artifacts[{index}]"


def _holders(spec: dict[str, Any]) -> None:
    for holder, path in callers(spec, "spec"):
        hook, expression = ".hooks." in path, holder.get("expression") or ""
        if hook and not path.endswith(".hooks.exit") and not expression:
            raise ConfigError(f"{path}.expression is missing: only an exit hook runs without one.")
        if expression and "{{" not in expression:
            try:
                expr.find_calls(expression)
            except ExprError as error:
                raise ConfigError(f"{path}.expression is {expression!r}: {error}.") from None
        sequence = holder.get("withSequence")
        if sequence is not None and len([end for end in ("count", "end") if sequence.get(end) is not None]) != 1:
            raise ConfigError(f"{path}.withSequence must have either a count or an end: give one of them.")
        if sequence and "{{" not in (form := sequence.get("format") or "%d"):
            try:
                gofmt.sprintf(form, 0)
            except ValueError as error:
                raise ConfigError(f"{path}.withSequence.format: {error}.") from None


def _expressions(value: Any, where: str) -> None:
    """Every function that an expression calls must exist: otherwise it fails late or, worse, stays as text."""
    if isinstance(value, dict):
        for key, child in value.items():
            _expressions(child, f"{where}.{key}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _expressions(child, f"{where}[{index}]")
    elif isinstance(value, str):
        plain = [value] if where.endswith((".expression", ".fromExpression", ".http.successCondition")) else []
        for source in [*EXPRESSION.findall(value), *plain]:
            _functions(source, where)


def _functions(source: str, where: str) -> None:
    try:
        called = expr.find_calls(source)
    except ExprError:
        return  # stays as text, or fails its node, as on Argo
    for name, arguments in called:
        if name == "jsonpath" and isinstance(path := (arguments[1:2] or [None])[0], str):
            _path(path, where)
        known = set(SPRIG) if name.startswith("sprig.") else {*ARGO, *BUILTINS, *PREDICATES}
        if (short := name.removeprefix("sprig.")) not in known:
            hint = did_you_mean(short, known)
            raise ConfigError(f"{where} calls {name}(), which the local runner does not know.{hint}")


def _path(path: str, where: str) -> None:
    try:
        json_path.tokens(path)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from None
