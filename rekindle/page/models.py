"""The section `models`: each model with its champion, its servers and its releases."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from argolocal.manifest.types import Object
from rekindle import mlflow_api, tracking
from rekindle.cluster.errors import ApiError
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import INSTANCE_LABEL, NAME_LABEL
from rekindle.mlflow_api import format_condition, send_request
from rekindle.page.mlflow import STARTING, Tracking
from rekindle.release.rollback import KubernetesObjects

MILLISECONDS = re.compile(r"[0-9]{1,14}")
MAX_MODELS = 100
MAX_RELEASES = 20
# an evaluation also logs each metric of the candidate for the baseline and the champion, with these
# prefixes
COMPARED_PREFIXES = ("baseline_", "champion_")


@dataclass(frozen=True)
class Server:
    """A Deployment of a model. `ready`: number of ready pods; `pods`: number of pods that the
    Deployment should have."""

    deployment: str
    version: str
    address: str
    ready: int
    pods: int
    has_traffic: bool

    @property
    def state(self) -> str:
        """The state of the server in one or a few words."""
        if self.ready:
            return "running"
        return "starting or down" if self.pods else "scaled down"


@dataclass(frozen=True)
class ModelRelease:
    """A version of a model. `registered`: time of the registration in the format of RFC 3339;
    `run`: name of the run that registered the version. `can_roll_back` is True if a rollback to
    this version is possible."""

    version: str
    is_champion: bool
    run: str
    registered: str | None
    deployment: str
    can_roll_back: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Drift:
    """The result of the last drift check of a model."""

    verdict: str
    reason: str
    run: str
    checked: str | None


@dataclass(frozen=True)
class Model:
    """A model. `since`: time when the champion was promoted, if the time is known."""

    name: str
    champion: str
    since: str | None
    servers: list[Server]
    releases: list[ModelRelease]
    drift: Drift | None
    rollback_targets: list[str]


@dataclass(frozen=True)
class Models:
    """All models. `notes`: sentences about services that do not answer. `has_releases` is True if
    MLflow has answered, so that the champions and releases are complete."""

    models: list[Model]
    notes: list[str]
    is_starting: bool
    can_roll_back: bool
    has_releases: bool = True


class ModelReader:
    """Reads the models from MLflow, and their servers from the Kubernetes objects.

    `server_address`: function that returns the address of a Service; `is_serving`: function that
    returns False if the servers of this machine are down. `can_roll_back` is True if the user of
    the page may roll back.
    """

    def __init__(
        self,
        tracking_server: Tracking,
        open_objects: Callable[[], KubernetesObjects],
        list_names: Callable[[], Iterable[str]],
        server_address: Callable[[Object], str],
        is_serving: Callable[[], bool],
        can_roll_back: bool,
    ) -> None:
        self.tracking = tracking_server
        self.open_objects = open_objects
        self.list_names = list_names
        self.server_address = server_address
        self.is_serving = is_serving
        self.can_roll_back = can_roll_back

    def read(self, query: Mapping[str, str]) -> Models:
        """Return all models, and a note for each service that does not answer."""
        notes = []
        problem = self.tracking.connect()
        names: set[str] = set()
        if problem:
            notes.append(problem)
        else:
            try:
                names.update(_list_models())
            except RekindleError as error:
                problem = str(error)
                notes.append(problem)

        try:
            names.update(self.list_names())
        except RekindleError as error:
            notes.append(f"The servers cannot be read: {error}")

        models = []
        for model_name in sorted(names)[:MAX_MODELS]:
            try:
                models.append(self._read_model(model_name, has_tracking=not problem))
            except RekindleError as error:
                notes.append(f"{model_name} cannot be read: {error}")

        is_starting = problem == STARTING
        return Models(models, notes, is_starting, self.can_roll_back, has_releases=not problem)

    def _read_model(self, model_name: str, has_tracking: bool) -> Model:
        try:
            objects = self.open_objects()
            service = objects.find("Service", model_name)
            deployments = objects.deployments(model_name)
        except ApiError:
            # without permission to read Deployments, show only the releases
            service = None
            deployments = []

        champion = tracking.champion(model_name) if has_tracking else None
        versions = _list_versions(model_name) if has_tracking else []
        deployment_names = {deployment["metadata"]["name"] for deployment in deployments}
        releases = [
            _make_release(version, champion.version if champion else "", deployment_names)
            for version in versions[:MAX_RELEASES]
        ]
        promoted = {release.deployment: release.version for release in releases}

        return Model(
            model_name,
            champion.version if champion else "",
            _find_promotion_time(champion, versions, releases) if champion else None,
            [self._make_server(deployment, service, promoted) for deployment in deployments],
            releases,
            _find_drift(model_name) if has_tracking else None,
            [release.version for release in releases if release.can_roll_back],
        )

    def _make_server(
        self, deployment: Object, service: Object | None, promoted: Mapping[str, str]
    ) -> Server:
        name = deployment["metadata"]["name"]
        selector = (service or {}).get("spec", {}).get("selector") or {}
        metadata = deployment["spec"]["template"].get("metadata") or {}
        # the pods of a canary also have the labels that the Service selects
        has_traffic = bool(selector) and selector.items() <= (metadata.get("labels") or {}).items()
        ready = (deployment.get("status") or {}).get("readyReplicas") or 0
        return Server(
            name,
            promoted.get(name, ""),
            self.server_address(service) if service and has_traffic else "",
            ready if self.is_serving() else 0,
            deployment["spec"].get("replicas", 1),
            has_traffic,
        )


def list_served_models(deployments: Iterable[Object]) -> set[str]:
    """Return the models that Deployments serve."""
    all_labels = [deployment["metadata"].get("labels") or {} for deployment in deployments]
    return {
        labels[NAME_LABEL]
        for labels in all_labels
        if NAME_LABEL in labels and INSTANCE_LABEL in labels
    }


def _list_models() -> list[str]:
    page = send_request(
        "GET",
        "mlflow/registered-models/search",
        mlflow_api.ModelsPage,
        params={"max_results": MAX_MODELS},
    )
    return [model.name for model in page.registered_models]


def _list_versions(model_name: str) -> list[mlflow_api.ModelVersion]:
    """Return the versions of a model, newest first."""
    search = {"filter": format_condition("name", model_name), "max_results": 1000}
    page = send_request(
        "GET", "mlflow/model-versions/search", mlflow_api.VersionsPage, params=search
    )
    versions = [version for version in page.model_versions if version.name == model_name]
    return sorted(versions, key=lambda version: -int(version.version))


def _make_release(
    version: mlflow_api.ModelVersion, champion: str, deployments: set[str]
) -> ModelRelease:
    deployment = version.tags.get(tracking.DEPLOYMENT, "")
    run = _find_run(version.run_id)
    return ModelRelease(
        version.version,
        version.version == champion,
        run.data.tags.get(tracking.WORKFLOW, "") if run else "",
        format_ms(version.creation_timestamp),
        deployment,
        deployment in deployments and version.version != champion,
        select_measures(run.data.metrics) if run else {},
    )


def _find_run(run_id: str) -> mlflow_api.Run | None:
    """Return an MLflow run, or None if the run was deleted."""
    if not run_id:
        return None
    try:
        return send_request(
            "GET", "mlflow/runs/get", mlflow_api.RunAnswer, params={"run_id": run_id}
        ).run
    except mlflow_api.RequestRefused:
        return None


def select_measures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a run that its evaluation has computed."""
    return {
        name: value
        for name, value in metrics.items()
        if any(f"{prefix}{name}" in metrics for prefix in COMPARED_PREFIXES)
    }


def _find_promotion_time(
    champion: tracking.Release,
    versions: list[mlflow_api.ModelVersion],
    releases: list[ModelRelease],
) -> str | None:
    """Return the time when the version became the champion. Return None if the time is unknown
    because an earlier version of Rekindle, which did not record the time, rolled the model back."""
    tags = next((version.tags for version in versions if version.version == champion.version), {})
    recorded_time = tags.get(tracking.CHAMPION_SINCE, "")
    if MILLISECONDS.fullmatch(recorded_time):
        return format_ms(int(recorded_time))

    promoted = [release for release in releases if release.deployment]
    is_newest = not promoted or promoted[0].version == champion.version
    run = _find_run(champion.promoted_by) if is_newest else None
    if run:
        return format_ms(run.info.end_time or run.info.start_time)
    return None


def _find_drift(model_name: str) -> Drift | None:
    """Return the result of the newest drift check of a model."""
    experiments = send_request(
        "POST", "mlflow/experiments/search", mlflow_api.ExperimentsPage, json={"max_results": 1000}
    ).experiments
    search: dict[str, Any] = {
        "experiment_ids": [experiment.experiment_id for experiment in experiments],
        "filter": format_condition(f"tags.`{tracking.MODEL}`", model_name),
        "order_by": ["attributes.start_time DESC"],
        "max_results": 1,
    }
    if not experiments:
        return None

    runs = send_request("POST", "mlflow/runs/search", mlflow_api.RunsPage, json=search).runs
    for run in runs:
        tags = run.data.tags
        return Drift(
            tags.get("verdict", ""),
            tags.get("reason", ""),
            tags.get(tracking.WORKFLOW, ""),
            format_ms(run.info.start_time),
        )
    return None


def format_ms(milliseconds: int) -> str | None:
    """Return a time of MLflow in the format of RFC 3339; None if the time is unknown."""
    if not milliseconds:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
