"""Runs the pods of JobSets and TrainJobs as child processes, by the rules of the JobSet controller
and the Job controller.

The rules for the pods are from JobSet 0.12
(pkg/controllers/{jobset_controller,failure_policy,success_policy}.go), Kubernetes
(pkg/controller/job) and Kubeflow Trainer 2.3 (pkg/runtime). This module differs from the
controllers of Kubernetes: pod names lack the random suffix, environment variables have loopback
addresses instead of DNS names, a lost pod is replaced after the back-off of pod_process.py, and
startupPolicy is rejected.
"""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from argolocal.controllers.controller import Controller, require_single_container
from argolocal.controllers.pod_process import Pod
from argolocal.language.gofmt import format_timestamp
from argolocal.manifest.object_labels import TRAINER_STEP_LABEL
from argolocal.manifest.types import Object
from argolocal.validate.applied_objects import reject_invalid_object
from rekindle.errors import ConfigError
from rekindle.local.jobs.training_job import (
    JobState,
    TrainingJobs,
    find_condition,
    is_finished,
    is_suspended,
)

# names of a pod's ReplicatedJob and Job, and the pod's completion index
PodPosition = tuple[str, str, int]


def map_pods_to_positions(job_set: Object) -> dict[str, PodPosition]:
    """Return the PodPosition of each pod of a JobSet, by the name of the pod without its random
    suffix."""
    job_set_name = job_set["metadata"]["name"]
    pod_positions = {}
    for replicated_job in job_set["spec"]["replicatedJobs"]:
        job_spec = _get_job_spec(replicated_job)
        for job_number in range(replicated_job.get("replicas", 1)):
            job_name = f"{job_set_name}-{replicated_job['name']}-{job_number}"
            for completion_index in range(
                job_spec.get("completions", job_spec.get("parallelism", 1))
            ):
                pod_positions[f"{job_name}-{completion_index}"] = (
                    replicated_job["name"],
                    job_name,
                    completion_index,
                )
    return pod_positions


class JobSets(TrainingJobs):
    """The controller of JobSets. `JobState.failures` contains the number of failed pods of each Job
    of a JobSet, which the Job's backoffLimit limits."""

    kind = "JobSet"
    api_versions = ()
    pods_of = staticmethod(map_pods_to_positions)

    def check(self, kubernetes_object: Object) -> None:
        """Raise ConfigError for a JobSet that its webhook or the API server rejects, or that cannot
        run locally."""
        Controller.check(self, kubernetes_object)
        reject_invalid_object(kubernetes_object)
        job_set_name = kubernetes_object["metadata"]["name"]

        job_set_spec = kubernetes_object["spec"]
        if job_set_spec.get("startupPolicy"):
            raise ConfigError(
                f"JobSet {job_set_name}: spec.startupPolicy is not supported here: all jobs start"
                " at once."
            )

        for pod_name in (
            f"{pod_name}-abcde" for pod_name in map_pods_to_positions(kubernetes_object)
        ):
            if len(pod_name) > 63:
                raise ConfigError(
                    f"JobSet {job_set_name}: the pod name {pod_name} has {len(pod_name)}"
                    " characters: shorten metadata.name, so that the pod name has at most 63."
                )

        for replicated_job in job_set_spec["replicatedJobs"]:
            require_single_container(
                _get_job_spec(replicated_job)["template"]["spec"],
                f"JobSet {job_set_name}: {replicated_job['name']}",
            )

        current_job_set = self.read(job_set_name)
        current_status = (current_job_set or {}).get("status") or {}
        if (
            current_job_set
            and not is_finished(current_status)
            and current_job_set["spec"].get("replicatedJobs") != job_set_spec["replicatedJobs"]
        ):
            raise ConfigError(f"JobSet {job_set_name}: spec.replicatedJobs: field is immutable.")

    def _advance(
        self, job_object: Object, job_state: JobState, status: Object, succeeded_pods: set[str]
    ) -> None:
        status.setdefault("restarts", 0)
        if not is_finished(status):
            if job_object["spec"].get("suspend"):
                self._terminate_pods(job_state, list(job_state.pods))
                _set_condition(status, "Suspended", "SuspendedJobs", "jobset is suspended")
            else:
                if is_suspended(status):
                    _set_condition(status, "Suspended", "ResumeJobs", "jobset is resumed", "False")
                self._run(job_object, job_state, status, succeeded_pods)
        status["replicatedJobsStatus"] = _make_job_statuses(job_object, job_state, succeeded_pods)
        if is_finished(status):
            self._terminate_pods(job_state, list(job_state.pods))

    def _set_failed(self, status: Object, message: str) -> None:
        _set_terminal_state(status, "Failed", "Error", message)

    def _run(
        self, job_object: Object, job_state: JobState, status: Object, succeeded_pods: set[str]
    ) -> None:
        """Start missing pods, handle pods that ended, and apply the failure and success
        policies."""
        pod_positions = map_pods_to_positions(job_object)
        terminating_pod_names = {pod.name for pod in job_state.terminating}

        for pod, (replicated_job_name, _, completion_index) in pod_positions.items():
            if pod not in {*job_state.pods, *succeeded_pods, *terminating_pod_names}:
                job_state.pods[pod] = self._start_pod(
                    job_object, pod, replicated_job_name, completion_index
                )

        replicated_jobs = {
            replicated_job["name"]: replicated_job
            for replicated_job in job_object["spec"]["replicatedJobs"]
        }
        for pod in list(job_state.pods.values()):
            exit_code = pod.poll()
            if exit_code is not None:
                replicated_job_name, job_name, _ = pod_positions[pod.name]
                if exit_code == 0:
                    succeeded_pods.add(pod.name)
                    del job_state.pods[pod.name]
                    continue

                job_spec = _get_job_spec(replicated_jobs[replicated_job_name])
                failure_reason = _restart_or_fail_pod(job_spec, pod, exit_code, job_state, job_name)
                if failure_reason:
                    failure_details = (
                        f"{pod.name} ended with code {exit_code} ({pod.log}): {pod.last_log_line()}"
                    )
                    self._apply_failure_policy(
                        job_object,
                        job_state,
                        status,
                        succeeded_pods,
                        pod.name,
                        failure_reason,
                        failure_details,
                    )
                    return

        success_policy = job_object["spec"].get("successPolicy") or {}
        target_jobs = success_policy.get("targetReplicatedJobs") or list(replicated_jobs)

        pod_successes = [
            pod in succeeded_pods
            for pod, (replicated_job_name, _, _) in pod_positions.items()
            if replicated_job_name in target_jobs
        ]
        if all(pod_successes) or (success_policy.get("operator") == "Any" and any(pod_successes)):
            _set_terminal_state(
                status, "Completed", "AllJobsCompleted", "jobset completed successfully"
            )

    def _apply_failure_policy(
        self,
        job_object: Object,
        job_state: JobState,
        status: Object,
        succeeded_pods: set[str],
        failed_pod_name: str,
        failure_reason: str,
        failure_details: str,
    ) -> None:
        """Apply the failure policy of the JobSet: restart the failed Job or all Jobs, or fail the
        JobSet."""
        pod_positions = map_pods_to_positions(job_object)
        failure_policy = job_object["spec"].get("failurePolicy") or {}
        replicated_job_name, job_name, _ = pod_positions[failed_pod_name]

        matching_rules = (
            failure_rule
            for failure_rule in failure_policy.get("rules") or []
            if replicated_job_name
            in (failure_rule.get("targetReplicatedJobs") or [replicated_job_name])
            and failure_reason in (failure_rule.get("onJobFailureReasons") or [failure_reason])
        )

        failure_action = next(
            (failure_rule["action"] for failure_rule in matching_rules), "RestartJobSet"
        )
        if failure_action == "FailJobSet":
            _set_terminal_state(
                status,
                "Failed",
                "FailJobSetFailurePolicyAction",
                f"{failure_reason} of {job_name}: {failure_details}",
            )
            return

        if failure_action == "RestartJobSet" and status["restarts"] >= failure_policy.get(
            "maxRestarts", 0
        ):
            _set_terminal_state(
                status,
                "Failed",
                "ReachedMaxRestarts",
                f"{failure_reason} of {job_name}: {failure_details}",
            )
            return

        restarts_only_this_job = failure_action.startswith("RestartJobAnd")
        if not restarts_only_this_job:
            status["restarts"] += 1

        restarted_pods = [
            pod_name
            for pod_name, (_, pod_job_name, _) in pod_positions.items()
            if not restarts_only_this_job or pod_job_name == job_name
        ]

        self._terminate_pods(
            job_state, [pod_name for pod_name in restarted_pods if pod_name in job_state.pods]
        )
        succeeded_pods -= set(restarted_pods)

        for pod_name in restarted_pods:
            job_state.failures.pop(pod_positions[pod_name][1], None)

    def _start_pod(
        self, job_object: Object, pod_name: str, replicated_job_name: str, completion_index: int
    ) -> Pod:
        replicated_job = next(
            replicated_job
            for replicated_job in job_object["spec"]["replicatedJobs"]
            if replicated_job["name"] == replicated_job_name
        )
        pod_spec = _get_job_spec(replicated_job)["template"]["spec"]
        environment = {"JOB_COMPLETION_INDEX": str(completion_index)}
        subdomain = (job_object["spec"].get("network") or {}).get("subdomain") or job_object[
            "metadata"
        ]["name"]
        for variable in pod_spec["containers"][0].get("env") or []:
            host_name, separator, domain_suffix = str(variable.get("value", "")).partition(".")
            if (
                separator
                and domain_suffix == subdomain
                and host_name in map_pods_to_positions(job_object)
            ):
                environment[variable["name"]] = self.cluster.address(host_name)
        environment.update(self._make_memory_variables(job_object, pod_spec))
        return Pod(
            self.cluster,
            pod_name,
            pod_spec,
            self.run,
            environment,
            claim_names=self._list_claim_names(),
        )


def _get_job_spec(replicated_job: Object) -> Object:
    return (replicated_job.get("template") or {}).get("spec") or {}


def _restart_or_fail_pod(
    job_spec: Object, pod: Pod, exit_code: int, job_state: JobState, job_name: str
) -> str:
    """Restart a failed pod as the Job controller would, and return "". If the failure of the pod
    fails its Job, return the reason instead."""
    must_recreate = job_spec["template"]["spec"].get("restartPolicy") == "Never"
    failure_rules = (job_spec.get("podFailurePolicy") or {}).get("rules") or []

    failure_action = next(
        (
            failure_rule["action"]
            for failure_rule in failure_rules
            if _matches_exit_code(failure_rule, exit_code)
        ),
        "Count",
    )
    if failure_action == "FailJob":
        return "PodFailurePolicy"

    if failure_action == "Count":
        job_state.failures[job_name] = job_state.failures.get(job_name, 0) + 1
        if job_state.failures[job_name] > job_spec.get("backoffLimit", 6):
            return "BackoffLimitExceeded"

    pod.restart(exit_code, recreates_pod=must_recreate)
    return ""


def _matches_exit_code(failure_rule: Mapping[str, Any], exit_code: int) -> bool:
    exit_code_condition = failure_rule.get("onExitCodes")
    return bool(exit_code_condition) and (exit_code in exit_code_condition["values"]) == (
        exit_code_condition["operator"] == "In"
    )


def _make_job_statuses(
    job_set: Object, job_state: JobState, succeeded_pods: set[str]
) -> list[Object]:
    counts_by_job: dict[str, Counter[str]] = {
        replicated_job["name"]: Counter() for replicated_job in job_set["spec"]["replicatedJobs"]
    }
    pods_by_job: dict[tuple[str, str], list[str]] = {}
    for pod, (replicated_job_name, job_name, _) in map_pods_to_positions(job_set).items():
        pods_by_job.setdefault((replicated_job_name, job_name), []).append(pod)

    for (replicated_job_name, _), job_pods in pods_by_job.items():
        running_pods = [pod for pod in job_pods if pod in job_state.pods]
        succeeded_count = sum(pod in succeeded_pods for pod in job_pods)
        job_states = {
            "succeeded": succeeded_count == len(job_pods),
            "active": bool(running_pods),
            "ready": len(running_pods) + succeeded_count == len(job_pods),
            "suspended": bool(job_set["spec"].get("suspend")),
        }
        counts_by_job[replicated_job_name].update(
            job_state_name for job_state_name, is_set in job_states.items() if is_set
        )

    pod_states = ("active", "failed", "ready", "succeeded", "suspended")

    return [
        {"name": name, **{pod_state: state_counts[pod_state] for pod_state in pod_states}}
        for name, state_counts in sorted(counts_by_job.items())
    ]


def _set_condition(
    status: Object, condition_type: str, reason: str, message: str, condition_status: str = "True"
) -> None:
    current_condition = find_condition(status, condition_type)
    if current_condition and (current_condition["status"], current_condition["reason"]) == (
        condition_status,
        reason,
    ):
        return

    new_condition = {
        "type": condition_type,
        "status": condition_status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": format_timestamp(time.time()),
    }

    conditions = status.setdefault("conditions", [])
    if current_condition:
        conditions[conditions.index(current_condition)] = new_condition
    else:
        conditions.append(new_condition)


def _set_terminal_state(status: Object, terminal_state: str, reason: str, message: str) -> None:
    _set_condition(status, terminal_state, reason, message)
    status["terminalState"] = terminal_state


class TrainJobs(Controller):
    """The controller of TrainJobs. For each TrainJob, TrainJobs creates a JobSet of the same name
    from the template in the TrainingRuntime."""

    kind = "TrainJob"

    def check(self, kubernetes_object: Object) -> None:
        """Raise ConfigError for a TrainJob whose runtime is missing, or that changes an immutable
        field."""
        super().check(kubernetes_object)
        train_job_name = kubernetes_object["metadata"]["name"]
        current_train_job = self.read(kubernetes_object["metadata"]["name"])

        for immutable_field in ("runtimeRef", "trainer"):
            if current_train_job and current_train_job["spec"].get(
                immutable_field
            ) != kubernetes_object["spec"].get(immutable_field):
                raise ConfigError(
                    f"TrainJob {train_job_name}: spec.{immutable_field}: field is immutable."
                )

        runtime_reference = kubernetes_object["spec"].get("runtimeRef") or {}
        runtime_controller = self.controllers["TrainingRuntime"]
        if runtime_reference.get("kind") != "TrainingRuntime" or not runtime_controller.read(
            str(runtime_reference.get("name"))
        ):
            raise ConfigError(
                f"TrainJob {train_job_name}: TrainingRuntime {runtime_reference.get('name')} does"
                " not exist: apply it."
            )

    def on_write(self, stored_object: Object) -> Object:
        self.controllers["JobSet"].apply(self._make_job_set(stored_object))
        return stored_object

    def get(self, name: str) -> Object | None:
        self.controllers["JobSet"].get(name)
        return self.read(name)

    def delete(self, name: str) -> bool:
        self.controllers["JobSet"].delete(name)
        return super().delete(name)

    def poll(self) -> None:
        """Copy the status of each JobSet to its TrainJob; the controller of JobSets polls the
        JobSets."""
        for job_name in self.names():
            job_set = self.controllers["JobSet"].read(job_name) or {}
            if job_set.get("status"):
                train_job_status = _make_train_job_status(job_set["status"])
                self.change(
                    job_name,
                    lambda train_job, train_job_status=train_job_status: (
                        train_job and train_job | {"status": train_job_status}
                    ),
                )

    def _make_job_set(self, train_job: Object) -> Object:
        train_job_spec = train_job["spec"]
        train_job_name = train_job["metadata"]["name"]
        training_runtime = self.controllers["TrainingRuntime"].read(
            train_job_spec["runtimeRef"]["name"]
        )
        assert training_runtime
        trainer_spec = train_job_spec.get("trainer") or {}
        node_count = trainer_spec.get(
            "numNodes", (training_runtime["spec"].get("mlPolicy") or {}).get("numNodes", 1)
        )
        job_set_spec = dict(training_runtime["spec"]["template"]["spec"])
        job_set_spec["replicatedJobs"] = [
            _apply_trainer(replicated_job, node_count, trainer_spec)
            for replicated_job in job_set_spec["replicatedJobs"]
        ]
        if "suspend" in train_job_spec:
            job_set_spec["suspend"] = train_job_spec["suspend"]

        job_set_metadata = {
            "name": train_job_name,
            "labels": train_job["metadata"].get("labels") or {},
        }

        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": job_set_metadata,
            "spec": job_set_spec,
        }


def _apply_trainer(replicated_job: Object, node_count: int, trainer_spec: Object) -> Object:
    """Return the runtime's job `replicated_job`. If `replicated_job` is the job of the trainer, the
    TrainJob's nodes, command and image replace the values in the runtime.

    Source: plugins/torch/torch.go.
    """
    template_labels = ((replicated_job.get("template") or {}).get("metadata") or {}).get(
        "labels"
    ) or {}
    if template_labels.get(TRAINER_STEP_LABEL) != "trainer":
        return replicated_job

    job_spec = _get_job_spec(replicated_job)
    pod_spec = job_spec["template"]["spec"]
    container = pod_spec["containers"][0] | {
        key: trainer_spec[key] for key in ("image", "command", "args") if key in trainer_spec
    }
    torchrun_variables = {
        "PET_NNODES": str(node_count),
        "PET_NPROC_PER_NODE": str(trainer_spec.get("numProcPerNode", 1)),
    }
    environment = [
        variable
        for variable in container.get("env") or []
        if variable["name"] not in torchrun_variables
    ]
    environment += [
        *(trainer_spec.get("env") or []),
        *(
            {"name": key, "value": variable_value}
            for key, variable_value in torchrun_variables.items()
        ),
    ]
    pod_template = job_spec["template"] | {
        "spec": pod_spec | {"containers": [container | {"env": environment}]}
    }
    updated_job_spec = job_spec | {
        "completions": node_count,
        "parallelism": node_count,
        "template": pod_template,
    }

    return replicated_job | {"template": replicated_job["template"] | {"spec": updated_job_spec}}


def _make_train_job_status(job_set_status: Object) -> Object:
    condition_types = {"Completed": "Complete"}
    conditions = [
        job_set_condition
        | {"type": condition_types.get(job_set_condition["type"], job_set_condition["type"])}
        for job_set_condition in job_set_status.get("conditions") or []
    ]
    return {
        "conditions": conditions,
        "jobsStatus": job_set_status.get("replicatedJobsStatus") or [],
    }
