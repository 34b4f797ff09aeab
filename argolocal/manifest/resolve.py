"""templateRef and workflowTemplateRef: inserts templates of other objects before the run.

    spec = joined(spec, find); workflow = resolved(workflow, find)       # find(kind, name) → an object, or None

In the run a template of the WorkflowTemplate T is named `namespaced/T/NAME` (`cluster/...` for a
ClusterWorkflowTemplate), and so are the templates that it calls.
Source: Argo's workflow/templateresolution and util/merge.go.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from argolocal.errors import ConfigError
from argolocal.language.gofmt import anystring
from argolocal.manifest.names import CONFIG_MAP_TYPE
from argolocal.manifest.patch import merged
from argolocal.manifest.schema import walk
from argolocal.manifest.shape import shape_errors, without_nulls
from argolocal.manifest.tag_scope import supplied
from argolocal.manifest.types import Find

OBJECTS = {
    **dict.fromkeys(("configMapKeyRef", "configMapRef", "configMap"), ("ConfigMap", "name")),
    **dict.fromkeys(("secretKeyRef", "secretRef", "accessKeySecret", "secretKeySecret"), ("Secret", "name")),
    "secret": ("Secret", "secretName"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}
WORKFLOW_TEMPLATES = {False: ("WorkflowTemplate", "namespaced"), True: ("ClusterWorkflowTemplate", "cluster")}


def joined(spec: dict[str, Any], find: Find, given: Iterable[str] = ()) -> dict[str, Any]:
    """The spec merged over that of its workflowTemplateRef; `given`: parameters that get a value later.

    Raises ConfigError.
    """
    reference = spec.get("workflowTemplateRef")
    if not reference:
        return spec
    if not isinstance(reference, dict):
        raise ConfigError(f"spec.workflowTemplateRef is {reference!r}: it must be an object with a name.")
    if spec.get("templates"):
        raise ConfigError("spec has templates beside workflowTemplateRef: Argo refuses that. Take one of them out.")
    base = _found(reference, "spec.workflowTemplateRef", find)
    over = {key: value for key, value in spec.items() if key != "workflowTemplateRef"}
    both = merged(base, over)
    if base.get("hooks") and over.get("hooks"):
        both["hooks"] = {**base["hooks"], **over["hooks"]}
    mine = {parameter.get("name"): parameter for parameter in (over.get("arguments") or {}).get("parameters") or []}
    parameters = (both.get("arguments") or {}).get("parameters") or []
    for index, parameter in enumerate(parameters):
        if "value" in (override := mine.get(parameter.get("name"), {})):
            parameters[index] = copy.deepcopy(override)
    exit_handler(both, {*mine, *given})
    return both


def exit_handler(spec: dict[str, Any], given: Collection[str | None]) -> None:
    """Raises ConfigError if the exit handler needs more than `given`: Argo ignores the WorkflowTemplate's arguments.

    Source: validate.go, Workflow.
    """
    handler = next((body for body in spec.get("templates") or [] if body.get("name") == spec.get("onExit")), {})
    for parameter in (handler.get("inputs") or {}).get("parameters") or []:
        name = parameter.get("name")
        if name not in given and not supplied(parameter):
            raise ConfigError(
                f"the exit handler {handler['name']} needs the input {name!r}, which Argo does not take "
                f"from the arguments of a WorkflowTemplate: give it a default there, or -p {name}=VALUE."
            )


def resolved(workflow: dict[str, Any], find: Find, check: Callable[[dict[str, Any], str], Any]) -> dict[str, Any]:
    """The workflow with all referenced templates as `storedTemplates`; specs are checked first. Raises ConfigError."""
    workflow, stored, waiting = copy.deepcopy(workflow), {}, []
    qualify(workflow["spec"], "", "spec", waiting)
    seen: set[str] = set()
    while waiting:
        scope, reference, path = waiting.pop()
        if scope in seen:
            continue
        seen.add(scope)
        spec = _found(reference, path, find)
        check(spec, f"{WORKFLOW_TEMPLATES[bool(reference.get('clusterScope'))][0]} {reference['name']}: spec")
        qualify(spec, scope, f"{scope}.spec", waiting)
        stored |= {f"{scope}/{template['name']}": template for template in spec.get("templates") or []}
        name = str(reference.get("template"))
        if "template" in reference and "{{" not in name and f"{scope}/{name}" not in stored:
            raise ConfigError(f"{path}.template is {name!r}, which {reference['name']} does not have.")
    return {**workflow, "storedTemplates": stored} if stored else workflow


def filled(spec: dict[str, Any], find: Find) -> None:
    """Set the values of parameters that come from ConfigMaps. Raises ConfigError."""
    given = [(spec.get("arguments") or {}, "spec.arguments")]
    given += [(template.get("inputs") or {}, f"{path}.inputs") for template, path in bodies(spec, "spec")]
    given += [(caller.get("arguments") or {}, f"{path}.arguments") for caller, path in holders(spec, "spec")]
    for holder, path in given:
        for index, parameter in enumerate(holder.get("parameters") or []):
            source = parameter.get("valueFrom") or {}
            reference = source.get("configMapKeyRef")
            if not reference or (holder is spec.get("arguments") and parameter.get("value") is not None):
                continue
            where, name, key = f"{path}.parameters[{index}].valueFrom", reference.get("name"), reference.get("key")
            config_map = find("ConfigMap", str(name)) or {}
            labels = (config_map.get("metadata") or {}).get("labels") or {}
            if config_map and labels.get(CONFIG_MAP_TYPE) != "Parameter":
                raise ConfigError(f"{where}: the ConfigMap {name!r} needs the label {CONFIG_MAP_TYPE}: Parameter.")
            value = (config_map.get("data") or {}).get(key, source.get("default"))
            if value is None:
                way = "Put it into the same file as the Workflow, separated by ---, or give a default."
                raise ConfigError(f"{where}: there is no ConfigMap {name!r} with {key!r} here. {way}")
            parameter["value"] = value


def needed(spec: dict[str, Any]) -> Iterator[tuple[str, str, str, str | None]]:
    """Path, kind, name and key of every object that the pods of a spec require, where written without tags."""
    sources: list[tuple[Any, str]] = [((spec.get("arguments") or {}).get("artifacts"), "spec.arguments.artifacts")]
    sources.append((spec.get("volumes"), "spec.volumes"))
    for template, path in bodies(spec, "spec"):
        for way in ("inputs", "outputs"):
            sources.append(((template.get(way) or {}).get("artifacts"), f"{path}.{way}.artifacts"))
        sources.append((template.get("volumes"), f"{path}.volumes"))
        group = template.get("containerSet") or {}
        for holder, at in ((template, path), (group, f"{path}.containerSet")):
            for kind in ("container", "script", "containers", "initContainers", "sidecars"):
                given = holder.get(kind) or []
                for index, container in enumerate(given if isinstance(given, list) else [given]):
                    where = f"{at}.{kind}[{index}]" if isinstance(given, list) else f"{at}.{kind}"
                    sources += [(container.get("env"), f"{where}.env"), (container.get("envFrom"), f"{where}.envFrom")]
    for source, path in sources:
        yield from _objects(source, path)


def _objects(value: Any, path: str) -> Iterator[tuple[str, str, str, str | None]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _objects(item, f"{path}[{index}]")
    for key, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, dict) and key in OBJECTS and not item.get("optional"):
            kind, field = OBJECTS[key]
            name = item.get(field) or item.get("name")
            if name and "{{" not in f"{name}{item.get('key')}":
                yield f"{path}.{key}", kind, str(name), item.get("key")
        else:
            yield from _objects(item, f"{path}.{key}")


def _found(reference: dict[str, Any], path: str, find: Find) -> dict[str, Any]:
    kind, _ = WORKFLOW_TEMPLATES[bool(reference.get("clusterScope"))]
    name = reference.get("name")
    if "{{" in str(name):
        raise ConfigError(f"{path}.name is {name!r}: the local runner must know it before the run. Write it out.")
    template = referred(reference, find)
    if not template:
        raise ConfigError(
            f"{path}: there is no {kind} {name!r} here. Put it into the same file as the Workflow, separated by ---."
        )
    if problem := next(shape_errors(template), ""):
        raise ConfigError(f"{kind} {name}: {problem}.")
    list(walk(template.get("spec"), "Spec", f"{kind} {name}: spec"))
    spec = copy.deepcopy(dict(template.get("spec") or {}))
    texts(spec)
    return spec


def texts(value: Any, parameters: bool = False) -> None:
    """Convert every parameter's value to the text that Argo sees."""
    if isinstance(value, list):
        for item in value:
            if parameters and isinstance(item, dict):
                for holder in (item, item.get("valueFrom")):
                    for key in ("value", "default"):
                        if isinstance(holder, dict) and holder.get(key) is not None:
                            holder[key] = anystring(holder[key])
                if isinstance(item.get("enum"), list):
                    item["enum"] = [*map(anystring, item["enum"])]
            texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            texts(item, key == "parameters")


def among(objects: Iterable[Mapping[str, Any]]) -> Find:
    """A `Find` over these objects."""
    known = {
        (str(item.get("kind")), str(metadata.get("name"))): item
        for item in objects
        if isinstance(metadata := item.get("metadata"), dict)
    }
    return lambda kind, name: known.get((kind, name))


def referred(reference: Mapping[str, Any], find: Find) -> Mapping[str, Any] | None:
    """The WorkflowTemplate of a templateRef or workflowTemplateRef, or None."""
    return without_nulls(find(WORKFLOW_TEMPLATES[bool(reference.get("clusterScope"))][0], str(reference.get("name"))))


def scope_of(reference: Mapping[str, Any]) -> str:
    """The prefix of a WorkflowTemplate's names in a run."""
    return f"{WORKFLOW_TEMPLATES[bool(reference.get('clusterScope'))][1]}/{reference.get('name')}"


def called(reference: Mapping[str, Any]) -> str:
    """The name of a templateRef's template in a run."""
    return f"{scope_of(reference)}/{reference.get('template')}"


def qualify(spec: dict[str, Any], scope: str, path: str, waiting: list[Any]) -> None:
    """Give callers in `spec` the full names of their templates; append references to other objects to `waiting`."""
    for holder, where in holders(spec, path):
        if isinstance(reference := holder.get("templateRef"), dict):
            holder.setdefault("template", called(reference))  # one that is there is for lint to find
            waiting.append((scope_of(reference), reference, f"{where}.templateRef"))
        elif scope and holder.get("template"):
            holder["template"] = f"{scope}/{holder['template']}"
        if scope and holder.get("onExit"):
            holder["onExit"] = f"{scope}/{holder['onExit']}"


def holders(spec: dict[str, Any], path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every step, task and hook."""
    for name, hook in (spec.get("hooks") or {}).items():
        yield hook, f"{path}.hooks.{name}"
    for template, where in bodies(spec, path):
        for task, at in _tasks(template, where):
            yield task, at
            yield from ((hook, f"{at}.hooks.{name}") for name, hook in (task.get("hooks") or {}).items())


def bodies(spec: dict[str, Any], path: str) -> list[tuple[dict[str, Any], str]]:
    """Every template and its path, including inline ones."""
    templates = [(template, f"{path}.templates[{i}]") for i, template in enumerate(spec.get("templates") or [])]
    for template, where in templates:
        templates += [(task["inline"], f"{at}.inline") for task, at in _tasks(template, where) if task.get("inline")]
    return templates


def _tasks(template: dict[str, Any], path: str) -> Iterator[tuple[dict[str, Any], str]]:
    for index, task in enumerate((template.get("dag") or {}).get("tasks") or []):
        yield task, f"{path}.dag.tasks[{index}]"
    for number, group in enumerate(template.get("steps") or []):
        yield from ((step, f"{path}.steps[{number}][{index}]") for index, step in enumerate(group))
