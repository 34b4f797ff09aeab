"""The objects that commands change on a cluster, by kind."""

from rekindle.cluster.api import SERVICES, Cluster, Object, Resource
from rekindle.cluster.errors import ApiError
from rekindle.errors import Conflict

KINDS = {
    "Deployment": Resource("apps/v1", "deployments"),
    "PyTorchJob": Resource("kubeflow.org/v1", "pytorchjobs"),
    "Service": SERVICES,
    "HorizontalPodAutoscaler": Resource("autoscaling/v2", "horizontalpodautoscalers"),
}


class ClusterObjects:
    """What `rekindle rollback` and `rekindle scale` change in one namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def find(self, kind: str, name: str) -> Object | None:
        """The object, or None."""
        return self.cluster.find(KINDS[kind], name)

    def deployments(self, model: str) -> list[Object]:
        """The Deployments of a model."""
        return self.cluster.list_objects(KINDS["Deployment"], f"app.kubernetes.io/name={model}")

    def patch(self, kind: str, name: str, change: Object, dry_run: bool = False) -> None:
        """Apply a merge patch, or only try it. Raises ApiError, and Conflict for another resourceVersion."""
        try:
            self.cluster.patch(KINDS[kind], name, change, dry_run)
        except ApiError as error:
            raise Conflict(str(error)) if error.code == 409 else error from error
