"""Check the objects of resource templates for mistakes that the API server, a webhook or an
operator rejects or misinterprets.

Before the checks, `{{workflow.name}}` is replaced by an example name of the correct length, and any
other tag by UNKNOWN.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from argolocal.common import object_names
from argolocal.common.object_names import LABEL_VALUE
from argolocal.errors import ConfigError
from argolocal.language import selector
from argolocal.manifest.object_labels import REPLICA_TYPE
from argolocal.manifest.shape import ANY_OBJECTS, CONTAINER, POD, shape_errors, without_nulls
from argolocal.manifest.training_jobs import JOB_VERSION, JOBS, REMOVED_KINDS
from argolocal.manifest.types import Data
from argolocal.validate import pods
from argolocal.validate.findings import Findings
from argolocal.validate.tag_rules import TAG, UNKNOWN, find_tagged_texts

ACTIONS = ("get", "create", "apply", "delete", "replace", "patch")
NAME = re.compile(r"\{\{\s*workflow\.name\s*\}\}")
JSON_TOKEN = re.compile(rf'"(?:\\.|[^"\\])*"|{UNKNOWN}')
DNS_NAME = object_names.SUBDOMAIN.pattern
DNS_LABEL = object_names.SERVICE.pattern
RESTART_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN_POD_POLICIES = ("None", "Running", "All")
ON_JOB_FAILURE = (
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJobAndIgnoreMaxRestarts",
)
POD_SPEC_PATHS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job"),
        ("spec", "template", "spec"),
    ),
    "CronJob": ("spec", "jobTemplate", "spec", "template", "spec"),
    "Pod": ("spec",),
}
SERVER_KINDS = ("Deployment", "StatefulSet")
# fields of an InferenceService that are PodSpecs
INFERENCE_ROLES = ("predictor", "transformer", "explainer")
RUNTIME_KINDS = ("TrainingRuntime", "ClusterTrainingRuntime")
KINDS_WITH_SELECTOR = (*SERVER_KINDS, "DaemonSet", "ReplicaSet")
# kind → required fields of the spec
REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(KINDS_WITH_SELECTOR, ("selector", "template")),
    "Job": ("template",),
    "CronJob": ("schedule", "jobTemplate"),
    "HorizontalPodAutoscaler": ("scaleTargetRef", "maxReplicas"),
}
NAME_RULE = "begin with a letter and have at most {} lower-case letters, digits and dashes"
# kind → (maximum length of the name, pattern of the name, reason for this rule)
NAME_RULES: dict[str, tuple[int, re.Pattern[str], str]] = {
    **dict.fromkeys(JOBS, (53, DNS_LABEL, "its pods are called NAME-worker-99")),
    **dict.fromkeys(("JobSet", "TrainJob"), (63, DNS_LABEL, "a Service has this name")),
    "Service": (63, DNS_LABEL, "it is a DNS label"),
    "Job": (63, DNS_NAME, "it is a label of its pods"),
    "CronJob": (52, DNS_NAME, "its jobs are called NAME-MINUTES"),
}


def check_resource(findings: Findings, path: str, resource: Data, workflow_name: str) -> None:
    """Check a resource template. `workflow_name` is an example of the workflow's name with the
    correct length."""
    action = str(resource.get("action"))
    if action not in ACTIONS:
        message = f'the action "{action}" does not exist.{findings.hint(action, ACTIONS)}'
        findings.add(f"{path}.action", "resource", message)

    _check_conditions(findings, path, resource)
    if action == "patch" and resource.get("mergeStrategy") == "json":
        return  # the manifest of a JSON patch is not an object, but a list of operations

    if resource.get("manifest"):
        for applied_object in _parse_manifest(
            findings, f"{path}.manifest", NAME.sub(workflow_name, str(resource["manifest"]))
        ):
            if action in ("create", "apply", "replace"):
                check(findings, f"{path}.manifest", applied_object)
    elif not resource.get("manifestFrom") and not resource.get("flags"):
        findings.add(
            f"{path}.manifest", "resource", "the manifest is missing: give a manifest, or flags."
        )


def reject_invalid(obj: Data) -> None:
    """Raise ConfigError for an object that the API server, a webhook or an operator rejects."""
    findings = Findings(f"{obj.get('kind')} {_get_nested(obj, ('metadata',)).get('name')}")
    check(findings, "", obj)
    fatal = [finding for finding in findings.all() if finding.fatal]
    if fatal:
        raise ConfigError(str(fatal[0]))


def check(findings: Findings, path: str, obj: Data) -> None:
    """Check a Kubernetes object. `path`: its location in the manifest, or "" for an object in a
    file of its own."""
    kind = str(obj.get("kind"))
    prefix = f"{path}." if path else ""

    if kind in REMOVED_KINDS:
        findings.add(f"{prefix}kind", "kind", f"{REMOVED_KINDS[kind]}.")
        return

    problems = list(shape_errors(obj, _shape_of(kind), path or "manifest"))
    if problems:
        for where, _, message in (
            problem.partition(" ") for problem in problems if repr(UNKNOWN) not in problem
        ):
            findings.add(where, "shape", f"{message}.")

        return

    _check_metadata(findings, prefix, kind, obj.get("metadata") or {})
    for field in REQUIRED_FIELDS.get(kind, ()):
        if not (obj.get("spec") or {}).get(field):
            findings.add(
                f"{prefix}spec.{field}", "shape", f"the field is missing: a {kind} needs it."
            )

    if kind in KINDS_WITH_SELECTOR:
        _check_selector(findings, f"{prefix}spec", obj.get("spec") or {})

    if kind in JOBS:
        version = str(obj.get("apiVersion", JOB_VERSION))
        if version != JOB_VERSION and UNKNOWN not in version:
            message = (
                f"{version} is not the version of the training operator: `run` supports only"
                f" {JOB_VERSION}."
            )
            findings.warn(f"{prefix}apiVersion", "version", message)

        _check_job(findings, f"{prefix}spec", kind, obj.get("spec") or {})

    if kind in CHECKS_BY_KIND:
        CHECKS_BY_KIND[kind](findings, f"{prefix}spec", obj.get("spec") or {})

    if kind in POD_SPEC_PATHS:
        spec = _get_nested(obj, POD_SPEC_PATHS[kind])
        where = prefix + ".".join(POD_SPEC_PATHS[kind])
        pods.check(findings, where, spec, pods.containers_in(where, spec))

        labels = (_get_nested(obj, POD_SPEC_PATHS[kind][:-1]).get("metadata") or {}).get(
            "labels"
        ) or {}
        # training workers do not serve requests, so they need no probes
        if kind in SERVER_KINDS and REPLICA_TYPE not in labels:
            pods.check_probes(findings, pods.containers_in(where, spec, "containers"))

        if kind in ("Job", "CronJob"):
            _check_plain_job(
                findings,
                where.removesuffix(".template.spec"),
                _get_nested(obj, POD_SPEC_PATHS[kind][:-2]),
                spec,
            )


def _check_inference_service(findings: Findings, path: str, spec: Data) -> None:
    """Check an InferenceService, whose roles are PodSpecs. Source: KServe v1beta1, PredictorSpec,
    TransformerSpec."""
    for role in filter(spec.__contains__, INFERENCE_ROLES):
        where = f"{path}.{role}"
        pod = spec[role]
        # a model without an image runs in the container of a serving runtime, which is a separate
        # object
        if (pod.get("model") or {}).get("image"):
            model_containers = [(f"{where}.model", pod["model"])]
        else:
            model_containers = []

        pods.check(findings, where, pod, [*pods.containers_in(where, pod), *model_containers])
        pods.check_probes(
            findings, [*pods.containers_in(where, pod, "containers"), *model_containers]
        )


def _check_runtime(findings: Findings, path: str, spec: Data, is_complete: bool = True) -> None:
    """Check a training runtime, which contains a JobSet. Source: Kubeflow Trainer v2,
    TrainingRuntimeSpec."""
    _check_job_set(
        findings, f"{path}.template.spec", _get_nested(spec, ("template", "spec")), is_complete
    )


def _check_job_set(findings: Findings, path: str, spec: Data, is_complete: bool = True) -> None:
    """Check a JobSet. Source: JobSetSpec and the webhook of JobSet 0.12, which adds a missing
    restartPolicy."""
    jobs = spec.get("replicatedJobs") or []

    names = [str(job.get("name")) for job in jobs]
    if is_complete and (not jobs or len(set(names)) < len(names)):
        findings.add(
            f"{path}.replicatedJobs", "job", "a JobSet must have jobs with different names."
        )

    failure_policy = spec.get("failurePolicy") or {}
    for rule in [spec.get("successPolicy") or {}, *(failure_policy.get("rules") or [])]:
        for target in map(str, rule.get("targetReplicatedJobs") or []):
            if is_complete and target not in names and UNKNOWN not in "".join([target, *names]):
                findings.add(
                    path,
                    "job",
                    f"a policy names {target}: it must be one of its jobs: {sorted(names)}.",
                )

        action = str(rule.get("action", UNKNOWN))
        if action not in (*ON_JOB_FAILURE, UNKNOWN):
            message = f'the action "{action}" must be one of {", ".join(ON_JOB_FAILURE)}.'
            findings.add(f"{path}.failurePolicy", "job", message)

    for number, job in enumerate(jobs):
        where = f"{path}.replicatedJobs[{job.get('name', number)}].template.spec"
        template = _get_nested(job, ("template", "spec"))
        pod = _get_nested(template, ("template", "spec"))
        _check_job_pods(findings, where, template, {"restartPolicy": "OnFailure", **pod})

        pods.check(
            findings,
            f"{where}.template.spec",
            pod,
            pods.containers_in(f"{where}.template.spec", pod),
            is_complete,
        )


def _check_train_job(findings: Findings, path: str, spec: Data) -> None:
    """Check the fields of a TrainJob that override its runtime. Source: Kubeflow Trainer,
    TrainJobSpec."""
    trainer = spec.get("trainer") or {}
    pods.check(findings, path, {}, [(f"{path}.trainer", trainer)], is_complete=False)

    if "resourcesPerNode" in trainer:
        pods.check_resources(
            findings, f"{path}.trainer.resourcesPerNode", trainer["resourcesPerNode"]
        )

    for number, override in enumerate(spec.get("podTemplateOverrides") or []):
        where = f"{path}.podTemplateOverrides[{number}].spec"
        pod = override.get("spec") or {}
        pods.check(findings, where, pod, pods.containers_in(where, pod), is_complete=False)

    for number, override in enumerate(spec.get("runtimePatches") or []):
        patch = override.get("trainingRuntimeSpec") or {}
        _check_runtime(
            findings,
            f"{path}.runtimePatches[{number}].trainingRuntimeSpec",
            patch,
            is_complete=False,
        )


CHECKS_BY_KIND = {
    "InferenceService": _check_inference_service,
    "JobSet": _check_job_set,
    "TrainJob": _check_train_job,
    **dict.fromkeys(RUNTIME_KINDS, _check_runtime),
}


def _check_conditions(findings: Findings, path: str, resource: Data) -> None:
    success = resource.get("successCondition")
    failure = resource.get("failureCondition")
    if failure and not success:
        message = (
            "the template succeeds immediately without a successCondition: add a successCondition."
        )
        findings.add(f"{path}.failureCondition", "condition", message)

    if resource.get("action") == "delete" and (success or failure):
        findings.add(path, "condition", "a delete does not wait: remove the conditions.")

    for field, condition in (("successCondition", success), ("failureCondition", failure)):
        try:
            selector.parse(TAG.sub("x", str(condition or "")))
        except selector.SelectorError as error:
            findings.add(
                f"{path}.{field}", "condition", f'"{condition}" is not a label selector: {error}.'
            )


def _parse_manifest(findings: Findings, path: str, text: str) -> Sequence[Data]:
    """Return the objects in a manifest. A JSON manifest is parsed as JSON, which is faster than
    YAML, even if it contains tags without quotes."""
    substituted = TAG.sub(UNKNOWN, text)
    if substituted.lstrip().startswith("{"):
        try:
            quoted = JSON_TOKEN.sub(
                lambda token: f'"{UNKNOWN}"' if token[0] == UNKNOWN else token[0], substituted
            )
            return [without_nulls(json.loads(quoted))]
        except (ValueError, RecursionError):
            pass  # the text is YAML that starts with a brace, or too deeply nested JSON

    from argolocal.manifest.read import documents

    try:
        return [without_nulls(document) for document in documents(substituted)]
    except ConfigError as error:
        if not find_tagged_texts(Findings(), path, TAG.sub("", text)):
            findings.warn(path, "resource", f"{error}")

        return []


def _shape_of(kind: str) -> dict[str, Any]:
    template = {"metadata": {"labels": {}}, "spec": POD}
    policies = {
        "successPolicy": {"targetReplicatedJobs": []},
        "failurePolicy": {"rules": [{"targetReplicatedJobs": []}]},
    }
    jobs = [{"template": {"spec": {"template": template}}}]
    runtime = {"template": {"spec": {"replicatedJobs": jobs, **policies}}}
    spec: dict[str, Any] = {}

    if kind in JOBS:
        replicas = {JOBS[kind].replicas_field: {"": {"template": template}}}
        spec = {**replicas, "runPolicy": {}, "elasticPolicy": {"rdzvConf": ANY_OBJECTS}}
    elif kind == "Pod":
        spec = POD
    elif kind == "CronJob":
        spec = {"jobTemplate": {"spec": {"template": template}}}
    elif kind in POD_SPEC_PATHS:
        spec = {"template": template, "selector": {"matchLabels": {}}}
    elif kind == "InferenceService":
        spec = {role: {**POD, "model": CONTAINER} for role in INFERENCE_ROLES}
    elif kind == "JobSet":
        spec = runtime["template"]["spec"]
    elif kind in RUNTIME_KINDS:
        spec = runtime
    elif kind == "TrainJob":
        trainer = {**CONTAINER, "resourcesPerNode": {"requests": {}, "limits": {}}}
        spec = {
            "trainer": trainer,
            "podTemplateOverrides": [{"spec": POD}],
            "runtimePatches": [{"trainingRuntimeSpec": runtime}],
        }

    return {
        "metadata": {"labels": {}, "annotations": {}},
        **({"spec": spec} if spec or kind in REQUIRED_FIELDS else {}),
    }


def _get_nested(value: Any, path: Sequence[str]) -> Data:
    for key in path:
        value = value.get(key) or {}
    return value


def _check_metadata(findings: Findings, prefix: str, kind: str, metadata: Data) -> None:
    name = str(metadata.get("name") or "")
    max_length, pattern, reason = NAME_RULES.get(kind, (253, DNS_NAME, ""))

    if (
        not name
        and not metadata.get("generateName")
        and (prefix or kind in {*NAME_RULES, *POD_SPEC_PATHS})
    ):
        findings.add(f"{prefix}metadata.name", "name", "the name is missing: give a name.")
    elif name and (not pattern.fullmatch(name.replace(UNKNOWN, "x")) or len(name) > max_length):
        if pattern is DNS_LABEL:
            rule = NAME_RULE.format(max_length)
        else:
            rule = NAME_RULE.format(max_length).partition(" and ")[2]

        reason_text = f", as {reason}" if reason else ""
        displayed_name = name.replace(UNKNOWN, "…")

        findings.add(
            f"{prefix}metadata.name",
            "name",
            f'the name will be "{displayed_name}" ({len(name)} characters): it must'
            f" {rule}{reason_text}.",
        )

    check_labels(findings, f"{prefix}metadata.labels", metadata.get("labels") or {})


def check_labels(findings: Findings, path: str, labels: Data) -> None:
    for key, value in labels.items():
        if not isinstance(value, str) or not LABEL_VALUE.allows(
            TAG.sub("x", value.replace(UNKNOWN, "x"))
        ):
            rule = "a text of at most 63 letters, digits, dashes, dots and underscores"
            findings.add(f"{path}.{key}", "name", f'"{value}" must be {rule}.')


def _check_selector(findings: Findings, path: str, spec: Data) -> None:
    """Check that the selector matches the labels of the pod template. A selector or label that
    contains a template tag counts as matching."""
    labels = _get_nested(spec, ("template", "metadata", "labels"))
    for key, value in _get_nested(spec, ("selector", "matchLabels")).items():
        if (
            UNKNOWN not in f"{key}{value}{''.join(map(str, labels.items()))}"
            and labels.get(key) != value
        ):
            label = "no such label" if key not in labels else repr(labels[key])
            message = f'the selector has "{value}", and the pods have {label}: both must be equal.'
            findings.add(f"{path}.selector.matchLabels.{key}", "name", message)


def _check_job(findings: Findings, path: str, kind: str, spec: Data) -> None:
    job = JOBS[kind]
    replicas: Data = spec.get(job.replicas_field) or {}
    where = f"{path}.{job.replicas_field}"

    for name in job.required_roles or (() if replicas else job.roles[-1:]):
        if name not in replicas:
            findings.add(where, "job", f"a {kind} needs a {name}: add one.")

    if {"Chief", "Master"} <= replicas.keys():
        findings.add(where, "job", "Chief and Master are names of the same role: keep one of them.")

    for name, replica in replicas.items():
        if name not in job.roles:
            message = (
                f'"{name}" is not a replica type of a {kind}: it must be one of'
                f" {', '.join(job.roles)}."
            )
            findings.add(f"{where}.{name}", "job", message + findings.suggest(name, job.roles))

        replica_count = replica.get("replicas", 1 if kind == "MPIJob" else "missing")
        if name in job.single_roles and replica_count not in (1, UNKNOWN):
            message = f"replicas is {replica_count}: it must be 1, or the job is rejected."
            findings.add(f"{where}.{name}.replicas", "job", message)

        if kind == "PyTorchJob" and replica.get("replicas", 1) in (0, "0"):
            message = "replicas is 0: it must be at least 1, or the webhook rejects the job."
            findings.add(f"{where}.{name}.replicas", "job", message)

        restart_policy = replica.get("restartPolicy", UNKNOWN)
        if restart_policy not in (*RESTART_POLICIES, UNKNOWN):
            findings.add(
                f"{where}.{name}.restartPolicy",
                "job",
                f'"{restart_policy}" must be one of {", ".join(RESTART_POLICIES)}.',
            )

        if job.requires_container_name:
            container_name = job.container_name
        else:
            container_name = ""

        _check_replica(
            findings,
            f"{where}.{name}.template.spec",
            container_name,
            _get_nested(replica, ("template", "spec")),
        )

    run_policy = spec.get("runPolicy") or {}
    if "activeDeadlineSeconds" not in run_policy:
        message = "a job that hangs would never end: give a number of seconds."
        findings.warn(f"{path}.runPolicy.activeDeadlineSeconds", "deadline", message)

    clean_pod_policy = run_policy.get("cleanPodPolicy", spec.get("cleanPodPolicy", "None"))
    if clean_pod_policy not in (
        *CLEAN_POD_POLICIES,
        UNKNOWN,
    ):
        message = f'"{clean_pod_policy}" must be one of {", ".join(CLEAN_POD_POLICIES)}.'
        findings.add(f"{path}.runPolicy.cleanPodPolicy", "job", message)

    if clean_pod_policy == "None":
        message = (
            "pods that still run when the job ends are kept, with their nodes: set cleanPodPolicy"
            " to Running."
        )
        findings.warn(f"{path}.runPolicy.cleanPodPolicy", "job", message)

    if kind == "PyTorchJob" and "elasticPolicy" in spec:
        _check_elastic_policy(findings, path, spec, replicas)


def _check_replica(findings: Findings, path: str, container_name: str, pod: Data) -> None:
    containers = pod.get("containers") or []
    if not containers:
        findings.add(f"{path}.containers", "job", "the list is empty: a replica needs a container.")
    elif container_name and not any(
        container.get("name") in (container_name, UNKNOWN) for container in containers
    ):
        findings.add(
            f"{path}.containers",
            "job",
            f'one container must be called "{container_name}": the operator looks for it.',
        )

    for where, container in pods.containers_in(path, pod, "containers"):
        if not container.get("image"):
            findings.add(
                f"{where}.image", "job", "the image is missing: give the container an image."
            )

    pods.check(findings, path, pod, pods.containers_in(path, pod))


def _check_elastic_policy(findings: Findings, path: str, spec: Data, replicas: Data) -> None:
    elastic_policy = spec["elasticPolicy"]
    where = f"{path}.elasticPolicy"
    if "Worker" not in replicas:
        findings.add(where, "job", "an elastic job needs a Worker: add it to pytorchReplicaSpecs.")

    if elastic_policy.get("rdzvConf") == []:
        findings.add(
            f"{where}.rdzvConf", "job", "an empty list crashes the operator: remove rdzvConf."
        )

    if elastic_policy.get("standalone"):
        findings.add(
            f"{where}.standalone",
            "job",
            "torchrun cannot parse the operator's value: remove standalone.",
        )

    if "nProcPerNode" in elastic_policy and "nprocPerNode" in spec:
        findings.add(
            f"{where}.nProcPerNode", "job", "spec.nprocPerNode is set, too: remove nProcPerNode."
        )

    min_replicas = elastic_policy.get("minReplicas")
    max_replicas = elastic_policy.get("maxReplicas")
    workers = (replicas.get("Worker") or {}).get("replicas")

    numbers = [
        number for number in (min_replicas, workers, max_replicas) if isinstance(number, int)
    ]
    if numbers != sorted(numbers):
        order = (
            f"minReplicas ({min_replicas}) ≤ Worker.replicas ({workers}) ≤ maxReplicas"
            f" ({max_replicas})"
        )
        message = f"the numbers must satisfy {order}: change one of them."
        findings.warn(where, "job", message)


def _check_plain_job(findings: Findings, path: str, spec: Data, pod: Data) -> None:
    _check_job_pods(findings, path, spec, pod)
    if "activeDeadlineSeconds" not in spec:
        message = "a job that hangs would never end: give a number of seconds."
        findings.warn(f"{path}.activeDeadlineSeconds", "deadline", message)


def _check_job_pods(findings: Findings, path: str, spec: Data, pod: Data) -> None:
    """Check that the pods of a Job follow the rules of Kubernetes."""
    restart_policy = pod.get("restartPolicy", "Always")
    if restart_policy not in ("OnFailure", "Never", UNKNOWN):
        message = (
            f'restartPolicy is "{restart_policy}": for the pods of a Job it must be OnFailure or'
            " Never."
        )
        findings.add(f"{path}.template.spec.restartPolicy", "job", message)
    if "podFailurePolicy" in spec and restart_policy not in ("Never", UNKNOWN):
        findings.add(
            f"{path}.podFailurePolicy", "job", "podFailurePolicy needs restartPolicy: Never."
        )
