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
from rekindle.local.services.services import DATABASE_FILE
from rekindle.operations.plan.tasks import CACHED_STATUS, SKIPPED_STATUS, Task, TaskTree

# outputs of a step that registers a version of a model
RELEASE_OUTPUTS = {"model_uri", "content"}
CHAMPION_QUERY = (
    "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = 'champion'"
)


class ServicePort(Document):
    port: int = Field(ge=1, le=65535)


class ServiceSpec(Document):
    ports: list[ServicePort] = Field(min_length=1)


class Service(Document):
    """A Kubernetes Service, read from a file in REKINDLE_HOME or from a cluster."""

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
    """A release that the run may make. If the champion is unknown, `note` is the reason."""

    task: str
    model: str
    condition: str
    champion: Champion | None
    note: str = ""

    def __str__(self) -> str:
        condition_text = self.condition or "in every run"
        if not self.champion:
            return f"{self.model}: {condition_text}; its champion is not known: {self.note}"
        if not self.champion.version:
            return f"{self.model}: {condition_text}; it would be the first version"

        address_text = f" at {self.champion.endpoint}" if self.champion.endpoint else ""
        return (
            f"{self.model}: {condition_text}; it would replace version"
            f" {self.champion.version}{address_text}"
        )


def plan_releases(
    task_tree: TaskTree, find_champion: Callable[[str], Champion]
) -> list[PlannedRelease]:
    """Return the releases of a run. `find_champion` returns the champion of a model, or raises
    RekindleError."""
    planned_releases = []

    for task in task_tree.leaves():
        if task.status in (CACHED_STATUS, SKIPPED_STATUS):
            continue

        model_name = _get_model_name(task)
        if not model_name:
            continue

        try:
            planned_releases.append(
                PlannedRelease(task.path, model_name, task.reason, find_champion(model_name))
            )
        except (RekindleError, OSError, sqlite3.Error) as error:
            planned_releases.append(
                PlannedRelease(task.path, model_name, task.reason, None, str(error))
            )

    return planned_releases


def _get_model_name(task: Task) -> str:
    """Return the name of the model that a task registers, or ""."""
    output_names = {
        parameter["name"]
        for parameter in (task.template.get("outputs") or {}).get("parameters") or []
    }
    argument_values = {
        parameter["name"]: parameter.get("value")
        for parameter in (task.call.get("arguments") or {}).get("parameters") or []
    }
    if output_names >= RELEASE_OUTPUTS:
        return str(argument_values.get("name", ""))
    return ""


def find_local_champion(home_folder: Path, model_name: str) -> Champion:
    """Return the champion of `model_name` on this machine. The version of the champion is read from
    the MLflow server at MLFLOW_TRACKING_URI or, if this is not set, from the database of the
    embedded MLflow; the address of its servers is read from REKINDLE_HOME."""
    endpoint = ""
    service_file = home_folder / "objects/Service" / f"{model_name}.json"
    if service_file.exists():
        service_port = read_file(Service, service_file).port
        endpoint = f"http://127.0.0.1:{service_port}"

    if os.environ.get(MLFLOW_TRACKING_URI):
        return Champion(_find_tracked_version(model_name), endpoint)

    database_path = home_folder / DATABASE_FILE
    if not database_path.exists():
        return Champion()

    with closing(
        sqlite3.connect(f"{database_path.resolve().as_uri()}?mode=ro", uri=True)
    ) as connection:
        version_row = connection.execute(CHAMPION_QUERY, [model_name]).fetchone()

    if version_row:
        return Champion(str(version_row[0]), endpoint)

    return Champion()


def find_cluster_champion(cluster: Cluster, model_name: str) -> Champion:
    """Return the champion of `model_name` from the MLflow server at MLFLOW_TRACKING_URI, which
    must be set, and its address in the cluster. Raises RekindleError."""
    if not os.environ.get(MLFLOW_TRACKING_URI):
        raise RekindleError("MLFLOW_TRACKING_URI is not set on this machine")

    champion_version = _find_tracked_version(model_name)
    service_object = cluster.find(SERVICES, model_name) if champion_version else None
    if not service_object:
        return Champion(champion_version)

    service_port = service_object["spec"]["ports"][0]["port"]
    return Champion(champion_version, f"http://{model_name}.{cluster.namespace}:{service_port}")


def _find_tracked_version(model_name: str) -> str:
    """Return the version of the champion in MLflow; "" if the model does not have a champion.
    Requests to MLflow are retried at most once in this process."""
    from rekindle import tracking
    from rekindle.mlflow_api import RETRIES_VARIABLE

    # only one retry, because a plan is useful even without the champion
    os.environ.setdefault(RETRIES_VARIABLE, "1")
    champion_release = tracking.champion(model_name)
    if champion_release:
        return champion_release.version
    return ""
