"""Store the WorkflowTemplates, ClusterWorkflowTemplates and CronWorkflows of a home. Each object is
validated before it is stored.

    objects = Objects(cluster)
    template = objects.create(manifest)    # raises ConfigError, ObjectExists

Workflows refer to the templates with `templateRef`. The server starts the CronWorkflows.
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
    """The versioned objects of a home. Methods that store a manifest raise ConfigError if Argo
    would reject the manifest."""

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
        """Store the objects of several files, each given with its file, or none of them if one is
        invalid. Return the changes in the words of `kubectl apply`. Raises ConfigError."""
        # templates come first, because schedules may refer to them
        ordered = sorted(objects, key=lambda pair: pair[1].get("kind") == "CronWorkflow")
        by_name = {(item.get("kind"), _read_name(item)): item for _, item in ordered}

        def find(kind: str, name: str) -> Object | None:
            return by_name.get((kind, name)) or self.cluster.find(kind, name)

        for file, item in ordered:
            try:
                self._check(item, find, file)
            except ConfigError as error:
                kind = item.get("kind")
                raise ConfigError(f"{file}: {kind} {_read_name(item)}: {error}") from None

        changes: list[str] = []
        for _, item in ordered:
            if item["kind"] in VERSIONED_KINDS:
                changes.append(self.apply_and_describe(item))
            else:
                self.cluster.store_objects([item])
                changes.append(f"{item['kind']} {_read_name(item)} stored")
        return changes

    def _check(self, item: Object, find: Find, file: str) -> None:
        """Raise ConfigError for an object that cannot be stored."""
        kind = str(item.get("kind"))
        if kind == "Workflow":
            command = shlex.join([program.name, "run", file])
            raise ConfigError(f"a Workflow is not stored. Run it: `{command}`.")
        if kind not in {*STORABLE_KINDS, *VERSIONED_KINDS}:
            kinds = dict.fromkeys([*VERSIONED_KINDS, *STORABLE_KINDS])
            raise ConfigError(
                f"this kind is not stored on one machine. The kinds are {', '.join(kinds)}."
            )
        if kind in VERSIONED_KINDS:
            object_names.check_object_name(kind, (item.get("metadata") or {}).get("name"))
            validate.check(item, find_object=find)
        else:
            check_storable(item)

    def apply_and_describe(self, manifest: Mapping[str, Any]) -> str:
        """Create or replace an object, and return the message of `kubectl apply`, such as
        `CronWorkflow demo created`. Raises ConfigError."""
        kind = str(manifest.get("kind"))
        name = _read_name(manifest)
        previous = self.find(kind, name)
        stored = self.apply(manifest)
        if previous is None:
            change = "created"
        elif previous["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]:
            change = "unchanged"
        else:
            change = "configured"
        return f"{kind} {name} {change}"


def _read_name(item: Mapping[str, Any]) -> str:
    return str((item.get("metadata") or {}).get("name") or "without a name")
