"""Apply the patches of `kubectl patch`. PATCHES maps the values of `--type` to functions.

    new_object = PATCHES["json"](old_object, [{"op": "add", "path": "/data/a", "value": "1"}])

The type `apply_merge_patch` is defined in RFC 7396, and the type `json` in RFC 6902. Patches of the
type `apply_strategic_patch` also merge lists by the keys of their items, as in Kubernetes.
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


def apply_strategic_patch(base_object: object, patch: object) -> Any:
    """Apply a strategic merge patch without directives such as $patch. Raises PatchError."""
    return apply_merge_patch(base_object, patch, MERGE_KEYS)


def apply_merge_patch(
    base_object: object,
    patch: object,
    merge_keys: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Any:
    """Apply a JSON merge patch (RFC 7396). A list whose name is in `merge_keys` is merged by the
    keys of its items instead of replaced. Raises PatchError."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)

    merged_fields = dict(base_object) if isinstance(base_object, dict) else {}
    for name, value in patch.items():
        if name.startswith("$") and merge_keys:
            raise PatchError(f"the directive {name} of a strategic merge patch is not supported")

        if value is None:
            merged_fields.pop(name, None)
        elif (
            isinstance(value, list)
            and isinstance(merged_fields.get(name), list)
            and name in merge_keys
        ):
            merged_fields[name] = _merge_lists(merged_fields[name], value, name, merge_keys)
        else:
            merged_fields[name] = apply_merge_patch(merged_fields.get(name), value, merge_keys)

    return merged_fields


def _merge_lists(
    base_list: list[Any],
    patch: list[Any],
    list_name: str,
    merge_keys: Mapping[str, tuple[str, ...]],
) -> list[Any]:
    merge_key = next(
        (
            merge_key
            for merge_key in merge_keys[list_name]
            if any(merge_key in patch_item for patch_item in patch)
        ),
        merge_keys[list_name][0],
    )
    base_items_by_key = {patch_item.get(merge_key): patch_item for patch_item in base_list}
    item_positions = {list_name: index for index, list_name in enumerate(base_items_by_key)}
    merged_items = list[Any]()
    untouched_names = [
        list_name
        for list_name in base_items_by_key
        if list_name not in [patch_item.get(merge_key) for patch_item in patch]
    ]
    # as in Kubernetes, insert new items before the items that the patch does not mention
    for patch_item in patch:
        if merge_key not in patch_item:
            raise PatchError(f"map: {patch_item} does not contain declared merge key: {merge_key}")
        while untouched_names and item_positions[untouched_names[0]] < item_positions.get(
            patch_item[merge_key], 0
        ):
            merged_items.append(base_items_by_key[untouched_names.pop(0)])
        merged_items.append(
            apply_merge_patch(base_items_by_key.get(patch_item[merge_key]), patch_item, merge_keys)
        )
    return merged_items + [base_items_by_key[list_name] for list_name in untouched_names]


def merge_over(base_object: Any, patch: Any, field_name: str = "") -> Any:
    """Merge `patch` into `base_object` as Argo merges templates: maps, and lists that have a
    merge key, are merged."""
    if isinstance(base_object, dict) and isinstance(patch, dict):
        merged_map = {**base_object, **patch}
        return {
            key: merge_over(base_object.get(key), value, key)
            if key in patch
            else copy.deepcopy(value)
            for key, value in merged_map.items()
        }

    key = ARGO_MERGE_KEYS.get(field_name)
    are_lists = isinstance(base_object, list) and isinstance(patch, list)
    if (
        key
        and are_lists
        and all(
            isinstance(list_item, dict) and key in list_item for list_item in (*base_object, *patch)
        )
    ):
        base_items_by_key = {list_item[key]: list_item for list_item in base_object}
        return [
            merge_over(base_items_by_key.pop(list_item[key], None), list_item)
            for list_item in patch
        ] + list(base_items_by_key.values())

    if patch is not None:
        return patch

    return base_object


def apply_operations(base_object: object, patch: object) -> Any:
    """Apply a JSON patch (RFC 6902). Raises PatchError."""
    import jsonpatch  # pyright: ignore[reportMissingImports]

    if not isinstance(patch, list) or not all(isinstance(operation, dict) for operation in patch):
        raise PatchError("a JSON patch is a list of operations")

    document = base_object
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
            missing_path_message = f"doc is missing path: {operation.get('path')}"
            raise PatchError(
                f"{operation.get('op')} operation does not apply: {missing_path_message}: {error}"
            ) from None

    return document


PATCH_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "strategic": apply_strategic_patch,
    "merge": apply_merge_patch,
    "json": apply_operations,
}
