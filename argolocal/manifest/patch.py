"""Apply the patches of `kubectl patch`. PATCHES maps the values of `--type` to functions.

    new_object = PATCHES["json"](old_object, [{"op": "add", "path": "/data/a", "value": "1"}])

The type `merge` is defined in RFC 7396, and the type `json` in RFC 6902. Patches of the type
`strategic` also merge lists by the keys of their items, as in Kubernetes.
"""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# name of a list → its merge keys (patchMergeKey in apimachinery); a patch replaces all other lists
MERGE_KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("containers", "initContainers", "volumes", "env", "imagePullSecrets"), ("name",)
    ),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
    "hostAliases": ("ip",),
}

# merge keys of lists in Kubernetes and Argo. `containers` is left out, because Argo replaces the
# containers of a containerSet.
ARGO_MERGE_KEYS = {name: keys[0] for name, keys in MERGE_KEYS.items() if name != "containers"}
ARGO_MERGE_KEYS.update(
    dict.fromkeys(("parameters", "artifacts", "templates", "tasks", "sidecars"), "name")
)
ARGO_MERGE_KEYS["tolerations"] = "key"
ARGO_MERGE_KEYS["volumeDevices"] = "devicePath"


class PatchError(Exception):
    """The patch cannot be applied. The message equals the API server's."""


def strategic(base: object, patch: object) -> Any:
    """Apply a strategic merge patch without directives such as $patch. Raises PatchError."""
    return merge(base, patch, MERGE_KEYS)


def merge(
    base: object, patch: object, keys: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> Any:
    """Apply a JSON merge patch (RFC 7396). A list whose name is in `keys` is merged by the keys of
    its items instead of replaced. Raises PatchError."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)

    result = dict(base) if isinstance(base, dict) else {}
    for name, value in patch.items():
        if name.startswith("$") and keys:
            raise PatchError(f"the directive {name} of a strategic merge patch is not supported")

        if value is None:
            result.pop(name, None)
        elif isinstance(value, list) and isinstance(result.get(name), list) and name in keys:
            result[name] = _merge_lists(result[name], value, name, keys)
        else:
            result[name] = merge(result.get(name), value, keys)

    return result


def _merge_lists(
    base: list[Any], patch: list[Any], name: str, keys: Mapping[str, tuple[str, ...]]
) -> list[Any]:
    key = next((key for key in keys[name] if any(key in item for item in patch)), keys[name][0])
    base_items = {item.get(key): item for item in base}
    positions = {name: index for index, name in enumerate(base_items)}
    result = list[Any]()
    untouched_names = [name for name in base_items if name not in [item.get(key) for item in patch]]
    # as in Kubernetes, insert new items before the items that the patch does not mention
    for item in patch:
        if key not in item:
            raise PatchError(f"map: {item} does not contain declared merge key: {key}")
        while untouched_names and positions[untouched_names[0]] < positions.get(item[key], 0):
            result.append(base_items[untouched_names.pop(0)])
        result.append(merge(base_items.get(item[key]), item, keys))
    return result + [base_items[name] for name in untouched_names]


def merge_over(base: Any, patch: Any, field: str = "") -> Any:
    """Merge `patch` into `base` as Argo merges templates: maps, and lists that have a merge key,
    are merged."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged_map = {**base, **patch}
        return {
            key: merge_over(base.get(key), value, key) if key in patch else copy.deepcopy(value)
            for key, value in merged_map.items()
        }

    key = ARGO_MERGE_KEYS.get(field)
    are_lists = isinstance(base, list) and isinstance(patch, list)
    if (
        key
        and are_lists
        and all(isinstance(item, dict) and key in item for item in (*base, *patch))
    ):
        base_items = {item[key]: item for item in base}
        return [merge_over(base_items.pop(item[key], None), item) for item in patch] + list(
            base_items.values()
        )

    if patch is not None:
        return patch

    return base


def apply_operations(base: object, patch: object) -> Any:
    """Apply a JSON patch (RFC 6902). Raises PatchError."""
    import jsonpatch  # pyright: ignore[reportMissingImports]

    if not isinstance(patch, list) or not all(isinstance(operation, dict) for operation in patch):
        raise PatchError("a JSON patch is a list of operations")

    document = base
    for operation in patch:
        try:
            document = jsonpatch.apply_patch(document, [operation])
        except jsonpatch.JsonPatchTestFailed:
            raise PatchError(f"testing value {operation['path']} failed") from None
        except jsonpatch.InvalidJsonPatch as error:
            raise PatchError(f"invalid operation {operation}: {error}") from None
        except (
            jsonpatch.JsonPatchConflict,
            jsonpatch.JsonPointerException,
            TypeError,
            ValueError,
        ) as error:
            where = f"doc is missing path: {operation.get('path')}"
            raise PatchError(
                f"{operation.get('op')} operation does not apply: {where}: {error}"
            ) from None

    return document


PATCHES: dict[str, Callable[[Any, Any], Any]] = {
    "strategic": strategic,
    "merge": merge,
    "json": apply_operations,
}
