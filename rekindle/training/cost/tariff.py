"""The prices and the pods of each training of a run, from the run's manifest."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from argolocal.manifest.types import Manifest
from rekindle.content.recorded_manifest import unpack_manifest
from rekindle.documents import InvalidDocument, parse_object
from rekindle.keys import CHECKPOINTS_NAME, key
from rekindle.kubernetes_names import COORDINATOR_MODULES, LAUNCHERS, ON_DEMAND_CAPACITY
from rekindle.sections import Section
from rekindle.training.cost import pod_requests
from rekindle.training.cost.pod_requests import PodRequests
from rekindle.training.cost.prices import PRICES_ANNOTATION, Prices

TRIAL_STEP = "steps.search.trial"


class TrainingTariff(Section):
    """The prices and the pods of one training."""

    prices: Prices
    workers: dict[str, PodRequests] = Field(
        min_length=1, description="pods of the workers by role; the last is the default"
    )
    coordinator: PodRequests | None = None

    def find_worker_pod(self, worker_name: str) -> PodRequests:
        """Return the pod of a worker by its name, such as demo-x7k2p-train-worker-1."""
        # the name of the run, which comes before the role, may contain the name of a role
        role_positions = {
            role: worker_name.rfind(f"-{role.lower()}-") for role in self.workers if role
        }
        role = max(role_positions, key=lambda role: role_positions[role], default="")
        if role_positions.get(role, -1) < 0:
            role = [*self.workers][-1]
        return self.workers[role]

    def has_spot_price(self, worker_name: str) -> bool:
        """Return True if the nodes of a worker's class may be spot nodes."""
        node_class = self.prices.classes[self.prices.classify(self.find_worker_pod(worker_name))]
        return node_class.spot is not None

    def compute_worker_cost(
        self, worker_name: str, duration_seconds: float, runs_on_spot: bool | None = None
    ) -> float:
        """Return the cost of a worker that runs for `duration_seconds`. The workers of a pod,
        one per GPU, share the cost of the pod."""
        pod = self.find_worker_pod(worker_name)
        return self.prices.compute_pod_cost(
            pod, duration_seconds / max(1.0, self.prices.count_gpus(pod)), runs_on_spot
        )


def read_recorded_manifest(workflow: Manifest) -> Manifest:
    """Return the manifest in the workflow parameter `manifest`; if the parameter is missing, return
    the workflow itself."""
    parameters = (workflow["spec"].get("arguments") or {}).get("parameters") or []
    manifest_texts = [
        parameter.get("value") for parameter in parameters if parameter.get("name") == "manifest"
    ]
    try:
        if manifest_texts and manifest_texts[0]:
            return unpack_manifest(str(manifest_texts[0]))
        return workflow
    except InvalidDocument:
        # a manifest that Rekindle did not render may have a parameter with this name
        return workflow


def read_prices(manifest: Manifest) -> Prices | None:
    """Return the prices that rendering has stored in a recorded manifest. Raises ConfigError."""
    prices_json = (manifest.get("metadata", {}).get("annotations") or {}).get(PRICES_ANNOTATION)
    if prices_json:
        return Prices.parse(
            parse_object(prices_json, f"the annotation {PRICES_ANNOTATION}"), PRICES_ANNOTATION
        )
    return None


def build_tariffs(
    manifest: Manifest, prices: Prices | None, tasks: Iterable[str]
) -> dict[str, TrainingTariff]:
    """Return the tariff of each training task that has prices and pods, by task."""
    tariffs_by_task: dict[str, TrainingTariff] = {}
    for task in tasks if prices else ():
        worker_pods, coordinator_pod = find_training_pods(manifest, task)
        if prices and worker_pods:
            tariffs_by_task[task] = TrainingTariff(
                prices=prices, workers=worker_pods, coordinator=coordinator_pod
            )

    return tariffs_by_task


def find_training_pods(
    manifest: Manifest, task: str
) -> tuple[dict[str, PodRequests], PodRequests | None]:
    """Return the pods of the workers of a training by role, and the pod of its coordinator."""
    checkpoints_flag = f"--checkpoints={key(task, CHECKPOINTS_NAME)}"
    matching_replicas = [
        pod_replicas
        for template in manifest["spec"].get("templates") or []
        for pod_replicas in pod_requests.list_object_replicas(template)
        if checkpoints_flag in pod_replicas.command
    ]
    worker_pods = {
        pod_replicas.role: pod_replicas.pod
        for pod_replicas in matching_replicas
        if not LAUNCHERS.isdisjoint(pod_replicas.command)
    }
    # the last pod is the default, for workers such as harvested ones, whose names contain no role
    if ON_DEMAND_CAPACITY in worker_pods:
        worker_pods = {ON_DEMAND_CAPACITY: worker_pods[ON_DEMAND_CAPACITY], **worker_pods}

    coordinator_pods = [
        pod_replicas.pod
        for pod_replicas in matching_replicas
        if not COORDINATOR_MODULES.isdisjoint(pod_replicas.command)
    ]
    return worker_pods, coordinator_pods[0] if coordinator_pods else None


def build_trial_tariff(manifest: Manifest, prices: Prices | None) -> TrainingTariff | None:
    """Return the tariff of the trials of a sweep, each of which trains in a single pod; None if the
    prices or the pod are unknown."""
    for template in manifest["spec"].get("templates") or []:
        container: Mapping[str, Any] = template.get("container") or {}
        pod = pod_requests.read_template_pod(template)
        if (
            prices
            and pod
            and TRIAL_STEP in [*(container.get("command") or []), *(container.get("args") or [])]
        ):
            return TrainingTariff(prices=prices, workers={"": pod})
    return None
