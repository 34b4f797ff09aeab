"""Check that the cluster admits pods of each kind, and that a node can run them."""

from collections.abc import Iterator

from argolocal.manifest.types import Object
from rekindle.blocks.settings import POD_DEFAULTS, ClusterConfig
from rekindle.cluster.cluster_nodes import Node, find_obstacle, read_nodes
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import PODS, Cluster
from rekindle.cluster.pod_runner import pod_manifest
from rekindle.errors import Check
from rekindle.training.cost.pod_requests import read_pod


def check_admission(cluster: Cluster, config: ClusterConfig) -> Iterator[Check]:
    """Check that a pod of each kind is admitted (PodSecurity, quota, LimitRange, PriorityClass,
    ServiceAccount) and that it fits a node."""
    try:
        nodes = read_nodes(cluster, with_pods=True)
        note = ""
    except ApiError as error:
        nodes = []
        note = f"; not compared with the nodes of the cluster: {error}"

    for name in POD_DEFAULTS:
        settings = config.pod(name)
        settings = settings.model_copy(update={"cpu": settings.cpu or "1"})
        try:
            pod = pod_manifest(f"rekindle-{name}", config, settings, {"main": settings.image}, [])
            cluster.create(PODS, pod, dry_run=True)
        except ApiError as error:
            remedy = f"Change cluster.pods.{name}, or the policy that refuses the pod."
            yield Check(f"pod of {name}", False, str(error), remedy)
            continue

        if note:
            yield Check(f"pod of {name}", True, f"would be admitted{note}")
        else:
            yield _check_capacity(name, nodes, pod)


def _check_capacity(name: str, nodes: list[Node], pod: Object) -> Check:
    """Check that a node can run an admitted pod."""
    obstacle = find_obstacle(nodes, read_pod(pod["spec"]))
    if obstacle is None:
        return Check(f"pod of {name}", True, "would be admitted, and fits a node")

    remedy = f"Lower or change cluster.pods.{name}, or add a node that can run the pod."
    found = f"would be admitted, but stay Pending: {obstacle.text}"
    return Check(f"pod of {name}", False, found, remedy, required=not obstacle.may_end)
