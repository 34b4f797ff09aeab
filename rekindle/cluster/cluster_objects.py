"""The Kubernetes objects that commands read and change on a cluster."""

from collections.abc import Callable

from argolocal.common.object_names import LABEL_VALUE_RULE
from argolocal.manifest.training_jobs import JOB_API_VERSION
from argolocal.manifest.types import Object
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import SERVICES, Cluster, Resource
from rekindle.errors import Conflict
from rekindle.kubernetes_names import NAME_LABEL

KINDS = {
    "Deployment": Resource("apps/v1", "deployments"),
    "PyTorchJob": Resource(JOB_API_VERSION, "pytorchjobs"),
    "Service": SERVICES,
    "HorizontalPodAutoscaler": Resource("autoscaling/v2", "horizontalpodautoscalers"),
}


class ClusterObjects:
    """The objects of one namespace that `rekindle rollback` and `rekindle scale` read and
    change."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def find(self, object_kind: str, object_name: str) -> Object | None:
        return self.cluster.find(KINDS[object_kind], object_name)

    def deployments(
        self, model: str, on_malformed: Callable[[object], None] | None = None
    ) -> list[Object]:
        """Return the Deployments of a model; [] if the model's name is not a valid label value."""
        if not model or not LABEL_VALUE_RULE.allows(model):
            return []
        label_selector = f"{NAME_LABEL}={model}"
        return self.cluster.list_objects(
            KINDS["Deployment"], label_selector, on_malformed=on_malformed
        )

    def patch(
        self, object_kind: str, object_name: str, object_change: Object, dry_run: bool = False
    ) -> None:
        """Apply the merge patch `object_change` to an object. Raises ApiError; raises Conflict if
        the resourceVersion in `object_change` is outdated."""
        try:
            self.cluster.patch(KINDS[object_kind], object_name, object_change, dry_run)
        except ApiError as error:
            raise Conflict(str(error)) if error.code == 409 else error from error
