"""The prices and the pods of each training of a run, from the run's manifest."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from argolocal.manifest.types import Manifest
from rekindle.content.recorded_manifest import unpack_manifest
from rekindle.documents import InvalidDocument, parse_object
from rekindle.keys import CHECKPOINTS, key
from rekindle.kubernetes_names import COORDINATORS, LAUNCHERS
from rekindle.sections import Section
from rekindle.training.cost import pod_requests
from rekindle.training.cost.pod_requests import Pod
from rekindle.training.cost.prices import ANNOTATION, Prices

TRIAL_STEP = "steps.search.trial"


class Tariff(Section):
    """The prices and the pods of one training."""

    prices: Prices
    workers: dict[str, Pod] = Field(
        min_length=1, description="pods of the workers by role; the last is the default"
    )
    coordinator: Pod | None = None

    def worker_pod(self, name: str) -> Pod:
        """Return the pod of a worker by its name, such as demo-x7k2p-train-worker-1."""
        roles = (role for role in self.workers if role and f"-{role.lower()}-" in name)
        return self.workers[next(roles, [*self.workers][-1])]

    def worker_cost(self, name: str, seconds: float, spot: bool | None = None) -> float:
        """Return the cost of a worker that runs for `seconds`. The workers of a pod, one per GPU,
        share the cost of the pod."""
        pod = self.worker_pod(name)
        return self.prices.pod_cost(pod, seconds / max(1.0, self.prices.count_gpus(pod)), spot)


def read_recorded_manifest(workflow: Manifest) -> Manifest:
    """Return the manifest in the workflow parameter `manifest`; without it, the workflow itself."""
    parameters = (workflow["spec"].get("arguments") or {}).get("parameters") or []
    texts = [item.get("value") for item in parameters if item.get("name") == "manifest"]
    try:
        if texts and texts[0]:
            return unpack_manifest(str(texts[0]))
        return workflow
    except InvalidDocument:
        # a manifest that Rekindle did not render may have a parameter with this name
        return workflow


def read_prices(manifest: Manifest) -> Prices | None:
    """Return the prices that rendering has stored in a recorded manifest. Raises ConfigError."""
    text = (manifest.get("metadata", {}).get("annotations") or {}).get(ANNOTATION)
    if text:
        return Prices.parse(parse_object(text, f"the annotation {ANNOTATION}"), ANNOTATION)
    return None


def build_tariffs(
    manifest: Manifest, prices: Prices | None, tasks: Iterable[str]
) -> dict[str, Tariff]:
    """Return the tariff of each training task that has prices and pods, by task."""
    result: dict[str, Tariff] = {}
    for task in tasks if prices else ():
        workers, coordinator = find_training_pods(manifest, task)
        if prices and workers:
            result[task] = Tariff(prices=prices, workers=workers, coordinator=coordinator)

    return result


def find_training_pods(manifest: Manifest, task: str) -> tuple[dict[str, Pod], Pod | None]:
    """Return the pods of the workers of a training by role, and the pod of its coordinator."""
    flag = f"--checkpoints={key(task, CHECKPOINTS)}"
    members = [
        item
        for template in manifest["spec"].get("templates") or []
        for item in pod_requests.list_object_replicas(template)
        if flag in item.command
    ]
    workers = {item.role: item.pod for item in members if not LAUNCHERS.isdisjoint(item.command)}
    coordinators = [item.pod for item in members if not COORDINATORS.isdisjoint(item.command)]
    return workers, coordinators[0] if coordinators else None


def build_trial_tariff(manifest: Manifest, prices: Prices | None) -> Tariff | None:
    """Return the tariff of the trials of a sweep, each of which trains in a single pod; None
    without prices or without such a pod."""
    for template in manifest["spec"].get("templates") or []:
        container: Mapping[str, Any] = template.get("container") or {}
        pod = pod_requests.read_template_pod(template)
        if (
            prices
            and pod
            and TRIAL_STEP in [*(container.get("command") or []), *(container.get("args") or [])]
        ):
            return Tariff(prices=prices, workers={"": pod})
    return None
