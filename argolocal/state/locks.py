"""State shared by all runs in one home: mutexes, semaphores and memoized outputs.

    locks = SharedLocks(cluster)
    unavailable_lock, reason = locks.acquire("node", resolve_locks(...))
    locks.release("node")

Each slot of a lock is a file that is locked with flock. The kernel releases it when the process
exits for any reason. Waiting processes poll. As in Argo, memoized outputs are stored in ConfigMaps.
Source: Argo's workflow/sync and workflow/controller/cache.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from argolocal.common import object_names
from argolocal.common.files import write_atomically
from argolocal.common.json_text import read_object, to_json
from argolocal.engine.nodes import NodeError, format_time, parse_time
from argolocal.interfaces import Cluster
from argolocal.language import gofmt
from argolocal.manifest.object_labels import CONFIG_MAP_TYPE

CACHE_KEY = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
CACHE_TYPE = "Cache"
Lock = tuple[str, int]


class SharedLocks:
    """The locks that this process holds, and the memoization cache of the home."""

    def __init__(self, cluster: Cluster) -> None:
        self.configmap = cluster.configmap
        self.home = cluster.home
        # caller → name of a lock → file descriptor of the slot that the caller holds
        self.held_locks: dict[str, dict[str, int]] = {}

    def acquire(self, caller: str, locks: list[Lock]) -> tuple[str, str]:
        """Acquire all locks or, if one is unavailable, none. Return the name of the first
        unavailable lock and Argo's message about it, or two empty strings."""
        held_locks = self.held_locks.setdefault(caller, {})
        earlier_locks = set(held_locks)
        for name, limit in locks:
            if name not in held_locks and not self._try_acquire(held_locks, name, limit):
                for new_lock in set(held_locks) - earlier_locks:
                    os.close(held_locks.pop(new_lock))
                return name, f"Waiting for {name} lock. Lock status: 0/{limit}"
        return "", ""

    def holds_all_slots(self, name: str, limit: int) -> bool:
        """Return True if this run holds all `limit` slots of a lock."""
        return sum(name in locks for locks in self.held_locks.values()) >= limit

    def release(self, caller: str) -> None:
        """Release all locks of `caller`."""
        for descriptor in self.held_locks.pop(caller, {}).values():
            os.close(descriptor)

    def close(self) -> None:
        """Release all locks of this process."""
        for caller in list(self.held_locks):
            self.release(caller)

    def _try_acquire(self, held_locks: dict[str, int], name: str, limit: int) -> bool:
        folder = self.home / "locks" / hashlib.sha256(name.encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        for slot in range(limit):
            descriptor = os.open(folder / str(slot), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                held_locks[name] = descriptor
                return True
        return False

    def load(
        self, cache: str, key: str, max_age: str | None, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Look up `key` in a cache. Return (True, outputs), or (False, None) if no entry is valid.
        Raises NodeError."""
        if not CACHE_KEY.fullmatch(key) or not object_names.DATA_KEY.allows(key):
            raise NodeError(f"invalid cache key: {key}")

        try:
            age = gofmt.parse_duration(max_age) if max_age else None
        except ValueError as error:
            raise NodeError(f"invalid maxAge: {error}") from None

        with self._configmap(cache) as configmap:
            if not configmap["data"].get(key):
                return False, None

            entry = json.loads(configmap["data"][key])
            entry["lastHitTimestamp"] = format_time(now)
            configmap["data"][key] = to_json(entry)

        hit = bool(entry["nodeID"]) and (
            age is None or now - parse_time(entry["creationTimestamp"]) <= age
        )
        return hit, entry["outputs"] if hit else None

    def save(
        self, cache: str, key: str, id: str, outputs: dict[str, Any] | None, now: float
    ) -> None:
        """Cache the outputs of a successful node. Raises NodeError."""
        time = format_time(now)
        entry = {
            "nodeID": id,
            "outputs": outputs,
            "creationTimestamp": time,
            "lastHitTimestamp": time,
        }
        with self._configmap(cache) as configmap:
            configmap["data"][key] = to_json(entry)

    @contextmanager
    def _configmap(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the cache's ConfigMap, which is created if it does not exist. Store it at the end
        of the `with` block if its data have changed.

        Raises NodeError, and ConfigError for an invalid name.
        """
        object_names.check_object("ConfigMap", name)
        folder = self.home / "objects/ConfigMap"
        folder.mkdir(parents=True, exist_ok=True)

        with open(folder / f".{name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = folder / f"{name}.json"
            labels = {CONFIG_MAP_TYPE: CACHE_TYPE}

            empty = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name, "labels": labels},
            }

            old_text = path.read_text() if path.exists() else to_json(empty)
            configmap = read_object(path) if path.exists() else empty

            label = (configmap["metadata"].get("labels") or {}).get(CONFIG_MAP_TYPE)
            if label is None:
                raise NodeError(
                    f"memoization configmap doesn't have {CONFIG_MAP_TYPE} label, refusing to"
                    " use it"
                )

            if label != CACHE_TYPE:
                raise NodeError(
                    f"memoization configmap doesn't have label {CONFIG_MAP_TYPE} = {CACHE_TYPE},"
                    " refusing to use it"
                )

            configmap["data"] = configmap.get("data") or {}
            yield configmap
            if configmap["data"] and (new_text := to_json(configmap, indent=1)) != old_text:
                write_atomically(path, new_text)
