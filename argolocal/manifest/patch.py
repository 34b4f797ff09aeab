"""Apply the patches of `kubectl patch`. PATCH_FUNCTIONS maps the values of `--type` to functions.

    apply_patch = PATCH_FUNCTIONS["json"]
    new_object = apply_patch(old_object, [{"op": "add", "path": "/data/a", "value": "1"}])

The type `merge` is defined in RFC 7396, and the type `json` in RFC 6902. The type `strategic` is
Kubernetes' own: it also merges lists, by the keys of their items.
"""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# Name of a list → fields that may identify its items (patchMergeKey in apimachinery). A patch
# replaces a list whose name is not in MERGE_KEYS.
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

# Name of a list in a template → field that identifies its items. `containers` is left out, because
# Argo replaces the containers of a containerSet.
ARGO_MERGE_KEYS = {name: keys[0] for name, keys in MERGE_KEYS.items() if name != "containers"}
ARGO_MERGE_KEYS.update(
    dict.fromkeys(("parameters", "artifacts", "templates", "tasks", "sidecars"), "name")
)
ARGO_MERGE_KEYS["tolerations"] = "key"
ARGO_MERGE_KEYS["volumeDevices"] = "devicePath"


class PatchError(Exception):
    """A patch cannot be applied. The message of a PatchError equals the API server's."""


def apply_strategic_patch(base_object: object, patch: object) -> Any:
    """Apply a strategic merge patch. Raises PatchError, also for directives such as $patch, which
    are not supported."""
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
    """Merge the items of two lists that have the same value of the merge key. Raises PatchError."""
    if not all(isinstance(list_item, dict) for list_item in (*base_list, *patch)):
        raise PatchError(f"the items of the list {list_name} must be maps")

    merge_key = next(
        (
            merge_key
            for merge_key in merge_keys[list_name]
            if any(merge_key in patch_item for patch_item in patch)
        ),
        merge_keys[list_name][0],
    )
    base_items_by_key = {base_item.get(merge_key): base_item for base_item in base_list}
    base_positions = {item_key: index for index, item_key in enumerate(base_items_by_key)}
    patched_keys = [patch_item.get(merge_key) for patch_item in patch]
    untouched_keys = [item_key for item_key in base_items_by_key if item_key not in patched_keys]
    merged_items = list[Any]()

    # as in Kubernetes, insert new items before the items that the patch does not mention
    for patch_item in patch:
        if merge_key not in patch_item:
            raise PatchError(f"map: {patch_item} does not contain declared merge key: {merge_key}")

        patch_position = base_positions.get(patch_item[merge_key], 0)
        while untouched_keys and base_positions[untouched_keys[0]] < patch_position:
            merged_items.append(base_items_by_key[untouched_keys.pop(0)])

        merged_items.append(
            apply_merge_patch(base_items_by_key.get(patch_item[merge_key]), patch_item, merge_keys)
        )

    return merged_items + [base_items_by_key[item_key] for item_key in untouched_keys]


def merge_over(base_object: Any, patch: Any, field_name: str = "") -> Any:
    """Return `base_object` overridden by `patch`, merged as Argo merges templates. Maps are merged,
    and lists whose name is in ARGO_MERGE_KEYS, too. `field_name`: name of the field that contains
    both values."""
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
