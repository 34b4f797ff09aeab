"""Check the shape of manifests: the fields that must be a mapping or a list. The rules of
`validate` rely on this shape."""

from collections.abc import Iterator
from typing import Any

ANY_OBJECTS: list[Any] = [{}]
ARGUMENTS = {"parameters": [{"valueFrom": {"configMapKeyRef": {}}}], "artifacts": [{"s3": {}}]}
TASK: dict[str, Any] = {
    "arguments": ARGUMENTS,
    "hooks": {"": {"arguments": ARGUMENTS}},
    "dependencies": [],
    "continueOn": {},
}
SECURITY = {"seccompProfile": {}, "capabilities": {"drop": [], "add": []}}
CONTAINER = {
    "command": [],
    "args": [],
    "env": ANY_OBJECTS,
    "envFrom": ANY_OBJECTS,
    "ports": ANY_OBJECTS,
    "resources": {"requests": {}, "limits": {}},
    "securityContext": SECURITY,
}
POD = {
    "containers": [CONTAINER],
    "initContainers": [CONTAINER],
    "volumes": ANY_OBJECTS,
    "securityContext": SECURITY,
}
TEMPLATE = {
    "inputs": ARGUMENTS,
    "outputs": ARGUMENTS,
    "container": CONTAINER,
    "script": CONTAINER,
    "containerSet": {"containers": [CONTAINER]},
    "sidecars": [CONTAINER],
    "initContainers": [CONTAINER],
    "volumes": ANY_OBJECTS,
    "securityContext": SECURITY,
    "resource": {},
    "dag": {"tasks": [TASK]},
    "steps": [[TASK]],
    "retryStrategy": {},
    "memoize": {},
    "metrics": {
        "prometheus": [{"labels": ANY_OBJECTS, "gauge": {}, "counter": {}, "histogram": {}}]
    },
}
TASK["inline"] = TEMPLATE
SPEC = {
    "templates": [TEMPLATE],
    "templateDefaults": TEMPLATE,
    "arguments": ARGUMENTS,
    "hooks": {"": {"arguments": ARGUMENTS}},
    "workflowTemplateRef": {},
    "retryStrategy": {},
    "volumes": ANY_OBJECTS,
    "securityContext": SECURITY,
    "podGC": {},
}
MANIFEST = {"metadata": {"labels": {}, "annotations": {}}, "spec": {**SPEC, "workflowSpec": SPEC}}


def shape_errors(value: Any, shape: Any = MANIFEST, path: str = "manifest") -> Iterator[str]:
    """Yield a message for each value where `shape` requires a mapping or list and the value is of
    another type.

    In a shape, the key "" matches all keys, and an empty mapping or list allows any items.
    """
    if value is None:
        return

    if not isinstance(value, type(shape)):
        expected = "a list" if isinstance(shape, list) else "a mapping"
        yield f"{path} is {type(value).__name__} ({str(value)[:40]!r}): it must be {expected}"
    elif isinstance(shape, list):
        for number, item in enumerate(value):
            if item is None:
                yield f"{path}[{number}] is empty: give it a value, or remove it"
            if shape:
                yield from shape_errors(item, shape[0], f"{path}[{number}]")
    else:
        for key, item in value.items():
            if key == "name" and "" not in shape and not isinstance(item, str | None):
                yield (
                    f"{path}.name".removeprefix("manifest.")
                    + f" is {item!r}: it must be text. Quote it"
                )

            # withItems may contain null
            if shape is TASK and key == "withItems" and not isinstance(item, list | None):
                yield (
                    f"{path}.withItems".removeprefix("manifest.")
                    + f" is {item!r:.40}: it must be a list"
                )

            if key in shape or "" in shape:
                yield from shape_errors(
                    item, shape.get(key, shape.get("")), f"{path}.{key}".removeprefix("manifest.")
                )


def without_nulls(value: object) -> Any:
    """Return `value` without null fields, because null means absent. Nulls in loop items are
    kept."""
    if isinstance(value, dict):
        return {
            key: item if key == "withItems" else without_nulls(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
