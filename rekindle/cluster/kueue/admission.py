"""Compare the pods of a manifest with the queues and quotas of Kueue, before anything is submitted.

    for finding in check_admission(cluster, list_queued_jobs(read_templates(manifest))):
        print(finding)  # "train exceeds the quota of the ClusterQueue research, 12 cpu of 8: ..."

`rekindle submit`, `lint --cluster`, `plan --cluster` and `platform check` use the function
check_admission. If the user may not read an object of Kueue, the result contains a note, and no job
is refused for this reason.

Source: the rules are those of Kueue 0.19, pkg/scheduler and pkg/cache (admission),
pkg/controller/jobs (integrations).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from argolocal.manifest.types import Object
from rekindle.cluster.cluster_nodes import list_shortages
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.cluster.kueue.configuration import (
    CONFIG_MAP_NAME,
    FRAMEWORKS,
    KUEUE_NAMESPACE,
    Configuration,
    UnreadableConfiguration,
    read_configuration,
)
from rekindle.cluster.kueue.queued_jobs import SINGLE_POD_KINDS, QueuedJob
from rekindle.cluster.kueue.quotas import (
    KueueObjects,
    Quota,
    compute_quota,
    explain_mismatch,
    get_cohort_name,
    list_quotas,
    list_resource_groups,
)
from rekindle.cluster.kueue.selectors import NAMESPACE_LABEL, format_selector, matches

NAMESPACES = Resource("v1", "namespaces", namespaced=False)
# values of cluster.backend by kind of job
BACKEND_NAMES = {"PyTorchJob": "pytorchjob", "JobSet": "jobset", "TrainJob": "trainjob"}
STOPPED_POLICIES = ("Hold", "HoldAndDrain")
# kinds whose pods must all become ready, or Kueue evicts the job (waitForPodsReady)
READY_KINDS = ("JobSet", "TrainJob")


@dataclass(frozen=True)
class AdmissionFinding:
    """A reason why Kueue cannot admit a job, or (`is_fatal` is False) a note about its admission.
    `remedy`: the way out; "" if nothing has to be done."""

    problem: str
    remedy: str = ""
    is_fatal: bool = True

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}" if self.remedy else self.problem


def check_admission(cluster: Cluster, jobs: Sequence[QueuedJob]) -> list[AdmissionFinding]:
    """Return the reasons that prevent or delay the admission of jobs. Raises ApiError if
    the cluster does not answer."""
    if not jobs:
        return []
    return list(dict.fromkeys(_Admission(cluster).check(jobs)))


class _Admission:
    """The state of one check: the objects of Kueue that were read."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.kueue = KueueObjects(cluster)
        self.configuration: Configuration | None = None

    def check(self, jobs: Sequence[QueuedJob]) -> Iterator[AdmissionFinding]:
        queue_names = sorted({job.queue for job in jobs})
        queues_text = _join_names(queue_names)
        try:
            if not self.kueue.is_installed():
                yield AdmissionFinding(
                    f"{_join_jobs(jobs)} must wait in the queue {queues_text}, but Kueue is not"
                    " installed on the cluster",
                    "have Kueue installed, or leave cluster.gang empty.",
                )
                return
        except ApiError as error:
            yield _make_unreadable_note(f"the queue {queues_text}", error)
            return

        yield from self._check_configuration(jobs)
        yield from self._check_priorities(jobs)
        for queue_name in queue_names:
            yield from self._check_queue(
                queue_name, [job for job in jobs if job.queue == queue_name]
            )

    def _check_configuration(self, jobs: Sequence[QueuedJob]) -> Iterator[AdmissionFinding]:
        """Check that Kueue manages the kinds of the jobs, and the namespace."""
        kinds = sorted({job.kind for job in jobs if job.kind in FRAMEWORKS})
        try:
            self.configuration = read_configuration(self.cluster)
        except UnreadableConfiguration as error:
            yield AdmissionFinding(
                f"whether Kueue manages {_join_names([f'{kind}s' for kind in kinds])} is unknown,"
                f" because {error}; a job that it does not manage runs without a queue",
                is_fatal=False,
            )
            return

        for kind in kinds:
            kind_jobs = [job for job in jobs if job.kind == kind]
            if not self.configuration.has_framework(kind):
                yield AdmissionFinding(
                    f"Kueue does not manage {kind}s on this cluster, so {_join_jobs(kind_jobs)}"
                    f" would run without the queue {kind_jobs[0].queue}",
                    self._describe_framework_remedy(kind),
                )

        selector = self.configuration.namespace_selector
        if selector is not None and self._selects_namespace(selector) is False:
            yield AdmissionFinding(
                f"Kueue does not manage the namespace {self.cluster.namespace}, so"
                f" {_join_jobs(jobs)} would run without a queue",
                "have the namespace labelled as managedJobsNamespaceSelector of Kueue's"
                f" configuration demands ({format_selector(selector)}).",
            )

        ready_timeout = self.configuration.ready_timeout
        elastic_jobs = [job for job in jobs if job.kind in READY_KINDS]
        if ready_timeout and elastic_jobs:
            yield AdmissionFinding(
                f"Kueue suspends {_join_jobs(elastic_jobs)} and queues it again if some of its pods"
                f" are not ready {ready_timeout} after its admission (waitForPodsReady): with"
                " cluster.harvest, workers beyond train.min_workers may wait for nodes longer",
                is_fatal=False,
            )

    def _describe_framework_remedy(self, job_kind: str) -> str:
        """Return the way out if Kueue does not manage a kind of job."""
        assert self.configuration
        remedy = (
            f"have the line `- {FRAMEWORKS[job_kind]}` added to integrations.frameworks in the"
            f" ConfigMap {CONFIG_MAP_NAME} of namespace {KUEUE_NAMESPACE} and Kueue's controller"
            " restarted"
        )
        if job_kind == "Pod":
            return f"{remedy}, or list the kinds of these steps in cluster.unqueued."
        if job_kind in BACKEND_NAMES:
            managed_backends = [
                f"cluster.backend to {backend_name}"
                for other_kind, backend_name in BACKEND_NAMES.items()
                if other_kind != job_kind and self.configuration.has_framework(other_kind)
            ]
            if managed_backends:
                return f"{remedy}, or set {' or '.join(managed_backends)}."
        return f"{remedy}."

    def _check_priorities(self, jobs: Sequence[QueuedJob]) -> Iterator[AdmissionFinding]:
        for priority_name in sorted({job.priority_class for job in jobs} - {""}):
            try:
                if self.kueue.find("workloadpriorityclasses", priority_name):
                    continue
                class_names = [
                    item["metadata"]["name"]
                    for item in self.kueue.list_objects("workloadpriorityclasses")
                ]
            except ApiError as error:
                yield _make_unreadable_note(f"the WorkloadPriorityClass {priority_name}", error)
                continue

            priority_jobs = [job for job in jobs if job.priority_class == priority_name]
            yield AdmissionFinding(
                f"{_join_jobs(priority_jobs)} would never be admitted, because the"
                f" WorkloadPriorityClass {priority_name} does not exist",
                "set cluster.queue_priority and cluster.harvest_priority to existing classes"
                f" ({_join_names(class_names) or 'none exist'}), or have this class created.",
            )

    def _check_queue(
        self, queue_name: str, jobs: Sequence[QueuedJob]
    ) -> Iterator[AdmissionFinding]:
        """Check a LocalQueue and its ClusterQueue, and compare the jobs with its quota."""
        local_queues = {
            local_queue["metadata"]["name"]: local_queue
            for local_queue in self.kueue.list_objects("localqueues")
        }
        if queue_name not in local_queues:
            existing_names = _join_names(sorted(local_queues)) or "none exist"
            yield AdmissionFinding(
                f"the LocalQueue {queue_name} does not exist in namespace {self.cluster.namespace}",
                f"set cluster.queue to a LocalQueue of the namespace ({existing_names}), or have"
                f" the platform team create {queue_name}.",
            )
            return

        local_queue = local_queues[queue_name]
        yield from _check_active(f"LocalQueue {queue_name}", local_queue)
        cluster_queue_name = local_queue["spec"]["clusterQueue"]
        try:
            cluster_queue = self.kueue.find("clusterqueues", cluster_queue_name)
        except ApiError as error:
            yield _make_unreadable_note(f"the ClusterQueue {cluster_queue_name}", error)
            return

        if cluster_queue is None:
            yield AdmissionFinding(
                f"the ClusterQueue {cluster_queue_name} of the LocalQueue {queue_name} does not"
                " exist",
                "have the platform team create it, or set cluster.queue to another LocalQueue.",
            )
            return

        yield from _check_active(f"ClusterQueue {cluster_queue_name}", cluster_queue)
        yield from self._check_namespace(cluster_queue)
        yield from self._check_quota(cluster_queue, jobs)

    def _check_namespace(self, cluster_queue: Object) -> Iterator[AdmissionFinding]:
        queue_name = cluster_queue["metadata"]["name"]
        selector = cluster_queue["spec"].get("namespaceSelector")
        if selector is None:
            yield AdmissionFinding(
                f"the ClusterQueue {queue_name} admits no job, because its namespaceSelector is"
                " missing",
                "have `namespaceSelector: {}`, or a selector of this namespace, added to it.",
            )
            return

        is_selected = self._selects_namespace(selector)
        if is_selected is False:
            yield AdmissionFinding(
                f"the ClusterQueue {queue_name} admits no job of namespace"
                f" {self.cluster.namespace}, but only of namespaces with"
                f" {format_selector(selector)}",
                "have the namespace labelled, its name added to namespaceSelector, or set"
                " cluster.namespace.",
            )
        elif is_selected is None:
            yield AdmissionFinding(
                f"whether the ClusterQueue {queue_name} admits jobs of namespace"
                f" {self.cluster.namespace} is unknown, because the labels of the namespace may not"
                " be read",
                is_fatal=False,
            )

    def _selects_namespace(self, selector: Object) -> bool | None:
        """Return whether a selector matches the labels of the namespace; None if the result depends
        on labels that the user may not read."""
        name_label = {NAMESPACE_LABEL: self.cluster.namespace}
        known_result = matches(selector, name_label, is_complete=False)
        if known_result is not None:
            return known_result
        try:
            namespace_object = self.cluster.get(NAMESPACES, self.cluster.namespace)
        except ApiError:
            return None
        return matches(selector, name_label | (namespace_object["metadata"].get("labels") or {}))

    def _check_quota(
        self, cluster_queue: Object, jobs: Sequence[QueuedJob]
    ) -> Iterator[AdmissionFinding]:
        """Compare jobs with the whole quota of a ClusterQueue, and with the free part of the
        quota."""
        quota = compute_quota(self.kueue, cluster_queue)
        yield from self._check_resources(cluster_queue, quota, jobs)
        # jobs by the quota that they wait for
        waiting_jobs: dict[str, list[QueuedJob]] = {}

        for job in jobs:
            refusals = list(self._refuse_job(cluster_queue, quota, job))
            yield from refusals
            if refusals:
                continue
            free_amounts = quota.sum_flavors(quota.free, [name for name, _ in quota.free])
            missing = list_shortages(self._list_quota_requests(job, quota), free_amounts)
            if missing:
                waiting_jobs.setdefault(", ".join(missing), []).append(job)

        for missing, shortage_jobs in waiting_jobs.items():
            yield AdmissionFinding(
                f"{_join_jobs(shortage_jobs)} must wait for quota of the ClusterQueue"
                f" {cluster_queue['metadata']['name']}, {missing} that are free now"
                + _describe_order(cluster_queue),
                is_fatal=False,
            )

    def _check_resources(
        self, cluster_queue: Object, quota: Quota, jobs: Sequence[QueuedJob]
    ) -> Iterator[AdmissionFinding]:
        """Check that a ClusterQueue has a quota of each resource that the jobs request."""
        covered_names = list(dict.fromkeys(resource_name for _, resource_name in quota.limits))
        jobs_by_names: dict[tuple[str, ...], list[QueuedJob]] = {}
        for job in jobs:
            uncovered_names = tuple(
                name
                for name, amount in job.sum_requests().items()
                if amount and name not in (*covered_names, "pods") and not self._is_ignored(name)
            )
            if uncovered_names:
                jobs_by_names.setdefault(uncovered_names, []).append(job)

        queue_name = cluster_queue["metadata"]["name"]
        for uncovered_names, uncovered_jobs in jobs_by_names.items():
            yield AdmissionFinding(
                f"the requests of {_join_jobs(uncovered_jobs)} include"
                f" {_join_names(uncovered_names)}, but the ClusterQueue {queue_name} has a quota"
                f" only of {_join_names(covered_names) or 'nothing'}",
                f"have a quota of {_join_names(uncovered_names)} added to it, or the resource to"
                " resources.excludeResourcePrefixes of Kueue's configuration.",
                # only Kueue's configuration says whether Kueue ignores the resource
                is_fatal=self.configuration is not None,
            )

    def _refuse_job(
        self, cluster_queue: Object, quota: Quota, job: QueuedJob
    ) -> Iterator[AdmissionFinding]:
        """Yield the reasons why a ClusterQueue can never admit a job."""
        queue_name = cluster_queue["metadata"]["name"]
        shortage = self._find_shortage(cluster_queue, quota, job)
        if shortage:
            cohort_name = get_cohort_name(cluster_queue)
            borrowed_text = f" and all that it may borrow from {cohort_name}" if cohort_name else ""
            share_text = " per pod" if job.kind in SINGLE_POD_KINDS else ""
            yield AdmissionFinding(
                f"{job.name} exceeds the quota of the ClusterQueue {queue_name}{borrowed_text},"
                f" {shortage}{share_text}",
                "lower its requests (cluster.pods, train.workers or train.min_workers), or have the"
                " quota raised.",
            )
            return

        mismatch = self._find_mismatch(cluster_queue, quota, job)
        if mismatch:
            yield AdmissionFinding(
                f"no flavor of the ClusterQueue {queue_name} can run {job.name} ({mismatch})",
                "change node_selector, tolerations or the requests of its pods (cluster.pods), or"
                " have the flavor added.",
            )

    def _is_ignored(self, resource_name: str) -> bool:
        return self.configuration is not None and self.configuration.ignores_resource(resource_name)

    def _list_quota_requests(self, job: QueuedJob, quota: Quota) -> dict[str, float]:
        """Return the requests of a job that a quota of the ClusterQueue limits."""
        covered_names = {resource_name for _, resource_name in quota.limits}
        return {
            name: amount
            for name, amount in job.sum_requests().items()
            if name in covered_names and not self._is_ignored(name)
        }

    def _find_shortage(self, cluster_queue: Object, quota: Quota, job: QueuedJob) -> str:
        """Return, as text, the requests of a job that exceed all flavors together; "" if no request
        does."""
        flavor_names = {flavor_name for (flavor_name, _), _ in list_quotas(cluster_queue)}
        limits = quota.sum_flavors(quota.limits, flavor_names)
        return ", ".join(list_shortages(self._list_quota_requests(job, quota), limits))

    def _find_mismatch(self, cluster_queue: Object, quota: Quota, job: QueuedJob) -> str:
        """Return the reason why equal pods of a job fit into no flavor of a resource group; "" if
        the pods fit. Kueue gives all equal pods of a job the same flavor."""
        for resource_group in list_resource_groups(cluster_queue):
            specs = {
                flavor["name"]: self.kueue.find_flavor(flavor["name"])
                for flavor in resource_group.get("flavors") or []
            }
            group_labels = {key for spec in specs.values() for key in spec.get("nodeLabels") or {}}
            for pod_set in job.pod_sets:
                reasons: list[str] = []
                for flavor_name, spec in specs.items():
                    requests = {
                        name: pod_set.count * amount
                        for name, amount in pod_set.pod.requests.items()
                        if (flavor_name, name) in quota.limits and not self._is_ignored(name)
                    }
                    shortages = list_shortages(
                        requests, {name: quota.limits[flavor_name, name] for name in requests}
                    )
                    reason = explain_mismatch(spec, group_labels, pod_set.pod) or ", ".join(
                        shortages
                    )
                    if not reason or not requests:
                        break
                    reasons.append(f"{flavor_name}: {reason}")
                else:
                    if reasons:
                        return "; ".join(reasons)
        return ""


def _describe_order(cluster_queue: Object) -> str:
    """Return the reasons that delay a waiting job, as the end of a sentence."""
    texts = []
    pending_count = (cluster_queue.get("status") or {}).get("pendingWorkloads", 0)
    if pending_count:
        texts.append(f"{pending_count} workloads wait there already")
    preemption = cluster_queue["spec"].get("preemption") or {}
    if preemption.get("withinClusterQueue", "Never") == "Never":
        texts.append("the queue does not preempt workloads of lower priority")
    return f" ({'; '.join(texts)})" if texts else ""


def _check_active(title: str, queue: Object) -> Iterator[AdmissionFinding]:
    """Check that a queue is not stopped, and that Kueue has not reported a fault of the queue."""
    stop_policy = queue["spec"].get("stopPolicy")
    if stop_policy in STOPPED_POLICIES:
        yield AdmissionFinding(
            f"the {title} is stopped (stopPolicy {stop_policy}) and admits no job",
            "ask the platform team when it is opened again, or set another cluster.queue.",
        )
        return

    for condition in (queue.get("status") or {}).get("conditions") or []:
        if condition["type"] == "Active" and condition.get("status") == "False":
            reason = condition.get("message") or condition.get("reason") or "no reason given"
            yield AdmissionFinding(
                f"the {title} is not active and admits no job ({reason.rstrip('.')})",
                "have the platform team repair it, or set another cluster.queue.",
            )


def _make_unreadable_note(subject: str, error: ApiError) -> AdmissionFinding:
    return AdmissionFinding(f"not compared with {subject}: {error}", is_fatal=False)


def _join_jobs(jobs: Sequence[QueuedJob]) -> str:
    return _join_names(list(dict.fromkeys(job.name for job in jobs)))


def _join_names(names: Sequence[str], maximum: int = 5) -> str:
    """Return names as a list in a sentence, with at most `maximum` names."""
    shown_names = [*names[:maximum]]
    if len(names) > maximum:
        shown_names.append(f"{len(names) - maximum} more")
    return " and ".join(filter(None, [", ".join(shown_names[:-1]), *shown_names[-1:]]))
