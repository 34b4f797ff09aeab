"""The shape of manifests: the fields that must be a mapping or a list. The rules of `validate` rely
on this shape."""

from collections.abc import Iterator
from typing import Any

ITEMS: list[Any] = [{}]
VALUES = {"parameters": [{"valueFrom": {"configMapKeyRef": {}}}], "artifacts": [{"s3": {}}]}
TASK: dict[str, Any] = {
    "arguments": VALUES,
    "hooks": {"": {"arguments": VALUES}},
    "dependencies": [],
    "continueOn": {},
}
SECURITY = {"seccompProfile": {}, "capabilities": {"drop": [], "add": []}}
CONTAINER = {
    "command": [],
    "args": [],
    "env": ITEMS,
    "envFrom": ITEMS,
    "ports": ITEMS,
    "resources": {"requests": {}, "limits": {}},
    "securityContext": SECURITY,
}
POD = {
    "containers": [CONTAINER],
    "initContainers": [CONTAINER],
    "volumes": ITEMS,
    "securityContext": SECURITY,
}
TEMPLATE = {
    "inputs": VALUES,
    "outputs": VALUES,
    "container": CONTAINER,
    "script": CONTAINER,
    "containerSet": {"containers": [CONTAINER]},
    "sidecars": [CONTAINER],
    "initContainers": [CONTAINER],
    "volumes": ITEMS,
    "securityContext": SECURITY,
    "resource": {},
    "dag": {"tasks": [TASK]},
    "steps": [[TASK]],
    "retryStrategy": {},
    "memoize": {},
    "metrics": {"prometheus": [{"labels": ITEMS, "gauge": {}, "counter": {}, "histogram": {}}]},
}
TASK["inline"] = TEMPLATE
SPEC = {
    "templates": [TEMPLATE],
    "templateDefaults": TEMPLATE,
    "arguments": VALUES,
    "hooks": {"": {"arguments": VALUES}},
    "workflowTemplateRef": {},
    "retryStrategy": {},
    "volumes": ITEMS,
    "securityContext": SECURITY,
    "podGC": {},
}
MANIFEST = {"metadata": {"labels": {}, "annotations": {}}, "spec": {**SPEC, "workflowSpec": SPEC}}


def shape_errors(value: Any, shape: Any = MANIFEST, path: str = "manifest") -> Iterator[str]:
    """Yield a message for each value that must be a mapping or a list and is neither, or is the
    wrong one.

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


def without_nulls(value: Any) -> Any:
    """Return `value` without nulls: a null field counts as absent. Nulls in the items of a loop are
    kept."""
    if isinstance(value, dict):
        return {
            k: item if k == "withItems" else without_nulls(item)
            for k, item in value.items()
            if item is not None
        }
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
