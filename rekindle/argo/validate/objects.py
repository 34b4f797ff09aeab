"""The objects that resource templates apply: what the API server, a webhook or an operator refuses, or worse, accepts.

An object is read with its tags filled in: `{{workflow.name}}` by a name as long as it will be, any other by UNKNOWN.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.argo.manifest import selector
from rekindle.argo.manifest.scopes import CONTAINER, ITEMS, POD, Data, misshapen, present
from rekindle.argo.names import PYTORCH_REPLICAS
from rekindle.argo.validate import pods
from rekindle.argo.validate.findings import Findings
from rekindle.argo.validate.tags import TAG, UNKNOWN, closed
from rekindle.errors import ConfigError

ACTIONS = ("get", "create", "apply", "delete", "replace", "patch")
NAME = re.compile(r"\{\{\s*workflow\.name\s*\}\}")
JSON = re.compile(rf'"(?:\\.|[^"\\])*"|{UNKNOWN}')
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
RESTARTS = ("Always", "OnFailure", "Never", "ExitCode")


@dataclass(frozen=True)
class Job:
    """A job of Kubeflow's training operator 1.9: what its webhook or its reconciler refuses."""

    replicas: str
    container: str  # one of this name must be there ("": any)
    types: tuple[str, ...]
    one: tuple[str, ...] = ()  # of these there is exactly one, which must be said where a webhook looks
    needed: tuple[str, ...] = ()


JOBS = {
    "PyTorchJob": Job("pytorchReplicaSpecs", "pytorch", PYTORCH_REPLICAS, one=("Master",)),
    "TFJob": Job("tfReplicaSpecs", "tensorflow", ("Chief", "Master", "Worker", "PS", "Evaluator")),
    "XGBoostJob": Job("xgbReplicaSpecs", "xgboost", ("Master", "Worker"), one=("Master",), needed=("Master",)),
    "PaddleJob": Job("paddleReplicaSpecs", "paddle", ("Master", "Worker")),
    "JAXJob": Job("jaxReplicaSpecs", "jax", ("Worker",), needed=("Worker",)),
    "MPIJob": Job("mpiReplicaSpecs", "", ("Launcher", "Worker"), one=("Launcher",), needed=("Launcher",)),
}
GONE = {"MXJob": "the training operator dropped it in 1.9, as Apache MXNet is retired: train with a PyTorchJob"}
TEMPLATES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job"), ("spec", "template", "spec")),
    "CronJob": ("spec", "jobTemplate", "spec", "template", "spec"),
    "Pod": ("spec",),
}
SERVERS = ("Deployment", "StatefulSet")
ROLES = ("predictor", "transformer", "explainer")  # of an InferenceService: PodSpecs
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
SELECTING = (*SERVERS, "DaemonSet", "ReplicaSet")
NEEDED: dict[str, tuple[str, ...]] = {  # fields of the spec without which nothing is accepted
    **dict.fromkeys(SELECTING, ("selector", "template")),
    "Job": ("template",),
    "CronJob": ("schedule", "jobTemplate"),
    "HorizontalPodAutoscaler": ("scaleTargetRef", "maxReplicas"),
}
# longest name, what it must be, and why
LETTERS = "begin with a letter and have at most {} lower-case letters, digits and dashes"
NAMES: dict[str, tuple[int, re.Pattern[str], str]] = {
    **dict.fromkeys(JOBS, (53, DNS_LABEL, "its pods are called NAME-worker-99")),
    "Service": (63, DNS_LABEL, "it is a DNS label"),
    "Job": (63, DNS_NAME, "it is a label of its pods"),
    "CronJob": (52, DNS_NAME, "its jobs are called NAME-MINUTES"),
}


def resource(found: Findings, path: str, resource: Data, workflow_name: str) -> None:
    """The rules of a resource template; `workflow_name` is as long as the names of the workflows will be."""
    action = str(resource.get("action"))
    if action not in ACTIONS:
        found.add(f"{path}.action", "resource", f'"{action}" is no action.{found.hint(action, ACTIONS)}')
    _conditions(found, path, resource)
    if resource.get("manifest"):
        for each in _read(found, f"{path}.manifest", NAME.sub(workflow_name, str(resource["manifest"]))):
            if action in ("create", "apply", "replace"):
                check(found, f"{path}.manifest", each)
    elif not resource.get("manifestFrom") and not resource.get("flags"):
        found.add(f"{path}.manifest", "resource", "it is missing: give a manifest, or flags.")


def check(found: Findings, path: str, thing: Data) -> None:
    """The rules of one Kubernetes object, at `path` ("" if it is a file of its own)."""
    kind, at = str(thing.get("kind")), f"{path}." if path else ""
    if kind in GONE:
        found.add(f"{at}kind", "kind", f"{GONE[kind]}.")
        return
    if wrong := list(misshapen(thing, _shape(kind), path or "manifest")):
        for where, _, why in (each.partition(" ") for each in wrong if repr(UNKNOWN) not in each):
            found.add(where, "shape", f"{why}.")
        return
    _metadata(found, at, kind, thing.get("metadata") or {})
    for field in NEEDED.get(kind, ()):
        if not (thing.get("spec") or {}).get(field):
            found.add(f"{at}spec.{field}", "shape", f"it is missing: a {kind} needs it.")
    if kind in SELECTING:
        _selector(found, f"{at}spec", thing.get("spec") or {})
    if kind in JOBS:
        _job(found, f"{at}spec", kind, thing.get("spec") or {})
    if kind in OF_KIND:
        OF_KIND[kind](found, f"{at}spec", thing.get("spec") or {})
    if kind in TEMPLATES:
        spec = _at(thing, TEMPLATES[kind])
        where = at + ".".join(TEMPLATES[kind])
        pods.check(found, where, spec, pods.named(where, spec))
        if kind in SERVERS:
            pods.probes(found, pods.named(where, spec, "containers"))
        if kind in ("Job", "CronJob"):
            _plain_job(found, where.removesuffix(".template.spec"), _at(thing, TEMPLATES[kind][:-2]), spec)


def _inference(found: Findings, path: str, spec: Data) -> None:
    """Its roles are PodSpecs. Source: KServe v1beta1, PredictorSpec and TransformerSpec."""
    for role in [each for each in ROLES if each in spec]:
        where, pod = f"{path}.{role}", spec[role]
        # a model without an image of its own is served by the container of a runtime, which is not here
        model = [(f"{where}.model", pod["model"])] if (pod.get("model") or {}).get("image") else []
        pods.check(found, where, pod, [*pods.named(where, pod), *model])
        pods.probes(found, [*pods.named(where, pod, "containers"), *model])


def _runtime(found: Findings, path: str, spec: Data, whole: bool = True) -> None:
    """Source: Kubeflow Trainer v2, TrainingRuntimeSpec: a JobSet."""
    for number, job in enumerate(_at(spec, ("template", "spec")).get("replicatedJobs") or []):
        where = f"{path}.template.spec.replicatedJobs[{job.get('name', number)}].template.spec.template.spec"
        pod = _at(job, ("template", "spec", "template", "spec"))
        pods.check(found, where, pod, pods.named(where, pod), whole)


def _train_job(found: Findings, path: str, spec: Data) -> None:
    """What it says over its runtime. Source: Kubeflow Trainer, TrainJobSpec; overrides until 2.2, patches since."""
    trainer = spec.get("trainer") or {}
    pods.check(found, path, {}, [(f"{path}.trainer", trainer)], whole=False)
    if "resourcesPerNode" in trainer:
        pods.resources(found, f"{path}.trainer.resourcesPerNode", trainer["resourcesPerNode"])
    for number, each in enumerate(spec.get("podTemplateOverrides") or []):
        where, pod = f"{path}.podTemplateOverrides[{number}].spec", each.get("spec") or {}
        pods.check(found, where, pod, pods.named(where, pod), whole=False)
    for number, each in enumerate(spec.get("runtimePatches") or []):
        _runtime(
            found, f"{path}.runtimePatches[{number}].trainingRuntimeSpec", each.get("trainingRuntimeSpec") or {}, False
        )


OF_KIND = {"InferenceService": _inference, "TrainJob": _train_job, **dict.fromkeys(RUNTIMES, _runtime)}


def _conditions(found: Findings, path: str, resource: Data) -> None:
    success, failure = resource.get("successCondition"), resource.get("failureCondition")
    if failure and not success:
        why = "without a successCondition it succeeds at the first look: give one."
        found.add(f"{path}.failureCondition", "condition", why)
    if resource.get("action") == "delete" and (success or failure):
        found.add(path, "condition", "a delete has nothing to wait for: take its conditions out.")
    for field, condition in (("successCondition", success), ("failureCondition", failure)):
        try:
            selector.parse(TAG.sub("x", str(condition or "")))
        except selector.SelectorError as error:
            found.add(f"{path}.{field}", "condition", f'"{condition}" is no label selector: {error}.')


def _read(found: Findings, path: str, text: str) -> Sequence[Data]:
    """The objects in a manifest's text. JSON is read as such, which is faster; a bare tag in it stands for a number."""
    filled = TAG.sub(UNKNOWN, text)
    if filled.lstrip().startswith("{"):
        try:
            value = json.loads(JSON.sub(lambda m: f'"{UNKNOWN}"' if m[0] == UNKNOWN else m[0], filled))
            return [present(value)]
        except (json.JSONDecodeError, RecursionError):
            pass  # YAML that begins with a brace
    from rekindle.argo.manifest.read import documents

    try:
        return [present(each) for each in documents(filled)]
    except (ConfigError, RecursionError) as error:
        if not closed(Findings(), path, TAG.sub("", text)):
            found.warn(path, "resource", f"{error}")
        return []


def _shape(kind: str) -> dict[str, Any]:
    template = {"metadata": {"labels": {}}, "spec": POD}
    runtime = {"template": {"spec": {"replicatedJobs": [{"template": {"spec": {"template": template}}}]}}}
    spec: dict[str, Any] = {}
    if kind in JOBS:
        replicas = {JOBS[kind].replicas: {"": {"template": template}}}
        spec = {**replicas, "runPolicy": {}, "elasticPolicy": {"rdzvConf": ITEMS}}
    elif kind == "Pod":
        spec = POD
    elif kind == "CronJob":
        spec = {"jobTemplate": {"spec": {"template": template}}}
    elif kind in TEMPLATES:
        spec = {"template": template, "selector": {"matchLabels": {}}}
    elif kind == "InferenceService":
        spec = {role: {**POD, "model": CONTAINER} for role in ROLES}
    elif kind in RUNTIMES:
        spec = runtime
    elif kind == "TrainJob":
        trainer = {**CONTAINER, "resourcesPerNode": {"requests": {}, "limits": {}}}
        spec = {"trainer": trainer, "podTemplateOverrides": [{"spec": POD}]}
        spec["runtimePatches"] = [{"trainingRuntimeSpec": runtime}]
    return {"metadata": {"labels": {}, "annotations": {}}, **({"spec": spec} if spec or kind in NEEDED else {})}


def _at(value: Any, path: Sequence[str]) -> Data:
    for key in path:
        value = value.get(key) or {}
    return value


def _metadata(found: Findings, at: str, kind: str, metadata: Data) -> None:
    name = str(metadata.get("name") or "")
    most, pattern, why = NAMES.get(kind, (253, DNS_NAME, ""))
    if not name and not metadata.get("generateName") and (at or kind in {*NAMES, *TEMPLATES}):
        found.add(f"{at}metadata.name", "name", "it is missing: give a name.")
    elif name and (not pattern.fullmatch(name.replace(UNKNOWN, "x")) or len(name) > most):
        rule = LETTERS.format(most) if pattern is DNS_LABEL else LETTERS.format(most).partition(" and ")[2]
        because = f", as {why}" if why else ""
        shown = name.replace(UNKNOWN, "…")
        found.add(
            f"{at}metadata.name",
            "name",
            f'the name will be "{shown}" ({len(name)} characters): it must {rule}{because}.',
        )
    labels(found, f"{at}metadata.labels", metadata.get("labels") or {})


def labels(found: Findings, path: str, labels: Data) -> None:
    for key, value in labels.items():
        if not isinstance(value, str) or not LABEL.fullmatch(TAG.sub("x", value.replace(UNKNOWN, "x"))):
            rule = "a text of at most 63 letters, digits, dashes, dots and underscores"
            found.add(f"{path}.{key}", "name", f'"{value}" must be {rule}.')


def _selector(found: Findings, path: str, spec: Data) -> None:
    """It must find the pods that are made. A tag may become anything."""
    carried = _at(spec, ("template", "metadata", "labels"))
    for key, value in _at(spec, ("selector", "matchLabels")).items():
        if UNKNOWN not in f"{key}{value}{''.join(map(str, carried.items()))}" and carried.get(key) != value:
            why = (
                f"the pods have {'no such label' if key not in carried else repr(carried[key])}: let the two be equal."
            )
            found.add(f"{path}.selector.matchLabels.{key}", "name", f'it is "{value}", and {why}')


def _job(found: Findings, path: str, kind: str, spec: Data) -> None:
    job = JOBS[kind]
    replicas: Mapping[str, Any] = spec.get(job.replicas) or {}
    where = f"{path}.{job.replicas}"
    for name in job.needed or (() if replicas else job.types[-1:]):
        if name not in replicas:
            found.add(where, "job", f"a {kind} has no {name}: give it one.")
    if {"Chief", "Master"} <= replicas.keys():
        found.add(where, "job", "Chief and Master are two names of one role: keep one of them.")
    for name, each in replicas.items():
        if name not in job.types:
            why = f'"{name}" is no replica type of a {kind}: only {", ".join(job.types)} are.'
            found.add(f"{where}.{name}", "job", why + found.near(name, job.types))
        number = each.get("replicas", 1 if kind == "MPIJob" else "missing")
        if name in job.one and number not in (1, UNKNOWN):
            why = f"it is {number}: it must be there and be 1, or the job is refused."
            found.add(f"{where}.{name}.replicas", "job", why)
        if kind == "PyTorchJob" and each.get("replicas", 1) in (0, "0"):
            found.add(
                f"{where}.{name}.replicas", "job", "it is 0: it must be at least 1, or the webhook refuses the job."
            )
        if (restart := each.get("restartPolicy", UNKNOWN)) not in (*RESTARTS, UNKNOWN):
            found.add(f"{where}.{name}.restartPolicy", "job", f'"{restart}" must be {", ".join(RESTARTS)}.')
        _replica(found, f"{where}.{name}.template.spec", job.container, _at(each, ("template", "spec")))
    policy = spec.get("runPolicy") or {}
    if "activeDeadlineSeconds" not in policy:
        why = "nothing ends a job that hangs: give a number of seconds."
        found.warn(f"{path}.runPolicy.activeDeadlineSeconds", "deadline", why)
    if policy.get("cleanPodPolicy", spec.get("cleanPodPolicy", "None")) == "None":
        why = "pods that still run when the job is over stay, with their nodes: set Running."
        found.warn(f"{path}.runPolicy.cleanPodPolicy", "job", why)
    if kind == "PyTorchJob" and "elasticPolicy" in spec:
        _elastic(found, path, spec, replicas)


def _replica(found: Findings, path: str, wanted: str, pod: Data) -> None:
    containers = pod.get("containers") or []
    if not containers:
        found.add(f"{path}.containers", "job", "it is empty: a replica needs a container.")
    elif wanted and not any(each.get("name") in (wanted, UNKNOWN) for each in containers):
        found.add(f"{path}.containers", "job", f'one container must be called "{wanted}": the operator looks for it.')
    for where, each in pods.named(path, pod, "containers"):
        if not each.get("image"):
            found.add(f"{where}.image", "job", "it is missing: give the container an image.")
    pods.check(found, path, pod, pods.named(path, pod))


def _elastic(found: Findings, path: str, spec: Data, replicas: Data) -> None:
    elastic, where = spec["elasticPolicy"], f"{path}.elasticPolicy"
    if "Worker" not in replicas:
        found.add(where, "job", "an elastic job needs a Worker: add it to pytorchReplicaSpecs.")
    if elastic.get("rdzvConf") == []:
        found.add(f"{where}.rdzvConf", "job", "an empty list crashes the operator: take rdzvConf out.")
    if elastic.get("standalone"):
        found.add(f"{where}.standalone", "job", "torchrun cannot read what the operator makes of it: take it out.")
    if "nProcPerNode" in elastic and "nprocPerNode" in spec:
        found.add(f"{where}.nProcPerNode", "job", "spec.nprocPerNode is there as well: keep that one only.")
    least, most = elastic.get("minReplicas"), elastic.get("maxReplicas")
    workers = (replicas.get("Worker") or {}).get("replicas")
    numbers = [each for each in (least, workers, most) if isinstance(each, int)]
    if numbers != sorted(numbers):
        why = f"minReplicas ({least}) ≤ Worker.replicas ({workers}) ≤ maxReplicas ({most}) must hold: change one."
        found.warn(where, "job", why)


def _plain_job(found: Findings, path: str, spec: Data, pod: Data) -> None:
    if (restart := pod.get("restartPolicy", "Always")) not in ("OnFailure", "Never", UNKNOWN):
        why = f'it is "{restart}": the pods of a Job must say OnFailure or Never.'
        found.add(f"{path}.template.spec.restartPolicy", "job", why)
    if "podFailurePolicy" in spec and restart not in ("Never", UNKNOWN):
        found.add(f"{path}.podFailurePolicy", "job", "it needs restartPolicy: Never.")
    if "activeDeadlineSeconds" not in spec:
        why = "nothing ends a job that hangs: give a number of seconds."
        found.warn(f"{path}.activeDeadlineSeconds", "deadline", why)
