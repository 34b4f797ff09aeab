"""MLflow as the steps use it: one run per workflow, and a model registry whose alias `champion` is what is served.

Only `MLFLOW_TRACKING_URI` is needed; artifacts go through the server. Every operation is
idempotent, because steps are retried. Every failure is a TrackingError that names the server and the way out.
These are requests to MLflow's REST API, for the import of its Python client alone takes 4 s of CPU in every step.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from rekindle.errors import ConfigError, TrackingError, without_user
from rekindle.mlflow_api import Refused, address, request
from rekindle.step import to_text

WORKFLOW = "rekindle.workflow"  # tag: the one workflow that a run belongs to
DIGEST = "rekindle.digest"  # tag: the dataset that a run prepared
URI, SHA256 = "rekindle.uri", "rekindle.sha256"  # tags of a model version
DEPLOYMENT = "rekindle.deployment"  # the same, once it was promoted: what serves it
CHAMPION, CANDIDATE = "champion", "candidate"  # aliases: the version being served, and the one registered last
KIND = {"mlflow.experimentKind": "custom_model_development"}  # the page opens on runs and charts, not on traces
VIEW = "mlflow.sharedViewState.rekindle"  # tag: what the page shows if its address names the view "rekindle"
COLUMNS = ("tags.`verdict`", "tags.`rekindle.version`", "params.`train.learning_rate`", "params.`train.epochs`")
NOTE = "mlflow.note.content"  # tag: the description of a run
METRICS, PARAMS = 1000, 100  # MLflow's own limits of a request; that of tags is that of params
LAST_RUNS = 20  # that a new one is compared with, at most
PARAM_LENGTH, DIGEST_LENGTH = 6000, 36


@dataclass(frozen=True)
class Release:
    """One version of a registered model: `uri` is the prefix of its files in the bucket, `sha256` its weights'."""

    version: str
    uri: str
    sha256: str
    deployment: str = ""  # empty before it was promoted
    run_id: str = field(default="", compare=False)


@dataclass(frozen=True)
class Recorded:
    """What a run has logged."""

    metrics: dict[str, float]
    params: dict[str, str]
    tags: dict[str, str]


def start_run(experiment: str, workflow: str, tags: Mapping[str, str] | None = None) -> str:
    """The id of the run of `workflow` in `experiment`; both are created if missing."""
    if run_id := find_run(experiment, workflow):
        return run_id
    labels = _pairs({**(tags or {}), WORKFLOW: workflow})
    run = {"experiment_id": _experiment_id(experiment), "run_name": workflow, "start_time": _now(), "tags": labels}
    return _post("runs/create", run)["run"]["info"]["run_id"]


def find_run(experiment: str, workflow: str) -> str | None:
    """The id of the run of `workflow`, the first if there are several, or None."""
    runs = _runs(_ids(experiment), "start_time", f"tags.`{WORKFLOW}` = '{workflow}'")
    return runs[0]["info"]["run_id"] if runs else None


def last_start(experiment: str) -> float:
    """When the newest run of a workflow in `experiment` began, in Unix seconds; 0 if there is none."""
    runs = _runs(_ids(experiment), "start_time DESC", f"tags.`{WORKFLOW}` != ''")
    return runs[0]["info"]["start_time"] / 1000 if runs else 0.0


def last_prepared(experiment: str, workload: str, but: str) -> list[Recorded]:
    """The last runs of `workload` that prepared a dataset, other than `but`, newest first."""
    others = f"tags.`rekindle.workload` = '{workload}' AND tags.`{DIGEST}` != '' AND attributes.run_id != '{but}'"
    others += " AND metrics.rows > 0"  # not those that took the dataset of another
    found = _runs(_ids(experiment), "start_time DESC", others, LAST_RUNS)
    return [Recorded(*(_mapping(run["data"].get(name)) for name in ("metrics", "params", "tags"))) for run in found]


def page(workflow: str = "", at: str = "") -> str:
    """The address of the run of `workflow`, or of the newest run's experiment; MLflow's own if there is none.

    `at` is where people reach MLflow (empty: where this process does).
    """
    experiments = _post("experiments/search", {"max_results": 1000}).get("experiments", [])
    ids = {experiment["experiment_id"]: _mapping(experiment.get("tags")) for experiment in experiments}
    mine = f"tags.`{WORKFLOW}` = '{workflow}'" if workflow else f"tags.`{WORKFLOW}` != ''"
    runs = _runs(list(ids), "start_time DESC", mine)
    if not runs:
        if workflow:
            raise TrackingError(f"MLflow at {without_user(address())} has no run of {workflow}: see `rekindle status`.")
        return address()
    run_id, experiment = runs[0]["info"]["run_id"], runs[0]["info"]["experiment_id"]
    shown = f"/{run_id}" if workflow else ""
    view = "&viewStateShareKey=rekindle" if VIEW in ids[experiment] and not workflow else ""
    return f"{at or address()}/#/experiments/{experiment}/runs{shown}?workflowType=machine_learning{view}"


def log(
    run_id: str,
    *,
    params: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    """Params (never changed later), metrics (at step 0) and tags of a run; mappings in `params` are flattened."""
    log_metrics(run_id, [(name, value, 0) for name, value in (metrics or {}).items()])
    settings = _pairs({name: to_text(value)[:PARAM_LENGTH] for name, value in flatten(params or {}).items()})
    labels = _pairs(tags or {})
    while settings or labels:
        _post("runs/log-batch", {"run_id": run_id, "params": settings[:PARAMS], "tags": labels[:PARAMS]})
        settings, labels = settings[PARAMS:], labels[PARAMS:]


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`{"train": {"steps": 3}}` → `{"train.steps": 3}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{above}{name}.") if inner else {f"{above}{name}": value}
    return flat


def log_metrics(run_id: str, points: Iterable[tuple[str, float, int]]) -> None:
    """Points (name, value, step) of curves, in as few requests as MLflow allows."""
    now = _now()
    # proto3's JSON has NaN and the infinities as texts
    metrics = [{"key": name, "value": _number(value), "timestamp": now, "step": step} for name, value, step in points]
    for start in range(0, len(metrics), METRICS):
        _post("runs/log-batch", {"run_id": run_id, "metrics": metrics[start : start + METRICS]})


def log_dataset(run_id: str, name: str, digest: str, source: str, counts: Mapping[str, int]) -> None:
    """The dataset that the run trains on."""
    dataset = {
        "name": name,
        "digest": digest[:DIGEST_LENGTH],
        "source_type": urlsplit(source).scheme or "local",
        "source": json.dumps({"uri": source}),
        "profile": json.dumps(counts),
    }
    used = {"tags": [{"key": "mlflow.data.context", "value": "training"}], "dataset": dataset}
    _post("runs/log-inputs", {"run_id": run_id, "datasets": [used]})


def log_dir(run_id: str, path: Path, name: str) -> None:
    """Every file below `path` as artifacts of the run, under `name`."""
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        log_artifact(run_id, f"{name}/{file.relative_to(path)}", file.read_bytes())


def log_artifact(run_id: str, path: str, content: bytes) -> None:
    """One artifact of the run. Raises TrackingError if the server leaves artifacts to its clients."""
    root = urlsplit(_artifact_root(run_id))
    if root.scheme != "mlflow-artifacts":
        raise TrackingError(
            f"MLflow at {without_user(address())} keeps artifacts in {root.scheme}:, where a step cannot write: start "
            "it with --serve-artifacts (its default) and --artifacts-destination, and use a new experiment."
        )
    where = quote(f"{root.path.strip('/')}/{path}")
    _request("PUT", f"mlflow-artifacts/artifacts/{where}", data=content)


def artifacts(run_id: str, folder: str) -> list[str]:
    """The paths of the run's artifacts directly below `folder`."""
    answer = _request("GET", "mlflow/artifacts/list", params={"run_id": run_id, "path": folder})
    return [file["path"] for file in answer.get("files", [])]


def tags_of(run_id: str) -> dict[str, str]:
    """The tags of a run."""
    return _mapping(_run(run_id)["data"].get("tags"))


def params_of(run_id: str) -> dict[str, str]:
    """The parameters of a run; those of its config are called as there, such as train.workers."""
    return _mapping(_run(run_id)["data"].get("params"))


def show_columns(experiment: str, metrics: Iterable[str]) -> None:
    """What the table of the experiment's runs shows, where it is opened by `page`; charts begin with the first."""
    names = list(metrics)
    view = {"selectedColumns": [*(f"metrics.`{name}`" for name in names), *COLUMNS]}
    for key, value in ((VIEW, json.dumps(view)), ("mlflow.experiment.primaryMetric.name", names[0])):
        tag = {"experiment_id": _experiment_id(experiment), "key": key, "value": value}
        _post("experiments/set-experiment-tag", tag)


def finish(run_id: str, status: str) -> None:
    """Close the run as FINISHED, FAILED or KILLED."""
    _post("runs/update", {"run_id": run_id, "status": status, "end_time": _now()})


def champion(name: str) -> Release | None:
    """The version of `name` with the alias `champion`, which is the one being served; None before the first."""
    known = _get("registered-models/get", "registered_model", name=name) or {}
    versions = [alias["version"] for alias in known.get("aliases", []) if alias["alias"] == CHAMPION]
    if not versions:
        return None
    version = _request("GET", "mlflow/model-versions/get", params={"name": name, "version": versions[0]})
    return _release(version["model_version"])


def present_champion(name: str) -> Release:
    """The champion of a model that must have one. Raises ConfigError."""
    if release := champion(name):
        return release
    raise ConfigError(f'the model "{name}" has no champion: release one first, or correct the name.')


def register(name: str, uri: str, source: str, sha256: str, run_id: str, tags: Mapping[str, str]) -> Release:
    """The version of `name` whose files lie at `uri`, created if missing; it gets the alias `candidate`.

    `source` is the location of those files that people see (s3://bucket/prefix).
    """
    _create_if_missing("registered-models/create", {"name": name})
    mine = {"filter": f"name = '{name}' and tags.`{URI}` = '{uri}'"}
    versions = _request("GET", "mlflow/model-versions/search", params=mine).get("model_versions")
    labels = _pairs({**tags, URI: uri, SHA256: sha256})
    if versions:
        version = min(versions, key=lambda version: int(version["version"]))
    else:
        made = {"name": name, "source": source, "run_id": run_id, "tags": labels}
        version = _post("model-versions/create", made)["model_version"]
    _set_alias(name, CANDIDATE, version["version"])
    return _release(version)


def promote(name: str, version: str, deployment: str) -> None:
    """Give version `version` of `name` the alias `champion`: what `deployment` serves from now on."""
    record_deployment(name, version, deployment)
    _set_alias(name, CHAMPION, version)


def record_deployment(name: str, version: str, deployment: str) -> None:
    """Record what serves a version."""
    _post("model-versions/set-tag", {"name": name, "version": version, "key": DEPLOYMENT, "value": deployment})


def promoted(name: str) -> list[Release]:
    """The versions of `name` that were promoted with a Deployment, the oldest first."""
    search = {"filter": f"name = '{name}' and tags.`{DEPLOYMENT}` != ''", "max_results": 1000}
    versions = _request("GET", "mlflow/model-versions/search", params=search).get("model_versions", [])
    return sorted(map(_release, versions), key=lambda release: int(release.version))


def _set_alias(name: str, alias: str, version: str) -> None:
    _post("registered-models/alias", {"name": name, "alias": alias, "version": version})


def _release(version: dict[str, Any]) -> Release:
    tags = _mapping(version.get("tags"))
    try:
        return Release(version["version"], tags[URI], tags[SHA256], tags.get(DEPLOYMENT, ""), version.get("run_id", ""))
    except KeyError as error:
        raise TrackingError(
            f'version {version["version"]} of the model "{version["name"]}" has no tag {error}: only versions that a '
            "release made can serve. Remove its alias in MLflow, or give the model another name."
        ) from error


def _runs(experiments: list[str], order: str, where: str, most: int = 1) -> list[dict[str, Any]]:
    """The first runs of these experiments."""
    search = {"experiment_ids": experiments, "filter": where, "order_by": [f"attributes.{order}"], "max_results": most}
    return _post("runs/search", search).get("runs", []) if experiments else []


def _ids(experiment: str) -> list[str]:
    """The id of an experiment, if there is one of that name."""
    known = _get("experiments/get-by-name", "experiment", experiment_name=experiment)
    return [known["experiment_id"]] if known else []


def _run(run_id: str) -> dict[str, Any]:
    return _request("GET", "mlflow/runs/get", params={"run_id": run_id})["run"]


@cache
def _artifact_root(run_id: str) -> str:
    return _run(run_id)["info"]["artifact_uri"]


def _get(path: str, kind: str, **names: str) -> dict[str, Any] | None:
    """The `kind` of these names, or None if there is none."""
    try:
        return _request("GET", f"mlflow/{path}", params=names)[kind]
    except Refused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _experiment_id(name: str) -> str:
    _create_if_missing("experiments/create", {"name": name, "tags": _pairs(KIND)})
    known = _get("experiments/get-by-name", "experiment", experiment_name=name)
    assert known
    if known["lifecycle_stage"] == "deleted":
        raise TrackingError(
            f'the experiment "{name}" is deleted in MLflow: its name stays taken. Restore it (mlflow experiments '
            f"restore -x {known['experiment_id']}), or choose another name."
        )
    return known["experiment_id"]


def _create_if_missing(path: str, content: Mapping[str, Any]) -> None:
    try:
        _post(path, content)
    except Refused as error:
        if error.code != "RESOURCE_ALREADY_EXISTS":
            raise


def _pairs(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"key": name, "value": str(value)} for name, value in values.items()]


def _mapping(pairs: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {pair["key"]: pair.get("value", "") for pair in pairs or []}


def _number(value: float) -> float | str:
    number = float(value)
    return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(str(number), number)


def _post(path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return _request("POST", f"mlflow/{path}", json=content)


@cache
def resolved(run_id: str) -> str:
    """The id of a run that may be given as EXPERIMENT/WORKFLOW, as where no step ran that makes one."""
    return start_run(run_id.partition("/")[0], run_id.partition("/")[2]) if "/" in run_id else run_id


def _request(method: str, path: str, **content: Any) -> dict[str, Any]:
    """Return MLflow's answer, with the id of a run that is given by its names."""
    if "run_id" in (values := content.get("json") or content.get("params") or {}):
        values["run_id"] = resolved(values["run_id"])
    return request(method, path, **content)


def _now() -> int:
    return int(time.time() * 1000)
