"""The kinds of objects that can be applied on this machine, and the controller of each.

kinds = Kinds()
kinds.register(SparkApplications)     # a Controller whose `kind` is SparkApplication
cluster = LocalCluster(home, kinds=kinds)
"""

from pathlib import Path

from argolocal.controllers.controller import Controller
from argolocal.controllers.deployment import Deployments, Services
from argolocal.interfaces import Cluster

# kinds whose controller only stores the objects
STORE_ONLY_KINDS = (
    "ConfigMap",
    "Secret",
    "HorizontalPodAutoscaler",
    "PodDisruptionBudget",
    "HTTPRoute",
    "Ingress",
)


class Kinds:
    """Maps kinds of objects to controllers: the built-in kinds, and the kinds that `register`
    adds."""

    def __init__(self) -> None:
        self.types: dict[str, type[Controller]] = {}
        self.register(Deployments)
        self.register(Services)
        self.register(Controller, *STORE_ONLY_KINDS)

    def register(self, controller: type[Controller], *kinds: str) -> None:
        """Register `controller` for objects of `kinds`, in place of the controllers that these
        kinds had. Without `kinds`, use the attribute `controller.kind`."""
        self.types.update(dict.fromkeys(kinds or (controller.kind,), controller))

    def controllers(self, cluster: Cluster, run_directory: Path) -> dict[str, Controller]:
        """Return a new controller for each kind. The controllers store the logs and directories of
        pods below `run_directory`."""
        controllers = {
            kind: controller_class(cluster, kind=kind, run=run_directory)
            for kind, controller_class in self.types.items()
        }
        for controller in controllers.values():
            controller.controllers = controllers
        return controllers
