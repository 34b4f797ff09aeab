"""Runs the replicas of Kubeflow's training jobs as child processes, with the environment, restarts
and status that the operator defines.

The rules are from Kubeflow training operator 1.9 (common/job.go, common/pod.go, util/status.go, and
each kind's KIND_controller.go and KIND_webhook.go). This module differs from the operator: pods
have loopback addresses instead of DNS names, the back-off before restarts is shorter
(pod_process.py), failure messages quote the pod's log, and processes that `mpirun` starts in a
Worker see the Launcher's files.
"""

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree

from argolocal.controllers.controller import Controller, require_single_container
from argolocal.controllers.memory_volumes import memory_volume, shared_memory
from argolocal.controllers.pod_process import Pod, terminate_all
from argolocal.errors import describe
from argolocal.interfaces import Cluster
from argolocal.language.gofmt import timestamp
from argolocal.manifest.object_labels import JOB_NAME, REPLICA_TYPE
from argolocal.manifest.training_jobs import JOB_VERSION, JOBS
from argolocal.manifest.types import Object
from argolocal.state.journal import RunFiles, claims_of_run
from argolocal.validate.applied_objects import reject_invalid
from rekindle.errors import ConfigError
from rekindle.local.jobs import mpi_job
from rekindle.local.jobs.frameworks import (
    is_complete,
    leading_role,
    operator_environment,
    pods_of,
    replicas_of,
    tolerates_failure,
)
from rekindle.local.ports import move_job_port

MIN_RETRYABLE_CODE = 128  # lowest exit code that restarts the pod, with restartPolicy ExitCode
SUCCEEDED_ANNOTATION = "rekindle/succeeded-pods"  # annotation with the names of succeeded pods


@dataclass
class Job:
    """The state of a job while this process runs it."""

    lock: int  # descriptor of the lock file, which is locked while this process runs the pods
    pods: dict[str, Pod] = field(default_factory=dict)
    terminating: list[Pod] = field(default_factory=list)  # deleted pods that have not exited yet
    # name of a name of a failed pod → exit code
    failures: dict[str, int] = field(default_factory=dict)


class TrainingJobs(Controller):
    """The controller of one kind of training job."""

    api_versions = (JOB_VERSION,)

    pods_of: Callable[[Object], Mapping[str, tuple]] = staticmethod(pods_of)

    def __init__(self, cluster: Cluster, kind: str = "", run: Path | None = None) -> None:
        super().__init__(cluster, kind, run)
        self.jobs: dict[str, Job] = {}

    def check(self, obj: Object) -> None:
        """Raise ConfigError for a job that the operator's webhook rejects or the operator cannot
        handle."""
        super().check(obj)
        label = f"{self.kind} {obj['metadata']['name']}"
        if self.api_versions and obj.get("apiVersion", JOB_VERSION) not in self.api_versions:
            raise ConfigError(
                f"{label}: its apiVersion is {obj['apiVersion']}: use {self.api_versions[0]}."
            )
        reject_invalid(obj)
        for role, replica in replicas_of(obj).items():
            require_single_container(replica["template"]["spec"], f"{label}: {role}")

    def apply(self, obj: Object) -> Object:
        """Apply the job; its pods use another port if a program of this machine listens on the
        default port at all addresses."""
        self.check(obj)
        return super().apply(move_job_port(self.cluster, obj, self.read(obj["metadata"]["name"])))

    def on_write(self, stored: Object) -> Object:
        self._adopt(stored)
        return stored

    def get(self, name: str) -> Object | None:
        obj = self.read(name)
        if obj:
            self._adopt(obj)
        return obj

    def delete(self, name: str) -> bool:
        job = self.jobs.pop(name, None)
        if job:
            terminate_all([*job.pods.values(), *job.terminating], float("inf"))
            os.close(job.lock)
        rmtree(shared_memory(self.run, name), ignore_errors=True)
        return super().delete(name)

    def poll(self) -> None:
        for name, job in list(self.jobs.items()):
            obj = self.read(name)
            if obj is None:  # another command has deleted the job
                self.delete(name)
                continue
            try:
                self._reconcile(obj, job)
            except Exception as error:  # an error, such as a missing Secret, fails only this job
                self._fail(obj, job, error)

    def stop(self, grace: float) -> None:
        jobs = list(self.jobs.values())
        terminate_all(
            [pod for job in jobs for pod in [*job.pods.values(), *job.terminating]], grace
        )
        for job in jobs:
            os.close(job.lock)
        self.jobs.clear()

    def clean_up(self) -> None:
        """Remove the files of the finished jobs of this run."""
        for name in self.names():
            obj = self.read(name) or {}
            status = obj.get("status") or {}
            if is_finished(status):
                self._remove_job_files(obj, status)

    def _remove_job_files(self, obj: Object, status: Object) -> None:
        rmtree(shared_memory(self.run, obj["metadata"]["name"]), ignore_errors=True)
        rmtree(self._mpi_folder(obj), ignore_errors=True)
        # the directories of a failed job are kept for diagnosis
        if not condition(status, "Failed"):
            for folder in (
                self.run / kind / pod for kind in ("pods", "volumes") for pod in self.pods_of(obj)
            ):
                rmtree(folder, ignore_errors=True)

    def _adopt(self, obj: Object) -> None:
        """Continue an unfinished job after the process that ran it has died; its pods count as
        lost, as after a node failure."""
        name = obj["metadata"]["name"]
        if name in self.jobs or is_finished(obj.get("status") or {}):
            return

        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return

        self.jobs[name] = Job(lock)
        if condition(obj.get("status") or {}, "Running"):
            status = obj["status"]
            set_condition(
                status,
                self.kind,
                "Restarting",
                f"{self.kind} {name} is restarting because its node was lost.",
            )
            self._save(name, status)

    def _reconcile(self, obj: Object, job: Job) -> None:
        name = obj["metadata"]["name"]
        status = obj.get("status") or {}
        job.terminating = [pod for pod in job.terminating if pod.poll() is None and pod.running]
        succeeded_pods = set(
            filter(None, obj["metadata"]["annotations"].get(SUCCEEDED_ANNOTATION, "").split(","))
        )
        self._advance(obj, job, status, succeeded_pods)
        self._save(name, status, succeeded_pods)
        if is_finished(status) and not job.pods and not job.terminating:
            os.close(self.jobs.pop(name).lock)
            self._remove_job_files(obj, status)

    def _fail(self, obj: Object, job: Job, error: Exception) -> None:
        """Fail a job that cannot be reconciled."""
        name = obj["metadata"]["name"]
        status = (self.read(name) or obj).get("status") or {}
        self._set_failed(
            status, f"{self.kind} {name} is failed because of an error: {describe(error)}"
        )
        self._end_pods(job, list(job.pods))
        self._save(name, status)

    def _set_failed(self, status: Object, message: str) -> None:
        set_condition(status, self.kind, "Created", f"{self.kind} is created.")
        set_condition(status, self.kind, "Failed", message)

    def _advance(self, obj: Object, job: Job, status: Object, succeeded_pods: set[str]) -> None:
        """Reconcile the pods and the status with the spec; `succeeded_pods` are the pods that have
        succeeded."""
        name = obj["metadata"]["name"]
        spec = obj["spec"]
        policy = spec.get("runPolicy") or {}
        set_condition(status, self.kind, "Created", f"{self.kind} {name} is created.")

        if not is_finished(status):
            if policy.get("suspend"):
                self._end_pods(job, list(job.pods))
                set_condition(status, self.kind, "Suspended", f"{self.kind} {name} is suspended.")
                status.pop("startTime", None)
            else:
                if is_suspended(status):
                    set_condition(
                        status,
                        self.kind,
                        "Suspended",
                        f"{self.kind} {name} is resumed.",
                        "Resumed",
                        "False",
                    )

                status.setdefault("startTime", timestamp(time.time()))
                self._sync_pods(obj, job, succeeded_pods)
                self._reap(obj, job, status, succeeded_pods)

                reason = find_exceeded_limit(policy, status, job)
                if reason:
                    status.setdefault("completionTime", timestamp(time.time()))
                    set_condition(
                        status,
                        self.kind,
                        "Failed",
                        f"{self.kind} {name} has failed because it {reason}.",
                    )

            self._update_counts(obj, job, status, succeeded_pods)

        if is_finished(status):
            self._finish(_clean_policy(spec), job, status)

    def _sync_pods(self, obj: Object, job: Job, succeeded_pods: set[str]) -> None:
        """Create missing pods, and delete surplus pods."""
        desired_pods = pods_of(obj)
        terminating_names = {pod.name for pod in job.terminating}

        for pod, (role, index) in desired_pods.items():
            must_wait = role == "Launcher" and not mpi_job.all_workers_run(obj, job.pods)
            if not must_wait and pod not in {
                *job.pods,
                *succeeded_pods,
                *job.failures,
                *terminating_names,
            }:
                job.pods[pod] = self._pod(obj, pod, role, index)

        self._end_pods(job, [pod for pod in job.pods if pod not in desired_pods])
        if self.kind == "MPIJob":
            mpi_job.write_processes(self._mpi_folder(obj), job.pods)

    def _pod(self, obj: Object, name: str, role: str, index: int) -> Pod:
        spec = replicas_of(obj)[role]["template"]["spec"]
        environment = {
            **operator_environment(obj, role, index, self.cluster.address),
            **self._host_variables(obj, spec),
            **self._memory(obj, spec),
        }
        directories = {}
        if role == "Launcher":
            mpi_job.write_files(obj, self._mpi_folder(obj))
            spec, environment, directories = mpi_job.mount_files(
                spec, environment, self._mpi_folder(obj)
            )
        return Pod(
            self.cluster, name, spec, self.run, environment, directories, claims=self._claims()
        )

    def _claims(self) -> list[str]:
        """Return the names of the PersistentVolumeClaims that the workflow of this run creates."""
        return claims_of_run(RunFiles(self.cluster.home, self.run.name))

    def _host_variables(self, obj: Object, spec: Object) -> dict[str, str]:
        """Return the environment variables whose value is the host name of a pod; the address of
        the pod replaces the host name."""
        variables = spec["containers"][0].get("env") or []
        names = pods_of(obj)
        return {
            variable["name"]: self.cluster.address(variable["value"])
            for variable in variables
            if variable.get("value") in names
        }

    def _memory(self, obj: Object, spec: Object) -> dict[str, str]:
        return memory_volume(self.run, obj["metadata"]["name"], spec)

    def _mpi_folder(self, obj: Object) -> Path:
        return self.run / "mpi" / obj["metadata"]["name"]

    def _reap(self, obj: Object, job: Job, status: Object, succeeded_pods: set[str]) -> None:
        """Poll the pods. The restartPolicy decides whether an exited pod succeeds, fails, restarts
        in place or is recreated."""
        name = obj["metadata"]["name"]

        for pod in list(job.pods.values()):
            code = pod.poll()
            if code is None:
                continue

            role = pods_of(obj)[pod.name][0]
            policy = replicas_of(obj)[role].get("restartPolicy", JOBS[self.kind].restart_policy)
            if policy == "Always" or (code and policy == "OnFailure"):
                pod.restart(code)
            elif code == 0:
                succeeded_pods.add(pod.name)
                del job.pods[pod.name]
            elif policy == "ExitCode" and code >= MIN_RETRYABLE_CODE and self.kind != "MPIJob":
                pod.restart(code, recreate=True)
                message = f"{self.kind} {name} is restarting because 1 {role} replica(s) failed."
                set_condition(status, self.kind, "Restarting", message)
            else:
                job.failures[pod.name] = code
                del job.pods[pod.name]
                if tolerates_failure(obj, role, policy):
                    continue
                # the operator sets completionTime here, except for restartPolicy ExitCode in kinds
                # other than MPIJob
                if policy == "Never" or self.kind == "MPIJob":
                    status.setdefault("completionTime", timestamp(time.time()))

                details = f"{pod.name} ended with code {code} ({pod.log}): {pod.last_log_line()}"
                message = (
                    f"{self.kind} {name} is failed because 1 {role} replica(s) failed: {details}"
                )
                set_condition(status, self.kind, "Failed", message)

    def _update_counts(
        self, obj: Object, job: Job, status: Object, succeeded_pods: set[str]
    ) -> None:
        """Update replicaStatuses and the conditions derived from them."""
        name = obj["metadata"]["name"]
        roles = {pod: role for pod, (role, _) in pods_of(obj).items()}
        status["replicaStatuses"] = {}

        for role in sorted(replicas_of(obj)):
            counts = {
                # a pod whose container is about to restart is in phase Running
                "active": sum(roles.get(pod) == role for pod in job.pods),
                "succeeded": sum(roles.get(pod) == role for pod in succeeded_pods),
                "failed": sum(roles.get(pod) == role for pod in job.failures),
            }

            selector = f"{JOB_NAME}={name},{REPLICA_TYPE}={role.lower()}"
            status["replicaStatuses"][role] = {k: v for k, v in counts.items() if v} | {
                "selector": selector
            }

        if is_finished(status):
            return

        if is_complete(obj, succeeded_pods):
            status.setdefault("completionTime", timestamp(time.time()))
            set_condition(
                status, self.kind, "Succeeded", f"{self.kind} {name} is successfully completed."
            )
        elif any(
            pod.running for key, pod in job.pods.items() if roles.get(key) == leading_role(obj)
        ):
            set_condition(status, self.kind, "Running", f"{self.kind} {name} is running.")

    def _finish(self, clean_policy: str, job: Job, status: Object) -> None:
        if clean_policy in ("Running", "All"):
            self._end_pods(job, list(job.pods))
        else:  # every other cleanPodPolicy leaves the pods of a finished job unchanged
            job.pods = {
                key: pod for key, pod in job.pods.items() if pod.running and pod.poll() is None
            }
        if condition(status, "Succeeded"):
            for counts in status["replicaStatuses"].values():
                total = counts.pop("active", 0) + counts.get("succeeded", 0)
                if total:
                    counts["succeeded"] = total

    def _end_pods(self, job: Job, names: list[str]) -> None:
        for name in names:
            pod = job.pods.pop(name)
            pod.end()
            job.terminating.append(pod)

    def _save(self, name: str, status: Object, succeeded_pods: set[str] | None = None) -> None:
        def set_status(obj: Object | None) -> Object | None:
            if obj and succeeded_pods is not None:
                obj["metadata"]["annotations"][SUCCEEDED_ANNOTATION] = ",".join(
                    sorted(succeeded_pods)
                )
            return obj and obj | {"status": status}

        self.change(name, set_status)


def _clean_policy(spec: Object) -> str:
    return (
        (spec.get("runPolicy") or {}).get("cleanPodPolicy") or spec.get("cleanPodPolicy") or "None"
    )


def find_exceeded_limit(policy: Object, status: Object, job: Job) -> str:
    """Return a message about the limit that a job has exceeded, or "". As in the operator, only
    in-place restarts count towards backoffLimit."""
    restarts = sum(pod.restarts for pod in job.pods.values() if pod.running)
    if policy.get("backoffLimit") is not None and restarts >= max(1, policy["backoffLimit"]):
        return "has reached the specified backoff limit"

    start_seconds = (
        time.mktime(time.strptime(status["startTime"], "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    )
    if (
        policy.get("activeDeadlineSeconds") is not None
        and time.time() - start_seconds >= policy["activeDeadlineSeconds"]
    ):
        return "was active longer than specified deadline"

    return ""


def condition(status: Object, condition_type: str) -> Object | None:
    return next(
        (entry for entry in status.get("conditions") or [] if entry["type"] == condition_type), None
    )


def is_finished(status: Object) -> bool:
    return any(condition(status, name) for name in ("Succeeded", "Completed", "Failed"))


def is_suspended(status: Object) -> bool:
    return (condition(status, "Suspended") or {}).get("status") == "True"


def set_condition(
    status: Object,
    job_kind: str,
    condition_type: str,
    message: str,
    reason: str = "",
    value: str = "True",
) -> None:
    """Append a condition as the operator does: Failed is final, Running and Restarting replace each
    other."""
    reason = f"{job_kind}{reason or condition_type}"

    current = condition(status, condition_type)
    if condition(status, "Failed") or (
        current and (current["status"], current["reason"]) == (value, reason)
    ):
        return

    opposite = {"Running": "Restarting", "Restarting": "Running"}.get(condition_type)
    conditions = [
        entry
        for entry in status.get("conditions") or []
        if entry["type"] not in (condition_type, opposite)
    ]
    if condition_type in ("Succeeded", "Failed", "Suspended"):
        conditions = [
            entry | {"status": "False"} if entry["type"] == "Running" else entry
            for entry in conditions
        ]

    stamp = timestamp(time.time())
    times = {"lastUpdateTime": stamp, "lastTransitionTime": stamp}
    entry = {"type": condition_type, "status": value, "reason": reason, "message": message, **times}
    status["conditions"] = [*conditions, entry]
