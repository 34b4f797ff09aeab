"""State shared by all runs in one home (a directory of runs): mutexes, semaphores and memoized
outputs.

    locks = SharedLocks(cluster)
    unavailable_lock, reason = locks.acquire("node", resolve_locks(...))
    locks.release("node")

A lock has as many slots as it may have holders at the same time. Each slot is a file that its
holder locks with flock, so the kernel releases the slot when the process exits for any reason. A
process that waits for a lock tries again at intervals. As in Argo, memoized outputs are stored in
ConfigMaps. The behaviour follows Argo's workflow/sync and workflow/controller/cache.
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
from argolocal.manifest.object_labels import CONFIG_MAP_TYPE_LABEL

CACHE_KEY_PATTERN = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
CACHE_TYPE = "Cache"
# (name, maximum number of holders)
Lock = tuple[str, int]


class SharedLocks:
    """The locks that this process holds, and the memoization cache of the home (the directory of
    runs)."""

    def __init__(self, cluster: Cluster) -> None:
        self.configmap = cluster.configmap
        self.home = cluster.home
        # id of an owner → name of a lock → file descriptor of the slot that the owner holds
        self.held_locks: dict[str, dict[str, int]] = {}

    def acquire(self, owner_id: str, locks: list[Lock]) -> tuple[str, str]:
        """Acquire all locks, or none of them if one is unavailable. Return the name of the first
        unavailable lock and Argo's message about it, or two empty strings."""
        held_locks = self.held_locks.setdefault(owner_id, {})
        earlier_locks = set(held_locks)
        for lock_name, max_holders in locks:
            if lock_name not in held_locks and not self._try_acquire(
                held_locks, lock_name, max_holders
            ):
                for new_lock in set(held_locks) - earlier_locks:
                    os.close(held_locks.pop(new_lock))
                return lock_name, f"Waiting for {lock_name} lock. Lock status: 0/{max_holders}"
        return "", ""

    def holds_all_slots(self, lock_name: str, max_holders: int) -> bool:
        """Return True if this run holds all `max_holders` slots of a lock."""
        return sum(lock_name in locks for locks in self.held_locks.values()) >= max_holders

    def release(self, owner_id: str) -> None:
        """Release all locks of `owner_id`."""
        for file_descriptor in self.held_locks.pop(owner_id, {}).values():
            os.close(file_descriptor)

    def close(self) -> None:
        """Release all locks of this process."""
        for owner_id in list(self.held_locks):
            self.release(owner_id)

    def _try_acquire(self, held_locks: dict[str, int], lock_name: str, max_holders: int) -> bool:
        """Lock a free slot of a lock and add it to `held_locks`. Return False if all slots of the
        lock are held."""
        lock_folder = self.home / "locks" / hashlib.sha256(lock_name.encode()).hexdigest()
        lock_folder.mkdir(parents=True, exist_ok=True)
        for slot_number in range(max_holders):
            file_descriptor = os.open(
                lock_folder / str(slot_number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            try:
                fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file_descriptor)
            else:
                held_locks[lock_name] = file_descriptor
                return True
        return False

    def load(
        self, cache_name: str, key: str, max_age: str | None, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Look up `key` in a cache, and record the time of this look-up in the entry. Return (True,
        outputs), or (False, None) if no entry exists, or if the entry is older than `max_age`.
        Raises NodeError."""
        if not CACHE_KEY_PATTERN.fullmatch(key) or not object_names.DATA_KEY_RULE.allows(key):
            raise NodeError(f"invalid cache key: {key}")

        try:
            max_age_seconds = gofmt.parse_duration(max_age) if max_age else None
        except ValueError as error:
            raise NodeError(f"invalid maxAge: {error}") from None

        with self._configmap(cache_name) as config_map:
            if not config_map["data"].get(key):
                return False, None

            cache_entry = json.loads(config_map["data"][key])
            cache_entry["lastHitTimestamp"] = format_time(now)
            config_map["data"][key] = to_json(cache_entry)

        is_cache_hit = bool(cache_entry["nodeID"]) and (
            max_age_seconds is None
            or now - parse_time(cache_entry["creationTimestamp"]) <= max_age_seconds
        )
        return is_cache_hit, cache_entry["outputs"] if is_cache_hit else None

    def save(
        self, cache_name: str, key: str, node_id: str, outputs: dict[str, Any] | None, now: float
    ) -> None:
        """Cache the outputs of a successful node. Raises NodeError."""
        creation_time = format_time(now)
        cache_entry = {
            "nodeID": node_id,
            "outputs": outputs,
            "creationTimestamp": creation_time,
            "lastHitTimestamp": creation_time,
        }
        with self._configmap(cache_name) as config_map:
            config_map["data"][key] = to_json(cache_entry)

    @contextmanager
    def _configmap(self, config_map_name: str) -> Iterator[dict[str, Any]]:
        """Lock and yield the ConfigMap of a cache, or a new ConfigMap if it does not exist. At the
        end of the `with` block, store the ConfigMap if its data have changed.

        Raises NodeError if the ConfigMap is not a cache, and ConfigError for an invalid name.
        """
        object_names.check_object_name("ConfigMap", config_map_name)
        object_folder = self.home / "objects/ConfigMap"
        object_folder.mkdir(parents=True, exist_ok=True)

        with open(object_folder / f".{config_map_name}.lock", "a") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            path = object_folder / f"{config_map_name}.json"
            labels = {CONFIG_MAP_TYPE_LABEL: CACHE_TYPE}

            empty_config_map = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": config_map_name, "labels": labels},
            }

            old_text = path.read_text() if path.exists() else to_json(empty_config_map)
            config_map = read_object(path) if path.exists() else empty_config_map

            type_label = (config_map["metadata"].get("labels") or {}).get(CONFIG_MAP_TYPE_LABEL)
            if type_label is None:
                raise NodeError(
                    f"memoization configmap doesn't have {CONFIG_MAP_TYPE_LABEL} label, refusing to"
                    " use it"
                )

            if type_label != CACHE_TYPE:
                raise NodeError(
                    f"memoization configmap doesn't have label {CONFIG_MAP_TYPE_LABEL} ="
                    f" {CACHE_TYPE}, refusing to use it"
                )

            config_map["data"] = config_map.get("data") or {}
            yield config_map
            new_text = to_json(config_map, indent=1)
            if config_map["data"] and new_text != old_text:
                write_atomically(path, new_text)
