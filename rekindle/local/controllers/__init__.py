"""The kinds that can be applied here, one controller each; see `base.Controller`."""

from pathlib import Path

from rekindle.local.controllers.base import Controller
from rekindle.local.controllers.deployment import Deployments, Services
from rekindle.local.controllers.pytorch_job import PyTorchJobs
from rekindle.local.pods.interfaces import Cluster

KINDS = ("PyTorchJob", "Deployment", "Service", "ConfigMap", "Secret", "HorizontalPodAutoscaler", "PodDisruptionBudget")
PLAIN = KINDS[3:]  # only stored


def controllers(cluster: Cluster, run: Path) -> dict[str, Controller]:
    """A controller for each kind; the logs and directories of jobs' pods go below `run`."""
    plain = {kind: Controller(cluster, kind) for kind in PLAIN}
    return {
        "PyTorchJob": PyTorchJobs(cluster, run),
        "Deployment": Deployments(cluster),
        "Service": Services(cluster),
        **plain,
    }
