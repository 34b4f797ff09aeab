"""The pods of a manifest: their requests, and the nodes that they select."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from argolocal.language.quantity import quantity

GIB = 1 << 30
COUNTS = ("replicas", "parallelism")  # fields of a job or Deployment that multiply its pods
Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class Pod:
    """The requests of a pod, and its node selection."""

    cpus: float = 0.0
    gib: float = 0.0
    gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)  # labels that its node must have
    tolerations: Mapping[str, str] = field(default_factory=dict)  # taint → tolerated value ("" for Exists)
    devices: tuple[str, ...] = ()  # resource names of the GPUs

    def __str__(self) -> str:
        selection = [f"{key}={value}" for key, value in sorted(self.labels.items())]
        return f"a pod with {', '.join([*selection, *self.devices]) or 'no node selection'}"

    def resource_seconds(self, seconds: float) -> tuple[float, float, float]:
        """Return the CPU-seconds, GiB-seconds and GPU-seconds of this pod."""
        return self.cpus * seconds, self.gib * seconds, self.gpus * seconds


@dataclass(frozen=True)
class Replicas:
    """Equal pods of an object that a step applies; `role` is the key or name above them, such as Worker."""

    role: str
    count: int
    pod: Pod
    words: tuple[str, ...]  # command and arguments of the containers


def of_spec(spec: Manifest, containers: list[Manifest] | None = None) -> Pod:
    """Return the pod of a PodSpec. A limit without a request counts as request, as in Kubernetes."""
    totals: dict[str, float] = {}
    for container in spec.get("containers") or [] if containers is None else containers:
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            totals[name] = totals.get(name, 0.0) + _amount(amount)
    devices = {name: count for name, count in totals.items() if "/" in name and count}
    tolerations = {item["key"]: str(item.get("value", "")) for item in spec.get("tolerations") or [] if item.get("key")}
    labels = {**_required_labels(spec), **{str(k): str(v) for k, v in (spec.get("nodeSelector") or {}).items()}}
    return Pod(
        totals.get("cpu", 0.0), totals.get("memory", 0.0) / GIB, sum(devices.values()), labels, tolerations, (*devices,)
    )


def of_template(template: Manifest) -> Pod | None:
    """Return the pod of a step; None for a template that does not run a container of its own."""
    main = [template[kind] for kind in ("container", "script") if template.get(kind)]
    main += (template.get("containerSet") or {}).get("containers") or []
    return of_spec(template, [*main, *(template.get("sidecars") or [])]) if main else None


def applied(template: Manifest) -> list[Replicas]:
    """Return the pods of the object that a template applies, such as a training job or a Deployment."""
    text = (template.get("resource") or {}).get("manifest")
    try:
        return [*_replicas(yaml.safe_load(text), "", 1)] if text else []
    except yaml.YAMLError:  # tags outside of quotes: the text is YAML only when Argo has replaced them
        return []


def of_manifest(manifest: Manifest) -> Iterator[Pod]:
    """Yield the pods of all templates, and of the objects that they apply."""
    for template in manifest["spec"].get("templates") or []:
        if pod := of_template(template):
            yield pod
        yield from (replicas.pod for replicas in applied(template))


def _replicas(value: Any, role: str, count: int) -> Iterator[Replicas]:
    if isinstance(value, list):
        for item in value:
            yield from _replicas(item, role, count)
    if not isinstance(value, Mapping):
        return
    if isinstance(containers := value.get("containers"), list):
        words = tuple(str(word) for c in containers for key in ("command", "args") for word in c.get(key) or [])
        yield Replicas(role, count, of_spec(value), words)
        return
    for name in COUNTS:
        count *= value[name] if isinstance(value.get(name), int) else 1
    role = str(value["name"]) if "replicas" in value and "name" in value else role
    for key, item in value.items():
        yield from _replicas(item, key if re.match("[A-Z]", str(key)) else role, count)


def _required_labels(spec: Manifest) -> dict[str, str]:
    """Return the labels that the required node affinity prescribes, in each of its alternatives."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
    alternatives = [
        {
            (rule["key"], str(rule["values"][0]))
            for rule in term.get("matchExpressions") or []
            if rule.get("operator") == "In" and len(rule.get("values") or []) == 1
        }
        for term in terms
    ]
    return dict(set.intersection(*alternatives)) if alternatives else {}


def _amount(text: Any) -> float:
    try:
        return float(quantity(text))
    except ValueError:  # a template tag: the amount is known only when the pod starts
        return 0.0
