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
