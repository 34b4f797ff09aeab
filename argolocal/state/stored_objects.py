"""Store WorkflowTemplates, ClusterWorkflowTemplates and CronWorkflows as an API server does. Each
stored object is a file `objects/<Kind>/<name>.json` in the home, the directory of runs.

    objects = StoredObjects(home)
    template = objects.create(manifest)                 # raises ObjectExists
    objects.replace({**template, "spec": new_spec})     # raises ObjectConflict for an old version

Each object has a uid, a creationTimestamp, a generation (a counter of the changes of its spec) and
a resourceVersion that grows with every change of any object. A process holds a lock of the home
(directory of all runs) while it writes objects.
"""

import errno
import fcntl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from argolocal.common import homes, object_names
from argolocal.common.checked_names import format_untrusted
from argolocal.common.files import write_atomically
from argolocal.common.json_text import read_object, to_json
from argolocal.errors import ConfigError
from argolocal.language.gofmt import format_timestamp
from argolocal.manifest.allowed_values import VERSIONED_KINDS
from argolocal.manifest.types import Object

# fields of `metadata` that this module sets
SERVER_FIELDS = ("uid", "creationTimestamp", "generation", "resourceVersion")
FOLDER = "objects"
VERSION_FILE = ".resource-version"
# namespace for the uids of objects that an earlier version of this program has stored without a uid
UID_NAMESPACE = uuid.UUID("2f7c4a52-4f0c-4a0e-9d0a-6f2b3f6f6c1d")


class ObjectExists(ConfigError):
    """An object with this kind and name exists already."""


class ObjectMissing(ConfigError):
    """The object does not exist."""


class ObjectConflict(ConfigError):
    """Another process has changed the object since this process has read it."""


class StoredObjects:
    """The versioned objects of a home (a directory of runs). `clock`: function that returns the
    unix time."""

    def __init__(self, home: Path, clock: Callable[[], float] = time.time) -> None:
        self.home = home.resolve()
        self.clock = clock
        self.folder = self.home / FOLDER

    def names(self, kind: str) -> list[str]:
        """Return the names of the objects of a kind, sorted."""
        return sorted(path.stem for path in (self.folder / kind).glob("[!.]*.json"))

    def list(self, kind: str) -> list[Object]:
        """Return the objects of a kind, sorted by name."""
        objects = (self.find(kind, name) for name in self.names(kind))
        # another process may delete an object in the meantime
        return [stored_object for stored_object in objects if stored_object is not None]

    def find(self, kind: str, name: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        if not object_names.find_name_rule(kind).allows(name):
            return None
        path = self._path(kind, name)
        try:
            return _complete(read_object(path), path)
        except OSError as error:
            # an object with a name that is longer than the file system allows does not exist
            if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
                return None
            raise

    def get(self, kind: str, name: str) -> Object:
        """Return an object. Raises ObjectMissing."""
        stored_object = self.find(kind, name)
        if stored_object is None:
            raise ObjectMissing(
                f"the {kind} {format_untrusted(name)} does not exist in {self.home}: create it"
                " first."
            )
        return stored_object

    def version(self) -> int:
        """Return the newest resourceVersion of all objects."""
        try:
            return int((self.folder / VERSION_FILE).read_text())
        except FileNotFoundError:
            return 1

    def create(self, manifest: Mapping[str, Any]) -> Object:
        """Store a new object, and return it as stored. Raises ObjectExists, and ConfigError for an
        invalid name."""
        with self._locked():
            kind, name = _identify(manifest)
            if self.find(kind, name):
                raise ObjectExists(
                    f"the {kind} {format_untrusted(name)} exists already: choose another name, or"
                    " replace it."
                )
            return self._write(manifest, None)

    def replace(self, manifest: Mapping[str, Any]) -> Object:
        """Replace an object, and return it as stored. Raises ObjectMissing, and ObjectConflict if
        `manifest` has a resourceVersion that differs from the current resourceVersion."""
        with self._locked():
            kind, name = _identify(manifest)
            current = self.get(kind, name)
            expected_version = (manifest.get("metadata") or {}).get("resourceVersion")
            current_version = current["metadata"]["resourceVersion"]
            if expected_version and expected_version != current_version:
                raise ObjectConflict(
                    f"the {kind} {format_untrusted(name)} has the resourceVersion"
                    f" {current_version}, not {format_untrusted(expected_version)}: it was changed"
                    " in the meantime. Read it again, and repeat the change."
                )
            return self._write(manifest, current)

    def apply(self, manifest: Mapping[str, Any]) -> Object:
        """Create or replace an object as `kubectl apply` does, and return it as stored. The object
        keeps its status and, if it is unchanged, its resourceVersion. Raises ConfigError for an
        invalid name."""
        with self._locked():
            kind, name = _identify(manifest)
            current = self.find(kind, name)
            if current is None:
                return self._write(manifest, None)

            new_object = dict(manifest)
            if "status" in current:
                new_object["status"] = current["status"]
            if _without_server_fields(new_object) == _without_server_fields(current):
                return current
            return self._write(new_object, current)

    def update(self, kind: str, name: str, change: Callable[[Object], None]) -> Object:
        """Let the function `change` change an object in place while this process holds the lock.
        Store the changed object, and return it as stored. Raises ObjectMissing."""
        with self._locked():
            current = self.get(kind, name)
            new_object = self.get(kind, name)
            change(new_object)
            if new_object == current:
                return current
            return self._write(new_object, current)

    def delete(self, kind: str, name: str) -> Object:
        """Delete an object, and return it. Raises ObjectMissing."""
        with self._locked():
            stored_object = self.get(kind, name)
            self._path(kind, name).unlink()
            self._increase_version()
            return stored_object

    def _path(self, kind: str, name: str) -> Path:
        return self.folder / kind / f"{name}.json"

    def _write(self, manifest: Mapping[str, Any], current: Object | None) -> Object:
        """Store an object with the metadata that the server sets. `current`: the object to replace,
        or None for a new object."""
        kind, name = _identify(manifest)
        metadata = dict(manifest["metadata"])

        if current is None:
            metadata["uid"] = str(uuid.uuid4())
            metadata["creationTimestamp"] = format_timestamp(self.clock())
            metadata["generation"] = 1
        else:
            for field in SERVER_FIELDS:
                metadata[field] = current["metadata"][field]
            if manifest.get("spec") != current.get("spec"):
                metadata["generation"] += 1

        metadata["resourceVersion"] = str(self._increase_version())
        stored_object = {**manifest, "metadata": metadata}
        path = self._path(kind, name)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, to_json(stored_object), 0o600)
        return stored_object

    def _increase_version(self) -> int:
        """Increase the newest resourceVersion by 1, store it, and return it."""
        version = self.version() + 1
        write_atomically(self.folder / VERSION_FILE, str(version), 0o600)
        return version

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock for writing objects during the `with` block."""
        homes.create_home(self.home)
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _identify(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind and the name of an object. Raises ConfigError."""
    kind = manifest.get("kind")
    if kind not in VERSIONED_KINDS:
        raise ConfigError(
            f"kind is {format_untrusted(kind)}: it must be one of {', '.join(VERSIONED_KINDS)}."
        )
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    object_names.check_object_name(kind, name)
    return str(kind), str(name)


def _complete(stored_object: Object, path: Path) -> Object:
    """Add the metadata that earlier versions of this program have not stored, and return the
    object."""
    metadata: Object = stored_object["metadata"]
    if "resourceVersion" not in metadata:
        metadata.setdefault("uid", str(uuid.uuid5(UID_NAMESPACE, str(path))))
        metadata.setdefault("creationTimestamp", format_timestamp(path.stat().st_mtime))
        metadata.setdefault("generation", 1)
        metadata["resourceVersion"] = "1"
    return stored_object


def _without_server_fields(manifest: Mapping[str, Any]) -> Object:
    metadata = {
        field: value for field, value in manifest["metadata"].items() if field not in SERVER_FIELDS
    }
    return {**manifest, "metadata": metadata}
