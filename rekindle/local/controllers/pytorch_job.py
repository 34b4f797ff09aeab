"""PyTorchJobs: replicas as child processes, with the environment, restarts and status of the training operator.

Source: Kubeflow training operator 1.9 (pytorchjob_controller.go, common/job.go, common/pod.go, util/status.go,
pytorch/envvar.go, pytorchjob_webhook.go). Differences: loopback addresses instead of DNS names, a shorter
back-off before restarts (pod.py), and failure messages that quote the pod's log.
"""

import fcntl
import hashlib
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

from rekindle.argo.language.gofmt import timestamp
from rekindle.argo.names import JOB_NAME, PYTORCH_PORT, PYTORCH_PORT_NAME, REPLICA_TYPE
from rekindle.errors import ConfigError
from rekindle.local.controllers.base import Controller, Object, sole_container
from rekindle.local.controllers.pod import Pod, end_all
from rekindle.local.journal import RunFiles
from rekindle.local.pods.interfaces import Cluster

RETRYABLE = 128  # with restartPolicy ExitCode, codes from here on start the pod again
SUCCEEDED = "rekindle/succeeded-pods"  # annotation: succeeded pods are remembered like pod objects
RESTART_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN_POD_POLICIES = ("None", "Running", "All")
SHARED = Path("/dev/shm")
OWNER = "run"  # file with the path of the run that a memory volume belongs to
ABANDONED = 3600.0  # seconds after which nobody resumes the run


@dataclass
class Job:
    """The state of a job while this process runs it."""

    lock: int  # held by the process that runs the pods
    pods: dict[str, Pod] = field(default_factory=dict)
    terminating: list[Pod] = field(default_factory=list)  # deleted, but not yet exited
    failed: dict[str, int] = field(default_factory=dict)  # exit codes of pods that are Failed


class PyTorchJobs(Controller):
    """The controller. `run` is the folder for the pods' logs and directories."""

    kind = "PyTorchJob"

    def __init__(self, cluster: Cluster, run: Path) -> None:
        super().__init__(cluster)
        self.run = run
        self.jobs: dict[str, Job] = {}

    def check(self, obj: Object) -> None:
        """Raises ConfigError for a job that the operator's webhook refuses or that makes the operator fail."""
        super().check(obj)
        name, spec = obj["metadata"]["name"], obj.get("spec") or {}
        where = f"PyTorchJob {name}"
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 53:
            raise ConfigError(
                f"{where}: a name is lower-case letters, digits and -, begins with a letter, has at most 53."
            )
        replicas, elastic = spec.get("pytorchReplicaSpecs") or {}, spec.get("elasticPolicy")
        if not replicas or set(replicas) - {"Master", "Worker"}:
            raise ConfigError(f"{where}: pytorchReplicaSpecs has {sorted(replicas)}, not Master, Worker or both.")
        if "Master" in replicas and replicas["Master"].get("replicas") != 1:
            raise ConfigError(f"{where}: Master.replicas must be written, as 1.")
        if elastic is not None and "Worker" not in replicas:
            raise ConfigError(f"{where}: elasticPolicy needs a Worker.")
        for rtype, replica in replicas.items():
            if replica.get("replicas", 1) < 1 or replica.get("restartPolicy", "OnFailure") not in RESTART_POLICIES:
                raise ConfigError(
                    f"{where}: {rtype} needs replicas >= 1 and a restartPolicy of {', '.join(RESTART_POLICIES)}."
                )
            sole_container((replica.get("template") or {}).get("spec") or {}, f"{where}: {rtype}", "pytorch")
        if elastic and ("standalone" in elastic or elastic.get("rdzvConf") == []):
            raise ConfigError(
                f"{where}: elasticPolicy.standalone and an empty rdzvConf break the operator. Leave them out."
            )
        if elastic and "nProcPerNode" in elastic and "nprocPerNode" in spec:
            raise ConfigError(
                f"{where}: elasticPolicy.nProcPerNode and nprocPerNode exclude each other. Keep the latter."
            )
        if (spec.get("runPolicy") or {}).get("cleanPodPolicy", "None") not in CLEAN_POD_POLICIES:
            raise ConfigError(f"{where}: runPolicy.cleanPodPolicy must be one of {', '.join(CLEAN_POD_POLICIES)}.")

    def apply(self, obj: Object) -> Object:
        stored = super().apply(obj)
        self._adopt(stored)
        return stored

    def get(self, name: str) -> Object | None:
        obj = self.read(name)
        if obj:
            self._adopt(obj)
        return obj

    def delete(self, name: str) -> bool:
        if job := self.jobs.pop(name, None):
            end_all([*job.pods.values(), *job.terminating], float("inf"))
            os.close(job.lock)
        rmtree(shared_memory(self.run, name), ignore_errors=True)
        return super().delete(name)

    def poll(self) -> None:
        self.cluster.poll()  # the pods always need the store
        for name, job in list(self.jobs.items()):
            obj = self.read(name)
            if obj is None:  # deleted by another command
                self.delete(name)
            else:
                self._reconcile(obj, job)

    def stop(self, grace: float) -> None:
        jobs = list(self.jobs.values())
        end_all([pod for job in jobs for pod in [*job.pods.values(), *job.terminating]], grace)
        for job in jobs:
            os.close(job.lock)
        self.jobs.clear()

    def clean_up(self) -> None:
        """Removes leftovers of completed jobs of this run."""
        for name in self.names():
            obj = self.read(name) or {}
            if finished(status := obj.get("status") or {}):
                self._clean(obj, status)

    def _clean(self, obj: Object, status: Object) -> None:
        rmtree(shared_memory(self.run, obj["metadata"]["name"]), ignore_errors=True)
        if condition(status, "Succeeded"):  # a failed job's directories stay for diagnosis
            for pod in pods_of(obj):
                rmtree(self.run / "pods" / pod, ignore_errors=True)

    def _adopt(self, obj: Object) -> None:
        """Take over an unfinished job that no process runs; its pods are lost, as with a lost cluster node."""
        name = obj["metadata"]["name"]
        if name in self.jobs or finished(obj.get("status") or {}):
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
            set_condition(status, "Restarting", f"PyTorchJob {name} is restarting because its node was lost.")
            self._save(obj, status)

    def _reconcile(self, obj: Object, job: Job) -> None:
        name, spec, status = obj["metadata"]["name"], obj["spec"], obj.get("status") or {}
        policy = spec.get("runPolicy") or {}
        job.terminating = [pod for pod in job.terminating if pod.poll() is None and pod.running]
        set_condition(status, "Created", f"PyTorchJob {name} is created.")
        done = set(filter(None, obj["metadata"]["annotations"].get(SUCCEEDED, "").split(",")))
        if not finished(status):
            if policy.get("suspend"):
                self._remove(job, list(job.pods))
                set_condition(status, "Suspended", f"PyTorchJob {name} is suspended.")
                status.pop("startTime", None)
            else:
                suspended = condition(status, "Suspended")
                if suspended and suspended["status"] == "True":
                    set_condition(status, "Suspended", f"PyTorchJob {name} is resumed.", "Resumed", "False")
                status.setdefault("startTime", timestamp(time.time()))
                self._sync_pods(obj, job, done)
                self._reap(obj, job, status, done)
                if reason := past_limit(policy, status, spec["pytorchReplicaSpecs"], job):
                    status.setdefault("completionTime", timestamp(time.time()))
                    set_condition(status, "Failed", f"PyTorchJob {name} has failed because it {reason}.")
            self._update_counts(obj, job, status, done)
        if finished(status):
            self._finish(policy.get("cleanPodPolicy", "None"), job, status)
        self._save(obj, status, ",".join(sorted(done)))
        if finished(status) and not job.pods and not job.terminating:
            os.close(self.jobs.pop(name).lock)
            self._clean(obj, status)

    def _sync_pods(self, obj: Object, job: Job, done: set[str]) -> None:
        """Create missing pods, delete surplus ones."""
        desired, terminating = pods_of(obj), {pod.name for pod in job.terminating}
        for pod, (rtype, index) in desired.items():
            if pod not in {*job.pods, *done, *job.failed, *terminating}:
                spec = obj["spec"]["pytorchReplicaSpecs"][rtype]["template"]["spec"]
                environment = operator_environment(obj, rtype, index, self.cluster.address)
                if any(
                    (volume.get("emptyDir") or {}).get("medium") == "Memory" for volume in spec.get("volumes") or []
                ):
                    memory = shared_memory(self.run, obj["metadata"]["name"])
                    memory.mkdir(mode=0o700, exist_ok=True)
                    (memory / OWNER).write_text(str(self.run.resolve()))
                    environment["REKINDLE_SHM"] = str(memory)
                job.pods[pod] = Pod(self.cluster, pod, spec, self.run, environment)
        self._remove(job, [pod for pod in job.pods if pod not in desired])

    def _reap(self, obj: Object, job: Job, status: Object, done: set[str]) -> None:
        """Poll the pods; those that exited succeed, fail, restart in place or are recreated, by restartPolicy."""
        name = obj["metadata"]["name"]
        for pod in list(job.pods.values()):
            code = pod.poll()
            if code is None:
                continue
            rtype = pods_of(obj)[pod.name][0]
            policy = obj["spec"]["pytorchReplicaSpecs"][rtype].get("restartPolicy", "OnFailure")
            if policy == "Always" or (code and policy == "OnFailure"):
                pod.restart(code)
            elif code == 0:
                done.add(pod.name)
                del job.pods[pod.name]
            elif policy == "ExitCode" and code >= RETRYABLE:
                pod.restart(code, recreate=True)
                set_condition(
                    status, "Restarting", f"PyTorchJob {name} is restarting because 1 {rtype} replica(s) failed."
                )
            else:
                job.failed[pod.name] = code
                del job.pods[pod.name]
                if policy == "Never":  # the operator omits it for a permanent code with ExitCode
                    status.setdefault("completionTime", timestamp(time.time()))
                why = f"{rtype} replica(s) failed: {pod.name} ended with code {code} ({pod.log}): {pod.last_log_line()}"
                set_condition(status, "Failed", f"PyTorchJob {name} is failed because 1 {why}")

    def _update_counts(self, obj: Object, job: Job, status: Object, done: set[str]) -> None:
        """Update replicaStatuses and the conditions that follow from them."""
        name, replicas = obj["metadata"]["name"], obj["spec"]["pytorchReplicaSpecs"]
        status["replicaStatuses"] = {}
        for rtype in sorted(replicas):
            prefix = f"{name}-{rtype.lower()}-"
            counts = {
                # a pod between two runs of its container is in phase Running
                "active": sum(pod.startswith(prefix) for pod in job.pods),
                "succeeded": sum(pod.startswith(prefix) for pod in done),
                "failed": sum(pod.startswith(prefix) for pod in job.failed),
            }
            selector = f"{JOB_NAME}={name},{REPLICA_TYPE}={rtype.lower()}"
            status["replicaStatuses"][rtype] = {k: v for k, v in counts.items() if v} | {"selector": selector}
            if rtype != ("Master" if "Master" in replicas else "Worker") or finished(status):
                continue
            elastic = rtype == "Worker" and obj["spec"].get("elasticPolicy") is not None
            if counts["succeeded"] >= replicas[rtype].get("replicas", 1) or (elastic and counts["succeeded"]):
                status.setdefault("completionTime", timestamp(time.time()))
                set_condition(status, "Succeeded", f"PyTorchJob {name} is successfully completed.")
            elif any(pod.running for key, pod in job.pods.items() if key.startswith(prefix)):
                set_condition(status, "Running", f"PyTorchJob {name} is running.")

    def _finish(self, clean: str, job: Job, status: Object) -> None:
        if clean in ("Running", "All"):
            self._remove(job, list(job.pods))
        else:  # no pod is deleted or restarted
            job.pods = {key: pod for key, pod in job.pods.items() if pod.running and pod.poll() is None}
        if condition(status, "Succeeded"):
            for counts in status["replicaStatuses"].values():
                if total := counts.pop("active", 0) + counts.get("succeeded", 0):
                    counts["succeeded"] = total

    def _remove(self, job: Job, names: list[str]) -> None:
        for name in names:
            pod = job.pods.pop(name)
            pod.end()
            job.terminating.append(pod)

    def _save(self, obj: Object, status: Object, done: str = "") -> None:
        def with_status(now: Object | None) -> Object | None:
            if now and done:
                now["metadata"]["annotations"][SUCCEEDED] = done
            return now and now | {"status": status}

        self.change(obj["metadata"]["name"], with_status)


def shared_memory(run: Path, job: str) -> Path:
    """The directory for memory volumes of a job's pods: it outlives their processes, but not the job."""
    key = f"{run.resolve()}/{job}"
    return SHARED / f"rekindle-job-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def sweep_shared_memory() -> None:
    """Removes what interrupted runs left, an hour after its last use, or at once if the run itself was removed.

    A run that is resumed later goes on from its checkpoints in the object store.
    """
    for memory in SHARED.glob("rekindle-job-*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            run = Path((memory / OWNER).read_text())
            used = max(file.stat().st_mtime for file in memory.iterdir())
            abandoned = time.time() - used > ABANDONED and not RunFiles(run.parents[1], run.name).runner()
            if abandoned or not run.exists():
                rmtree(memory, ignore_errors=True)


def pods_of(obj: Object) -> dict[str, tuple[str, int]]:
    """Pod name → (replica type, index)."""
    replicas = obj["spec"]["pytorchReplicaSpecs"].items()
    every = [(rtype, index) for rtype, replica in replicas for index in range(replica.get("replicas", 1))]
    return {f"{obj['metadata']['name']}-{rtype.lower()}-{index}": (rtype, index) for rtype, index in every}


def past_limit(policy: Object, status: Object, replicas: Object, job: Job) -> str:
    """Why a job must fail now, or "". Only in-place restarts count, as in the operator."""
    counted = [pod.restarts for pod in job.pods.values() if pod.running]
    if policy.get("backoffLimit") is not None and sum(counted) >= max(1, policy["backoffLimit"]):
        return "has reached the specified backoff limit"
    started = time.mktime(time.strptime(status["startTime"], "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    if policy.get("activeDeadlineSeconds") is not None and time.time() - started >= policy["activeDeadlineSeconds"]:
        return "was active longer than specified deadline"
    return ""


def operator_environment(obj: Object, rtype: str, index: int, address: Any) -> dict[str, str]:
    """The operator's variables for one replica; `address` gives a pod's address."""
    name, spec = obj["metadata"]["name"], obj["spec"]
    replicas, elastic = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy")
    total = sum(replica.get("replicas", 1) for replica in replicas.values())
    nproc = str(spec.get("nprocPerNode", "auto"))
    env = {"PYTHONUNBUFFERED": "1"}
    if "Master" in replicas:
        host, port = address(f"{name}-master-0"), str(port_of(replicas["Master"]))
        rank = str(0 if rtype == "Master" else index + 1)
        env |= {"MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": host, "PET_MASTER_ADDR": host}
        env |= {"WORLD_SIZE": str(total * (int(nproc) if nproc.isdigit() else 1)), "RANK": rank, "PET_NODE_RANK": rank}
    if elastic is None:
        return env | {"PET_NPROC_PER_NODE": nproc, "PET_NNODES": str(total)}
    workers = replicas["Worker"].get("replicas", 1)
    least, most = elastic.get("minReplicas"), elastic.get("maxReplicas")
    least, most = least or most or workers, most or least or workers
    host = elastic.get("rdzvHost", f"{name}-worker-0")
    host = address(host) if re.fullmatch(rf"{name}-(master|worker)-\d+", host) else host
    env |= {
        "PET_RDZV_ENDPOINT": f"{host}:{elastic.get('rdzvPort', port_of(replicas['Worker']))}",
        "PET_RDZV_BACKEND": elastic.get("rdzvBackend", "c10d"),
        "PET_NNODES": f"{least}:{most}",
        "PET_NPROC_PER_NODE": str(elastic.get("nProcPerNode", nproc)),
    }
    if "maxRestarts" in elastic:
        env["PET_MAX_RESTARTS"] = str(elastic["maxRestarts"])
    if "rdzvId" in elastic:
        env["PET_RDZV_ID"] = elastic["rdzvId"]
    if "rdzvConf" in elastic:
        env["PET_RDZV_CONF"] = ",".join(f"{entry['key']}={entry['value']}" for entry in elastic["rdzvConf"])
    return env


def port_of(replica: Object) -> int:
    """The container port named pytorchjob-port, or the operator's default."""
    ports = replica["template"]["spec"]["containers"][0].get("ports") or []
    return next((port["containerPort"] for port in ports if port.get("name") == PYTORCH_PORT_NAME), PYTORCH_PORT)


def condition(status: Object, kind: str) -> Object | None:
    """The condition of a type, or None."""
    return next((entry for entry in status.get("conditions") or [] if entry["type"] == kind), None)


def finished(status: Object) -> bool:
    return bool(condition(status, "Succeeded") or condition(status, "Failed"))


def set_condition(status: Object, kind: str, message: str, reason: str = "", value: str = "True") -> None:
    """Append a condition as the operator does: Failed is final, Running and Restarting replace each other."""
    reason = f"PyTorchJob{reason or kind}"
    now = condition(status, kind)
    if condition(status, "Failed") or (now and (now["status"], now["reason"]) == (value, reason)):
        return
    opposite = {"Running": "Restarting", "Restarting": "Running"}.get(kind)
    kept = [entry for entry in status.get("conditions") or [] if entry["type"] not in (kind, opposite)]
    if kind in ("Succeeded", "Failed", "Suspended"):
        kept = [entry | {"status": "False"} if entry["type"] == "Running" else entry for entry in kept]
    stamp = timestamp(time.time())
    times = {"lastUpdateTime": stamp, "lastTransitionTime": stamp}
    status["conditions"] = [*kept, {"type": kind, "status": value, "reason": reason, "message": message, **times}]
