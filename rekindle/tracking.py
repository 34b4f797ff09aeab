"""Access of the steps to MLflow: one run per workflow, and the model registry.

The alias `champion` in the registry names the served version. The only setting is
`MLFLOW_TRACKING_URI`; MLflow's server also stores the artifacts. Operations are idempotent, because
Argo retries steps. Failures raise TrackingError with the server and the remedy. The module uses
MLflow's REST API: the import of its Python client would take 4 s of CPU time in every step.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from argolocal.common.json_text import to_json
from rekindle import mlflow_api
from rekindle.errors import ConfigError, RekindleError, TrackingError, format_address, say
from rekindle.kubernetes_names import S3_BUCKET, S3_ENDPOINT_URL
from rekindle.mlflow_api import A, RequestRefused, address, condition, request
from rekindle.names import (
    ArtifactKey,
    InvalidName,
    ObjectId,
    ObjectName,
    Version,
    show,
    split_address,
)
from rekindle.step import to_text

# tags of a run; the tag of a provenance field of a release is PREFIX + the field's name
PREFIX = "rekindle."
WORKFLOW = "rekindle.workflow"
WORKLOAD = "rekindle.workload"
MODEL = "rekindle.model"  # tag of a run that checks a served model for drift: the model's name
# identity of the code; set only for scheduled runs that are not part of a backfill
CODE = "rekindle.code"
CONFIG_HASH = "rekindle.config_hash"
MANIFEST_HASH = "rekindle.manifest_hash"
GIT_SHA = "rekindle.git_sha"
SCHEDULED = "rekindle.scheduled"  # scheduled time
WINDOW_END = "data.window_until"  # end of the moving data window
VERSION = "rekindle.version"  # a release: version, file prefix, sha256
MODEL_URI = "rekindle.model_uri"
MODEL_SHA256 = "rekindle.model_sha256"
CANARY = "rekindle.canary"  # outcome of the canary
PROMOTED = "rekindle.promoted"  # value: MODEL VERSION
FAILURES = "rekindle.failures"  # messages of the failed steps
CURRENCY = "rekindle.currency"
# tag with the value "removed" after the deletion of everything but the run's record in MLflow
EMPTIED = "rekindle.artifacts"
STORE_TAG = "rekindle.store"  # id of the object store
PARENT = "mlflow.parentRunId"  # for a trial: MLflow run of its sweep
DIGEST = "rekindle.digest"  # digest of the prepared dataset
CACHED = "rekindle.cached."  # CACHED + task: source of its reused outputs
REFERS = "rekindle.refers"  # reused outputs are read in place, not copied
BACKFILL = "rekindle.backfill"  # the run belongs to a backfill
NOTE = "mlflow.note.content"  # description of the run
# tags of a model version: prefix of its files, sha256 of its weights
URI = "rekindle.uri"
SHA256 = "rekindle.sha256"
REMOVED = "rekindle.removed"  # tag of a model version whose files retention is removing
# tag of a new model version until it is certain that no earlier version has the same files
UNCONFIRMED = "rekindle.unconfirmed"
DEPLOYMENT = "rekindle.deployment"  # tag of a promoted model version: its Deployment
KEEP_RELEASES = "rekindle.keep_releases"  # tag of a promoted model version: its serve.keep_releases
PROMOTED_BY = "rekindle.promoted_by"  # tag of a model version: the MLflow run that promoted it last
CHAMPION_SINCE = "rekindle.champion_since"  # tag of a model version: since when, in milliseconds
CHAMPION = "champion"  # alias of the served version
CANDIDATE = "candidate"  # alias of the version registered last
# MLflow's page of the experiment shows runs and charts instead of traces
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
# experiment tag with the page state that MLflow shows for addresses with the view "rekindle"
VIEW_TAG = "mlflow.sharedViewState.rekindle"
TABLE_COLUMNS = (
    "tags.`verdict`",
    f"tags.`{VERSION}`",
    "params.`train.learning_rate`",
    "params.`train.epochs`",
)
# MLflow's limits per request; MAX_PARAMS also applies to tags
MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_SAME_NAMES = 1000  # maximum runs of equal name to read
LAST_RUNS = 20  # earlier runs to compare a new run with
NUMBER = re.compile("[0-9]{1,9}")  # valid value of KEEP_RELEASES
MAX_PARAM_LENGTH = 6000
MAX_DIGEST_LENGTH = 36


@dataclass(frozen=True)
class Release:
    """A version of a registered model. `uri`: key prefix of its files; `sha256`: sha256 of its
    weights."""

    version: str
    uri: str
    sha256: str
    deployment: str = ""  # name of its Deployment; empty until the version is promoted
    run_id: str = field(default="", compare=False)
    promoted_by: str = field(default="", compare=False)  # MLflow run that promoted it last
    keep_releases: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RunData:
    """Metrics with finite values, parameters and tags of a run."""

    metrics: dict[str, float]
    params: dict[str, str]
    tags: dict[str, str]


def start_run(experiment: str, workflow: str, tags: Mapping[str, str] | None = None) -> str:
    """Return the id of the run of `workflow` in `experiment`. Create the run and the experiment if
    they do not exist."""
    run_id = find_run(experiment, workflow)
    if run_id:
        return run_id

    own_store = _own_store_id()
    store_tags = {STORE_TAG: own_store} if own_store else {}
    tag_pairs = _make_pairs({**(tags or {}), **store_tags, WORKFLOW: workflow})
    run = {
        "experiment_id": _experiment_id(experiment),
        "run_name": workflow,
        "start_time": _now_ms(),
        "tags": tag_pairs,
    }
    return _post("runs/create", run, mlflow_api.RunAnswer).run.info.run_id


def find_run(experiment: str, workflow: str) -> str | None:
    """Return the id of the oldest run of `workflow`, or None.

    Runs of other object stores are ignored: several stores may share MLflow, and their workflows,
    such as those of a schedule, may have equal names.
    """
    run_filter = condition(f"tags.`{WORKFLOW}`", workflow)
    for run in _search_runs(_experiment_ids(experiment), "start_time", run_filter, MAX_SAME_NAMES):
        recorded_store = run.data.tags.get(STORE_TAG, "")
        if not recorded_store or _own_store_id() in ("", recorded_store):
            return run.info.run_id
    return None


def _own_store_id() -> str:
    """Return the id of the object store of this process; "" without a store, or if it is
    unavailable."""
    bucket = os.environ.get(S3_BUCKET, "")
    try:
        return _read_store_id(bucket, os.environ.get(S3_ENDPOINT_URL, "")) if bucket else ""
    except RekindleError:
        return ""


@cache
def _read_store_id(bucket: str, endpoint: str) -> str:
    # imported in this function: it needs the client of the object store
    from rekindle.storage import Store, store_id

    return store_id(Store(bucket, endpoint or None, short_retries=True))


def find_last_start(experiment: str) -> float:
    """Return the start time of the newest workflow's run in `experiment`, in Unix seconds, or 0."""
    runs = _search_runs(_experiment_ids(experiment), "start_time DESC", f"tags.`{WORKFLOW}` != ''")
    if runs:
        return runs[0].info.start_time / 1000
    return 0.0


def find_last_prepared_runs(
    experiment: str, workload: str, except_run: str, more_filter: str = ""
) -> list[RunData]:
    """Return the newest runs of `workload` that prepared a dataset, newest first, except the run
    `except_run`.

    `more_filter`: a further condition in MLflow's search syntax.
    """
    run_filter = f"{condition(f'tags.`{WORKLOAD}`', workload)} AND tags.`{DIGEST}` != ''"
    # exclude runs that reused a dataset: they lack the metric `rows`
    run_filter += " AND metrics.rows > 0"

    if except_run:
        run_filter += f" AND attributes.run_id != '{ObjectId(except_run)}'"

    run_filter += f" AND {more_filter}" if more_filter else ""
    runs = _search_runs(_experiment_ids(experiment), "start_time DESC", run_filter, LAST_RUNS)

    return [RunData(run.data.metrics, run.data.params, run.data.tags) for run in runs]


def find_page_address(workflow: str = "", mlflow_url: str = "") -> str:
    """Return the web address of the run of `workflow`. Without a workflow, return that of the
    newest run's experiment or, before the first run, of MLflow.

    `mlflow_url`: address of MLflow for browsers (empty: the address that this process uses).
    """
    answer = _post("experiments/search", {"max_results": 1000}, mlflow_api.ExperimentsPage)
    experiments = {experiment.experiment_id: experiment for experiment in answer.experiments}

    if workflow:
        run_filter = condition(f"tags.`{WORKFLOW}`", workflow)
    else:
        run_filter = f"tags.`{WORKFLOW}` != ''"

    runs = _search_runs(list(experiments), "start_time DESC", run_filter)
    if not runs:
        if workflow:
            raise TrackingError(
                f"MLflow at {format_address(address())} lacks the run {workflow}: see `rekindle"
                " status`."
            )

        return format_address(address())

    info = runs[0].info
    experiment = experiments.get(info.experiment_id)
    run_path = f"/{info.run_id}" if workflow else ""

    has_view = experiment is not None and VIEW_TAG in experiment.tags
    view_parameter = "&viewStateShareKey=rekindle" if has_view and not workflow else ""
    parameters = f"workflowType=machine_learning{view_parameter}"
    server = mlflow_url or format_address(address())
    return f"{server}/#/experiments/{info.experiment_id}/runs{run_path}?{parameters}"


def log(
    run_id: str,
    *,
    params: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    """Log params (which cannot change later), metrics (at step 0) and tags. Nested mappings in
    `params` are flattened."""
    log_metrics(run_id, [(name, value, 0) for name, value in (metrics or {}).items()])
    param_pairs = _make_pairs(
        {name: to_text(value)[:MAX_PARAM_LENGTH] for name, value in flatten(params or {}).items()}
    )

    tag_pairs = _make_pairs(tags or {})
    while param_pairs or tag_pairs:
        _post(
            "runs/log-batch",
            {"run_id": run_id, "params": param_pairs[:MAX_PARAMS], "tags": tag_pairs[:MAX_PARAMS]},
        )
        param_pairs = param_pairs[MAX_PARAMS:]
        tag_pairs = tag_pairs[MAX_PARAMS:]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: `{"train": {"steps": 3}}` → `{"train.steps": 3}`."""
    flat_values: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, Mapping) and value
        flat_values.update(
            flatten(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
        )
    return flat_values


def log_metrics(run_id: str, points: Iterable[tuple[str, float, int]]) -> None:
    """Log points (name, value, step) of curves, in as few requests as MLflow allows."""
    now = _now_ms()
    # NaN and infinities are sent as texts, as proto3's JSON format requires
    metrics = [
        {"key": name, "value": _encode_number(value), "timestamp": now, "step": step}
        for name, value, step in points
    ]
    for start in range(0, len(metrics), MAX_METRICS):
        _post("runs/log-batch", {"run_id": run_id, "metrics": metrics[start : start + MAX_METRICS]})


def log_dataset(
    run_id: str, name: str, digest: str, source: str, counts: Mapping[str, int]
) -> None:
    """Log the training dataset of a run."""
    dataset = {
        "name": name,
        "digest": digest[:MAX_DIGEST_LENGTH],
        "source_type": split_address(source).scheme or "local",
        "source": to_json({"uri": source}),
        "profile": to_json(counts),
    }

    dataset_input = {
        "tags": [{"key": "mlflow.data.context", "value": "training"}],
        "dataset": dataset,
    }
    _post("runs/log-inputs", {"run_id": run_id, "datasets": [dataset_input]})


def log_dir(run_id: str, path: Path, name: str) -> None:
    """Log all files below `path` as artifacts of the run, under `name`."""
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        log_artifact(run_id, f"{name}/{file.relative_to(path)}", file.read_bytes())


def log_artifact(run_id: str, path: str, content: bytes) -> None:
    """Log an artifact of the run. Raises TrackingError if the server does not store artifacts."""
    root = split_address(_artifact_root(run_id))
    if root.scheme != "mlflow-artifacts":
        raise TrackingError(
            f"MLflow at {format_address(address())} keeps artifacts in {root.scheme}:, where a step"
            " cannot write: start it with --serve-artifacts (its default) and"
            " --artifacts-destination, and use a new experiment."
        )
    target = quote(f"{root.path.strip('/')}/{path}")
    address_path = f"mlflow-artifacts/artifacts/{target}"
    _request("PUT", address_path, mlflow_api.ArtifactChanged, data=content)


def artifacts(run_id: str, folder: str) -> list[str]:
    """Return the paths of the run's artifacts directly below `folder`."""
    search = {"run_id": run_id, "path": folder}
    page = _request("GET", "mlflow/artifacts/list", mlflow_api.ArtifactsPage, params=search)
    return [file.path for file in page.files]


def read_tags(run_id: str) -> dict[str, str]:
    return _read_run(run_id).data.tags


def read_params(run_id: str) -> dict[str, str]:
    """Return the parameters of a run. The settings of its config have names such as
    train.workers."""
    return _read_run(run_id).data.params


def show_columns(experiment: str, metrics: Iterable[str]) -> None:
    """Set the columns of the experiment's table of runs, and the first of `metrics` as its primary
    metric."""
    names = list(metrics)
    view = {"selectedColumns": [*(f"metrics.`{name}`" for name in names), *TABLE_COLUMNS]}
    for key, value in (
        (VIEW_TAG, to_json(view)),
        ("mlflow.experiment.primaryMetric.name", names[0]),
    ):
        tag = {"experiment_id": _experiment_id(experiment), "key": key, "value": value}
        _post("experiments/set-experiment-tag", tag)


def finish(run_id: str, status: str) -> None:
    """Close the run with the status FINISHED, FAILED or KILLED."""
    _post("runs/update", {"run_id": run_id, "status": status, "end_time": _now_ms()})


def champion(name: str) -> Release | None:
    """Return the served version of `name` (alias `champion`), or None before the first release."""
    answer = _get_or_none("registered-models/get", mlflow_api.ModelAnswer, name=name)
    aliases = answer.registered_model.aliases if answer else []
    versions = [alias.version for alias in aliases if alias.alias == CHAMPION]
    if not versions:
        return None

    version = {"name": name, "version": versions[0]}
    answer = _request("GET", "mlflow/model-versions/get", mlflow_api.VersionAnswer, params=version)
    return _make_release(answer.model_version)


def find_version(name: str, version: str) -> Release | None:
    """Return a version of a registered model, or None if it does not exist."""
    found = _get_version(name, version)
    if found:
        return _make_release(found)
    return None


def _get_version(name: str, version: str) -> mlflow_api.ModelVersion | None:
    """Return MLflow's record of a version, or None if it does not exist."""
    answer = _get_or_none(
        "model-versions/get", mlflow_api.VersionAnswer, name=name, version=version
    )
    if answer:
        return answer.model_version
    return None


def require_champion(name: str) -> Release:
    """Return the champion of a model. Raises ConfigError if the model does not have a champion."""
    release = champion(name)
    if release:
        return release
    raise ConfigError(
        f'the model "{name}" does not have a champion: release a version first, or correct the'
        " name."
    )


def register(
    name: str, uri: str, source: str, sha256: str, run_id: str, tags: Mapping[str, str]
) -> Release:
    """Return the version of the model `name` whose files are at `uri`, and give it the alias
    `candidate`. Create it if it does not exist.

    `source`: full address of the files (s3://bucket/prefix).
    """
    _create_if_missing("registered-models/create", {"name": name})
    content = {
        "name": name,
        "source": source,
        "run_id": run_id,
        "tags": _make_pairs({**tags, URI: uri, SHA256: sha256, UNCONFIRMED: "yes"}),
    }

    while True:
        for registered in _registered_versions(name, uri, source):
            number = registered.version
            # the alias protects the version from retention
            _set_alias(name, CANDIDATE, number)
            found = _get_version(name, number)
            if not found or REMOVED in found.tags:
                continue

            if _confirm_first_version(name, number):
                remove_duplicates(name, uri, source, number)
                return _make_release(found)

        version = _post("model-versions/create", content, mlflow_api.VersionAnswer).model_version
        number = version.version
        # search again: if another process has registered the same files, only the first version is
        # kept
        first = next(iter(_registered_versions(name, uri, source)), version)
        if first.version == number and _confirm_first_version(name, number):
            _set_alias(name, CANDIDATE, number)
            return _make_release(version)

        _delete("model-versions/delete", {"name": name, "version": number})


def remove_duplicates(name: str, uri: str, source: str, number: str) -> None:
    """Delete later versions with the same files as the version `number`. Normally, the process that
    registered such a duplicate deletes it, but it may have ended before.
    """
    for version in _registered_versions(name, uri, source):
        is_later = int(version.version) > int(number)
        if is_later and UNCONFIRMED in version.tags:
            _delete("model-versions/delete", {"name": name, "version": version.version})


def _confirm_first_version(name: str, number: str) -> bool:
    """Record that a version is the first with its files. Return False if the version was
    deleted."""
    version = {"name": name, "version": number, "key": UNCONFIRMED}
    return _delete("model-versions/delete-tag", version)


def _delete(path: str, content: Mapping[str, Any]) -> bool:
    """Delete an object in MLflow. Return False if another process has already deleted it."""
    try:
        _request("DELETE", f"mlflow/{path}", mlflow_api.Answer, json=content)
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True


def _registered_versions(name: str, uri: str, source: str) -> list[mlflow_api.ModelVersion]:
    """Return the versions of `name` whose files are at `uri` in this bucket, oldest first, except
    versions that are being removed."""
    search_filter = f"{condition('name', name)} and {condition(f'tags.`{URI}`', uri)}"
    versions = []

    for version in _search_versions(search_filter, name):
        has_files = version.tags.get(URI) == uri and version.source == source
        if has_files and REMOVED not in version.tags:
            versions.append(version)

    return sorted(versions, key=lambda version: int(version.version))


def record_champion(name: str, version: str, deployment: str, run_id: str = "") -> None:
    """Give a version of the model `name` the alias `champion`. Record its Deployment, the time, and
    the run that promotes it."""
    record_deployment(name, version, deployment)
    _set_alias(name, CHAMPION, version)
    tag_version(name, version, CHAMPION_SINCE, str(_now_ms()))
    if run_id:
        tag_version(name, version, PROMOTED_BY, run_id)


def record_deployment(name: str, version: str, deployment: str) -> None:
    """Record the Deployment that serves a version."""
    tag_version(name, version, DEPLOYMENT, deployment)


def tag_version(name: str, version: str, key: str, value: str) -> None:
    """Set a tag of a version."""
    _post("model-versions/set-tag", {"name": name, "version": version, "key": key, "value": value})


def promoted_releases(name: str) -> list[Release]:
    """Return the versions of `name` that were promoted with a Deployment, oldest first."""
    versions = _search_versions(f"{condition('name', name)} and tags.`{DEPLOYMENT}` != ''", name)
    releases = list[Release]()

    for version in versions:
        try:
            releases.append(_make_release(version))
        except (InvalidName, TrackingError) as error:
            say(f"a version is passed over: {error}")

    return sorted(releases, key=lambda release: int(release.version))


def _search_versions(search_filter: str, name: str) -> list[mlflow_api.ModelVersion]:
    """Return the versions of the model `name` that match a filter."""
    search = {"filter": search_filter, "max_results": 10_000}
    page = _request("GET", "mlflow/model-versions/search", mlflow_api.VersionsPage, params=search)
    return [version for version in page.model_versions if version.name == name]


def _set_alias(name: str, alias: str, version: str) -> None:
    content = {"name": name, "alias": alias, "version": version}
    try:
        _post("registered-models/alias", content)
    except RequestRefused as error:
        # retry once: MLflow answers BAD_REQUEST if another process creates the alias at the same
        # time
        if error.code != "BAD_REQUEST":
            raise
        _post("registered-models/alias", content)


def _make_release(version: mlflow_api.ModelVersion) -> Release:
    """Convert a version of MLflow, and validate its tags, which every client can write.

    Raises TrackingError if a tag is missing, and InvalidName if a tag is invalid.
    """
    tags = version.tags
    try:
        uri = tags[URI]
        sha256 = tags[SHA256]
    except KeyError as error:
        raise TrackingError(
            f"version {version.version} of the model {show(version.name)} lacks the tag {error}:"
            " only versions that `steps.release` registered can serve. Remove the alias of this"
            " version in MLflow, or give the model another name."
        ) from error

    origin = f"of version {version.version} of {show(version.name)} in MLflow"
    ArtifactKey(uri.rstrip("/"), f"the tag {URI} {origin}")

    deployment = tags.get(DEPLOYMENT, "")
    if deployment:
        ObjectName(deployment, f"the tag {DEPLOYMENT} {origin}")

    keep = tags.get(KEEP_RELEASES, "")
    return Release(
        version=Version(version.version, "MLflow"),
        uri=uri,
        sha256=sha256,
        deployment=deployment,
        run_id=version.run_id,
        promoted_by=tags.get(PROMOTED_BY, ""),
        keep_releases=int(keep) if NUMBER.fullmatch(keep) else None,
    )


def _search_runs(
    experiments: list[str], order: str, run_filter: str, limit: int = 1
) -> list[mlflow_api.Run]:
    """Return the first runs of these experiments that match a filter."""
    search = {
        "experiment_ids": experiments,
        "filter": run_filter,
        "order_by": [f"attributes.{order}"],
        "max_results": limit,
    }
    if experiments:
        return _post("runs/search", search, mlflow_api.RunsPage).runs
    return []


def _experiment_ids(name: str) -> list[str]:
    """Return a list with the id of the experiment `name`; an empty list if it does not exist."""
    answer = _get_or_none(
        "experiments/get-by-name", mlflow_api.ExperimentAnswer, experiment_name=name
    )
    if answer:
        return [answer.experiment.experiment_id]
    return []


def _read_run(run_id: str) -> mlflow_api.Run:
    return _request("GET", "mlflow/runs/get", mlflow_api.RunAnswer, params={"run_id": run_id}).run


@cache
def _artifact_root(run_id: str) -> str:
    return _read_run(run_id).info.artifact_uri


def _get_or_none(path: str, model: type[A], **names: str) -> A | None:
    """Return MLflow's answer, or None if the object does not exist."""
    try:
        return _request("GET", f"mlflow/{path}", model, params=names)
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _experiment_id(name: str) -> str:
    _create_if_missing("experiments/create", {"name": name, "tags": _make_pairs(EXPERIMENT_TAGS)})
    path = "mlflow/experiments/get-by-name"
    names = {"experiment_name": name}
    experiment = _request("GET", path, mlflow_api.ExperimentAnswer, params=names).experiment
    if experiment.lifecycle_stage == "deleted":
        raise TrackingError(
            f'the experiment "{name}" is deleted in MLflow, but keeps its name. Restore it (mlflow'
            " experiments "
            f"restore -x {experiment.experiment_id}), or choose another name."
        )
    return experiment.experiment_id


def _create_if_missing(path: str, content: Mapping[str, Any]) -> None:
    try:
        _post(path, content)
    except RequestRefused as error:
        if error.code != "RESOURCE_ALREADY_EXISTS":
            raise


def _make_pairs(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"key": name, "value": str(value)} for name, value in values.items()]


def _encode_number(value: float) -> float | str:
    number = float(value)
    return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(str(number), number)


def _post(path: str, content: Mapping[str, Any], model: type[A] = mlflow_api.Answer) -> A:
    return _request("POST", f"mlflow/{path}", model, json=content)


@cache
def resolve_run_id(run_id: str) -> str:
    """Return the id of a run, given as its id or as EXPERIMENT/WORKFLOW. Create the run if it does
    not exist."""
    if "/" in run_id:
        return start_run(run_id.partition("/")[0], run_id.partition("/")[2])
    return run_id


def _request(method: str, path: str, model: type[A], **content: Any) -> A:
    """Send a request and return MLflow's answer. `run_id` may be EXPERIMENT/WORKFLOW."""
    values = content.get("json") or content.get("params") or {}
    if "run_id" in values:
        values["run_id"] = resolve_run_id(values["run_id"])
    return request(method, path, model, **content)


def _now_ms() -> int:
    return int(time.time() * 1000)
