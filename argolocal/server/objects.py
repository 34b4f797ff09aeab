"""Store the WorkflowTemplates, ClusterWorkflowTemplates and CronWorkflows of a home. Each object is
validated before it is stored.

    objects = Objects(cluster)
    template = objects.create(manifest)    # raises ConfigError, ObjectExists

Workflows refer to the templates with `templateRef`. The server starts the CronWorkflows.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from argolocal import validate
from argolocal.interfaces import Cluster
from argolocal.manifest.types import Object
from argolocal.state.stored_objects import VERSIONED_KINDS, StoredObjects

__all__ = ["VERSIONED_KINDS", "Objects"]


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

    def apply_and_describe(self, manifest: Mapping[str, Any]) -> str:
        """Create or replace an object, and return the message of `kubectl apply`, such as
        `CronWorkflow demo created`. Raises ConfigError."""
        kind = str(manifest.get("kind"))
        name = str((manifest.get("metadata") or {}).get("name"))
        previous = self.find(kind, name)
        stored = self.apply(manifest)
        if previous is None:
            change = "created"
        elif previous["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]:
            change = "unchanged"
        else:
            change = "configured"
        return f"{kind} {name} {change}"
