"""Runs the pods of JobSets and TrainJobs as child processes, by the rules of the JobSet controller
and the Job controller.

The rules are from JobSet 0.12
(pkg/controllers/{jobset_controller,failure_policy,success_policy}.go), Kubernetes
(pkg/controller/job) and Kubeflow Trainer 2.3 (pkg/runtime). This module differs from these
controllers: pod names lack the random suffix, environment variables have loopback addresses instead
of DNS names, a lost pod is replaced after the back-off of pod_process.py, and startupPolicy is
rejected.
"""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from argolocal.controllers.controller import Controller, require_single_container
from argolocal.controllers.pod_process import Pod
from argolocal.language.gofmt import timestamp
from argolocal.manifest.object_labels import TRAINER_STEP
from argolocal.manifest.types import Object
from argolocal.validate.applied_objects import reject_invalid
from rekindle.errors import ConfigError
from rekindle.local.jobs.training_job import Job, TrainingJobs, condition, is_finished, is_suspended

# names of a pod's ReplicatedJob and Job, and the pod's completion index
PodIndex = tuple[str, str, int]


def pods_of(obj: Object) -> dict[str, PodIndex]:
    """Map the name of each pod of a JobSet, without the random suffix, to its PodIndex."""
    name = obj["metadata"]["name"]
    pods = {}
    for entry in obj["spec"]["replicatedJobs"]:
        spec = _job_spec(entry)
        for job in range(entry.get("replicas", 1)):
            owner = f"{name}-{entry['name']}-{job}"
            for index in range(spec.get("completions", spec.get("parallelism", 1))):
                pods[f"{owner}-{index}"] = (entry["name"], owner, index)
    return pods


class JobSets(TrainingJobs):
    """The controller of JobSets. `Job.failures` contains the number of failed pods of each Job of
    the JobSet, which the Job's backoffLimit restricts."""

    kind = "JobSet"
    api_versions = ()
    pods_of = staticmethod(pods_of)

    def check(self, obj: Object) -> None:
        """Raise ConfigError for a JobSet that its webhook or the API server rejects, or that cannot
        run locally."""
        Controller.check(self, obj)
        reject_invalid(obj)
        name = obj["metadata"]["name"]

        spec = obj["spec"]
        if spec.get("startupPolicy"):
            raise ConfigError(
                f"JobSet {name}: spec.startupPolicy is not supported here: all jobs start at once."
            )

        for pod in (f"{pod}-abcde" for pod in pods_of(obj)):
            if len(pod) > 63:
                raise ConfigError(
                    f"JobSet {name}: the pod name {pod} has {len(pod)} characters: shorten"
                    " metadata.name, so that the pod name has at most 63."
                )

        for job in spec["replicatedJobs"]:
            require_single_container(
                _job_spec(job)["template"]["spec"], f"JobSet {name}: {job['name']}"
            )

        current_job_set = self.read(name)
        status = (current_job_set or {}).get("status") or {}
        if (
            current_job_set
            and not is_finished(status)
            and current_job_set["spec"].get("replicatedJobs") != spec["replicatedJobs"]
        ):
            raise ConfigError(f"JobSet {name}: spec.replicatedJobs: field is immutable.")

    def _advance(self, obj: Object, job: Job, status: Object, succeeded_pods: set[str]) -> None:
        status.setdefault("restarts", 0)
        if not is_finished(status):
            if obj["spec"].get("suspend"):
                self._end_pods(job, list(job.pods))
                _set_condition(status, "Suspended", "SuspendedJobs", "jobset is suspended")
            else:
                if is_suspended(status):
                    _set_condition(status, "Suspended", "ResumeJobs", "jobset is resumed", "False")
                self._run(obj, job, status, succeeded_pods)
        status["replicatedJobsStatus"] = _job_statuses(obj, job, succeeded_pods)
        if is_finished(status):
            self._end_pods(job, list(job.pods))

    def _set_failed(self, status: Object, message: str) -> None:
        _end(status, "Failed", "Error", message)

    def _run(self, obj: Object, job: Job, status: Object, succeeded_pods: set[str]) -> None:
        """Start missing pods, handle pods that ended, and apply the failure and success
        policies."""
        pods = pods_of(obj)
        terminating_names = {pod.name for pod in job.terminating}

        for pod, (role, _, index) in pods.items():
            if pod not in {*job.pods, *succeeded_pods, *terminating_names}:
                job.pods[pod] = self._start_pod(obj, pod, role, index)

        jobs = {entry["name"]: entry for entry in obj["spec"]["replicatedJobs"]}
        for pod in list(job.pods.values()):
            code = pod.poll()
            if code is not None:
                role, owner, _ = pods[pod.name]
                if code == 0:
                    succeeded_pods.add(pod.name)
                    del job.pods[pod.name]
                elif reason := _restart_or_fail(_job_spec(jobs[role]), pod, code, job, owner):
                    details = (
                        f"{pod.name} ended with code {code} ({pod.log}): {pod.last_log_line()}"
                    )
                    self._apply_failure_policy(
                        obj, job, status, succeeded_pods, pod.name, reason, details
                    )
                    return

        policy = obj["spec"].get("successPolicy") or {}
        targets = policy.get("targetReplicatedJobs") or list(jobs)

        has_ended = [pod in succeeded_pods for pod, (role, _, _) in pods.items() if role in targets]
        if all(has_ended) or (policy.get("operator") == "Any" and any(has_ended)):
            _end(status, "Completed", "AllJobsCompleted", "jobset completed successfully")

    def _apply_failure_policy(
        self,
        obj: Object,
        job: Job,
        status: Object,
        succeeded_pods: set[str],
        pod: str,
        reason: str,
        details: str,
    ) -> None:
        """Apply the failure policy of the JobSet: restart the failed Job or all Jobs, or fail the
        JobSet."""
        pods = pods_of(obj)
        policy = obj["spec"].get("failurePolicy") or {}
        role, owner, _ = pods[pod]

        rules = (
            rule
            for rule in policy.get("rules") or []
            if role in (rule.get("targetReplicatedJobs") or [role])
            and reason in (rule.get("onJobFailureReasons") or [reason])
        )

        action = next((rule["action"] for rule in rules), "RestartJobSet")
        if action == "FailJobSet":
            _end(
                status, "Failed", "FailJobSetFailurePolicyAction", f"{reason} of {owner}: {details}"
            )
            return

        if action == "RestartJobSet" and status["restarts"] >= policy.get("maxRestarts", 0):
            _end(status, "Failed", "ReachedMaxRestarts", f"{reason} of {owner}: {details}")
            return

        only_this_job = action.startswith("RestartJobAnd")
        if not only_this_job:
            status["restarts"] += 1

        restarted_pods = [
            name
            for name, (_, pod_owner, _) in pods.items()
            if not only_this_job or pod_owner == owner
        ]

        self._end_pods(job, [name for name in restarted_pods if name in job.pods])
        succeeded_pods -= set(restarted_pods)

        for name in restarted_pods:
            job.failures.pop(pods[name][1], None)

    def _start_pod(self, obj: Object, name: str, role: str, index: int) -> Pod:
        entry = next(entry for entry in obj["spec"]["replicatedJobs"] if entry["name"] == role)
        spec = _job_spec(entry)["template"]["spec"]
        environment = {"JOB_COMPLETION_INDEX": str(index)}
        domain = (obj["spec"].get("network") or {}).get("subdomain") or obj["metadata"]["name"]
        for variable in spec["containers"][0].get("env") or []:
            host, dot, suffix = str(variable.get("value", "")).partition(".")
            if dot and suffix == domain and host in pods_of(obj):
                environment[variable["name"]] = self.cluster.address(host)
        environment.update(self._memory(obj, spec))
        return Pod(self.cluster, name, spec, self.run, environment, claims=self._claims())


def _job_spec(entry: Object) -> Object:
    return (entry.get("template") or {}).get("spec") or {}


def _restart_or_fail(spec: Object, pod: Pod, code: int, job: Job, owner: str) -> str:
    """Restart the pod as the Job controller would, and return ""; if its Job has failed instead,
    return the reason."""
    recreate = spec["template"]["spec"].get("restartPolicy") == "Never"
    rules = (spec.get("podFailurePolicy") or {}).get("rules") or []

    action = next((rule["action"] for rule in rules if _matches(rule, code)), "Count")
    if action == "FailJob":
        return "PodFailurePolicy"

    if action == "Count":
        job.failures[owner] = job.failures.get(owner, 0) + 1
        if job.failures[owner] > spec.get("backoffLimit", 6):
            return "BackoffLimitExceeded"

    pod.restart(code, recreate=recreate)
    return ""


def _matches(rule: Mapping[str, Any], code: int) -> bool:
    codes = rule.get("onExitCodes")
    return bool(codes) and (code in codes["values"]) == (codes["operator"] == "In")


def _job_statuses(obj: Object, job: Job, succeeded_pods: set[str]) -> list[Object]:
    counts: dict[str, Counter[str]] = {
        entry["name"]: Counter() for entry in obj["spec"]["replicatedJobs"]
    }
    pods_by_job: dict[tuple[str, str], list[str]] = {}
    for pod, (role, owner, _) in pods_of(obj).items():
        pods_by_job.setdefault((role, owner), []).append(pod)

    for (role, _), pods in pods_by_job.items():
        running = [pod for pod in pods if pod in job.pods]
        counts[role]["succeeded"] += all(pod in succeeded_pods for pod in pods)
        counts[role]["active"] += bool(running)
        counts[role]["ready"] += len(running) + sum(pod in succeeded_pods for pod in pods) == len(
            pods
        )
        counts[role]["suspended"] += bool(obj["spec"].get("suspend"))

    states = ("active", "failed", "ready", "succeeded", "suspended")

    return [
        {"name": name, **{state: count[state] for state in states}}
        for name, count in sorted(counts.items())
    ]


def _set_condition(
    status: Object, condition_type: str, reason: str, message: str, value: str = "True"
) -> None:
    current = condition(status, condition_type)
    if current and (current["status"], current["reason"]) == (value, reason):
        return

    entry = {
        "type": condition_type,
        "status": value,
        "reason": reason,
        "message": message,
        "lastTransitionTime": timestamp(time.time()),
    }

    conditions = status.setdefault("conditions", [])
    if current:
        conditions[conditions.index(current)] = entry
    else:
        conditions.append(entry)


def _end(status: Object, state: str, reason: str, message: str) -> None:
    _set_condition(status, state, reason, message)
    status["terminalState"] = state


class TrainJobs(Controller):
    """The controller of TrainJobs. For each TrainJob, it creates a JobSet of the same name from the
    template in the TrainingRuntime."""

    kind = "TrainJob"

    def check(self, obj: Object) -> None:
        """Raise ConfigError for a TrainJob whose runtime is missing, or that changes an immutable
        field."""
        super().check(obj)
        name = obj["metadata"]["name"]
        current = self.read(obj["metadata"]["name"])

        for field in ("runtimeRef", "trainer"):
            if current and current["spec"].get(field) != obj["spec"].get(field):
                raise ConfigError(f"TrainJob {name}: spec.{field}: field is immutable.")

        reference = obj["spec"].get("runtimeRef") or {}
        runtimes = self.controllers["TrainingRuntime"]
        if reference.get("kind") != "TrainingRuntime" or not runtimes.read(
            str(reference.get("name"))
        ):
            raise ConfigError(
                f"TrainJob {name}: TrainingRuntime {reference.get('name')} does not exist:"
                " apply it."
            )

    def on_write(self, stored: Object) -> Object:
        self.controllers["JobSet"].apply(self._job_set(stored))
        return stored

    def get(self, name: str) -> Object | None:
        self.controllers["JobSet"].get(name)
        return self.read(name)

    def delete(self, name: str) -> bool:
        self.controllers["JobSet"].delete(name)
        return super().delete(name)

    def poll(self) -> None:
        """Copy the status of each JobSet to its TrainJob; the controller of JobSets polls the
        JobSets."""
        for name in self.names():
            child = (self.controllers["JobSet"].read(name) or {}).get("status") or {}
            if child:
                self.change(
                    name,
                    lambda obj, child=child: obj and obj | {"status": _train_job_status(child)},
                )

    def _job_set(self, obj: Object) -> Object:
        spec = obj["spec"]
        name = obj["metadata"]["name"]
        runtime = self.controllers["TrainingRuntime"].read(spec["runtimeRef"]["name"])
        assert runtime
        trainer = spec.get("trainer") or {}
        nodes = trainer.get("numNodes", (runtime["spec"].get("mlPolicy") or {}).get("numNodes", 1))
        job_set = dict(runtime["spec"]["template"]["spec"])
        job_set["replicatedJobs"] = [
            _with_trainer(entry, nodes, trainer) for entry in job_set["replicatedJobs"]
        ]
        job_set.update({"suspend": spec["suspend"]} if "suspend" in spec else {})
        meta = {"name": name, "labels": obj["metadata"].get("labels") or {}}

        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": meta,
            "spec": job_set,
        }


def _with_trainer(entry: Object, nodes: int, trainer: Object) -> Object:
    """Return the runtime's job `entry`. If it is the job of the trainer, the TrainJob's nodes,
    command and image replace those of the runtime.

    Source: plugins/torch/torch.go.
    """
    labels = ((entry.get("template") or {}).get("metadata") or {}).get("labels") or {}
    if labels.get(TRAINER_STEP) != "trainer":
        return entry

    spec = _job_spec(entry)
    pod = spec["template"]["spec"]
    container = pod["containers"][0] | {
        key: trainer[key] for key in ("image", "command", "args") if key in trainer
    }
    torchrun = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", 1)),
    }
    env = [variable for variable in container.get("env") or [] if variable["name"] not in torchrun]
    env += [
        *(trainer.get("env") or []),
        *({"name": key, "value": value} for key, value in torchrun.items()),
    ]
    template = spec["template"] | {"spec": pod | {"containers": [container | {"env": env}]}}
    job = spec | {"completions": nodes, "parallelism": nodes, "template": template}

    return entry | {"template": entry["template"] | {"spec": job}}


def _train_job_status(child: Object) -> Object:
    types = {"Completed": "Complete"}
    conditions = [
        entry | {"type": types.get(entry["type"], entry["type"])}
        for entry in child.get("conditions") or []
    ]
    return {"conditions": conditions, "jobsStatus": child.get("replicatedJobsStatus") or []}
