"""Access of the steps to MLflow (one run per workflow) and to MLflow's model registry.

The alias `champion` in the registry names the served version. MLflow is configured only by
`MLFLOW_TRACKING_URI`, because MLflow's server also stores the artifacts. The functions of this
module can be repeated, because Argo retries steps. Failures of MLflow raise TrackingError, whose
message names the server and the remedy. The module uses MLflow's REST API, because the import of
MLflow's Python client would take 4 s of CPU time in every step.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from argolocal.common.json_text import to_json
from rekindle import mlflow_api
from rekindle.errors import ConfigError, RekindleError, TrackingError, format_address, write_stderr
from rekindle.kubernetes_names import S3_BUCKET, S3_ENDPOINT_URL
from rekindle.mlflow_api import (
    A,
    RequestRefused,
    encode_number,
    format_condition,
    get_server_address,
    make_pairs,
    now_ms,
    send_request,
)
from rekindle.names import (
    ArtifactKey,
    InvalidName,
    ObjectId,
    ObjectName,
    Version,
    format_untrusted,
    split_address,
)
from rekindle.step import format_parameter

# tags of a run; the tag for a field of a release's provenance is TAG_PREFIX + the field's name
TAG_PREFIX = "rekindle."
WORKFLOW = "rekindle.workflow"
WORKLOAD = "rekindle.workload"
# tag of a run that checks a served model for drift: the model's name
MODEL = "rekindle.model"
# identity of the code; set only for scheduled runs that are not part of a backfill
CODE = "rekindle.code"
CONFIG_HASH = "rekindle.config_hash"
MANIFEST_HASH = "rekindle.manifest_hash"
GIT_SHA = "rekindle.git_sha"
# tag of a run with the time for which it was scheduled
SCHEDULED_TIME_TAG = "rekindle.scheduled"
# tag of a run with the end of its moving data window
WINDOW_END = "data.window_until"
# tags of a run that made a release: version, key prefix of the files, and sha256 of the weights
VERSION = "rekindle.version"
MODEL_URI = "rekindle.model_uri"
MODEL_SHA256 = "rekindle.model_sha256"
CANARY = "rekindle.canary"  # tag: outcome of the canary
PROMOTED = "rekindle.promoted"  # tag whose value is "MODEL VERSION"
FAILURES = "rekindle.failures"  # tag: messages of the failed steps
CURRENCY = "rekindle.currency"
# the value "removed" means that only the run's record in MLflow is left; all its files are deleted
ARTIFACTS_EMPTIED = "rekindle.artifacts"
# id of the object store
STORE_TAG = "rekindle.store"
# tag of a trial's run with the MLflow run of its sweep
PARENT = "mlflow.parentRunId"
# tag of a run with the digest of its prepared dataset
DIGEST = "rekindle.digest"
# the tag CACHED + TASK names the run and the task whose outputs the task TASK reuses
CACHED = "rekindle.cached."
# set if the run reads reused outputs in the storage of the earlier runs, instead of copying them
REFERS_TO_RUNS = "rekindle.refers"
# tag of a run that belongs to a backfill
BACKFILL = "rekindle.backfill"
# tag with the description of a run
NOTE = "mlflow.note.content"
# tags of a model version: prefix of its files, sha256 of its weights
URI = "rekindle.uri"
SHA256 = "rekindle.sha256"
# tag of a model version whose files retention is removing
REMOVED = "rekindle.removed"
# tag of a new model version until it is certain that no earlier version has the same files
UNCONFIRMED = "rekindle.unconfirmed"
# tag of a promoted model version with the name of its Deployment
DEPLOYMENT = "rekindle.deployment"
# tag of a promoted model version with the value of its setting serve.keep_releases
KEEP_RELEASES = "rekindle.keep_releases"
# tag of a model version: the MLflow run that promoted it last
PROMOTED_BY = "rekindle.promoted_by"
# tag of a model version: time at which it became the champion, in milliseconds since 1970
CHAMPION_SINCE = "rekindle.champion_since"
# alias of the model version that is served
CHAMPION = "champion"
# alias of the model version that was registered last
CANDIDATE = "candidate"
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
# MLflow's limits of a parameter and a digest, in characters
MAX_PARAM_LENGTH = 6000
MAX_DIGEST_LENGTH = 36
MAX_SAME_NAMES = 1000  # maximum number of runs with equal names to read
MAX_LAST_RUNS = 20  # maximum number of earlier runs with which a new run is compared
NUMBER_PATTERN = re.compile("[0-9]{1,9}")  # valid value of the tag KEEP_RELEASES


@dataclass(frozen=True)
class Release:
    """A version of a registered model. `uri`: key prefix of the version's files; `sha256`: sha256
    of its weights."""

    version: str
    uri: str
    sha256: str
    deployment: str = ""  # name of the version's Deployment; empty until the promotion
    run_id: str = field(default="", compare=False)
    promoted_by: str = field(default="", compare=False)  # MLflow run that promoted it last
    keep_releases: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RunData:
    """The data of an MLflow run: metrics with finite values, parameters and tags."""

    metrics: dict[str, float]
    params: dict[str, str]
    tags: dict[str, str]


def start_run(
    experiment_name: str, workflow_name: str, run_tags: Mapping[str, str] | None = None
) -> str:
    """Return the id of the MLflow run of `workflow_name` in `experiment_name`. Create the run and
    the experiment if they do not exist."""
    run_id = find_run(experiment_name, workflow_name)
    if run_id:
        return run_id

    own_store_id = _find_own_store_id()
    store_tags = {STORE_TAG: own_store_id} if own_store_id else {}
    tag_pairs = make_pairs({**(run_tags or {}), **store_tags, WORKFLOW: workflow_name})
    run_request = {
        "experiment_id": _get_or_create_experiment(experiment_name),
        "run_name": workflow_name,
        "start_time": now_ms(),
        "tags": tag_pairs,
    }
    return _post("runs/create", run_request, mlflow_api.RunAnswer).run.info.run_id


def find_run(experiment_name: str, workflow_name: str) -> str | None:
    """Return the id of the oldest run of `workflow_name`, or None.

    MLflow runs of other object stores are ignored, because several object stores may share MLflow,
    and their workflows, such as those of a schedule, may have equal names.
    """
    run_filter = format_condition(f"tags.`{WORKFLOW}`", workflow_name)
    for found_run in _search_runs(
        _find_experiment_ids(experiment_name), "start_time", run_filter, MAX_SAME_NAMES
    ):
        recorded_store = found_run.data.tags.get(STORE_TAG, "")
        if not recorded_store or _find_own_store_id() in ("", recorded_store):
            return found_run.info.run_id
    return None


def _find_own_store_id() -> str:
    """Return the id of the object store of this process; "" if no object store is available."""
    bucket = os.environ.get(S3_BUCKET, "")
    try:
        return _read_store_id(bucket, os.environ.get(S3_ENDPOINT_URL, "")) if bucket else ""
    except RekindleError:
        return ""


@cache
def _read_store_id(bucket_name: str, endpoint_url: str) -> str:
    # imported only here, because the client of the object store is slow to import
    from rekindle.storage import Store, read_or_create_store_id

    return read_or_create_store_id(Store(bucket_name, endpoint_url or None, short_retries=True))


def find_last_start(experiment_name: str) -> float:
    """Return the start time of the newest workflow's run in `experiment_name`, in Unix seconds; 0
    if the experiment has no run."""
    newest_runs = _search_runs(
        _find_experiment_ids(experiment_name), "start_time DESC", f"tags.`{WORKFLOW}` != ''"
    )
    if newest_runs:
        return newest_runs[0].info.start_time / 1000
    return 0.0


def find_last_prepared_runs(
    experiment_name: str, workload_name: str, excluded_run_id: str, more_filter: str = ""
) -> list[RunData]:
    """Return the newest runs of `workload_name` that prepared a dataset, newest first, except the
    run `excluded_run_id`.

    `more_filter`: a further condition in MLflow's search syntax.
    """
    run_filter = (
        f"{format_condition(f'tags.`{WORKLOAD}`', workload_name)} AND tags.`{DIGEST}` != ''"
    )
    # exclude runs that reused a dataset, because they lack the metric `rows`
    run_filter += " AND metrics.rows > 0"

    if excluded_run_id:
        run_filter += f" AND attributes.run_id != '{ObjectId(excluded_run_id)}'"

    run_filter += f" AND {more_filter}" if more_filter else ""
    matching_runs = _search_runs(
        _find_experiment_ids(experiment_name), "start_time DESC", run_filter, MAX_LAST_RUNS
    )

    return [
        RunData(matching_run.data.metrics, matching_run.data.params, matching_run.data.tags)
        for matching_run in matching_runs
    ]


def find_page_address(workflow_name: str = "", mlflow_url: str = "") -> str:
    """Return the web address of the run of `workflow_name`. If `workflow_name` is empty, return the
    address of the newest run's experiment or, before the first run, of MLflow.

    `mlflow_url`: address of MLflow for browsers (empty: the address that this process uses).
    """
    search_answer = _post("experiments/search", {"max_results": 1000}, mlflow_api.ExperimentsPage)
    experiments_by_id = {
        experiment.experiment_id: experiment for experiment in search_answer.experiments
    }

    if workflow_name:
        run_filter = format_condition(f"tags.`{WORKFLOW}`", workflow_name)
    else:
        run_filter = f"tags.`{WORKFLOW}` != ''"

    newest_runs = _search_runs(list(experiments_by_id), "start_time DESC", run_filter)
    if not newest_runs:
        if workflow_name:
            raise TrackingError(
                f"MLflow at {format_address(get_server_address())} lacks the run {workflow_name}:"
                " see `rekindle status`."
            )

        return format_address(get_server_address())

    run_info = newest_runs[0].info
    experiment = experiments_by_id.get(run_info.experiment_id)
    run_path = f"/{run_info.run_id}" if workflow_name else ""

    has_view = experiment is not None and VIEW_TAG in experiment.tags
    view_parameter = "&viewStateShareKey=rekindle" if has_view and not workflow_name else ""
    query_parameters = f"workflowType=machine_learning{view_parameter}"
    server_address = mlflow_url or format_address(get_server_address())
    return (
        f"{server_address}/#/experiments/{run_info.experiment_id}/runs{run_path}?{query_parameters}"
    )


def log_to_run(
    run_id: str,
    *,
    run_params: Mapping[str, Any] | None = None,
    run_metrics: Mapping[str, float] | None = None,
    run_tags: Mapping[str, str] | None = None,
) -> None:
    """Log params (which cannot change later), metrics (at step 0) and tags. Nested mappings in
    `run_params` are flattened."""
    log_metrics(
        run_id, [(name, metric_value, 0) for name, metric_value in (run_metrics or {}).items()]
    )
    param_pairs = make_pairs(
        {
            name: format_parameter(param_value)[:MAX_PARAM_LENGTH]
            for name, param_value in flatten(run_params or {}).items()
        }
    )

    tag_pairs = make_pairs(run_tags or {})
    while param_pairs or tag_pairs:
        _post(
            "runs/log-batch",
            {"run_id": run_id, "params": param_pairs[:MAX_PARAMS], "tags": tag_pairs[:MAX_PARAMS]},
        )
        param_pairs = param_pairs[MAX_PARAMS:]
        tag_pairs = tag_pairs[MAX_PARAMS:]


def flatten(nested_values: Mapping[str, Any], name_prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, for example `{"train": {"steps": 3}}` to `{"train.steps": 3}`."""
    flat_values: dict[str, Any] = {}
    for name, value in nested_values.items():
        is_nested = isinstance(value, Mapping) and value
        flat_values.update(
            flatten(value, f"{name_prefix}{name}.")
            if is_nested
            else {f"{name_prefix}{name}": value}
        )
    return flat_values


def log_metrics(run_id: str, metric_points: Iterable[tuple[str, float, int]]) -> None:
    """Log points (name, value, step) of curves, in as few requests as MLflow allows."""
    current_time_ms = now_ms()
    # NaN and infinities are sent as texts, as proto3's JSON format requires
    metric_records = [
        {
            "key": name,
            "value": encode_number(metric_value),
            "timestamp": current_time_ms,
            "step": step,
        }
        for name, metric_value, step in metric_points
    ]
    for batch_start in range(0, len(metric_records), MAX_METRICS):
        _post(
            "runs/log-batch",
            {"run_id": run_id, "metrics": metric_records[batch_start : batch_start + MAX_METRICS]},
        )


def log_dataset(
    run_id: str, name: str, dataset_digest: str, data_source: str, row_counts: Mapping[str, int]
) -> None:
    """Log the training dataset of a run."""
    dataset_record = {
        "name": name,
        "digest": dataset_digest[:MAX_DIGEST_LENGTH],
        "source_type": split_address(data_source).scheme or "local",
        "source": to_json({"uri": data_source}),
        "profile": to_json(row_counts),
    }

    dataset_input = {
        "tags": [{"key": "mlflow.data.context", "value": "training"}],
        "dataset": dataset_record,
    }
    _post("runs/log-inputs", {"run_id": run_id, "datasets": [dataset_input]})


def log_folder(run_id: str, path: Path, artifact_name: str) -> None:
    """Log all files below `path` as artifacts of the run, under `artifact_name`."""
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        log_artifact(run_id, f"{artifact_name}/{file.relative_to(path)}", file.read_bytes())


def log_artifact(run_id: str, path: str, artifact_content: bytes) -> None:
    """Log an artifact of the run. Raises TrackingError if the server does not store artifacts."""
    artifact_root = split_address(_read_artifact_root(run_id))
    if artifact_root.scheme != "mlflow-artifacts":
        raise TrackingError(
            f"MLflow at {format_address(get_server_address())} keeps artifacts in"
            f" {artifact_root.scheme}:, where a step cannot write: start it with --serve-artifacts"
            " (its default) and --artifacts-destination, and use a new experiment."
        )
    target_path = quote(f"{artifact_root.path.strip('/')}/{path}")
    address_path = f"mlflow-artifacts/artifacts/{target_path}"
    _request("PUT", address_path, mlflow_api.ArtifactChanged, data=artifact_content)


def artifacts(run_id: str, folder: str) -> list[str]:
    """Return the paths of the run's artifacts directly below `folder`."""
    search_parameters = {"run_id": run_id, "path": folder}
    artifacts_page = _request(
        "GET", "mlflow/artifacts/list", mlflow_api.ArtifactsPage, params=search_parameters
    )
    return [file.path for file in artifacts_page.files]


def read_tags(run_id: str) -> dict[str, str]:
    return _read_run(run_id).data.tags


def read_params(run_id: str) -> dict[str, str]:
    """Return the parameters of a run. The settings of the run's config are parameters with names
    such as train.workers."""
    return _read_run(run_id).data.params


def show_columns(experiment_name: str, metric_names: Iterable[str]) -> None:
    """Set the columns of the experiment's table of runs, and the first of `metric_names` as its
    primary metric."""
    listed_metrics = list(metric_names)
    table_view = {
        "selectedColumns": [*(f"metrics.`{name}`" for name in listed_metrics), *TABLE_COLUMNS]
    }
    for key, tag_value in (
        (VIEW_TAG, to_json(table_view)),
        ("mlflow.experiment.primaryMetric.name", listed_metrics[0]),
    ):
        experiment_tag = {
            "experiment_id": _get_or_create_experiment(experiment_name),
            "key": key,
            "value": tag_value,
        }
        _post("experiments/set-experiment-tag", experiment_tag)


def finish(run_id: str, run_status: str) -> None:
    """Set the status of an MLflow run to FINISHED, FAILED or KILLED."""
    _post("runs/update", {"run_id": run_id, "status": run_status, "end_time": now_ms()})


def champion(model_name: str) -> Release | None:
    """Return the served version of a model (alias `champion`), or None before the first release."""
    model_answer = _get_or_none("registered-models/get", mlflow_api.ModelAnswer, name=model_name)
    model_aliases = model_answer.registered_model.aliases if model_answer else []
    champion_versions = [
        model_alias.version for model_alias in model_aliases if model_alias.alias == CHAMPION
    ]
    if not champion_versions:
        return None

    version_key = {"name": model_name, "version": champion_versions[0]}
    model_answer = _request(
        "GET", "mlflow/model-versions/get", mlflow_api.VersionAnswer, params=version_key
    )
    return _make_release(model_answer.model_version)


def find_version(model_name: str, version: str) -> Release | None:
    """Return a version of a registered model, or None if the version does not exist."""
    model_version = _get_version(model_name, version)
    if model_version:
        return _make_release(model_version)
    return None


def _get_version(model_name: str, version: str) -> mlflow_api.ModelVersion | None:
    """Return MLflow's record of a model version, or None if the version does not exist."""
    version_answer = _get_or_none(
        "model-versions/get", mlflow_api.VersionAnswer, name=model_name, version=version
    )
    if version_answer:
        return version_answer.model_version
    return None


def require_champion(model_name: str) -> Release:
    """Return the champion of a model. Raises ConfigError if the model does not have a champion."""
    champion_release = champion(model_name)
    if champion_release:
        return champion_release
    raise ConfigError(
        f'the model "{model_name}" does not have a champion: release a version first, or correct'
        " the name."
    )


def register_version(
    model_name: str,
    model_uri: str,
    source: str,
    weights_sha256: str,
    run_id: str,
    version_tags: Mapping[str, str],
) -> Release:
    """Return the version of the model `model_name` whose files are at `model_uri`, and give it the
    alias `candidate`. Create the version if no version has these files.

    `source`: full address of the files (s3://bucket/prefix).
    """
    _create_if_missing("registered-models/create", {"name": model_name})
    version_request = {
        "name": model_name,
        "source": source,
        "run_id": run_id,
        "tags": make_pairs(
            {**version_tags, URI: model_uri, SHA256: weights_sha256, UNCONFIRMED: "yes"}
        ),
    }

    while True:
        for existing_version in _find_registered_versions(model_name, model_uri, source):
            version_number = existing_version.version
            # the alias protects the version from retention
            _set_alias(model_name, CANDIDATE, version_number)
            model_version = _get_version(model_name, version_number)
            if not model_version or REMOVED in model_version.tags:
                continue

            if _confirm_first_version(model_name, version_number):
                remove_duplicates(model_name, model_uri, source, version_number)
                return _make_release(model_version)

        created_version = _post(
            "model-versions/create", version_request, mlflow_api.VersionAnswer
        ).model_version
        version_number = created_version.version
        # search again: if another process has registered the same files, only the first version is
        # kept
        first_version = next(
            iter(_find_registered_versions(model_name, model_uri, source)), created_version
        )
        is_first = first_version.version == version_number
        if is_first and _confirm_first_version(model_name, version_number):
            _set_alias(model_name, CANDIDATE, version_number)
            return _make_release(created_version)

        _delete("model-versions/delete", {"name": model_name, "version": version_number})


def remove_duplicates(model_name: str, model_uri: str, source: str, version_number: str) -> None:
    """Delete later versions with the same files as the version `version_number`. The process that
    registers a duplicate also deletes it, unless this process has ended before.
    """
    for registered_version in _find_registered_versions(model_name, model_uri, source):
        is_later = int(registered_version.version) > int(version_number)
        if is_later and UNCONFIRMED in registered_version.tags:
            version_key = {"name": model_name, "version": registered_version.version}
            _delete("model-versions/delete", version_key)


def _confirm_first_version(model_name: str, version_number: str) -> bool:
    """Delete the tag UNCONFIRMED of a version, which is the first with its files. Return False if
    the version was deleted in the meantime."""
    version_key = {"name": model_name, "version": version_number, "key": UNCONFIRMED}
    return _delete("model-versions/delete-tag", version_key)


def _delete(path: str, request_content: Mapping[str, Any]) -> bool:
    """Delete an object in MLflow. Return False if another process has already deleted it."""
    try:
        _request("DELETE", f"mlflow/{path}", mlflow_api.Answer, json=request_content)
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True


def _find_registered_versions(
    model_name: str, model_uri: str, source: str
) -> list[mlflow_api.ModelVersion]:
    """Return the versions of `model_name` whose files are at `model_uri` in this bucket, oldest
    first, except versions that are being removed."""
    search_filter = (
        f"{format_condition('name', model_name)} and {format_condition(f'tags.`{URI}`', model_uri)}"
    )
    matching_versions = []

    for model_version in _search_versions(search_filter, model_name):
        has_files = model_version.tags.get(URI) == model_uri and model_version.source == source
        if has_files and REMOVED not in model_version.tags:
            matching_versions.append(model_version)

    return sorted(matching_versions, key=lambda model_version: int(model_version.version))


def record_champion(model_name: str, version: str, deployment_name: str, run_id: str = "") -> None:
    """Give a version of the model `model_name` the alias `champion`. Record its Deployment, the
    time, and the run that promotes it."""
    record_deployment(model_name, version, deployment_name)
    _set_alias(model_name, CHAMPION, version)
    tag_version(model_name, version, CHAMPION_SINCE, str(now_ms()))
    if run_id:
        tag_version(model_name, version, PROMOTED_BY, run_id)


def record_deployment(model_name: str, version: str, deployment_name: str) -> None:
    """Record the Deployment that serves a version."""
    tag_version(model_name, version, DEPLOYMENT, deployment_name)


def tag_version(model_name: str, version: str, tag_key: str, tag_value: str) -> None:
    """Set a tag of a model version."""
    tag_request = {"name": model_name, "version": version, "key": tag_key, "value": tag_value}
    _post("model-versions/set-tag", tag_request)


def promoted_releases(model_name: str) -> list[Release]:
    """Return the versions of `model_name` that were promoted with a Deployment, oldest first."""
    promoted_versions = _search_versions(
        f"{format_condition('name', model_name)} and tags.`{DEPLOYMENT}` != ''", model_name
    )
    releases = list[Release]()

    for model_version in promoted_versions:
        try:
            releases.append(_make_release(model_version))
        except (InvalidName, TrackingError) as error:
            write_stderr(f"a version is ignored: {error}")

    return sorted(releases, key=lambda release: int(release.version))


def _search_versions(search_filter: str, model_name: str) -> list[mlflow_api.ModelVersion]:
    """Return the versions of the model `model_name` that match a filter."""
    search_parameters = {"filter": search_filter, "max_results": 10_000}
    versions_page = _request(
        "GET", "mlflow/model-versions/search", mlflow_api.VersionsPage, params=search_parameters
    )
    return [
        model_version
        for model_version in versions_page.model_versions
        if model_version.name == model_name
    ]


def _set_alias(model_name: str, alias: str, version: str) -> None:
    alias_request = {"name": model_name, "alias": alias, "version": version}
    try:
        _post("registered-models/alias", alias_request)
    except RequestRefused as error:
        # retry once: MLflow answers BAD_REQUEST if another process creates the alias at the same
        # time
        if error.code != "BAD_REQUEST":
            raise
        _post("registered-models/alias", alias_request)


def _make_release(model_version: mlflow_api.ModelVersion) -> Release:
    """Convert a version of MLflow, and validate its tags, which every client can write.

    Raises TrackingError if a tag is missing, and InvalidName if a tag is invalid.
    """
    version_tags = model_version.tags
    try:
        model_uri = version_tags[URI]
        sha256 = version_tags[SHA256]
    except KeyError as error:
        raise TrackingError(
            f"version {model_version.version} of the model {format_untrusted(model_version.name)}"
            " lacks the"
            f" tag {error}: only versions that `steps.release` registered can serve. Remove the"
            " alias of this version in MLflow, or give the model another name."
        ) from error

    tag_origin = (
        f"of version {model_version.version} of {format_untrusted(model_version.name)} in MLflow"
    )
    ArtifactKey(model_uri.rstrip("/"), f"the tag {URI} {tag_origin}")

    deployment_name = version_tags.get(DEPLOYMENT, "")
    if deployment_name:
        ObjectName(deployment_name, f"the tag {DEPLOYMENT} {tag_origin}")

    keep_releases_text = version_tags.get(KEEP_RELEASES, "")
    return Release(
        version=Version(model_version.version, "MLflow"),
        uri=model_uri,
        sha256=sha256,
        deployment=deployment_name,
        run_id=model_version.run_id,
        promoted_by=version_tags.get(PROMOTED_BY, ""),
        keep_releases=int(keep_releases_text)
        if NUMBER_PATTERN.fullmatch(keep_releases_text)
        else None,
    )


def _search_runs(
    experiment_ids: list[str], sort_order: str, run_filter: str, max_runs: int = 1
) -> list[mlflow_api.Run]:
    """Return the first runs of these experiments that match a filter."""
    search_parameters = {
        "experiment_ids": experiment_ids,
        "filter": run_filter,
        "order_by": [f"attributes.{sort_order}"],
        "max_results": max_runs,
    }
    if experiment_ids:
        return _post("runs/search", search_parameters, mlflow_api.RunsPage).runs
    return []


def _find_experiment_ids(name: str) -> list[str]:
    """Return a list with the id of the experiment `name`; [] if the experiment does not exist."""
    experiment_answer = _get_or_none(
        "experiments/get-by-name", mlflow_api.ExperimentAnswer, experiment_name=name
    )
    if experiment_answer:
        return [experiment_answer.experiment.experiment_id]
    return []


def _read_run(run_id: str) -> mlflow_api.Run:
    return _request("GET", "mlflow/runs/get", mlflow_api.RunAnswer, params={"run_id": run_id}).run


@cache
def _read_artifact_root(run_id: str) -> str:
    return _read_run(run_id).info.artifact_uri


def _get_or_none(path: str, answer_type: type[A], **query_parameters: str) -> A | None:
    """Send a request to MLflow; return the answer, or None if the object does not exist."""
    try:
        return _request("GET", f"mlflow/{path}", answer_type, params=query_parameters)
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _get_or_create_experiment(name: str) -> str:
    """Return the id of the experiment `name`; create the experiment if it does not
    exist. Raises TrackingError if the experiment is deleted."""
    _create_if_missing("experiments/create", {"name": name, "tags": make_pairs(EXPERIMENT_TAGS)})
    path = "mlflow/experiments/get-by-name"
    query_parameters = {"experiment_name": name}
    experiment = _request(
        "GET", path, mlflow_api.ExperimentAnswer, params=query_parameters
    ).experiment
    if experiment.lifecycle_stage == "deleted":
        raise TrackingError(
            f'the experiment "{name}" is deleted in MLflow, but keeps its name. Restore it (mlflow'
            f" experiments restore -x {experiment.experiment_id}), or choose another name."
        )
    return experiment.experiment_id


def _create_if_missing(path: str, request_content: Mapping[str, Any]) -> None:
    try:
        _post(path, request_content)
    except RequestRefused as error:
        if error.code != "RESOURCE_ALREADY_EXISTS":
            raise


def _post(
    path: str, request_content: Mapping[str, Any], answer_type: type[A] = mlflow_api.Answer
) -> A:
    return _request("POST", f"mlflow/{path}", answer_type, json=request_content)


@cache
def resolve_run_id(run_id: str) -> str:
    """Return the id of a run, given as its id or as EXPERIMENT/WORKFLOW. Create the run if it does
    not exist."""
    if "/" in run_id:
        return start_run(run_id.partition("/")[0], run_id.partition("/")[2])
    return run_id


def _request(method: str, path: str, answer_type: type[A], **request_options: Any) -> A:
    """Send a request to MLflow and return the answer. The value `run_id` in the JSON or the query
    of the request may be EXPERIMENT/WORKFLOW, which is replaced by the run's id."""
    request_values = request_options.get("json") or request_options.get("params") or {}
    if "run_id" in request_values:
        request_values["run_id"] = resolve_run_id(request_values["run_id"])
    return send_request(method, path, answer_type, **request_options)
