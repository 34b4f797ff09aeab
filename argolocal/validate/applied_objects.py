"""Check the objects of resource templates for mistakes that the API server, a webhook or an
operator rejects or misinterprets.

Before the checks of a manifest, `{{workflow.name}}` is replaced by an example name of the correct
length, and any other tag by UNKNOWN_VALUE.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from argolocal.common import object_names
from argolocal.common.object_names import LABEL_VALUE_RULE
from argolocal.errors import ConfigError
from argolocal.language import selector
from argolocal.manifest.object_labels import REPLICA_TYPE_LABEL
from argolocal.manifest.shape import (
    CONTAINER_SHAPE,
    OBJECTS_SHAPE,
    POD_SHAPE,
    find_shape_errors,
    remove_nulls,
)
from argolocal.manifest.training_jobs import JOB_API_VERSION, JOB_KINDS, REMOVED_KINDS
from argolocal.manifest.types import Data
from argolocal.validate import job_rules, pods
from argolocal.validate.findings import Findings
from argolocal.validate.tag_rules import TAG, UNKNOWN_VALUE, find_tagged_texts

KUBECTL_ACTIONS = ("get", "create", "apply", "delete", "replace", "patch")
WORKFLOW_NAME_TAG = re.compile(r"\{\{\s*workflow\.name\s*\}\}")
JSON_STRING_OR_UNKNOWN = re.compile(rf'"(?:\\.|[^"\\])*"|{UNKNOWN_VALUE}')
DNS_NAME = object_names.SUBDOMAIN_RULE.pattern
DNS_LABEL = object_names.SERVICE_NAME_RULE.pattern
# kind → path of its PodSpec
POD_SPEC_PATHS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job"),
        ("spec", "template", "spec"),
    ),
    "CronJob": ("spec", "jobTemplate", "spec", "template", "spec"),
    "Pod": ("spec",),
}
SERVER_OBJECT_KINDS = ("Deployment", "StatefulSet")
# fields of an InferenceService that are PodSpecs
INFERENCE_ROLES = ("predictor", "transformer", "explainer")
RUNTIME_KINDS = ("TrainingRuntime", "ClusterTrainingRuntime")
KINDS_WITH_SELECTOR = (*SERVER_OBJECT_KINDS, "DaemonSet", "ReplicaSet")
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
    **dict.fromkeys(JOB_KINDS, (53, DNS_LABEL, "its pods are called NAME-worker-99")),
    **dict.fromkeys(("JobSet", "TrainJob"), (63, DNS_LABEL, "a Service has this name")),
    "Service": (63, DNS_LABEL, "it is a DNS label"),
    "Job": (63, DNS_NAME, "it is a label of its pods"),
    "CronJob": (52, DNS_NAME, "its jobs are called NAME-MINUTES"),
}


def check_resource(findings: Findings, path: str, resource: Data, workflow_name: str) -> None:
    """Check a resource template. `workflow_name` is an example of the workflow's name with the
    correct length."""
    kubectl_action = str(resource.get("action"))
    if kubectl_action not in KUBECTL_ACTIONS:
        message = (
            f'the action "{kubectl_action}" does not'
            f" exist.{findings.hint(kubectl_action, KUBECTL_ACTIONS)}"
        )
        findings.add(f"{path}.action", "resource", message)

    _check_conditions(findings, path, resource)
    if kubectl_action == "patch" and resource.get("mergeStrategy") == "json":
        # the manifest of a JSON patch is not an object, but a list of operations
        return

    if resource.get("manifest"):
        for applied_object in _parse_manifest(
            findings,
            f"{path}.manifest",
            WORKFLOW_NAME_TAG.sub(workflow_name, str(resource["manifest"])),
        ):
            if kubectl_action in ("create", "apply", "replace"):
                check_object(findings, f"{path}.manifest", applied_object)
    elif not resource.get("manifestFrom") and not resource.get("flags"):
        findings.add(
            f"{path}.manifest", "resource", "the manifest is missing: give a manifest, or flags."
        )


def reject_invalid_object(kubernetes_object: Data) -> None:
    """Raise ConfigError for an object that the API server, a webhook or an operator rejects."""
    findings = Findings(
        f"{kubernetes_object.get('kind')}"
        f" {job_rules.get_nested(kubernetes_object, ('metadata',)).get('name')}"
    )
    check_object(findings, "", kubernetes_object)
    fatal_findings = [finding for finding in findings.all() if finding.fatal]
    if fatal_findings:
        raise ConfigError(str(fatal_findings[0]))


def check_object(findings: Findings, path: str, kubernetes_object: Data) -> None:
    """Check a Kubernetes object. `path`: path of the field that contains the object; "" if the
    object is a document of its own."""
    kind = str(kubernetes_object.get("kind"))
    path_prefix = f"{path}." if path else ""

    if kind in REMOVED_KINDS:
        findings.add(f"{path_prefix}kind", "kind", f"{REMOVED_KINDS[kind]}.")
        return

    problems = list(find_shape_errors(kubernetes_object, _make_shape(kind), path or "manifest"))
    if problems:
        for problem_path, _, message in (
            problem.partition(" ") for problem in problems if repr(UNKNOWN_VALUE) not in problem
        ):
            findings.add(problem_path, "shape", f"{message}.")

        return

    _check_metadata(findings, path_prefix, kind, kubernetes_object.get("metadata") or {})
    for required_field in REQUIRED_FIELDS.get(kind, ()):
        if not (kubernetes_object.get("spec") or {}).get(required_field):
            findings.add(
                f"{path_prefix}spec.{required_field}",
                "shape",
                f"the field is missing: a {kind} needs it.",
            )

    if kind in KINDS_WITH_SELECTOR:
        _check_selector(findings, f"{path_prefix}spec", kubernetes_object.get("spec") or {})

    if kind in JOB_KINDS:
        api_version = str(kubernetes_object.get("apiVersion", JOB_API_VERSION))
        if api_version != JOB_API_VERSION and UNKNOWN_VALUE not in api_version:
            message = (
                f"{api_version} is not the version of the training operator: `run` supports only"
                f" {JOB_API_VERSION}."
            )
            findings.warn(f"{path_prefix}apiVersion", "version", message)

        job_rules.check_job(
            findings, f"{path_prefix}spec", kind, kubernetes_object.get("spec") or {}
        )

    if kind in CHECKS_BY_KIND:
        CHECKS_BY_KIND[kind](findings, f"{path_prefix}spec", kubernetes_object.get("spec") or {})

    if kind in POD_SPEC_PATHS:
        spec = job_rules.get_nested(kubernetes_object, POD_SPEC_PATHS[kind])
        problem_path = path_prefix + ".".join(POD_SPEC_PATHS[kind])
        pods.check_containers(
            findings, problem_path, spec, pods.list_containers(problem_path, spec)
        )

        labels = (
            job_rules.get_nested(kubernetes_object, POD_SPEC_PATHS[kind][:-1]).get("metadata") or {}
        ).get("labels") or {}
        # training workers do not serve requests, so probes are not needed
        if kind in SERVER_OBJECT_KINDS and REPLICA_TYPE_LABEL not in labels:
            pods.check_probes(findings, pods.list_containers(problem_path, spec, "containers"))

        if kind in ("Job", "CronJob"):
            job_rules.check_kubernetes_job(
                findings,
                problem_path.removesuffix(".template.spec"),
                job_rules.get_nested(kubernetes_object, POD_SPEC_PATHS[kind][:-2]),
                spec,
            )


def _check_inference_service(findings: Findings, path: str, spec: Data) -> None:
    """Check an InferenceService, whose roles are PodSpecs. The behaviour follows KServe v1beta1,
    PredictorSpec, TransformerSpec."""
    for role in filter(spec.__contains__, INFERENCE_ROLES):
        role_path = f"{path}.{role}"
        pod_spec = spec[role]
        # a model without an image runs in the container of a serving runtime, which is a separate
        # object
        if (pod_spec.get("model") or {}).get("image"):
            model_containers = [(f"{role_path}.model", pod_spec["model"])]
        else:
            model_containers = []

        pods.check_containers(
            findings,
            role_path,
            pod_spec,
            [*pods.list_containers(role_path, pod_spec), *model_containers],
        )
        pods.check_probes(
            findings, [*pods.list_containers(role_path, pod_spec, "containers"), *model_containers]
        )


CHECKS_BY_KIND = {
    "InferenceService": _check_inference_service,
    "JobSet": job_rules.check_job_set,
    "TrainJob": job_rules.check_train_job,
    **dict.fromkeys(RUNTIME_KINDS, job_rules.check_runtime),
}


def _check_conditions(findings: Findings, path: str, resource: Data) -> None:
    """Check the successCondition and failureCondition of a resource template."""
    success_condition = resource.get("successCondition")
    failure_condition = resource.get("failureCondition")
    if failure_condition and not success_condition:
        message = (
            "the template succeeds immediately without a successCondition: add a successCondition."
        )
        findings.add(f"{path}.failureCondition", "condition", message)

    if resource.get("action") == "delete" and (success_condition or failure_condition):
        findings.add(path, "condition", "a delete does not wait: remove the conditions.")

    for field, condition in (
        ("successCondition", success_condition),
        ("failureCondition", failure_condition),
    ):
        try:
            selector.parse(TAG.sub("x", str(condition or "")))
        except selector.SelectorError as error:
            findings.add(
                f"{path}.{field}", "condition", f'"{condition}" is not a label selector: {error}.'
            )


def _parse_manifest(findings: Findings, path: str, manifest_text: str) -> Sequence[Data]:
    """Return the objects in a manifest. A JSON text is parsed as JSON, because the JSON parser is
    faster than the YAML parser. In a JSON text, template tags need not be quoted."""
    substituted_text = TAG.sub(UNKNOWN_VALUE, manifest_text)
    if substituted_text.lstrip().startswith("{"):
        try:
            quoted_text = JSON_STRING_OR_UNKNOWN.sub(
                lambda token: f'"{UNKNOWN_VALUE}"' if token[0] == UNKNOWN_VALUE else token[0],
                substituted_text,
            )
            return [remove_nulls(json.loads(quoted_text))]
        except (ValueError, RecursionError):
            # the text is YAML that starts with a brace, or too deeply nested JSON
            pass

    from argolocal.manifest.read import parse_objects

    try:
        return [remove_nulls(document) for document in parse_objects(substituted_text)]
    except ConfigError as error:
        if not find_tagged_texts(Findings(), path, TAG.sub("", manifest_text)):
            findings.warn(path, "resource", f"{error}")

        return []


def _make_shape(kind: str) -> dict[str, Any]:
    """Return the shape (see `find_shape_errors`) that the checks of this kind rely on."""
    pod_template = {"metadata": {"labels": {}}, "spec": POD_SHAPE}
    policy_shapes = {
        "successPolicy": {"targetReplicatedJobs": []},
        "failurePolicy": {"rules": [{"targetReplicatedJobs": []}]},
    }
    replicated_jobs = [{"template": {"spec": {"template": pod_template}}}]
    runtime_shape = {"template": {"spec": {"replicatedJobs": replicated_jobs, **policy_shapes}}}
    spec: dict[str, Any] = {}

    if kind in JOB_KINDS:
        replica_shapes = {JOB_KINDS[kind].replicas_field: {"": {"template": pod_template}}}
        spec = {**replica_shapes, "runPolicy": {}, "elasticPolicy": {"rdzvConf": OBJECTS_SHAPE}}
    elif kind == "Pod":
        spec = POD_SHAPE
    elif kind == "CronJob":
        spec = {"jobTemplate": {"spec": {"template": pod_template}}}
    elif kind in POD_SPEC_PATHS:
        spec = {"template": pod_template, "selector": {"matchLabels": {}}}
    elif kind == "InferenceService":
        spec = {role: {**POD_SHAPE, "model": CONTAINER_SHAPE} for role in INFERENCE_ROLES}
    elif kind == "JobSet":
        spec = runtime_shape["template"]["spec"]
    elif kind in RUNTIME_KINDS:
        spec = runtime_shape
    elif kind == "TrainJob":
        trainer = {**CONTAINER_SHAPE, "resourcesPerNode": {"requests": {}, "limits": {}}}
        spec = {
            "trainer": trainer,
            "podTemplateOverrides": [{"spec": POD_SHAPE}],
            "runtimePatches": [{"trainingRuntimeSpec": runtime_shape}],
        }

    return {
        "metadata": {"labels": {}, "annotations": {}},
        **({"spec": spec} if spec or kind in REQUIRED_FIELDS else {}),
    }


def _check_metadata(findings: Findings, path_prefix: str, kind: str, metadata: Data) -> None:
    """Check the name and the labels of an object."""
    name = str(metadata.get("name") or "")
    max_length, name_pattern, reason = NAME_RULES.get(kind, (253, DNS_NAME, ""))

    if (
        not name
        and not metadata.get("generateName")
        and (path_prefix or kind in {*NAME_RULES, *POD_SPEC_PATHS})
    ):
        findings.add(f"{path_prefix}metadata.name", "name", "the name is missing: give a name.")
    elif name and (
        not name_pattern.fullmatch(name.replace(UNKNOWN_VALUE, "x")) or len(name) > max_length
    ):
        if name_pattern is DNS_LABEL:
            name_rule = NAME_RULE.format(max_length)
        else:
            name_rule = NAME_RULE.format(max_length).partition(" and ")[2]

        reason_text = f", as {reason}" if reason else ""
        displayed_name = name.replace(UNKNOWN_VALUE, "…")

        findings.add(
            f"{path_prefix}metadata.name",
            "name",
            f'the name will be "{displayed_name}" ({len(name)} characters): it must'
            f" {name_rule}{reason_text}.",
        )

    check_labels(findings, f"{path_prefix}metadata.labels", metadata.get("labels") or {})


def check_labels(findings: Findings, path: str, labels: Data) -> None:
    """Check that the values of labels are valid. Template tags in a value are accepted."""
    for key, value in labels.items():
        if not isinstance(value, str) or not LABEL_VALUE_RULE.allows(
            TAG.sub("x", value.replace(UNKNOWN_VALUE, "x"))
        ):
            label_value_rule = "a text of at most 63 letters, digits, dashes, dots and underscores"
            findings.add(f"{path}.{key}", "name", f'"{value}" must be {label_value_rule}.')


def _check_selector(findings: Findings, path: str, spec: Data) -> None:
    """Check that the selector matches the labels of the pod template. A selector or label that
    contains a template tag counts as matching."""
    labels = job_rules.get_nested(spec, ("template", "metadata", "labels"))
    for key, value in job_rules.get_nested(spec, ("selector", "matchLabels")).items():
        if (
            UNKNOWN_VALUE not in f"{key}{value}{''.join(map(str, labels.items()))}"
            and labels.get(key) != value
        ):
            label_text = "no such label" if key not in labels else repr(labels[key])
            message = (
                f'the selector has "{value}", and the pods have {label_text}: both must be equal.'
            )
            findings.add(f"{path}.selector.matchLabels.{key}", "name", message)
