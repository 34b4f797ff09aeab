"""Check that the fields of a manifest which must be mappings or lists have this type. The rules of
`argolocal.validate` rely on these types."""

from collections.abc import Iterator
from typing import Any

OBJECTS_SHAPE: list[Any] = [{}]
ARGUMENTS_SHAPE = {
    "parameters": [{"valueFrom": {"configMapKeyRef": {}}}],
    "artifacts": [{"s3": {}}],
}
TASK_SHAPE: dict[str, Any] = {
    "arguments": ARGUMENTS_SHAPE,
    "hooks": {"": {"arguments": ARGUMENTS_SHAPE}},
    "dependencies": [],
    "continueOn": {},
}
SECURITY_SHAPE = {"seccompProfile": {}, "capabilities": {"drop": [], "add": []}}
CONTAINER_SHAPE = {
    "command": [],
    "args": [],
    "env": OBJECTS_SHAPE,
    "envFrom": OBJECTS_SHAPE,
    "ports": OBJECTS_SHAPE,
    "resources": {"requests": {}, "limits": {}},
    "securityContext": SECURITY_SHAPE,
}
POD_SHAPE = {
    "containers": [CONTAINER_SHAPE],
    "initContainers": [CONTAINER_SHAPE],
    "volumes": OBJECTS_SHAPE,
    "securityContext": SECURITY_SHAPE,
}
TEMPLATE_SHAPE = {
    "inputs": ARGUMENTS_SHAPE,
    "outputs": ARGUMENTS_SHAPE,
    "container": CONTAINER_SHAPE,
    "script": CONTAINER_SHAPE,
    "containerSet": {"containers": [CONTAINER_SHAPE]},
    "sidecars": [CONTAINER_SHAPE],
    "initContainers": [CONTAINER_SHAPE],
    "volumes": OBJECTS_SHAPE,
    "securityContext": SECURITY_SHAPE,
    "resource": {},
    "dag": {"tasks": [TASK_SHAPE]},
    "steps": [[TASK_SHAPE]],
    "retryStrategy": {},
    "memoize": {},
    "metrics": {
        "prometheus": [{"labels": OBJECTS_SHAPE, "gauge": {}, "counter": {}, "histogram": {}}]
    },
}
TASK_SHAPE["inline"] = TEMPLATE_SHAPE
SPEC_SHAPE = {
    "templates": [TEMPLATE_SHAPE],
    "templateDefaults": TEMPLATE_SHAPE,
    "arguments": ARGUMENTS_SHAPE,
    "hooks": {"": {"arguments": ARGUMENTS_SHAPE}},
    "workflowTemplateRef": {},
    "retryStrategy": {},
    "volumes": OBJECTS_SHAPE,
    "securityContext": SECURITY_SHAPE,
    "podGC": {},
}
MANIFEST_SHAPE = {
    "metadata": {"labels": {}, "annotations": {}},
    "spec": {**SPEC_SHAPE, "workflowSpec": SPEC_SHAPE},
}


def find_shape_errors(
    value: Any, shape: Any = MANIFEST_SHAPE, path: str = "manifest"
) -> Iterator[str]:
    """Yield a message for each value of a wrong type. `shape` contains a mapping or a list wherever
    the value must contain one.

    In a shape, the key "" matches all keys, and an empty mapping or list allows any members.
    """
    if value is None:
        return

    if not isinstance(value, type(shape)):
        expected_type = "a list" if isinstance(shape, list) else "a mapping"
        yield f"{path} is {type(value).__name__} ({str(value)[:40]!r}): it must be {expected_type}"
    elif isinstance(shape, list):
        for index, child_value in enumerate(value):
            if child_value is None:
                yield f"{path}[{index}] is empty: give it a value, or remove it"
            if shape:
                yield from find_shape_errors(child_value, shape[0], f"{path}[{index}]")
    else:
        for key, child_value in value.items():
            if key == "name" and "" not in shape and not isinstance(child_value, str | None):
                yield (
                    f"{path}.name".removeprefix("manifest.")
                    + f" is {child_value!r}: it must be text. Quote it"
                )

            # withItems is not part of TASK_SHAPE, because its items may be null
            if (
                shape is TASK_SHAPE
                and key == "withItems"
                and not isinstance(child_value, list | None)
            ):
                yield (
                    f"{path}.withItems".removeprefix("manifest.")
                    + f" is {child_value!r:.40}: it must be a list"
                )

            if key in shape or "" in shape:
                yield from find_shape_errors(
                    child_value,
                    shape.get(key, shape.get("")),
                    f"{path}.{key}".removeprefix("manifest."),
                )


def remove_nulls(value: object) -> Any:
    """Return `value` without the fields that are null, since null means that the field is absent.
    The items of withItems are not changed."""
    if isinstance(value, dict):
        return {
            key: child_value if key == "withItems" else remove_nulls(child_value)
            for key, child_value in value.items()
            if child_value is not None
        }
    if isinstance(value, list):
        return [remove_nulls(child_value) for child_value in value]
    return value
