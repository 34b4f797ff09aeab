"""What `kubectl patch` does to an object, by its `--type`.

    new = PATCHES["json"](old, [{"op": "add", "path": "/data/a", "value": "1"}])

merge is RFC 7396, json RFC 6902; strategic merges the lists that Kubernetes' API merges, by the keys that it has.
"""

import copy
from collections.abc import Callable
from typing import Any

# of apimachinery's patchMergeKey; any other list is replaced
KEYS: dict[str, tuple[str, ...]] = {
    **{each: ("name",) for each in ("containers", "initContainers", "volumes", "env", "imagePullSecrets")},
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
    """A patch that does not fit; the text is the API server's."""


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
    found = {item.get(key): item for item in base}
    place, new = {name: index for index, name in enumerate(found)}, list[Any]()
    rest = [name for name in found if name not in [item.get(key) for item in patch]]
    for item in patch:  # what is new comes before what the patch says nothing of
        if key not in item:
            raise PatchError(f"map: {item} does not contain declared merge key: {key}")
        while rest and place[rest[0]] < place.get(item[key], 0):
            new.append(found[rest.pop(0)])
        new.append(_merged(found.get(item[key]), item, keys))
    return new + [found[name] for name in rest]


def merged(base: Any, over: Any, field: str = "") -> Any:
    """`over` over `base`, as a strategic merge patch: maps are merged, and lists of which Kubernetes says a key."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {k: merged(base.get(k), over[k], k) if k in over else copy.deepcopy(base[k]) for k in {**base, **over}}
    key = MERGED.get(field)
    lists = isinstance(base, list) and isinstance(over, list)
    if key and lists and all(isinstance(each, dict) and key in each for each in (*base, *over)):
        named = {each[key]: each for each in base}
        return [merged(named.pop(each[key], None), each) for each in over] + list(named.values())
    return over if over is not None else base


def operations(base: Any, patch: Any) -> Any:
    """A JSON patch (RFC 6902). Raises PatchError."""
    new = copy.deepcopy(base)
    if not isinstance(patch, list) or not all(isinstance(each, dict) for each in patch):
        raise PatchError("a JSON patch is a list of operations")
    for each in patch:
        op, path = each.get("op"), each.get("path")
        if op not in ("add", "remove", "replace", "move", "copy", "test") or not isinstance(path, str):
            raise PatchError(f"Unexpected kind: {op} at {path}")
        if op in ("move", "copy"):
            value = copy.deepcopy(_at(new, _parts(each.get("from"))))
        elif op == "remove":
            value = None
        elif "value" in each:
            value = copy.deepcopy(each["value"])
        else:
            raise PatchError(f"{op} operation does not apply: doc is missing value: {path}")
        if op == "test":
            if _at(new, _parts(path)) != value:
                raise PatchError(f"testing value {path} failed")
            continue
        if op == "move":
            _set(new, _parts(each["from"]), "remove", None)
        new = _set(new, _parts(path), "add" if op in ("move", "copy") else op, value)
    return new


def _parts(pointer: Any) -> list[str]:
    if not isinstance(pointer, str) or not (pointer == "" or pointer.startswith("/")):
        raise PatchError(f"{pointer!r} is no JSON pointer")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _at(value: Any, parts: list[str]) -> Any:
    for part in parts:
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise PatchError(f"doc is missing path: /{'/'.join(parts)}: missing value") from None
    return value


def _set(document: Any, parts: list[str], op: str, value: Any) -> Any:
    if not parts:
        return value
    place, last, shown = _at(document, parts[:-1]), parts[-1], "/" + "/".join(parts)
    if isinstance(place, list):
        if not (last == "-" and op == "add") and not (last.isdecimal() and int(last) < len(place) + (op == "add")):
            raise PatchError(f"{op} operation does not apply: doc is missing path: {shown}: invalid index referenced")
        index = len(place) if last == "-" else int(last)
        place[index : index + (op != "add")] = [] if op == "remove" else [value]
    elif not isinstance(place, dict) or (op != "add" and last not in place):
        raise PatchError(f"{op} operation does not apply: doc is missing path: {shown}: missing value")
    elif op == "remove":
        del place[last]
    else:
        place[last] = value
    return document


PATCHES: dict[str, Callable[[Any, Any], Any]] = {"strategic": strategic, "merge": merge, "json": operations}
