"""Finds the models that a run may release, and the champions that they would replace, without
starting a service."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from rekindle.cluster.kubernetes_api import SERVICES, Cluster
from rekindle.documents import Document, read_file
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI
from rekindle.local.services.services import DATABASE
from rekindle.operations.plan.tasks import CACHED_RESULT, SKIPPED, Task, Tree

RELEASE_OUTPUTS = {"model_uri", "content"}  # outputs of a step that registers a version of a model
CHAMPION_QUERY = (
    "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = 'champion'"
)


class ServicePort(Document):
    port: int = Field(ge=1, le=65535)


class ServiceSpec(Document):
    ports: list[ServicePort] = Field(min_length=1)


class Service(Document):
    """A Kubernetes Service: a file in the home, or an object of a cluster."""

    spec: ServiceSpec

    @property
    def port(self) -> int:
        return self.spec.ports[0].port


@dataclass(frozen=True)
class Champion:
    """The served version of a model, and the address of its servers; an empty string means that it
    does not exist."""

    version: str = ""
    endpoint: str = ""


@dataclass(frozen=True)
class PlannedRelease:
    """A release that the run may make. If the champion is not known, `note` is the reason."""

    task: str
    model: str
    condition: str
    champion: Champion | None
    note: str = ""

    def __str__(self) -> str:
        condition = self.condition or "in every run"
        if not self.champion:
            return f"{self.model}: {condition}; its champion is not known: {self.note}"
        if not self.champion.version:
            return f"{self.model}: {condition}; it would be the first version"

        address = f" at {self.champion.endpoint}" if self.champion.endpoint else ""
        return (
            f"{self.model}: {condition}; it would replace version {self.champion.version}{address}"
        )


def plan_releases(tree: Tree, find: Callable[[str], Champion]) -> list[PlannedRelease]:
    """Return the releases of a run. `find` returns the champion of a model, or raises
    RekindleError."""
    releases = []

    for task in tree.leaves():
        if task.status in (CACHED_RESULT, SKIPPED):
            continue

        model = _model(task)
        if not model:
            continue

        try:
            releases.append(PlannedRelease(task.path, model, task.reason, find(model)))
        except (RekindleError, OSError, sqlite3.Error) as error:
            releases.append(PlannedRelease(task.path, model, task.reason, None, str(error)))

    return releases


def _model(task: Task) -> str:
    """Return the name of the model that a task registers, or ""."""
    outputs = {p["name"] for p in (task.template.get("outputs") or {}).get("parameters") or []}
    arguments = {
        p["name"]: p.get("value")
        for p in (task.call.get("arguments") or {}).get("parameters") or []
    }
    if outputs >= RELEASE_OUTPUTS:
        return str(arguments.get("name", ""))
    return ""


def local_champion(home: Path, model: str) -> Champion:
    """Return the champion of `model` on this machine. Its version is read from the MLflow server at
    MLFLOW_TRACKING_URI or, if this is not set, from the database of the embedded MLflow; its
    address is read from the home."""
    endpoint = ""
    service = home / "objects/Service" / f"{model}.json"
    if service.exists():
        port = read_file(Service, service).port
        endpoint = f"http://127.0.0.1:{port}"

    if os.environ.get(MLFLOW_TRACKING_URI):
        return Champion(_tracked_version(model), endpoint)

    database = home / DATABASE
    if not database.exists():
        return Champion()

    with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        row = connection.execute(CHAMPION_QUERY, [model]).fetchone()

    if row:
        return Champion(str(row[0]), endpoint)

    return Champion()


def cluster_champion(cluster: Cluster, model: str) -> Champion:
    """Return the champion of `model` from the MLflow server at MLFLOW_TRACKING_URI, which must be
    set, and its address in the cluster. Raises RekindleError."""
    if not os.environ.get(MLFLOW_TRACKING_URI):
        raise RekindleError("MLFLOW_TRACKING_URI is not set on this machine")

    version = _tracked_version(model)
    service = cluster.find(SERVICES, model) if version else None
    if not service:
        return Champion(version)

    port = service["spec"]["ports"][0]["port"]
    return Champion(version, f"http://{model}.{cluster.namespace}:{port}")


def _tracked_version(model: str) -> str:
    from rekindle import tracking
    from rekindle.mlflow_api import RETRIES

    # only one retry, because a plan is useful even without the champion
    os.environ.setdefault(RETRIES, "1")
    release = tracking.champion(model)
    if release:
        return release.version
    return ""
