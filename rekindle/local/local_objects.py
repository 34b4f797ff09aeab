"""The Kubernetes objects of this machine that `rekindle rollback` and `rekindle scale` read and
change."""

from collections.abc import Callable

from argolocal.controllers.kubectl import apply_patch
from argolocal.manifest.types import Object
from argolocal.runner.cluster import LocalCluster
from rekindle.kubernetes_names import NAME_LABEL


class LocalObjects:
    """The Kubernetes objects in the home of a local cluster."""

    def __init__(self, local_cluster: LocalCluster) -> None:
        self.controllers = local_cluster.kinds.controllers(local_cluster, local_cluster.home)

    def find(self, object_kind: str, object_name: str) -> Object | None:
        return self.controllers[object_kind].get(object_name)

    def deployments(
        self, model: str, on_malformed: Callable[[object], None] | None = None
    ) -> list[Object]:
        deployment_controller = self.controllers["Deployment"]
        stored_deployments = map(deployment_controller.read, deployment_controller.names())
        return [
            deployment
            for deployment in stored_deployments
            if deployment and deployment["metadata"].get("labels", {}).get(NAME_LABEL) == model
        ]

    def patch(
        self, object_kind: str, object_name: str, object_change: Object, dry_run: bool = False
    ) -> None:
        """Apply a merge patch to an object of this machine. A dry run does nothing, since this
        machine has no admission checks. Raises Conflict."""
        if not dry_run:
            self.controllers[object_kind].patch(
                object_name, lambda now: apply_patch(now, object_change, "merge")
            )
