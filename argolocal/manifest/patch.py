"""The patches of `kubectl patch`, by its `--type`.

    new = PATCHES["json"](old, [{"op": "add", "path": "/data/a", "value": "1"}])

merge is RFC 7396, json RFC 6902; strategic merges the lists that Kubernetes' API merges, by the keys that it has.
"""

import copy
from collections.abc import Callable
from typing import Any

# of apimachinery's patchMergeKey; any other list is replaced
KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets"), ("name",)),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
    "hostAliases": ("ip",),
}

# Argo's own lists beside those of Kubernetes, but for the containers of a set, which are replaced
MERGED = {name: keys[0] for name, keys in KEYS.items() if name != "containers"}
MERGED |= dict.fromkeys(("parameters", "artifacts", "templates", "tasks", "sidecars"), "name")
MERGED |= {"tolerations": "key", "volumeDevices": "devicePath"}


class PatchError(Exception):
    """The patch does not apply; the message is the API server's."""


def merge(base: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7396)."""
    return _merged(base, patch, {})


def strategic(base: Any, patch: Any) -> Any:
    """A strategic merge patch, without directives. Raises PatchError."""
    return _merged(base, patch, KEYS)


def _merged(base: Any, patch: Any, keys: dict[str, tuple[str, ...]]) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(base) if isinstance(base, dict) else {}
    for name, value in patch.items():
        if name.startswith("$") and keys:
            raise PatchError(f"the directive {name} of a strategic merge patch is not known here")
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, list) and isinstance(merged.get(name), list) and name in keys:
            merged[name] = _by_key(merged[name], value, keys[name], keys)
        else:
            merged[name] = _merged(merged.get(name), value, keys)
    return merged


def _by_key(base: list[Any], patch: list[Any], names: tuple[str, ...], keys: dict[str, tuple[str, ...]]) -> list[Any]:
    key = next((name for name in names if any(name in item for item in patch)), names[0])
    known = {item.get(key): item for item in base}
    place, new = {name: index for index, name in enumerate(known)}, list[Any]()
    rest = [name for name in known if name not in [item.get(key) for item in patch]]
    for item in patch:  # what is new comes before what the patch says nothing of
        if key not in item:
            raise PatchError(f"map: {item} does not contain declared merge key: {key}")
        while rest and place[rest[0]] < place.get(item[key], 0):
            new.append(known[rest.pop(0)])
        new.append(_merged(known.get(item[key]), item, keys))
    return new + [known[name] for name in rest]


def merged(base: Any, over: Any, field: str = "") -> Any:
    """Merge `over` into `base` as a strategic merge patch: maps, and lists with a merge key."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {k: merged(base.get(k), over[k], k) if k in over else copy.deepcopy(base[k]) for k in {**base, **over}}
    key = MERGED.get(field)
    lists = isinstance(base, list) and isinstance(over, list)
    if key and lists and all(isinstance(item, dict) and key in item for item in (*base, *over)):
        named = {item[key]: item for item in base}
        return [merged(named.pop(item[key], None), item) for item in over] + list(named.values())
    return over if over is not None else base


def operations(base: Any, patch: Any) -> Any:
    """A JSON patch (RFC 6902). Raises PatchError."""
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
        except (jsonpatch.JsonPatchConflict, jsonpatch.JsonPointerException, TypeError, ValueError) as error:
            where = f"doc is missing path: {operation.get('path')}"
            raise PatchError(f"{operation.get('op')} operation does not apply: {where}: {error}") from None
    return document


PATCHES: dict[str, Callable[[Any, Any], Any]] = {"strategic": strategic, "merge": merge, "json": operations}
