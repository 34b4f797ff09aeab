"""Check that the cluster admits pods of each kind, and that a node can run them."""

from collections.abc import Iterator

from argolocal.manifest.types import Object
from rekindle.blocks.settings import POD_DEFAULTS, ClusterConfig
from rekindle.cluster.cluster_nodes import Node, find_obstacle, read_nodes
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import PODS, Cluster
from rekindle.cluster.pod_runner import build_pod_manifest
from rekindle.errors import Check
from rekindle.training.cost.pod_requests import read_pod


def check_admission(cluster: Cluster, cluster_config: ClusterConfig) -> Iterator[Check]:
    """Check that a pod of each kind is admitted (PodSecurity, quota, LimitRange, PriorityClass,
    ServiceAccount) and that the pod fits a node."""
    try:
        nodes = read_nodes(cluster, reads_pods=True)
        capacity_note = ""
    except ApiError as error:
        nodes = []
        capacity_note = f"; not compared with the nodes of the cluster: {error}"

    for name in POD_DEFAULTS:
        pod_settings = cluster_config.pod(name)
        pod_settings = pod_settings.model_copy(update={"cpu": pod_settings.cpu or "1"})
        try:
            pod_object = build_pod_manifest(
                f"rekindle-{name}", cluster_config, pod_settings, {"main": pod_settings.image}, []
            )
            cluster.create(PODS, pod_object, dry_run=True)
        except ApiError as error:
            remedy = f"Change cluster.pods.{name}, or the policy that refuses the pod."
            yield Check(f"pod of {name}", False, str(error), remedy)
            continue

        if capacity_note:
            yield Check(f"pod of {name}", True, f"would be admitted{capacity_note}")
        else:
            yield _check_capacity(name, nodes, pod_object)


def _check_capacity(pod_kind: str, nodes: list[Node], pod_object: Object) -> Check:
    """Check that a node can run an admitted pod."""
    obstacle = find_obstacle(nodes, read_pod(pod_object["spec"]))
    if obstacle is None:
        return Check(f"pod of {pod_kind}", True, "would be admitted, and fits a node")

    remedy = f"Lower or change cluster.pods.{pod_kind}, or add a node that can run the pod."
    obstacle_text = f"would be admitted, but stay Pending: {obstacle.text}"
    return Check(f"pod of {pod_kind}", False, obstacle_text, remedy, required=not obstacle.may_end)
