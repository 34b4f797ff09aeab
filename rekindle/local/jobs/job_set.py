"""JobSets and TrainJobs: the pods of their Jobs as child processes, by JobSet's and the Job controller's rules.

Source: JobSet 0.12 (pkg/controllers/{jobset_controller,failure_policy,success_policy}.go), Kubernetes
pkg/controller/job, Kubeflow Trainer 2.3 (pkg/runtime). Differences: a pod has no random suffix, its DNS name is its
loopback address in the environment, a lost pod is replaced after the back-off of pod.py, startupPolicy is refused.
"""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from argolocal.controllers.base import Controller, Object, sole_container
from argolocal.controllers.pod import Pod
from argolocal.language.gofmt import timestamp
from argolocal.validate.objects import refuse
from rekindle.errors import ConfigError
from rekindle.local.jobs.training_job import Job, TrainingJobs, condition, finished, suspended

Index = tuple[str, str, int]  # of a pod: its ReplicatedJob, its Job, its completion index


def pods_of(obj: Object) -> dict[str, Index]:
    """The pods of a JobSet, by name without the random suffix."""
    name, pods = obj["metadata"]["name"], {}
    for entry in obj["spec"]["replicatedJobs"]:
        spec = _job_spec(entry)
        for job in range(entry.get("replicas", 1)):
            owner = f"{name}-{entry['name']}-{job}"
            for index in range(spec.get("completions", spec.get("parallelism", 1))):
                pods[f"{owner}-{index}"] = (entry["name"], owner, index)
    return pods


class JobSets(TrainingJobs):
    """The controller of JobSets. `Job.failed` counts the failed pods of each Job that its policy counts."""

    kind = "JobSet"
    pods_of = staticmethod(pods_of)

    def check(self, obj: Object) -> None:
        """Raises ConfigError for what JobSet's webhook or the API server refuses, or what does not run here."""
        Controller.check(self, obj)
        refuse(obj)
        name, spec = obj["metadata"]["name"], obj["spec"]
        if spec.get("startupPolicy"):
            raise ConfigError(f"JobSet {name}: spec.startupPolicy is not supported here: all jobs start at once.")
        for pod in (f"{pod}-abcde" for pod in pods_of(obj)):
            if len(pod) > 63:
                raise ConfigError(
                    f"JobSet {name}: its pod {pod} would have {len(pod)} characters, and 63 are the most."
                )
        for job in spec["replicatedJobs"]:
            sole_container(_job_spec(job)["template"]["spec"], f"JobSet {name}: {job['name']}")
        now = self.read(name)
        status = (now or {}).get("status") or {}
        if now and not finished(status) and now["spec"].get("replicatedJobs") != spec["replicatedJobs"]:
            raise ConfigError(f"JobSet {name}: spec.replicatedJobs: field is immutable.")

    def _advance(self, obj: Object, job: Job, status: Object, done: set[str]) -> None:
        status.setdefault("restarts", 0)
        if not finished(status):
            if obj["spec"].get("suspend"):
                self._remove(job, list(job.pods))
                _set(status, "Suspended", "SuspendedJobs", "jobset is suspended")
            else:
                if suspended(status):
                    _set(status, "Suspended", "ResumeJobs", "jobset is resumed", "False")
                self._run(obj, job, status, done)
        status["replicatedJobsStatus"] = _statuses(obj, job, done)
        if finished(status):
            self._remove(job, list(job.pods))

    def _run(self, obj: Object, job: Job, status: Object, done: set[str]) -> None:
        """Start missing pods, look at those that ended, and then at the two policies."""
        pods, terminating = pods_of(obj), {pod.name for pod in job.terminating}
        for pod, (role, _, index) in pods.items():
            if pod not in {*job.pods, *done, *terminating}:
                job.pods[pod] = self._started(obj, pod, role, index)
        jobs = {entry["name"]: entry for entry in obj["spec"]["replicatedJobs"]}
        for pod in list(job.pods.values()):
            if (code := pod.poll()) is not None:
                role, owner, _ = pods[pod.name]
                if code == 0:
                    done.add(pod.name)
                    del job.pods[pod.name]
                elif reason := _lost(_job_spec(jobs[role]), pod, code, job, owner):
                    why = f"{pod.name} ended with code {code} ({pod.log}): {pod.last_log_line()}"
                    self._job_failed(obj, job, status, done, pod.name, reason, why)
                    return
        policy = obj["spec"].get("successPolicy") or {}
        targets = policy.get("targetReplicatedJobs") or list(jobs)
        ended = [pod in done for pod, (role, _, _) in pods.items() if role in targets]
        if all(ended) or (policy.get("operator") == "Any" and any(ended)):
            _end(status, "Completed", "AllJobsCompleted", "jobset completed successfully")

    def _job_failed(
        self, obj: Object, job: Job, status: Object, done: set[str], pod: str, reason: str, why: str
    ) -> None:
        """What the failure policy makes of a Job that failed: nothing, one Job anew, all of them, or the end."""
        pods, policy = pods_of(obj), obj["spec"].get("failurePolicy") or {}
        role, owner, _ = pods[pod]
        rules = (
            rule
            for rule in policy.get("rules") or []
            if role in (rule.get("targetReplicatedJobs") or [role])
            and reason in (rule.get("onJobFailureReasons") or [reason])
        )
        action = next((rule["action"] for rule in rules), "RestartJobSet")
        if action == "FailJobSet":
            _end(status, "Failed", "FailJobSetFailurePolicyAction", f"{reason} of {owner}: {why}")
            return
        if action == "RestartJobSet" and status["restarts"] >= policy.get("maxRestarts", 0):
            _end(status, "Failed", "ReachedMaxRestarts", f"{reason} of {owner}: {why}")
            return
        one = action.startswith("RestartJobAnd")
        if not one:
            status["restarts"] += 1
        again = [name for name, (_, its, _) in pods.items() if not one or its == owner]
        self._remove(job, [name for name in again if name in job.pods])
        done -= set(again)
        for name in again:
            job.failed.pop(pods[name][1], None)

    def _started(self, obj: Object, name: str, role: str, index: int) -> Pod:
        entry = next(entry for entry in obj["spec"]["replicatedJobs"] if entry["name"] == role)
        spec = _job_spec(entry)["template"]["spec"]
        environment = {"JOB_COMPLETION_INDEX": str(index)}
        domain = (obj["spec"].get("network") or {}).get("subdomain") or obj["metadata"]["name"]
        for variable in spec["containers"][0].get("env") or []:
            host, dot, rest = str(variable.get("value", "")).partition(".")
            if dot and rest == domain and host in pods_of(obj):
                environment[variable["name"]] = self.cluster.address(host)
        return Pod(self.cluster, name, spec, self.run, environment | self._memory(obj, spec))


def _job_spec(entry: Object) -> Object:
    return (entry.get("template") or {}).get("spec") or {}


def _lost(spec: Object, pod: Pod, code: int, job: Job, owner: str) -> str:
    """Start the pod again, as the Job controller would; or why its Job has failed."""
    never = spec["template"]["spec"].get("restartPolicy") == "Never"
    actions = (rule["action"] for rule in (spec.get("podFailurePolicy") or {}).get("rules") or [] if _meets(rule, code))
    action = next(actions, "Count")
    if action == "FailJob":
        return "PodFailurePolicy"
    if action == "Count":
        job.failed[owner] = job.failed.get(owner, 0) + 1
        if job.failed[owner] > spec.get("backoffLimit", 6):
            return "BackoffLimitExceeded"
    pod.restart(code, recreate=never)
    return ""


def _meets(rule: Mapping[str, Any], code: int) -> bool:
    codes = rule.get("onExitCodes")
    return bool(codes) and (code in codes["values"]) == (codes["operator"] == "In")


def _statuses(obj: Object, job: Job, done: set[str]) -> list[Object]:
    counts: dict[str, Counter[str]] = {entry["name"]: Counter() for entry in obj["spec"]["replicatedJobs"]}
    by_job: dict[tuple[str, str], list[str]] = {}
    for pod, (role, owner, _) in pods_of(obj).items():
        by_job.setdefault((role, owner), []).append(pod)
    for (role, _), pods in by_job.items():
        running = [pod for pod in pods if pod in job.pods]
        counts[role]["succeeded"] += all(pod in done for pod in pods)
        counts[role]["active"] += bool(running)
        counts[role]["ready"] += len(running) + sum(pod in done for pod in pods) == len(pods)
        counts[role]["suspended"] += bool(obj["spec"].get("suspend"))
    kinds = ("active", "failed", "ready", "succeeded", "suspended")
    return [{"name": name, **{kind: count[kind] for kind in kinds}} for name, count in sorted(counts.items())]


def _set(status: Object, kind: str, reason: str, message: str, value: str = "True") -> None:
    now = condition(status, kind)
    if now and (now["status"], now["reason"]) == (value, reason):
        return
    entry = {"type": kind, "status": value, "reason": reason, "message": message}
    entry["lastTransitionTime"] = timestamp(time.time())
    conditions = status.setdefault("conditions", [])
    if now:
        conditions[conditions.index(now)] = entry
    else:
        conditions.append(entry)


def _end(status: Object, kind: str, reason: str, message: str) -> None:
    _set(status, kind, reason, message)
    status["terminalState"] = kind


class TrainJobs(Controller):
    """TrainJobs: each is a JobSet of its name, made of its TrainingRuntime."""

    kind = "TrainJob"

    @property
    def sets(self) -> Controller:
        return self.others["JobSet"]

    @property
    def runtimes(self) -> Controller:
        return self.others["TrainingRuntime"]

    def check(self, obj: Object) -> None:
        """Raises ConfigError for a TrainJob whose runtime is not here, or that changes."""
        super().check(obj)
        name, now = obj["metadata"]["name"], self.read(obj["metadata"]["name"])
        for field in ("runtimeRef", "trainer"):
            if now and now["spec"].get(field) != obj["spec"].get(field):
                raise ConfigError(f"TrainJob {name}: spec.{field}: field is immutable.")
        reference = obj["spec"].get("runtimeRef") or {}
        if reference.get("kind") != "TrainingRuntime" or not self.runtimes.read(str(reference.get("name"))):
            raise ConfigError(f"TrainJob {name}: there is no TrainingRuntime {reference.get('name')} here: apply it.")

    def on_write(self, stored: Object) -> Object:
        self.sets.apply(self._job_set(stored))
        return stored

    def get(self, name: str) -> Object | None:
        self.sets.get(name)
        return self.read(name)

    def delete(self, name: str) -> bool:
        self.sets.delete(name)
        return super().delete(name)

    def poll(self) -> None:
        """The JobSets are polled by their own controller: here their status becomes that of the TrainJobs."""
        for name in self.names():
            child = (self.sets.read(name) or {}).get("status") or {}
            if child:
                self.change(name, lambda obj, child=child: obj and obj | {"status": _mirrored(child)})

    def _job_set(self, obj: Object) -> Object:
        spec, name = obj["spec"], obj["metadata"]["name"]
        runtime = self.runtimes.read(spec["runtimeRef"]["name"])
        assert runtime
        trainer = spec.get("trainer") or {}
        nodes = trainer.get("numNodes", (runtime["spec"].get("mlPolicy") or {}).get("numNodes", 1))
        made = dict(runtime["spec"]["template"]["spec"])
        made["replicatedJobs"] = [_with_nodes(entry, nodes, trainer) for entry in made["replicatedJobs"]]
        made |= {"suspend": spec["suspend"]} if "suspend" in spec else {}
        meta = {"name": name, "labels": obj["metadata"].get("labels") or {}}
        return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": made}


def _with_nodes(entry: Object, nodes: int, trainer: Object) -> Object:
    """A job of the runtime; that of the trainer with its nodes, command and image. Source: plugins/torch/torch.go."""
    labels = ((entry.get("template") or {}).get("metadata") or {}).get("labels") or {}
    if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") != "trainer":
        return entry
    spec = _job_spec(entry)
    pod = spec["template"]["spec"]
    container = pod["containers"][0] | {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    told = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", 1))}
    own = [variable for variable in container.get("env") or [] if variable["name"] not in told]
    added = [*(trainer.get("env") or []), *({"name": key, "value": value} for key, value in told.items())]
    template = spec["template"] | {"spec": pod | {"containers": [container | {"env": [*own, *added]}]}}
    whole = spec | {"completions": nodes, "parallelism": nodes, "template": template}
    return entry | {"template": entry["template"] | {"spec": whole}}


def _mirrored(child: Object) -> Object:
    named = {"Completed": "Complete"}
    conditions = [entry | {"type": named.get(entry["type"], entry["type"])} for entry in child.get("conditions") or []]
    return {"conditions": conditions, "jobsStatus": child.get("replicatedJobsStatus") or []}
