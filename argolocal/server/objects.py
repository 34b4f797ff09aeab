"""Store the WorkflowTemplates, ClusterWorkflowTemplates and CronWorkflows of a home (a directory of
runs). Each object is validated before it is stored.

    objects = Objects(cluster)
    template = objects.create(manifest)    # raises ConfigError, ObjectExists

Workflows refer to the templates with `templateRef`. The server starts the runs of the
CronWorkflows.
"""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from argolocal import validate
from argolocal.common import object_names, program
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.manifest.allowed_values import VERSIONED_KINDS
from argolocal.manifest.types import Find, Object
from argolocal.runner.cluster import STORABLE_KINDS, check_storable
from argolocal.state.stored_objects import StoredObjects


class Objects(StoredObjects):
    """The versioned objects of a home (directory of all runs). Methods that store a manifest raise
    ConfigError if Argo would reject the manifest."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.time) -> None:
        super().__init__(cluster.home, clock)
        self.cluster = cluster

    def create(self, manifest: Mapping[str, Any]) -> Object:
        validate.check(manifest, find_object=self.cluster.find)
        return super().create(manifest)

    def replace(self, manifest: Mapping[str, Any]) -> Object:
        validate.check(manifest, find_object=self.cluster.find)
        return super().replace(manifest)

    def apply(self, manifest: Mapping[str, Any]) -> Object:
        validate.check(manifest, find_object=self.cluster.find)
        return super().apply(manifest)

    def apply_all(self, objects: Sequence[tuple[str, Object]]) -> list[str]:
        """Store the objects of several files. If one of the objects is invalid, store nothing and
        raise ConfigError. Return one message per object, as `kubectl apply` prints. `objects`:
        pairs of a file and an object in the file."""
        # store templates first, because schedules may refer to them
        ordered_objects = sorted(objects, key=lambda pair: pair[1].get("kind") == "CronWorkflow")
        objects_by_name = {
            (manifest.get("kind"), _read_name(manifest)): manifest
            for _, manifest in ordered_objects
        }

        def find(kind: str, name: str) -> Object | None:
            return objects_by_name.get((kind, name)) or self.cluster.find(kind, name)

        for file, manifest in ordered_objects:
            try:
                self._check(manifest, find, file)
            except ConfigError as error:
                kind = manifest.get("kind")
                raise ConfigError(f"{file}: {kind} {_read_name(manifest)}: {error}") from None

        messages: list[str] = []
        for _, manifest in ordered_objects:
            if manifest["kind"] in VERSIONED_KINDS:
                messages.append(self._apply_valid(manifest))
            else:
                self.cluster.store_objects([manifest])
                messages.append(f"{manifest['kind']} {_read_name(manifest)} stored")
        return messages

    def _check(self, manifest: Object, find: Find, file: str) -> None:
        """Raise ConfigError for an object that cannot be stored. `find`: function that finds an
        object to which the object refers. `file`: file of the object, for the message."""
        kind = str(manifest.get("kind"))
        if kind == "Workflow":
            command = shlex.join([program.name, "run", file])
            raise ConfigError(f"a Workflow is not stored. Run it: `{command}`.")
        if kind not in {*STORABLE_KINDS, *VERSIONED_KINDS}:
            kinds = dict.fromkeys([*VERSIONED_KINDS, *STORABLE_KINDS])
            raise ConfigError(
                f"this kind is not stored on one machine. The kinds are {', '.join(kinds)}."
            )
        if kind in VERSIONED_KINDS:
            object_names.check_object_name(kind, (manifest.get("metadata") or {}).get("name"))
            validate.check(manifest, find_object=find)
        else:
            check_storable(manifest)

    def apply_and_describe(self, manifest: Mapping[str, Any]) -> str:
        """Create or replace an object, and return the message that `kubectl apply` prints, such as
        `CronWorkflow demo created`. Raises ConfigError."""
        validate.check(manifest, find_object=self.cluster.find)
        return self._apply_valid(manifest)

    def _apply_valid(self, manifest: Mapping[str, Any]) -> str:
        """Create or replace an object that was validated, and return the message of `kubectl
        apply`."""
        kind = str(manifest.get("kind"))
        name = _read_name(manifest)
        old_object = self.find(kind, name)
        new_object = super().apply(manifest)
        if old_object is None:
            change = "created"
        elif old_object["metadata"]["resourceVersion"] == new_object["metadata"]["resourceVersion"]:
            change = "unchanged"
        else:
            change = "configured"
        return f"{kind} {name} {change}"


def _read_name(manifest: Mapping[str, Any]) -> str:
    return str((manifest.get("metadata") or {}).get("name") or "without a name")
