"""MLflow as the steps use it: one run per workflow, and a model registry whose alias `champion` is what is served.

Only `MLFLOW_TRACKING_URI` is needed; artifacts go through the server. Every operation is
idempotent, because steps are retried. Every failure is a TrackingError that names the server and the way out.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.errors import TrackingError, without_user

if TYPE_CHECKING:
    from mlflow import MlflowClient

WORKFLOW = "rekindle.workflow"  # tag: the one workflow that a run belongs to
URI, SHA256 = "rekindle.uri", "rekindle.sha256"  # tags of a model version
CHAMPION, CANDIDATE = "champion", "candidate"  # aliases: the version being served, and the one registered last
BATCH = 1000  # MLflow's own limit of metrics in a request
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5",  # 0 + 2 + 4 + 8 + 16 s; MLflow's own 7 with factor 2 take 4 minutes
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
for _name, _value in DEFAULTS.items():  # before mlflow is imported
    os.environ.setdefault(_name, _value)


@dataclass(frozen=True)
class Release:
    """One version of a registered model: `uri` is the prefix of its files in the bucket, `sha256` its weights'."""

    version: str
    uri: str
    sha256: str


def start_run(experiment: str, workflow: str, tags: Mapping[str, str] | None = None) -> str:
    """The id of the run of `workflow` in `experiment`; both are created if missing."""
    with _translated_errors():
        if run_id := find_run(experiment, workflow):
            return run_id
        run = _client().create_run(
            _experiment_id(experiment), run_name=workflow, tags={**(tags or {}), WORKFLOW: workflow}
        )
        return run.info.run_id


def find_run(experiment: str, workflow: str) -> str | None:
    """The id of the run of `workflow`, the first if there are several, or None."""
    with _translated_errors():
        known = _client().get_experiment_by_name(experiment)
        mine = f"tags.`{WORKFLOW}` = '{workflow}'"
        oldest = ["attributes.start_time"]
        runs = known and _client().search_runs([known.experiment_id], mine, order_by=oldest, max_results=1)
        return runs[0].info.run_id if runs else None


def log(
    run_id: str,
    *,
    params: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    """Params (never changed later), metrics (at step 0) and tags of a run."""
    from mlflow.entities import Metric, Param, RunTag

    now = _now()
    points = [Metric(k, float(v), now, 0) for k, v in (metrics or {}).items()]
    settings = [Param(k, str(v)) for k, v in (params or {}).items()]
    labels = [RunTag(k, str(v)) for k, v in (tags or {}).items()]
    with _translated_errors():
        while points or settings or labels:  # MLflow takes 100 params and 100 tags at once
            _client().log_batch(run_id, points[:BATCH], settings[:100], labels[:100])
            points, settings, labels = points[BATCH:], settings[100:], labels[100:]


def log_metrics(run_id: str, points: Iterable[tuple[str, float, int]]) -> None:
    """Points (name, value, step) of curves, in as few requests as MLflow allows."""
    from mlflow.entities import Metric

    now = _now()
    metrics = [Metric(name, float(value), now, step) for name, value, step in points]
    with _translated_errors():
        for at in range(0, len(metrics), BATCH):
            _client().log_batch(run_id, metrics[at : at + BATCH])


def log_dir(run_id: str, path: Path, name: str) -> None:
    """Every file below `path` as artifacts of the run, under `name`."""
    with _translated_errors():
        _client().log_artifacts(run_id, str(path), name)


def finish(run_id: str, status: str) -> None:
    """Close the run as FINISHED, FAILED or KILLED."""
    with _translated_errors():
        _client().set_terminated(run_id, status)


def champion(name: str) -> Release | None:
    """The version of `name` with the alias `champion`, which is the one being served; None before the first."""
    with _translated_errors():
        models = _client().search_registered_models(f"name = '{name}'")
        version = models[0].aliases.get(CHAMPION) if models else None
        return _release(_client().get_model_version(name, version)) if version else None


def register(name: str, uri: str, source: str, sha256: str, run_id: str, tags: Mapping[str, str]) -> Release:
    """The version of `name` whose files lie at `uri`, created if missing; it gets the alias `candidate`.

    `source` is the location of those files that people see (s3://bucket/prefix).
    """
    with _translated_errors():
        if not _client().search_registered_models(f"name = '{name}'"):
            _create_if_missing(lambda: _client().create_registered_model(name))
        versions = _client().search_model_versions(f"name = '{name}' and tags.`{URI}` = '{uri}'")
        version = min(versions, key=lambda version: int(version.version)) if versions else None
        version = version or _client().create_model_version(
            name, source, run_id, {**tags, URI: uri, SHA256: sha256}, await_creation_for=0
        )
        _client().set_registered_model_alias(name, CANDIDATE, version.version)
        return _release(version)


def promote(name: str, version: str) -> None:
    """Give version `version` of `name` the alias `champion`: it is the one being served from now on."""
    with _translated_errors():
        _client().set_registered_model_alias(name, CHAMPION, version)


def _release(version: Any) -> Release:
    try:
        return Release(str(version.version), version.tags[URI], version.tags[SHA256])
    except KeyError as error:
        raise TrackingError(
            f'version {version.version} of the model "{version.name}" has no tag {error}: only versions that a '
            "release made can serve. Remove its alias in MLflow, or give the model another name."
        ) from error


def _experiment_id(name: str) -> str:
    known = _client().get_experiment_by_name(name)
    if known and known.lifecycle_stage == "deleted":
        raise TrackingError(
            f'the experiment "{name}" is deleted in MLflow: its name stays taken. Restore it (mlflow experiments '
            f"restore -x {known.experiment_id}), or choose another name."
        )
    if not known:
        _create_if_missing(lambda: _client().create_experiment(name))
        known = _client().get_experiment_by_name(name)
    assert known
    return known.experiment_id


def _create_if_missing(create: Callable[[], object]) -> None:
    from mlflow.exceptions import MlflowException

    try:
        create()
    except MlflowException as error:  # another process created it first
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _client() -> "MlflowClient":
    return _client_of(_uri())


@cache
def _client_of(uri: str) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(uri, uri)


def _uri() -> str:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise TrackingError(
            "MLFLOW_TRACKING_URI is not set: runs and models are recorded there. Set it to an MLflow server's "
            'address, in a cluster through the ConfigMap "rekindle".'
        )
    return uri


def _now() -> int:
    return int(time.time() * 1000)


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Turn errors of MLflow and its HTTP client into a TrackingError."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        import requests
        from mlflow.exceptions import MlflowException

        if not isinstance(error, (MlflowException, requests.RequestException)):
            raise
        cause, uri = _root(error), without_user(_uri())
        if isinstance(error, MlflowException) and cause is error:  # the server answered with an error
            message = without_user(str(error).splitlines()[0])
            raise TrackingError(f"MLflow at {uri} refused: {message}") from error
        raise TrackingError(
            f"MLflow at {uri} does not answer ({without_user(str(cause))}). Check MLFLOW_TRACKING_URI and that `curl "
            f"{uri}/health` says OK, then run this step again: nothing is recorded twice."
        ) from error


def _root(error: BaseException) -> BaseException:
    while inner := error.__cause__ or error.__context__:
        error = inner
    return error
