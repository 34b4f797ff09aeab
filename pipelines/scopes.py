"""Which tags have a value where, in a manifest as plain data, and whether the manifest has the shape to ask that."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Data = Mapping[str, Any]

WORKFLOW = ("name", "namespace", "uid", "mainEntrypoint", "serviceAccountName", "priority", "status", "duration")
WORKFLOW += ("failures", "labels", "annotations", "creationTimestamp", "scheduledTime")
NODE = ("id", "status", "startedAt", "finishedAt", "ip", "hostNodeName", "exitCode")
NODE += ("outputs.result", "outputs.parameters")
# below these anything may follow
OPEN = re.compile(r"item|workflow\.(labels|annotations|creationTimestamp)|(tasks|steps)\.[^.]+\.outputs")

ITEMS: list[Any] = [{}]
VALUES = {"parameters": ITEMS, "artifacts": ITEMS}
TASK = {"arguments": VALUES, "hooks": {"": {"arguments": VALUES}}}
TEMPLATE = {
    "inputs": VALUES,
    "outputs": VALUES,
    "container": {},
    "script": {},
    "resource": {},
    "dag": {"tasks": [TASK]},
    "steps": [[TASK]],
    "retryStrategy": {},
    "memoize": {},
}
SPEC = {"templates": [TEMPLATE], "arguments": VALUES, "hooks": {"": {"arguments": VALUES}}, "workflowTemplateRef": {}}
MANIFEST = {"metadata": {}, "spec": {**SPEC, "workflowSpec": SPEC}}


def misshapen(value: Any, shape: Any = MANIFEST, path: str = "manifest") -> Iterator[str]:
    """Where a mapping or a list must be and is not, in words. In a shape the key "" stands for all keys."""
    if value is None:
        return
    if not isinstance(value, type(shape)):
        wanted = "a list" if isinstance(shape, list) else "a mapping"
        yield f"{path} is {type(value).__name__} ({str(value)[:40]!r}): it must be {wanted}"
    elif isinstance(shape, list):
        for number, each in enumerate(value):
            if each is None:
                yield f"{path}[{number}] is empty: it must hold something"
            yield from misshapen(each, shape[0], f"{path}[{number}]")
    else:
        for key, each in value.items():
            if key == "name" and "" not in shape and not isinstance(each, str | None):
                yield f"{path}.name".removeprefix("manifest.") + f" is {each!r}: it must be text. Quote it"
            if key in shape or "" in shape:
                yield from misshapen(each, shape.get(key, shape.get("")), f"{path}.{key}".removeprefix("manifest."))


def present(value: Any) -> Any:
    """The same without what is null, which is as if it were not there."""
    if isinstance(value, dict):
        return {key: present(each) for key, each in value.items() if each is not None}
    return [present(each) for each in value] if isinstance(value, list) else value


def names(items: Any) -> list[str]:
    """The names of parameters, artifacts, tasks or templates."""
    return [str(each.get("name", "")) for each in items or []]


def workflow(spec: Data) -> set[str]:
    """Tags that have a value everywhere."""
    known = {f"workflow.{name}" for name in WORKFLOW} | {"workflow.parameters.json"}
    known |= {f"workflow.parameters.{name}" for name in names((spec.get("arguments") or {}).get("parameters"))}
    for template in spec.get("templates") or []:
        for kind in ("parameters", "artifacts"):
            outputs = (template.get("outputs") or {}).get(kind) or []
            known |= {f"workflow.outputs.{kind}.{each['globalName']}" for each in outputs if each.get("globalName")}
    return known


def declared(prefix: str, template: Data) -> set[str]:
    """Tags of a template's inputs or outputs; `prefix` is `inputs`, `outputs` or `tasks.NAME.outputs`."""
    items = template.get(prefix.rpartition(".")[2]) or {}
    known = {f"{prefix}.{kind}.{name}" for kind in ("parameters", "artifacts") for name in names(items.get(kind))}
    return known | {f"{name}.path" for name in known if "." not in prefix} | {f"{prefix}.parameters"}


def nodes(kind: str, seen: Collection[str], tasks: Mapping[str, Data], templates: Mapping[str, Data]) -> set[str]:
    """What can be said of the tasks or steps (`kind`) called `seen`, once they are finished."""
    known = {f"{kind}.name"}
    for name in seen:
        node = f"{kind}.{name}"
        template = tasks[name].get("inline") or templates.get(str(tasks[name].get("template")))
        known |= {f"{node}.{field}" for field in NODE}
        known |= {f"{node}.outputs"} if template is None else declared(f"{node}.outputs", template)
    return known


def resolves(name: str, known: set[str]) -> bool:
    """Whether `name` has a value where `known` do, or is a map that holds some of them."""
    if name in known or any(each.startswith(f"{name}.") for each in known):
        return True
    parts = name.split(".")
    parents = [".".join(parts[:size]) for size in range(1, len(parts))]
    return any(parent in known and OPEN.fullmatch(parent) for parent in parents)


def texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text below `value` and where it is; members of lists go by their names."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from texts(each, f"{path}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            name = each.get("name", number) if isinstance(each, Mapping) else number
            yield from texts(each, f"{path}[{name}]")
