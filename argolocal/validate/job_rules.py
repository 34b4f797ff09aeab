"""Check the objects that run jobs: training jobs, JobSets, TrainJobs and their runtimes, and Jobs
of Kubernetes."""

from collections.abc import Sequence
from typing import Any

from argolocal.manifest.training_jobs import JOB_KINDS
from argolocal.manifest.types import Data
from argolocal.validate import pods
from argolocal.validate.findings import Findings
from argolocal.validate.tag_rules import UNKNOWN_VALUE

RESTART_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN_POD_POLICIES = ("None", "Running", "All")
JOB_FAILURE_ACTIONS = (
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJobAndIgnoreMaxRestarts",
)


def get_nested(value: Any, field_names: Sequence[str]) -> Data:
    """Return the mapping at a path of fields; {} if a field of the path is missing."""
    for field_name in field_names:
        value = value.get(field_name) or {}
    return value


def check_job(findings: Findings, path: str, kind: str, spec: Data) -> None:
    """Check the spec of a training job of the training operator. `kind`: a key of JOB_KINDS."""
    job_kind = JOB_KINDS[kind]
    replicas: Data = spec.get(job_kind.replicas_field) or {}
    replicas_path = f"{path}.{job_kind.replicas_field}"

    for role_name in job_kind.required_roles or (() if replicas else job_kind.roles[-1:]):
        if role_name not in replicas:
            findings.add(replicas_path, "job", f"a {kind} needs a {role_name}: add one.")

    if {"Chief", "Master"} <= replicas.keys():
        findings.add(
            replicas_path, "job", "Chief and Master are names of the same role: keep one of them."
        )

    for role_name, replica_spec in replicas.items():
        _check_role(findings, f"{replicas_path}.{role_name}", kind, role_name, replica_spec)

    _check_run_policy(findings, path, spec)
    if kind == "PyTorchJob" and "elasticPolicy" in spec:
        _check_elastic_policy(findings, path, spec, replicas)


def _check_role(
    findings: Findings, role_path: str, kind: str, role_name: str, replica_spec: Data
) -> None:
    """Check one role of a training job, such as Master or Worker."""
    job_kind = JOB_KINDS[kind]
    if role_name not in job_kind.roles:
        message = (
            f'"{role_name}" is not a replica type of a {kind}: it must be one of'
            f" {', '.join(job_kind.roles)}."
        )
        findings.add(
            role_path,
            "job",
            message + findings.suggest(role_name, job_kind.roles),
        )

    replica_count = replica_spec.get("replicas", 1 if kind == "MPIJob" else "missing")
    if role_name in job_kind.single_roles and replica_count not in (1, UNKNOWN_VALUE):
        message = f"replicas is {replica_count}: it must be 1, or the job is rejected."
        findings.add(f"{role_path}.replicas", "job", message)

    if kind == "PyTorchJob" and replica_spec.get("replicas", 1) in (0, "0"):
        message = "replicas is 0: it must be at least 1, or the webhook rejects the job."
        findings.add(f"{role_path}.replicas", "job", message)

    restart_policy = replica_spec.get("restartPolicy", UNKNOWN_VALUE)
    if restart_policy not in (*RESTART_POLICIES, UNKNOWN_VALUE):
        findings.add(
            f"{role_path}.restartPolicy",
            "job",
            f'"{restart_policy}" must be one of {", ".join(RESTART_POLICIES)}.',
        )

    if job_kind.requires_container_name:
        container_name = job_kind.container_name
    else:
        container_name = ""

    _check_replica(
        findings,
        f"{role_path}.template.spec",
        container_name,
        get_nested(replica_spec, ("template", "spec")),
    )


def _check_run_policy(findings: Findings, path: str, spec: Data) -> None:
    """Check the fields of a training job that determine when it ends and which of its pods are then
    deleted."""
    run_policy = spec.get("runPolicy") or {}
    if "activeDeadlineSeconds" not in run_policy:
        message = "a job that hangs would never end: give a number of seconds."
        findings.warn(f"{path}.runPolicy.activeDeadlineSeconds", "deadline", message)

    clean_pod_policy = run_policy.get("cleanPodPolicy", spec.get("cleanPodPolicy", "None"))
    if clean_pod_policy not in (*CLEAN_POD_POLICIES, UNKNOWN_VALUE):
        message = f'"{clean_pod_policy}" must be one of {", ".join(CLEAN_POD_POLICIES)}.'
        findings.add(f"{path}.runPolicy.cleanPodPolicy", "job", message)

    if clean_pod_policy == "None":
        message = (
            "pods that still run when the job ends are kept, with their nodes: set cleanPodPolicy"
            " to Running."
        )
        findings.warn(f"{path}.runPolicy.cleanPodPolicy", "job", message)


def _check_replica(findings: Findings, path: str, container_name: str, pod_spec: Data) -> None:
    """Check the pod of a role. `container_name`: name of a required container, or ""."""
    containers = pod_spec.get("containers") or []
    if not containers:
        findings.add(f"{path}.containers", "job", "the list is empty: a replica needs a container.")
    elif container_name and not any(
        container.get("name") in (container_name, UNKNOWN_VALUE) for container in containers
    ):
        findings.add(
            f"{path}.containers",
            "job",
            f'one container must be called "{container_name}": the operator looks for it.',
        )

    for container_path, container in pods.list_containers(path, pod_spec, "containers"):
        if not container.get("image"):
            findings.add(
                f"{container_path}.image",
                "job",
                "the image is missing: give the container an image.",
            )

    pods.check_containers(findings, path, pod_spec, pods.list_containers(path, pod_spec))


def _check_elastic_policy(findings: Findings, path: str, spec: Data, replicas: Data) -> None:
    """Check the elasticPolicy of a PyTorchJob. `replicas`: role → its replica spec."""
    elastic_policy = spec["elasticPolicy"]
    policy_path = f"{path}.elasticPolicy"
    if "Worker" not in replicas:
        findings.add(
            policy_path, "job", "an elastic job needs a Worker: add it to pytorchReplicaSpecs."
        )

    if elastic_policy.get("rdzvConf") == []:
        findings.add(
            f"{policy_path}.rdzvConf", "job", "an empty list crashes the operator: remove rdzvConf."
        )

    if elastic_policy.get("standalone"):
        findings.add(
            f"{policy_path}.standalone",
            "job",
            "torchrun cannot parse the operator's value: remove standalone.",
        )

    if "nProcPerNode" in elastic_policy and "nprocPerNode" in spec:
        findings.add(
            f"{policy_path}.nProcPerNode",
            "job",
            "spec.nprocPerNode is set, too: remove nProcPerNode.",
        )

    min_replicas = elastic_policy.get("minReplicas")
    max_replicas = elastic_policy.get("maxReplicas")
    worker_count = (replicas.get("Worker") or {}).get("replicas")

    replica_counts = [
        count for count in (min_replicas, worker_count, max_replicas) if isinstance(count, int)
    ]
    if replica_counts != sorted(replica_counts):
        required_order = (
            f"minReplicas ({min_replicas}) ≤ Worker.replicas ({worker_count}) ≤ maxReplicas"
            f" ({max_replicas})"
        )
        message = f"the numbers must satisfy {required_order}: change one of them."
        findings.warn(policy_path, "job", message)


def check_runtime(findings: Findings, path: str, spec: Data, is_complete: bool = True) -> None:
    """Check a training runtime, which contains a JobSet. `is_complete` is False if the training
    runtime only overrides fields of another runtime. The behaviour follows Kubeflow Trainer v2,
    TrainingRuntimeSpec."""
    check_job_set(
        findings, f"{path}.template.spec", get_nested(spec, ("template", "spec")), is_complete
    )


def check_job_set(findings: Findings, path: str, spec: Data, is_complete: bool = True) -> None:
    """Check a JobSet. `is_complete` is False if the JobSet only overrides fields of another JobSet.
    The behaviour follows JobSetSpec and the webhook of JobSet 0.12, which adds a missing
    restartPolicy."""
    replicated_jobs = spec.get("replicatedJobs") or []

    job_names = [str(replicated_job.get("name")) for replicated_job in replicated_jobs]
    if is_complete and (not replicated_jobs or len(set(job_names)) < len(job_names)):
        findings.add(
            f"{path}.replicatedJobs", "job", "a JobSet must have jobs with different names."
        )

    failure_policy = spec.get("failurePolicy") or {}
    for policy_rule in [spec.get("successPolicy") or {}, *(failure_policy.get("rules") or [])]:
        for target_name in map(str, policy_rule.get("targetReplicatedJobs") or []):
            if (
                is_complete
                and target_name not in job_names
                and UNKNOWN_VALUE not in "".join([target_name, *job_names])
            ):
                findings.add(
                    path,
                    "job",
                    f"a policy names {target_name}: it must be one of its jobs:"
                    f" {sorted(job_names)}.",
                )

        failure_action = str(policy_rule.get("action", UNKNOWN_VALUE))
        if failure_action not in (*JOB_FAILURE_ACTIONS, UNKNOWN_VALUE):
            message = (
                f'the action "{failure_action}" must be one of {", ".join(JOB_FAILURE_ACTIONS)}.'
            )
            findings.add(f"{path}.failurePolicy", "job", message)

    for index, replicated_job in enumerate(replicated_jobs):
        job_spec_path = f"{path}.replicatedJobs[{replicated_job.get('name', index)}].template.spec"
        job_template = get_nested(replicated_job, ("template", "spec"))
        pod_spec = get_nested(job_template, ("template", "spec"))
        _check_job_pods(
            findings, job_spec_path, job_template, {"restartPolicy": "OnFailure", **pod_spec}
        )

        pods.check_containers(
            findings,
            f"{job_spec_path}.template.spec",
            pod_spec,
            pods.list_containers(f"{job_spec_path}.template.spec", pod_spec),
            is_complete,
        )


def check_train_job(findings: Findings, path: str, spec: Data) -> None:
    """Check the fields of a TrainJob that override its runtime. The behaviour follows Kubeflow
    Trainer, TrainJobSpec."""
    trainer = spec.get("trainer") or {}
    pods.check_containers(findings, path, {}, [(f"{path}.trainer", trainer)], is_complete=False)

    if "resourcesPerNode" in trainer:
        pods.check_resources(
            findings, f"{path}.trainer.resourcesPerNode", trainer["resourcesPerNode"]
        )

    for index, template_override in enumerate(spec.get("podTemplateOverrides") or []):
        override_path = f"{path}.podTemplateOverrides[{index}].spec"
        pod_spec = template_override.get("spec") or {}
        pods.check_containers(
            findings,
            override_path,
            pod_spec,
            pods.list_containers(override_path, pod_spec),
            is_complete=False,
        )

    for index, template_override in enumerate(spec.get("runtimePatches") or []):
        runtime_patch = template_override.get("trainingRuntimeSpec") or {}
        check_runtime(
            findings,
            f"{path}.runtimePatches[{index}].trainingRuntimeSpec",
            runtime_patch,
            is_complete=False,
        )


def check_kubernetes_job(findings: Findings, path: str, spec: Data, pod_spec: Data) -> None:
    """Check the spec of a Job of Kubernetes."""
    _check_job_pods(findings, path, spec, pod_spec)
    if "activeDeadlineSeconds" not in spec:
        message = "a job that hangs would never end: give a number of seconds."
        findings.warn(f"{path}.activeDeadlineSeconds", "deadline", message)


def _check_job_pods(findings: Findings, path: str, spec: Data, pod_spec: Data) -> None:
    """Check that the restartPolicy of a Job's pods has a value that Kubernetes allows. `spec`: spec
    of the Job."""
    restart_policy = pod_spec.get("restartPolicy", "Always")
    if restart_policy not in ("OnFailure", "Never", UNKNOWN_VALUE):
        message = (
            f'restartPolicy is "{restart_policy}": for the pods of a Job it must be OnFailure or'
            " Never."
        )
        findings.add(f"{path}.template.spec.restartPolicy", "job", message)
    if "podFailurePolicy" in spec and restart_policy not in ("Never", UNKNOWN_VALUE):
        findings.add(
            f"{path}.podFailurePolicy", "job", "podFailurePolicy needs restartPolicy: Never."
        )
