"""Reads the runs, releases and cache entries that exist, from MLflow and the object store.

MLflow may be shared by several object stores: a run belongs to this store if the caller knows it, or if its tag has the
id of this store, which the step `report` sets.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rekindle import tracking
from rekindle.cache import claims, entries
from rekindle.errors import Conflict
from rekindle.mlflow_api import RequestRefused, request
from rekindle.release import origin, promotion
from rekindle.release.retention.decision import Listing, Release, Run
from rekindle.storage import NotFound, Store

STORE_TAG = "rekindle.store"  # tag of a run: id of its object store
EMPTIED_TAG = "rekindle.artifacts"  # tag of a run: "removed" if only the record in MLflow is left
STORE_ID_KEY = "store-id"  # object with a random id of the object store
PAGE = 1000
# later runs are compared with the newest successful run with each of these tags (steps/monitoring/moving_window.py)
COMPARED_TAGS = (tracking.DIGEST, "rekindle.code", "data.window_until")
SETTINGS = ("keep_runs", "keep_days", "keep_releases")


@dataclass(frozen=True)
class Context:
    """Information that only the caller has. `runs`: the runs of this machine or namespace, with exact phases.

    `claim_s`: number of seconds that the artifacts of a claimed cache entry stay. `resumable_s`: number of seconds
    after its end that any other failed run may be resumed, or be active again. `targets`: returns the versions of a
    model that `rekindle rollback` can restore; None: releases are not removed.
    """

    runs: Mapping[str, Run]
    claim_s: float
    resumable_s: float
    targets: Callable[[str], set[str]] | None


def store_id(store: Store) -> str:
    """Return the id of the object store; create it if it is missing. Raises StorageError."""
    with suppress(NotFound):
        return store.get(STORE_ID_KEY).decode()
    with suppress(Conflict):
        store.put(STORE_ID_KEY, uuid.uuid4().hex.encode(), if_absent=True)
    return store.get(STORE_ID_KEY).decode()


def read(store: Store, pipelines: Iterable[str], context: Context) -> Listing:
    """List the runs and releases of `pipelines`, all runs that the caller knows, and the entries of the cache.

    Raises StorageError, TrackingError.
    """
    own_id, runs, by_id = store_id(store), dict(context.runs), dict[str, Run]()
    for pipeline in (pipelines := set(pipelines)):
        records = list(_records(pipeline))
        compared = _compared(records)
        for record in records:
            name, tags = record["name"], record["tags"]
            known = runs.get(name)
            if known or tags.get(STORE_TAG) == own_id:
                run = known or _run(record, pipeline, context.resumable_s)
                uses = run.uses | _data_task(store, record["params"].get("data.source", ""))
                emptied = not known and tags.get(EMPTIED_TAG) == "removed"
                runs[name] = replace(run, uses=uses, compared=record["id"] in compared, emptied=emptied)
                by_id[record["id"]] = runs[name]
    releases = list(_releases(store, by_id, context)) if context.targets else []
    claimed = frozenset(claims.claimed_tasks(store, context.claim_s)) | _data_tasks(store, pipelines)
    return Listing([*runs.values()], releases, entries.entries(store), claimed)


def limits_of(pipeline: str) -> dict[str, Any]:
    """Return the section `retention` of the newest run of a pipeline in MLflow; {} if it is not recorded."""
    records = _search([pipeline], f"tags.`{tracking.WORKFLOW}` != ''", 1)
    for record in records:
        params = record["params"]
        values = {name: params.get(f"retention.{name}", "null") for name in SETTINGS}
        return {name: json.loads(value) for name, value in values.items() if value not in ("null", "None", "")}
    return {}


def inputs_of(store: Store, releases: Iterable[Release]) -> Callable[[Release], Iterator[str]]:
    """Return the function that lists the releases that `rekindle reproduce` of a release reads.

    These are the release that its training starts from and, for a refreshed champion, the previous champion.
    """
    versions = {(release.model, str(release.version)): release for release in releases}

    def inputs(release: Release) -> Iterator[str]:
        with suppress(NotFound):
            yield f"{json.loads(store.get(f'{release.prefix}model.json')).get('start', '').rstrip('/')}/"
            champion = json.loads(store.get(f"{release.prefix}{origin.FILE}")).get("champion", "")
            previous = versions.get((release.model, champion))
            if previous and previous.sha256 == release.sha256:
                yield previous.prefix

    return inputs


def has_alias(model: str, version: str) -> bool:
    """True if an alias refers to the version now."""
    registered = request("GET", "mlflow/registered-models/get", params={"name": model})["registered_model"]
    return any(alias["version"] == version for alias in registered.get("aliases") or [])


def has_other_version(release: Release) -> bool:
    """True if another version, which is not being removed, has the same files now, such as a copy in another model."""
    prefix, own = release.prefix.rstrip("/"), (release.model, str(release.version))
    filters = (f"tags.`{tracking.URI}` LIKE '{prefix}%'", f"source_path LIKE '%/{prefix}%'")
    versions = (found for each in filters for found in _all("model-versions", "model_versions", {"filter": each}))
    return any(
        (found["name"], found["version"]) != own and tracking.REMOVED not in tracking.mapping(found.get("tags"))
        for found in versions
    )


def children(run_id: str) -> list[str]:
    """Return the ids of the child runs of an MLflow run, such as the trials of a sweep."""
    experiment = request("GET", "mlflow/runs/get", params={"run_id": run_id})["run"]["info"]["experiment_id"]
    return [record["id"] for record in _pages([experiment], f"tags.`{tracking.PARENT}` = '{run_id}'")]


def _records(experiment: str) -> Iterator[dict[str, Any]]:
    """Yield the runs of an experiment, newest first, without the trials of sweeps."""
    for record in _search([experiment], f"tags.`{tracking.WORKFLOW}` != ''"):
        if tracking.PARENT not in record["tags"]:
            yield record


def _data_tasks(store: Store, pipelines: Set[str]) -> frozenset[str]:
    """Return RUN/TASK of the artifacts that are the data.source of other pipelines' runs."""
    ids = [found["experiment_id"] for found in _all("experiments", "experiments", {}) if found["name"] not in pipelines]
    condition = f"tags.`{tracking.WORKFLOW}` != '' AND params.`data.source` LIKE '{store.uri('')}%'"
    records = _pages(ids, condition) if ids else ()
    return frozenset().union(*(_data_task(store, record["params"]["data.source"]) for record in records))


def _search(names: Iterable[str], run_filter: str, limit: int = PAGE) -> Iterator[dict[str, Any]]:
    for name in names:
        try:
            answer = request("GET", "mlflow/experiments/get-by-name", params={"experiment_name": name})
        except RequestRefused as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            continue
        yield from _pages([answer["experiment"]["experiment_id"]], run_filter, limit)


def _pages(experiments: list[str], run_filter: str, limit: int = PAGE) -> Iterator[dict[str, Any]]:
    search: dict[str, Any] = {"experiment_ids": experiments, "filter": run_filter, "max_results": limit}
    search["order_by"] = ["attributes.start_time DESC"]
    while True:
        answer = request("POST", "mlflow/runs/search", json=search)
        for run in answer.get("runs", []):
            fields = {name: tracking.mapping(run["data"].get(name)) for name in ("tags", "params")}
            yield {"id": run["info"]["run_id"], "info": run["info"], "name": fields["tags"][tracking.WORKFLOW]} | fields
        if not (token := answer.get("next_page_token")):
            return
        search["page_token"] = token


def _run(record: dict[str, Any], pipeline: str, resumable_s: float) -> Run:
    """Return a run that only MLflow knows: a run that failed counts as active while it may be resumed."""
    info = record["info"]
    ended = info.get("end_time", 0) / 1000 if info["status"] != "RUNNING" else None
    succeeded = info["status"] == "FINISHED"
    if ended is not None and not succeeded and time.time() - ended < resumable_s:
        ended = None
    counted = tracking.BACKFILL not in record["tags"]
    refers = tracking.REFERS in record["tags"]
    uses = frozenset(task for tag, task in record["tags"].items() if refers and tag.startswith(tracking.CACHED))
    return Run(record["name"], pipeline, ended, succeeded, counted, uses)


def _compared(records: list[dict[str, Any]]) -> set[str]:
    """Return the ids of the runs that later runs are compared with; `records` are sorted, newest first."""
    newest: dict[str, str] = {}
    for record in records:
        for tag in COMPARED_TAGS:
            if tag in record["tags"] and record["info"]["status"] == "FINISHED":
                newest.setdefault(tag, record["id"])
    return {*newest.values()}


def _data_task(store: Store, uri: str) -> frozenset[str]:
    """Return RUN/TASK of data.source, if the data may be an artifact of an earlier run."""
    parts = urlsplit(uri)
    names = parts.path.strip("/").split("/")
    is_artifact = parts.scheme == "s3" and parts.netloc == store.bucket and len(names) > 1
    return frozenset({"/".join(names[:2])}) if is_artifact else frozenset()


def _releases(store: Store, records: Mapping[str, Run], context: Context) -> Iterator[Release]:
    """Yield all versions of all models.

    `records`: runs by the id of their record in MLflow; a version belongs to the pipeline of its run.
    """
    claimed = claims.claimed_tasks(store, context.resumable_s, claims.RELEASES)
    for model in _all("registered-models", "registered_models", {}):
        name, needed = model["name"], {alias["version"] for alias in model.get("aliases") or []}
        versions = list(_all("model-versions", "model_versions", {"filter": f"name = '{name}'"}))
        if context.targets and any(version.get("run_id") in records for version in versions):
            needed |= context.targets(name) | promotion.versions_in_use(store, name)
        for version in versions:
            if tracking.URI in (tags := tracking.mapping(version.get("tags"))):
                run, number = records.get(version.get("run_id", "")), version["version"]
                prefix, created = tags[tracking.URI].rstrip("/"), int(version.get("creation_timestamp", 0)) / 1000
                yield Release(
                    name, int(number), f"{prefix}/", run.pipeline if run else "", tags.get(tracking.SHA256, ""),
                    run.name if run else "", created, number in needed or prefix in claimed, tracking.REMOVED in tags,
                )  # fmt: skip


def _all(resource: str, field: str, search: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    parameters = {"max_results": PAGE, **search}
    while True:
        answer = request("GET", f"mlflow/{resource}/search", params=parameters)
        yield from answer.get(field) or []
        if not (token := answer.get("next_page_token")):
            return
        parameters["page_token"] = token
