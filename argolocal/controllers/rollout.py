"""Manage the pods of one Deployment: probe the pods, perform rolling updates, and write the
Deployment's status.

A pod of a new version receives connections once it is ready. When a new pod is ready, a pod of the
old version receives SIGTERM and finishes its open connections. A Deployment that a workflow owns
has pods only while the workflow is running. A pod whose exit code is in
`exit_codes.PERMANENT_ERRORS` is not restarted until another command applies the Deployment.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from argolocal.common import exit_codes
from argolocal.common.checked_names import RunName
from argolocal.common.json_text import to_json
from argolocal.controllers.deployment import (
    ORIGIN_ANNOTATION,
    PROBE_FIELDS,
    Deployments,
    pod_labels,
)
from argolocal.controllers.memory_volumes import memory_volume_environment
from argolocal.controllers.pod_process import Pod
from argolocal.interfaces import Cluster
from argolocal.language.gofmt import format_timestamp
from argolocal.manifest.types import Object
from argolocal.pods.probes import Probe
from argolocal.pods.process import Origin
from argolocal.state.journal import RunFiles, list_run_claims

# a rollout fails when a container of the new version has restarted this often
MAX_RESTARTS = 4
# maximum seconds between two probes until the first success
FAST_PROBE_PERIOD_S = 0.1


@dataclass(eq=False)
class Replica:
    """A pod of the Deployment and the state of its probes."""

    pod: Pod
    version: str
    labels: dict[str, str]
    ready: bool = False
    probe_task: asyncio.Task | None = None
    # number of open client connections to the pod
    connections: int = 0


@dataclass
class Progress:
    """The progress of a rollout to a version of the pod template."""

    # hash of the pod template
    version: str = ""
    # value of ORIGIN_ANNOTATION
    origin: str = ""
    # numbers of replicas that the status shows
    replica_counts: tuple = ()
    last_progress_time: float = field(default_factory=time.monotonic)
    # reason why the rollout has failed; "" if it has not
    failure: str = ""


class Rollout:
    """The pods of one Deployment. No method of a Rollout blocks."""

    def __init__(self, cluster: Cluster, deployments: Deployments, name: str) -> None:
        self.cluster = cluster
        self.deployments = deployments
        self.name = name
        self.replicas: list[Replica] = []
        self.terminating_replicas: list[Replica] = []
        self.progress = Progress()
        self.next_pod_number = 0

    @property
    def busy(self) -> bool:
        """True if a pod is starting or terminating."""
        return bool(self.terminating_replicas) or not all(
            replica.ready for replica in self.replicas
        )

    def end(self) -> bool:
        """Start to terminate all pods. Return True if all pods have already ended."""
        for replica in self.replicas:
            self._terminate(replica)
        self.reap()
        return not self.terminating_replicas

    def reconcile(self, kubernetes_object: Object) -> None:
        """Take the next step towards the Deployment's spec: start at most one pod, and terminate
        pods that are no longer needed."""
        template = kubernetes_object["spec"]["template"]
        version = hashlib.sha256(to_json(template, sort_keys=True).encode()).hexdigest()[:10]
        origin = (kubernetes_object["metadata"].get("annotations") or {}).get(
            ORIGIN_ANNOTATION, "{}"
        )

        run_files = find_owner_run(kubernetes_object, self.cluster)
        if run_files and not run_files.runner():
            desired_count = 0
        else:
            desired_count = kubernetes_object["spec"].get("replicas", 1)

        # a failed rollout is retried after scaling to 0, or when another command applies the
        # Deployment
        is_retry = self.progress.failure and (not desired_count or origin != self.progress.origin)
        if is_retry or version != self.progress.version:
            self.progress = Progress(version, origin)

        for replica in [replica for replica in self.replicas if is_retry and not replica.ready]:
            self._terminate(replica)

        self.reap()
        new_replicas = [replica for replica in self.replicas if replica.version == version]
        old_replicas = [replica for replica in self.replicas if replica.version != version]

        # maxSurge: 1, maxUnavailable: 0
        if len(new_replicas) < desired_count and len(self.replicas) <= desired_count:
            self._start_replica(template, version, run_files, json.loads(origin))

        surplus_count = len(self.replicas) - desired_count
        ready_count = sum(replica.ready for replica in self.replicas)
        if old_replicas:
            removable_replicas = sorted(old_replicas, key=lambda replica: replica.ready)
        else:
            removable_replicas = new_replicas[desired_count:]

        for replica in removable_replicas:
            # a ready old pod is terminated only when enough other pods are ready
            if surplus_count > 0 and (
                ready_count - replica.ready >= desired_count
                or (not replica.ready and len(new_replicas) >= desired_count)
            ):
                ready_count -= replica.ready
                surplus_count -= 1
                self._terminate(replica)

    def fail(self, message: str) -> None:
        """Record why the current rollout cannot proceed."""
        if not self.progress.failure:
            print(f"{self.name}: {message}", file=sys.stderr, flush=True)
            self.progress.failure = message

    def _start_replica(
        self, template: Object, version: str, run_files: RunFiles | None, origin: dict[str, str]
    ) -> None:
        """Add a pod of the template. `run_files`: the folder of the run that owns the Deployment,
        or None."""
        pod_name = f"{self.name}-{version}-{self.next_pod_number}"
        spec = template["spec"]
        self.next_pod_number += 1
        environment = (
            memory_volume_environment(run_files.root, self.name, spec) if run_files else {}
        )

        for env_variable in spec["containers"][0].get("env") or [] if run_files else []:
            # the local cluster knows host names without a domain, so remove the domain
            if env_variable["name"] == "MASTER_ADDR":
                environment["MASTER_ADDR"] = self.cluster.address(
                    env_variable["value"].partition(".")[0]
                )

        origin_fields = {key: value for key, value in origin.items() if key != "process"}
        folder = self.deployments.home / self.name
        claim_names = list_run_claims(run_files) if run_files else []
        pod = Pod(
            self.cluster,
            pod_name,
            spec,
            folder,
            environment,
            origin=Origin(**origin_fields),
            claim_names=claim_names,
            counts_resources=False,
        )
        self.replicas.append(Replica(pod, version, pod_labels(template)))

    def _terminate(self, replica: Replica) -> None:
        """Stop sending connections to a pod, and terminate it within its
        terminationGracePeriodSeconds."""
        self._stop_probes(replica)
        self.replicas = [
            other_replica for other_replica in self.replicas if other_replica is not replica
        ]
        replica.pod.end()
        self.terminating_replicas.append(replica)

    def reap(self) -> None:
        """Remove the record of terminated pods, restart pods whose container has exited, and probe
        pods that have started. Record the failure of the rollout if a pod of the new version cannot
        run."""
        for replica in self.terminating_replicas:
            if replica.pod.poll() is not None or not replica.pod.running:
                replica.pod.remove_files()

        self.terminating_replicas = [
            replica for replica in self.terminating_replicas if replica.pod.running
        ]

        for replica in self.replicas:
            exit_code = replica.pod.poll()
            if exit_code is not None:
                self._stop_probes(replica)
                is_permanent = exit_code in exit_codes.PERMANENT_ERRORS
                if is_permanent:
                    replica.pod.give_up(exit_code)
                else:
                    replica.pod.restart(exit_code)

                cannot_run = is_permanent or replica.pod.recent_restarts >= MAX_RESTARTS
                if replica.version == self.progress.version and cannot_run:
                    reason = (
                        f"{replica.pod.name} ended with code {exit_code} ({replica.pod.log}):"
                        f" {replica.pod.last_log_line()}"
                    )
                    self.progress.failure = self.progress.failure or reason

            if replica.pod.running and not replica.probe_task:
                replica.probe_task = asyncio.create_task(self._probe_replica(replica))

    def _stop_probes(self, replica: Replica) -> None:
        """Mark a pod as not ready, and stop its probes."""
        replica.ready = False
        if replica.probe_task:
            replica.probe_task.cancel()
            replica.probe_task = None

    async def _probe_replica(self, replica: Replica) -> None:
        """Run a container's probes: the start-up probe first, then the readiness and liveness
        probes concurrently."""
        container = replica.pod.spec["containers"][0]
        ip = replica.pod.ip

        startup_probe, readiness_probe, liveness_probe = (
            Probe(container, probe_kind) if probe_kind in container else None
            for probe_kind in PROBE_FIELDS
        )
        if startup_probe:
            deadline = (
                time.monotonic()
                + startup_probe.delay
                + startup_probe.period * startup_probe.failure_threshold
            )
            await asyncio.sleep(startup_probe.delay)

            while not await startup_probe.passes(ip):
                if time.monotonic() > deadline:
                    print(
                        f"{replica.pod.name}: the start-up probe failed",
                        file=sys.stderr,
                        flush=True,
                    )
                    replica.pod.terminate()
                    return

                await asyncio.sleep(min(FAST_PROBE_PERIOD_S, startup_probe.period))

        replica.ready = not readiness_probe

        def set_ready(has_passed: bool) -> None:
            replica.ready = has_passed

        def restart_if_dead(has_passed: bool) -> None:
            if not has_passed:
                print(f"{replica.pod.name}: the liveness probe failed", file=sys.stderr, flush=True)
                replica.pod.terminate()

        probe_reactions = [(readiness_probe, set_ready), (liveness_probe, restart_if_dead)]
        await asyncio.gather(
            *(
                self._run_probe(probe, ip, report_result)
                for probe, report_result in probe_reactions
                if probe
            )
        )

    async def _run_probe(
        self, probe: Probe, ip: str, report_result: Callable[[bool], None]
    ) -> None:
        """Run a probe forever. Call `report_result` for each success, and for each failure once the
        failure threshold is reached."""
        await asyncio.sleep(probe.delay)
        failure_count = 0
        has_passed = False

        while True:
            if await probe.passes(ip):
                failure_count = 0
                has_passed = True
                report_result(True)
            else:
                failure_count += 1
                if failure_count >= probe.failure_threshold:
                    report_result(False)

            await asyncio.sleep(
                probe.period if has_passed else min(FAST_PROBE_PERIOD_S, probe.period)
            )

    def update_status(self, kubernetes_object: Object) -> None:
        """Write the Deployment's status if it has changed. The behaviour follows Kubernetes'
        deployment controller (sync.go, progress.go)."""
        desired_count = kubernetes_object["spec"].get("replicas", 1)
        new_replicas = [
            replica for replica in self.replicas if replica.version == self.progress.version
        ]
        ready_count = sum(replica.ready for replica in self.replicas)

        replica_counts = {
            "replicas": len(self.replicas),
            "updatedReplicas": len(new_replicas),
            "readyReplicas": ready_count,
            "availableReplicas": ready_count,
            "unavailableReplicas": max(len(self.replicas), desired_count) - ready_count,
        }
        if self.progress.replica_counts != tuple(replica_counts.values()):
            self.progress.replica_counts = tuple(replica_counts.values())
            self.progress.last_progress_time = time.monotonic()

        is_complete = (
            len(new_replicas) == desired_count == len(self.replicas)
            and ready_count >= desired_count
        )
        progress_deadline_s = kubernetes_object["spec"].get("progressDeadlineSeconds", 600)
        if (
            not is_complete
            and not self.progress.failure
            and time.monotonic() - self.progress.last_progress_time > progress_deadline_s
        ):
            last_log_line = next(
                (replica.pod.last_log_line() for replica in new_replicas if not replica.ready), ""
            )
            self.progress.failure = (
                f"no progress in {progress_deadline_s} s. The last line of the log is:"
                f" {last_log_line}"
            )

        conditions = [
            make_available_condition(ready_count >= desired_count),
            make_progressing_condition(is_complete, self.progress),
        ]
        nonzero_counts = {key: value for key, value in replica_counts.items() if value}
        old_status = kubernetes_object.get("status") or {}
        dated_conditions = _add_times(conditions, old_status)

        new_status = {
            "observedGeneration": kubernetes_object["metadata"]["generation"],
            **nonzero_counts,
            "conditions": dated_conditions,
        }
        if new_status != old_status:
            self.deployments.change(
                self.name,
                lambda current_object: current_object and current_object | {"status": new_status},
            )


def find_owner_run(kubernetes_object: Object, cluster: Cluster) -> RunFiles | None:
    """Return the run whose workflow owns the Deployment, or None."""
    owner_references = kubernetes_object["metadata"].get("ownerReferences") or []
    run_names = (
        RunName.parse_or_none(owner_reference.get("name"))
        for owner_reference in owner_references
        if owner_reference.get("kind") == "Workflow"
    )
    return next((RunFiles(cluster.home, run_name) for run_name in run_names if run_name), None)


def make_available_condition(is_available: bool) -> Object:
    """Return the condition `Available` of a Deployment's status."""
    verb, reason = (
        ("has", "MinimumReplicasAvailable")
        if is_available
        else ("does not have", "MinimumReplicasUnavailable")
    )
    message = f"Deployment {verb} minimum availability."
    return {"type": "Available", "status": str(is_available), "reason": reason, "message": message}


def make_progressing_condition(is_complete: bool, progress: Progress) -> Object:
    """Return the condition `Progressing` of a Deployment's status."""
    version = progress.version

    if is_complete:
        reason = "NewReplicaSetAvailable"
        message = f'ReplicaSet "{version}" has successfully progressed.'
    elif progress.failure:
        reason = "ProgressDeadlineExceeded"
        message = f'ReplicaSet "{version}" has timed out progressing: {progress.failure}'
    else:
        reason = "ReplicaSetUpdated"
        message = f'ReplicaSet "{version}" is progressing.'

    has_failed = reason == "ProgressDeadlineExceeded"
    return {
        "type": "Progressing",
        "status": str(not has_failed),
        "reason": reason,
        "message": message,
    }


def _add_times(conditions: list[Object], old_status: Object) -> list[Object]:
    """Return the conditions with the times of their last change. An unchanged condition keeps its
    times from `old_status`."""
    old_conditions = {
        condition["type"]: condition for condition in old_status.get("conditions") or []
    }
    dated_conditions = []

    for condition in conditions:
        old_condition = old_conditions.get(condition["type"], {})
        now = format_timestamp(time.time())
        is_unchanged = condition.items() <= old_condition.items()
        has_flipped = old_condition.get("status") != condition["status"]
        condition_times = {
            "lastUpdateTime": old_condition["lastUpdateTime"] if is_unchanged else now,
            "lastTransitionTime": now if has_flipped else old_condition["lastTransitionTime"],
        }
        dated_conditions.append(condition | condition_times)

    return dated_conditions
