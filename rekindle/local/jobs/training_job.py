"""Runs the replicas of Kubeflow's training jobs as child processes, with the environment, restarts
and status that the operator defines.

The rules for the pods are from Kubeflow training operator 1.9 (common/job.go, common/pod.go,
util/status.go, and each kind's KIND_controller.go and KIND_webhook.go). This module differs from
the operator: pods have loopback addresses instead of DNS names, the back-off before restarts is
shorter (pod_process.py), failure messages quote the pod's log, and processes that `mpirun` starts
in a Worker see the Launcher's files.
"""

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree

from argolocal.controllers.controller import Controller, require_single_container
from argolocal.controllers.memory_volumes import memory_volume_environment, shared_memory_path
from argolocal.controllers.pod_process import Pod, terminate_all
from argolocal.errors import describe
from argolocal.interfaces import Cluster
from argolocal.language.gofmt import format_timestamp
from argolocal.manifest.object_labels import JOB_NAME_LABEL, REPLICA_TYPE_LABEL
from argolocal.manifest.training_jobs import JOB_API_VERSION, JOB_KINDS
from argolocal.manifest.types import Object
from argolocal.state.journal import RunFiles, list_run_claims
from argolocal.validate.applied_objects import reject_invalid_object
from rekindle.errors import ConfigError
from rekindle.local.jobs import mpi_job
from rekindle.local.jobs.frameworks import (
    get_leading_role,
    get_replica_specs,
    is_complete,
    make_operator_environment,
    map_pods_to_roles,
    tolerates_failure,
)
from rekindle.local.ports import move_job_port

# lowest exit code after which restartPolicy ExitCode restarts the pod
MIN_RETRYABLE_CODE = 128
# annotation with the names of succeeded pods
SUCCEEDED_PODS_ANNOTATION = "rekindle/succeeded-pods"


@dataclass
class JobState:
    """The state of a job while this process runs it."""

    # descriptor of the lock file, which is locked while this process runs the pods
    lock: int
    pods: dict[str, Pod] = field(default_factory=dict)
    # deleted pods whose processes have not exited yet
    terminating: list[Pod] = field(default_factory=list)
    # name of a failed pod → its exit code
    failures: dict[str, int] = field(default_factory=dict)


class TrainingJobs(Controller):
    """The controller of one kind of training job."""

    api_versions = (JOB_API_VERSION,)

    pods_of: Callable[[Object], Mapping[str, tuple]] = staticmethod(map_pods_to_roles)

    def __init__(self, cluster: Cluster, kind: str = "", run: Path | None = None) -> None:
        super().__init__(cluster, kind, run)
        self.jobs: dict[str, JobState] = {}

    def check(self, kubernetes_object: Object) -> None:
        """Raise ConfigError for a job that the operator's webhook rejects or the operator cannot
        handle."""
        super().check(kubernetes_object)
        job_label = f"{self.kind} {kubernetes_object['metadata']['name']}"
        if (
            self.api_versions
            and kubernetes_object.get("apiVersion", JOB_API_VERSION) not in self.api_versions
        ):
            raise ConfigError(
                f"{job_label}: its apiVersion is {kubernetes_object['apiVersion']}: use"
                f" {self.api_versions[0]}."
            )
        reject_invalid_object(kubernetes_object)
        for role, replica_spec in get_replica_specs(kubernetes_object).items():
            require_single_container(replica_spec["template"]["spec"], f"{job_label}: {role}")

    def apply(self, kubernetes_object: Object) -> Object:
        """Apply the job. If a program of this machine listens on the default port on all addresses,
        the pods of the job use another port."""
        self.check(kubernetes_object)
        return super().apply(
            move_job_port(
                self.cluster, kubernetes_object, self.read(kubernetes_object["metadata"]["name"])
            )
        )

    def on_write(self, stored_object: Object) -> Object:
        self._adopt(stored_object)
        return stored_object

    def get(self, name: str) -> Object | None:
        job_object = self.read(name)
        if job_object:
            self._adopt(job_object)
        return job_object

    def delete(self, name: str) -> bool:
        job_state = self.jobs.pop(name, None)
        if job_state:
            terminate_all([*job_state.pods.values(), *job_state.terminating], float("inf"))
            os.close(job_state.lock)
        rmtree(shared_memory_path(self.run, name), ignore_errors=True)
        return super().delete(name)

    def poll(self) -> None:
        for job_name, job_state in list(self.jobs.items()):
            job_object = self.read(job_name)
            # another command has deleted the job
            if job_object is None:
                self.delete(job_name)
                continue
            try:
                self._reconcile(job_object, job_state)
            except Exception as error:
                # an error, such as a missing Secret, fails only this job
                self._fail(job_object, job_state, error)

    def stop(self, grace_seconds: float) -> None:
        job_states = list(self.jobs.values())
        terminate_all(
            [
                pod
                for job_state in job_states
                for pod in [*job_state.pods.values(), *job_state.terminating]
            ],
            grace_seconds,
        )
        for job_state in job_states:
            os.close(job_state.lock)
        self.jobs.clear()

    def clean_up(self) -> None:
        """Remove the files of the finished jobs of this run."""
        for job_name in self.names():
            job_object = self.read(job_name) or {}
            job_status = job_object.get("status") or {}
            if is_finished(job_status):
                self._remove_job_files(job_object, job_status)

    def _remove_job_files(self, job_object: Object, job_status: Object) -> None:
        rmtree(shared_memory_path(self.run, job_object["metadata"]["name"]), ignore_errors=True)
        rmtree(self._get_mpi_folder(job_object), ignore_errors=True)
        # the directories of a failed job are kept for diagnosis
        if not find_condition(job_status, "Failed"):
            for pod_folder in (
                self.run / folder_kind / pod_name
                for folder_kind in ("pods", "volumes")
                for pod_name in self.pods_of(job_object)
            ):
                rmtree(pod_folder, ignore_errors=True)

    def _adopt(self, job_object: Object) -> None:
        """Take over an unfinished job, unless another process runs it. If the job was running, the
        process that ran the job has died, and the job's pods count as lost, as after a node
        failure."""
        job_name = job_object["metadata"]["name"]
        if job_name in self.jobs or is_finished(job_object.get("status") or {}):
            return

        self.folder.mkdir(parents=True, exist_ok=True)
        lock_descriptor = os.open(
            self.folder / f".{job_name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        )
        try:
            fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_descriptor)
            return

        self.jobs[job_name] = JobState(lock_descriptor)
        if find_condition(job_object.get("status") or {}, "Running"):
            job_status = job_object["status"]
            set_condition(
                job_status,
                self.kind,
                "Restarting",
                f"{self.kind} {job_name} is restarting because its node was lost.",
            )
            self._save_status(job_name, job_status)

    def _reconcile(self, job_object: Object, job_state: JobState) -> None:
        job_name = job_object["metadata"]["name"]
        job_status = job_object.get("status") or {}
        job_state.terminating = [
            pod for pod in job_state.terminating if pod.poll() is None and pod.running
        ]
        succeeded_pods = set(
            filter(
                None,
                job_object["metadata"]["annotations"].get(SUCCEEDED_PODS_ANNOTATION, "").split(","),
            )
        )
        self._advance(job_object, job_state, job_status, succeeded_pods)
        self._save_status(job_name, job_status, succeeded_pods)
        if is_finished(job_status) and not job_state.pods and not job_state.terminating:
            os.close(self.jobs.pop(job_name).lock)
            self._remove_job_files(job_object, job_status)

    def _fail(self, job_object: Object, job_state: JobState, error: Exception) -> None:
        """Set the status of a job to Failed, because the job cannot be brought to the state of its
        spec."""
        job_name = job_object["metadata"]["name"]
        job_status = (self.read(job_name) or job_object).get("status") or {}
        self._set_failed(
            job_status, f"{self.kind} {job_name} is failed because of an error: {describe(error)}"
        )
        self._terminate_pods(job_state, list(job_state.pods))
        self._save_status(job_name, job_status)

    def _set_failed(self, status: Object, message: str) -> None:
        set_condition(status, self.kind, "Created", f"{self.kind} is created.")
        set_condition(status, self.kind, "Failed", message)

    def _advance(
        self, job_object: Object, job_state: JobState, status: Object, succeeded_pods: set[str]
    ) -> None:
        """Bring the pods and the status of a job in line with its spec. `succeeded_pods`: names of
        the pods that have succeeded; newly succeeded pods are added."""
        job_name = job_object["metadata"]["name"]
        job_spec = job_object["spec"]
        run_policy = job_spec.get("runPolicy") or {}
        set_condition(status, self.kind, "Created", f"{self.kind} {job_name} is created.")

        if not is_finished(status):
            if run_policy.get("suspend"):
                self._terminate_pods(job_state, list(job_state.pods))
                set_condition(
                    status, self.kind, "Suspended", f"{self.kind} {job_name} is suspended."
                )
                status.pop("startTime", None)
            else:
                if is_suspended(status):
                    set_condition(
                        status,
                        self.kind,
                        "Suspended",
                        f"{self.kind} {job_name} is resumed.",
                        "Resumed",
                        "False",
                    )

                status.setdefault("startTime", format_timestamp(time.time()))
                self._sync_pods(job_object, job_state, succeeded_pods)
                self._handle_exited_pods(job_object, job_state, status, succeeded_pods)

                limit_message = find_exceeded_limit(run_policy, status, job_state)
                if limit_message:
                    status.setdefault("completionTime", format_timestamp(time.time()))
                    set_condition(
                        status,
                        self.kind,
                        "Failed",
                        f"{self.kind} {job_name} has failed because it {limit_message}.",
                    )

            self._update_replica_statuses(job_object, job_state, status, succeeded_pods)

        if is_finished(status):
            self._finish_job(_get_clean_policy(job_spec), job_state, status)

    def _sync_pods(self, job_object: Object, job_state: JobState, succeeded_pods: set[str]) -> None:
        """Create missing pods, and delete surplus pods."""
        desired_pods = map_pods_to_roles(job_object)
        terminating_pod_names = {pod.name for pod in job_state.terminating}

        for pod, (role, index) in desired_pods.items():
            must_wait_for_workers = role == "Launcher" and not mpi_job.are_all_workers_running(
                job_object, job_state.pods
            )
            if not must_wait_for_workers and pod not in {
                *job_state.pods,
                *succeeded_pods,
                *job_state.failures,
                *terminating_pod_names,
            }:
                job_state.pods[pod] = self._create_pod(job_object, pod, role, index)

        self._terminate_pods(job_state, [pod for pod in job_state.pods if pod not in desired_pods])
        if self.kind == "MPIJob":
            mpi_job.write_worker_processes(self._get_mpi_folder(job_object), job_state.pods)

    def _create_pod(self, job_object: Object, pod_name: str, role: str, index: int) -> Pod:
        pod_spec = get_replica_specs(job_object)[role]["template"]["spec"]
        environment = {
            **make_operator_environment(job_object, role, index, self.cluster.address),
            **self._resolve_host_variables(job_object, pod_spec),
            **self._make_memory_variables(job_object, pod_spec),
        }
        volume_directories = {}
        if role == "Launcher":
            mpi_job.write_launcher_files(job_object, self._get_mpi_folder(job_object))
            pod_spec, environment, volume_directories = mpi_job.mount_launcher_files(
                pod_spec, environment, self._get_mpi_folder(job_object)
            )
        return Pod(
            self.cluster,
            pod_name,
            pod_spec,
            self.run,
            environment,
            volume_directories,
            claim_names=self._list_claim_names(),
        )

    def _list_claim_names(self) -> list[str]:
        """Return the names of the PersistentVolumeClaims that the workflow of this run creates."""
        return list_run_claims(RunFiles(self.cluster.home, self.run.name))

    def _resolve_host_variables(self, job_object: Object, pod_spec: Object) -> dict[str, str]:
        """Return the environment variables whose value is the host name of a pod of this job, with
        the address of the pod instead of the host name."""
        environment_variables = pod_spec["containers"][0].get("env") or []
        own_pods = map_pods_to_roles(job_object)
        return {
            environment_variable["name"]: self.cluster.address(environment_variable["value"])
            for environment_variable in environment_variables
            if environment_variable.get("value") in own_pods
        }

    def _make_memory_variables(self, job_object: Object, pod_spec: Object) -> dict[str, str]:
        return memory_volume_environment(self.run, job_object["metadata"]["name"], pod_spec)

    def _get_mpi_folder(self, job_object: Object) -> Path:
        return self.run / "mpi" / job_object["metadata"]["name"]

    def _handle_exited_pods(
        self, job_object: Object, job_state: JobState, status: Object, succeeded_pods: set[str]
    ) -> None:
        """Poll the pods of a job. The restartPolicy decides whether a pod that has exited succeeds,
        fails, is restarted in place, or is recreated."""
        job_name = job_object["metadata"]["name"]

        for pod in list(job_state.pods.values()):
            exit_code = pod.poll()
            if exit_code is None:
                continue

            role = map_pods_to_roles(job_object)[pod.name][0]
            restart_policy = get_replica_specs(job_object)[role].get(
                "restartPolicy", JOB_KINDS[self.kind].restart_policy
            )
            if restart_policy == "Always" or (exit_code and restart_policy == "OnFailure"):
                pod.restart(exit_code)
            elif exit_code == 0:
                succeeded_pods.add(pod.name)
                del job_state.pods[pod.name]
            elif (
                restart_policy == "ExitCode"
                and exit_code >= MIN_RETRYABLE_CODE
                and self.kind != "MPIJob"
            ):
                pod.restart(exit_code, recreates_pod=True)
                restart_message = (
                    f"{self.kind} {job_name} is restarting because 1 {role} replica(s) failed."
                )
                set_condition(status, self.kind, "Restarting", restart_message)
            else:
                job_state.failures[pod.name] = exit_code
                del job_state.pods[pod.name]
                if tolerates_failure(job_object, role, restart_policy):
                    continue
                # the operator sets completionTime here, except for restartPolicy ExitCode in kinds
                # other than MPIJob
                if restart_policy == "Never" or self.kind == "MPIJob":
                    status.setdefault("completionTime", format_timestamp(time.time()))

                failure_details = (
                    f"{pod.name} ended with code {exit_code} ({pod.log}): {pod.last_log_line()}"
                )
                failure_message = (
                    f"{self.kind} {job_name} is failed because 1 {role} replica(s) failed:"
                    f" {failure_details}"
                )
                set_condition(status, self.kind, "Failed", failure_message)

    def _update_replica_statuses(
        self, job_object: Object, job_state: JobState, status: Object, succeeded_pods: set[str]
    ) -> None:
        """Update replicaStatuses and the conditions derived from them."""
        job_name = job_object["metadata"]["name"]
        roles_by_pod = {pod: role for pod, (role, _) in map_pods_to_roles(job_object).items()}
        status["replicaStatuses"] = {}

        for role in sorted(get_replica_specs(job_object)):
            replica_counts = {
                # a pod whose container is about to restart is in phase Running
                "active": sum(roles_by_pod.get(pod) == role for pod in job_state.pods),
                "succeeded": sum(roles_by_pod.get(pod) == role for pod in succeeded_pods),
                "failed": sum(roles_by_pod.get(pod) == role for pod in job_state.failures),
            }

            label_selector = f"{JOB_NAME_LABEL}={job_name},{REPLICA_TYPE_LABEL}={role.lower()}"
            status["replicaStatuses"][role] = {
                count_name: pod_count
                for count_name, pod_count in replica_counts.items()
                if pod_count
            } | {"selector": label_selector}

        if is_finished(status):
            return

        if is_complete(job_object, succeeded_pods):
            status.setdefault("completionTime", format_timestamp(time.time()))
            set_condition(
                status, self.kind, "Succeeded", f"{self.kind} {job_name} is successfully completed."
            )
        elif any(
            pod.running
            for pod_name, pod in job_state.pods.items()
            if roles_by_pod.get(pod_name) == get_leading_role(job_object)
        ):
            set_condition(status, self.kind, "Running", f"{self.kind} {job_name} is running.")

    def _finish_job(self, clean_policy: str, job_state: JobState, status: Object) -> None:
        if clean_policy in ("Running", "All"):
            self._terminate_pods(job_state, list(job_state.pods))
        else:
            # with every cleanPodPolicy except All and Running, the pods of a finished job stay
            # unchanged
            job_state.pods = {
                pod_name: pod
                for pod_name, pod in job_state.pods.items()
                if pod.running and pod.poll() is None
            }
        if find_condition(status, "Succeeded"):
            for replica_counts in status["replicaStatuses"].values():
                succeeded_count = replica_counts.pop("active", 0) + replica_counts.get(
                    "succeeded", 0
                )
                if succeeded_count:
                    replica_counts["succeeded"] = succeeded_count

    def _terminate_pods(self, job_state: JobState, pod_names: list[str]) -> None:
        for pod_name in pod_names:
            pod = job_state.pods.pop(pod_name)
            pod.end()
            job_state.terminating.append(pod)

    def _save_status(
        self, job_name: str, job_status: Object, succeeded_pods: set[str] | None = None
    ) -> None:
        def set_status(job_object: Object | None) -> Object | None:
            if job_object and succeeded_pods is not None:
                job_object["metadata"]["annotations"][SUCCEEDED_PODS_ANNOTATION] = ",".join(
                    sorted(succeeded_pods)
                )
            return job_object and job_object | {"status": job_status}

        self.change(job_name, set_status)


def _get_clean_policy(job_spec: Object) -> str:
    return (
        (job_spec.get("runPolicy") or {}).get("cleanPodPolicy")
        or job_spec.get("cleanPodPolicy")
        or "None"
    )


def find_exceeded_limit(run_policy: Object, status: Object, job_state: JobState) -> str:
    """Return a message about the limit that a job has exceeded, or "". As in the operator, only
    in-place restarts count towards backoffLimit."""
    restart_count = sum(pod.restarts for pod in job_state.pods.values() if pod.running)
    if run_policy.get("backoffLimit") is not None and restart_count >= max(
        1, run_policy["backoffLimit"]
    ):
        return "has reached the specified backoff limit"

    start_seconds = (
        time.mktime(time.strptime(status["startTime"], "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    )
    if (
        run_policy.get("activeDeadlineSeconds") is not None
        and time.time() - start_seconds >= run_policy["activeDeadlineSeconds"]
    ):
        return "was active longer than specified deadline"

    return ""


def find_condition(status: Object, condition_type: str) -> Object | None:
    return next(
        (
            status_condition
            for status_condition in status.get("conditions") or []
            if status_condition["type"] == condition_type
        ),
        None,
    )


def is_finished(status: Object) -> bool:
    return any(
        find_condition(status, condition_type)
        for condition_type in ("Succeeded", "Completed", "Failed")
    )


def is_suspended(status: Object) -> bool:
    return (find_condition(status, "Suspended") or {}).get("status") == "True"


def set_condition(
    status: Object,
    job_kind: str,
    condition_type: str,
    message: str,
    reason: str = "",
    condition_status: str = "True",
) -> None:
    """Set a condition as the operator does: after Failed, no condition changes, and Running and
    Restarting replace each other."""
    reason = f"{job_kind}{reason or condition_type}"

    current_condition = find_condition(status, condition_type)
    if find_condition(status, "Failed") or (
        current_condition
        and (current_condition["status"], current_condition["reason"]) == (condition_status, reason)
    ):
        return

    opposite_type = {"Running": "Restarting", "Restarting": "Running"}.get(condition_type)
    conditions = [
        other_condition
        for other_condition in status.get("conditions") or []
        if other_condition["type"] not in (condition_type, opposite_type)
    ]
    if condition_type in ("Succeeded", "Failed", "Suspended"):
        conditions = [
            other_condition | {"status": "False"}
            if other_condition["type"] == "Running"
            else other_condition
            for other_condition in conditions
        ]

    current_timestamp = format_timestamp(time.time())
    condition_times = {"lastUpdateTime": current_timestamp, "lastTransitionTime": current_timestamp}
    new_condition = {
        "type": condition_type,
        "status": condition_status,
        "reason": reason,
        "message": message,
        **condition_times,
    }
    status["conditions"] = [*conditions, new_condition]
