"""Store the objects of the local cluster as files `objects/<Kind>/<name>.json`, and apply changes
to them as kubectl does.

A plain `Controller` only stores objects, such as ConfigMaps and PodDisruptionBudgets. Kinds whose
objects have an effect have subclasses of `Controller`. The file of an object is changed under a
lock, because another process, the supervisor of the Deployments, may change the object's status at
the same time.
"""

import copy
import fcntl
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from argolocal.common import homes, object_names
from argolocal.common.json_text import read_object, to_json
from argolocal.errors import ConfigError, Conflict
from argolocal.interfaces import Cluster
from argolocal.language.gofmt import format_timestamp
from argolocal.manifest.types import Object
from argolocal.pods import volumes

LAST_APPLIED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"


class Controller:
    """Stores the objects of one kind. Base class of all controllers."""

    kind = ""
    # supported values of apiVersion; an empty tuple allows any value
    api_versions: tuple[str, ...] = ()

    def __init__(self, cluster: Cluster, kind: str = "", run: Path | None = None) -> None:
        """`run`: the folder of the run, with the logs and directories of its pods."""
        self.cluster = cluster
        self.run = run or cluster.home
        # kind of objects → its controller in the same run
        self.controllers: Mapping[str, Controller] = {}
        self.kind = kind or self.kind
        self.folder = cluster.home / "objects" / self.kind

    def check(self, kubernetes_object: Object) -> None:
        """Raise ConfigError for an object that the API server would reject or that this machine
        does not support."""
        metadata = kubernetes_object.get("metadata") or {}
        if not metadata.get("name"):
            raise ConfigError(f"metadata.name of a {self.kind} is missing. Set the name.")

        object_names.check_object_name(self.kind, metadata["name"])
        message_prefix = f'{self.kind} "{metadata["name"]}" is invalid: metadata'
        object_names.check_labels(metadata.get("labels"), f"{message_prefix}.labels")
        object_names.check_annotations(metadata.get("annotations"), f"{message_prefix}.annotations")
        if self.kind in object_names.DATA_KINDS:
            object_names.check_data(kubernetes_object, self.kind, metadata["name"])

    def apply(self, kubernetes_object: Object) -> Object:
        """Create or update the object as `kubectl apply` does. Fields of the stored object that no
        earlier `apply` has set are kept.

        Raises ConfigError, and Conflict if `kubernetes_object` has a resourceVersion that differs
        from the current object's.
        """
        self.check(kubernetes_object)
        applied_object = _without_last_applied(kubernetes_object)

        def merge_current(current_object: Object | None) -> Object:
            if current_object:
                last_object = json.loads(
                    current_object["metadata"]["annotations"].get(LAST_APPLIED_ANNOTATION, "{}")
                )
            else:
                last_object = {}
            new_object = merge_three_way(last_object, applied_object, current_object or {})
            annotations = new_object["metadata"].get("annotations") or {}
            annotations = {**annotations, LAST_APPLIED_ANNOTATION: to_json(applied_object)}
            return new_object | {"metadata": new_object["metadata"] | {"annotations": annotations}}

        return self._write(kubernetes_object["metadata"]["name"], merge_current)

    def patch(self, name: str, update: Callable[[Object], Object]) -> Object:
        """Replace an existing object by `update(object)`, as `kubectl patch` does, without changing
        the last-applied annotation.

        Raises ConfigError, and Conflict if `update` sets a resourceVersion that differs from the
        current object's.
        """

        def update_current(current_object: Object | None) -> Object:
            new_object = update(current_object or {})
            self.check(new_object)
            return new_object

        return self._write(name, update_current)

    def _write(self, name: str, update: Callable[[Object | None], Object]) -> Object:
        """Store the result of `update(object)` with the metadata that the API server sets, and
        return the result of `on_write`."""

        def add_metadata(current_object: Object | None) -> Object:
            new_object = update(copy.deepcopy(current_object))
            metadata = {
                "namespace": "default",
                "uid": str(uuid.uuid4()),
                "creationTimestamp": format_timestamp(time.time()),
            }

            metadata.update({"annotations": {}} | new_object["metadata"])

            if current_object:
                current_metadata = current_object["metadata"]
            else:
                current_metadata = {"resourceVersion": "0", "generation": 0}

            if current_object and metadata.get("resourceVersion") not in (
                None,
                "",
                current_metadata["resourceVersion"],
            ):
                raise Conflict(
                    f'Operation cannot be fulfilled on {self.kind.lower()}s "{name}": the object'
                    " has been modified; please apply your changes to the latest version and try"
                    " again"
                )

            metadata["resourceVersion"] = current_metadata["resourceVersion"]
            metadata["generation"] = current_metadata["generation"]
            if not current_object or current_object.get("spec") != new_object.get("spec"):
                metadata["generation"] += 1

            return new_object | {"metadata": metadata}

        stored_object = self.change(name, add_metadata)
        assert stored_object
        return self.on_write(stored_object)

    def on_write(self, stored_object: Object) -> Object:
        """Called after an object was applied or patched. Return the object with its current
        status."""
        return stored_object

    def get(self, name: str) -> Object | None:
        """Return the object with this name, or None. A subclass may update the object before it is
        returned."""
        return self.read(name)

    def read(self, name: str) -> Object | None:
        """Return the object with this name as it is on disk, or None."""
        try:
            return read_object(self._path(name))
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Return the sorted names of the objects on disk."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def objects(self) -> dict[str, Object]:
        """Return the objects on disk by name."""
        return {
            name: kubernetes_object
            for name in self.names()
            if (kubernetes_object := self.read(name))
        }

    def delete(self, name: str) -> bool:
        """Delete the object. Return False if the object did not exist."""
        with self._locked():
            existed = self._path(name).exists()
            self._path(name).unlink(missing_ok=True)
        return existed

    def change(self, name: str, update: Callable[[Object | None], Object | None]) -> Object | None:
        """Replace the object by the result of `update(object)`. Keep the object if the result is
        None. Return the object that is stored after the call; None if it does not exist."""
        with self._locked():
            current_object = self.read(name)
            new_object = update(copy.deepcopy(current_object))
            if new_object is None or new_object == current_object:
                return current_object

            new_object["metadata"]["resourceVersion"] = str(
                int(new_object["metadata"]["resourceVersion"]) + 1
            )
            draft_path = self._path(name).with_suffix(".new")
            # only the owner may read the file, because the object may be a Secret
            draft_path.touch(0o600)
            draft_path.write_text(to_json(new_object, indent=1))
            draft_path.replace(self._path(name))

            return new_object

    def poll(self) -> None:
        """Do the periodic work of this controller. Called every 0.1 s during a run."""

    def clean_up(self) -> None:
        """Remove the remaining files of this run's completed objects."""

    def stop(self, grace_seconds: float) -> None:
        """Stop the objects' processes that this process has started, without deleting objects."""

    def _path(self, name: str) -> Path:
        """Return the path of an object's file. Raises ConfigError for an invalid name."""
        object_names.check_object_name(self.kind, name)
        return self.folder / f"{name}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        homes.create_home(self.cluster.home)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            yield


def _without_last_applied(kubernetes_object: Object) -> Object:
    """Return the object without the annotation that stores its last applied version."""
    metadata = kubernetes_object["metadata"]
    annotations = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if key != LAST_APPLIED_ANNOTATION
    }
    if metadata.get("annotations"):
        return kubernetes_object | {"metadata": metadata | {"annotations": annotations}}
    return kubernetes_object


def merge_three_way(last_object: object, new_object: object, current_object: object) -> Any:
    """Return the new version of an object, extended by the fields of the current version that the
    last applied version did not contain, as kubectl's three-way merge does."""
    if not (isinstance(new_object, dict) and isinstance(current_object, dict)):
        return copy.deepcopy(new_object)

    last_applied_fields = last_object if isinstance(last_object, dict) else {}
    kept_fields = {
        key: value
        for key, value in current_object.items()
        if key not in last_applied_fields or key in new_object
    }

    return kept_fields | {
        key: merge_three_way(last_applied_fields.get(key), value, current_object.get(key))
        for key, value in new_object.items()
    }


def require_single_container(spec: Object, field_path: str) -> Object:
    """Return the only container of a pod spec. Raises ConfigError if the spec has several
    containers, if the image is missing, or if a volume is not supported."""
    containers = spec.get("containers") or []
    if len(containers) != 1 or spec.get("initContainers"):
        raise ConfigError(
            f"{field_path}: only pods with one container and without initContainers are supported"
            " here."
        )
    if not containers[0].get("image"):
        raise ConfigError(f"{field_path}: the image of its container is missing. Set the image.")
    volumes.check_pod_volumes(spec, field_path)
    return containers[0]
