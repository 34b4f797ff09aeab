"""Kueue's queues, flavors and cohorts: the quota that a job may use, and the part that is free.

Source: types LocalQueue, ClusterQueue, Cohort and ResourceFlavor of Kueue 0.19 (v1beta2; v1beta1
has other names for the cohort), and pkg/scheduler/flavorassigner.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from argolocal.manifest.types import Object
from rekindle.cluster.cluster_nodes import REPELLING_EFFECTS
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.cluster.queue import KUEUE_VERSIONS
from rekindle.training.cost.pod_requests import PodRequests, parse_quantity_or_zero

# key of an amount: the name of a flavor and the name of a resource
FlavorResource = tuple[str, str]
COHORT_FIELDS = ("cohortName", "cohort", "parentName", "parent")


@dataclass(frozen=True)
class Quota:
    """The amounts of resources that a ClusterQueue may use. `limits`: the most that the queue may
    ever use; `free`: the part that is not reserved now; an unknown amount is infinite."""

    limits: Mapping[FlavorResource, float]
    free: Mapping[FlavorResource, float]

    def sum_flavors(
        self, amounts: Mapping[FlavorResource, float], flavor_names: Iterable[str]
    ) -> dict[str, float]:
        """Return the sum over flavors of each resource in `amounts`."""
        accepted_flavors = set(flavor_names)
        sums: dict[str, float] = {}
        for (flavor_name, resource_name), amount in amounts.items():
            if flavor_name in accepted_flavors:
                sums[resource_name] = sums.get(resource_name, 0.0) + amount
        return sums


@dataclass
class KueueObjects:
    """Kueue's objects of one cluster, each read at most once. Methods raise ApiError if the user
    may not read the objects."""

    cluster: Cluster
    api_version: str = ""
    lists: dict[str, list[Object]] = field(default_factory=dict)

    def is_installed(self) -> bool:
        """Return whether the cluster has the kind LocalQueue, and find the API version of this
        kind. Raises ApiError."""
        for version in KUEUE_VERSIONS:
            self.api_version = f"kueue.x-k8s.io/{version}"
            try:
                self.list_objects("localqueues")
            except ApiError as error:
                if error.code != 404:
                    raise
            else:
                return True
        return False

    def list_objects(self, plural: str) -> list[Object]:
        """Return all objects of a kind of Kueue; of LocalQueues, return only those of the
        namespace. Raises ApiError."""
        if plural not in self.lists:
            is_namespaced = plural == "localqueues"
            resource = Resource(self.api_version, plural, is_namespaced)
            self.lists[plural] = self.cluster.list_objects(resource)
        return self.lists[plural]

    def find(self, plural: str, object_name: str) -> Object | None:
        """Return an object that is not in a namespace; None if it does not exist. Raises
        ApiError."""
        if plural in self.lists:
            return next(
                (item for item in self.lists[plural] if item["metadata"]["name"] == object_name),
                None,
            )
        return self.cluster.find(Resource(self.api_version, plural, namespaced=False), object_name)

    def find_flavor(self, flavor_name: str) -> Object:
        """Return the spec of a ResourceFlavor; {} if the ResourceFlavor does not exist or the user
        may not read it."""
        try:
            return (self.find("resourceflavors", flavor_name) or {}).get("spec") or {}
        except ApiError:
            return {}


def compute_quota(kueue: KueueObjects, cluster_queue: Object) -> Quota:
    """Return the quota of a ClusterQueue, including the quota that the queue may borrow in its
    cohort."""
    own_quotas = dict(list_quotas(cluster_queue))
    own_reserved = _sum_reserved([cluster_queue])
    cohort_name = get_cohort_name(cluster_queue)
    cohort_queues = _list_cohort_queues(kueue, cohort_name) if cohort_name else []

    limits: dict[FlavorResource, float] = {}
    free: dict[FlavorResource, float] = {}
    for key, resource_quota in own_quotas.items():
        nominal = _read_amount(resource_quota, "nominalQuota")
        reserved = own_reserved.get(key, 0.0)
        if not cohort_name:
            limits[key], free[key] = nominal, nominal - reserved
            continue

        if cohort_queues is None:
            cohort_limit = cohort_free = math.inf
        else:
            lent = sum(
                _compute_lendable(cohort_queue, key)
                for cohort_queue in cohort_queues
                if cohort_queue["metadata"]["name"] != cluster_queue["metadata"]["name"]
            )
            cohort_limit = nominal + lent
            cohort_free = cohort_limit - _sum_reserved(cohort_queues).get(key, 0.0)

        own_limit = math.inf
        if resource_quota.get("borrowingLimit") is not None:
            own_limit = nominal + _read_amount(resource_quota, "borrowingLimit")
        limits[key] = min(own_limit, cohort_limit)
        free[key] = min(limits[key] - reserved, cohort_free)

    return Quota(limits, free)


def list_quotas(queue: Object) -> Iterator[tuple[FlavorResource, Object]]:
    """Yield each quota of a ClusterQueue or Cohort with the names of its flavor and resource."""
    for resource_group in list_resource_groups(queue):
        for flavor in resource_group.get("flavors") or []:
            for resource_quota in flavor.get("resources") or []:
                yield (flavor["name"], resource_quota["name"]), resource_quota


def list_resource_groups(queue: Object) -> list[Object]:
    return (queue.get("spec") or {}).get("resourceGroups") or []


def get_cohort_name(queue: Object) -> str:
    """Return the name of a ClusterQueue's cohort, or of a Cohort's parent; "" if the object has no
    cohort or parent."""
    queue_spec = queue.get("spec") or {}
    return next((queue_spec[key] for key in COHORT_FIELDS if queue_spec.get(key)), "")


def explain_mismatch(flavor: Object, group_labels: set[str], pod: PodRequests) -> str:
    """Return why pods cannot use a flavor, which is a label or a taint of the flavor's nodes; "" if
    the pods can use the flavor.

    `group_labels`: keys of the labels of all flavors in the resource group; as in Kueue, other
    labels that the pod requires do not matter.
    """
    node_labels = flavor.get("nodeLabels") or {}
    for key, value in pod.labels.items():
        if key in group_labels and node_labels.get(key) != value:
            return f"{key}={node_labels.get(key, '')} instead of {value}"

    tolerations = [
        *pod.tolerations,
        *(
            (toleration.get("key") or "", toleration.get("value") or "")
            for toleration in flavor.get("tolerations") or []
        ),
    ]
    for taint in flavor.get("nodeTaints") or []:
        is_tolerated = any(
            key in ("", taint["key"]) and value in ("", taint.get("value", ""))
            for key, value in tolerations
        )
        if taint.get("effect") in REPELLING_EFFECTS and not is_tolerated:
            return f"taint {taint['key']}={taint.get('value', '')}:{taint['effect']}"
    return ""


def _list_cohort_queues(kueue: KueueObjects, cohort_name: str) -> list[Object] | None:
    """Return the ClusterQueues of a cohort, and the Cohort itself if it has quotas. Return None if
    the user may not read the ClusterQueues or the Cohort, or if other cohorts may lend to this
    cohort."""
    try:
        cohorts = kueue.list_objects("cohorts")
    except ApiError as error:
        if error.code != 404:
            return None
        cohorts = []
    if any(
        get_cohort_name(cohort) == cohort_name
        or (cohort["metadata"]["name"] == cohort_name and get_cohort_name(cohort))
        for cohort in cohorts
    ):
        return None

    try:
        cluster_queues = kueue.list_objects("clusterqueues")
    except ApiError:
        return None
    return [
        *(queue for queue in cluster_queues if get_cohort_name(queue) == cohort_name),
        *(
            # the Cohort gets another name here, because a ClusterQueue may have the name of its
            # cohort
            cohort | {"metadata": {"name": f"cohort {cohort_name}"}}
            for cohort in cohorts
            if cohort["metadata"]["name"] == cohort_name
        ),
    ]


def _compute_lendable(queue: Object, key: FlavorResource) -> float:
    """Return the amount that a queue may lend to the other queues of its cohort."""
    resource_quota = dict(list_quotas(queue)).get(key, {})
    nominal = _read_amount(resource_quota, "nominalQuota")
    if resource_quota.get("lendingLimit") is None:
        return nominal
    return min(nominal, _read_amount(resource_quota, "lendingLimit"))


def _sum_reserved(queues: Iterable[Object]) -> dict[FlavorResource, float]:
    reserved: dict[FlavorResource, float] = {}
    for queue in queues:
        for flavor in (queue.get("status") or {}).get("flavorsReservation") or []:
            for usage in flavor.get("resources") or []:
                key = (flavor["name"], usage["name"])
                reserved[key] = reserved.get(key, 0.0) + _read_amount(usage, "total")
    return reserved


def _read_amount(amounts: Object, resource_name: str) -> float:
    return parse_quantity_or_zero(amounts.get(resource_name) or 0)
