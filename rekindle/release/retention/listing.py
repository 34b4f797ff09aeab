"""Lists the existing runs, releases and cache entries, from MLflow and the object store.

Several object stores may share MLflow, and other clients may write to it. A run belongs to this
store if the caller lists it, or if the store has its mark (ownership.py). A version belongs to this
store if the store has its release.json. All other runs and versions are never removed, and the
artifacts and files that they refer to are kept.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar
from urllib.parse import unquote

from argolocal.common.json_text import loads
from rekindle import tracking
from rekindle.cache import claims, entries
from rekindle.content.verified_release import is_release
from rekindle.errors import TrackingError, say
from rekindle.mlflow_api import (
    SERVER_REMEDY,
    DownloadAddress,
    ExperimentAnswer,
    ExperimentsPage,
    ModelAnswer,
    ModelsPage,
    ModelVersion,
    Page,
    RequestRefused,
    RunAnswer,
    RunInfo,
    RunsPage,
    VersionsPage,
    condition,
    request,
)
from rekindle.names import (
    ArtifactKey,
    ModelName,
    ObjectId,
    RunName,
    TaskReference,
    Version,
    parse_s3_address,
    show,
    split_address,
)
from rekindle.release import origin, promotion
from rekindle.release.release_files import read_owner
from rekindle.release.retention import ownership
from rekindle.release.retention.decision import Listing, Release, Run
from rekindle.release.retention.ownership import Mark
from rekindle.storage import NotFound, Store, store_id
from rekindle.tracking import STORE_TAG

ANY_WORKFLOW = f"tags.`{tracking.WORKFLOW}` != ''"  # MLflow filter: runs of workflows
PAGE = 1000
PATTERN = re.compile(r"[*?\[{]")  # start of a glob pattern
RUN_ID = re.compile("[0-9a-f]{32}")  # id of an MLflow run in an artifact address
# later runs are compared with the newest successful run that has such a tag
# (steps/monitoring/moving_window.py)
COMPARED_TAGS = (tracking.DIGEST, tracking.CODE, tracking.WINDOW_END)
P = TypeVar("P", bound=Page)


@dataclass(frozen=True)
class Record:
    """The record of a run in MLflow. `name`: the tag tracking.WORKFLOW, which may be any text."""

    id: ObjectId
    name: str
    info: RunInfo
    params: Mapping[str, str]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Context:
    """Information that the caller provides, because MLflow and the object store lack it.

    `runs`: the runs of this machine or namespace, with exact phases. `claim_s`: number of seconds
    for which the claim of a cache entry protects its artifacts. `resumable_s`: number of seconds
    after its end during which a failed run that is not in `runs` may be resumed. `targets`:
    function that returns the versions of a model that `rekindle rollback` can restore, or None if
    they are unknown and all versions are kept; if `targets` is None, no release is removed.
    `needed`: RUN/TASK of further artifacts to keep.
    """

    runs: Mapping[str, Run]
    claim_s: float
    resumable_s: float
    targets: Callable[[str], set[str] | None] | None
    needed: frozenset[str] = frozenset()


def read(store: Store, pipelines: Iterable[str], context: Context) -> Listing:
    """List the runs and releases of `pipelines`, all runs of `context`, and the entries of the
    cache.

    Raises StorageError, TrackingError.
    """
    own_id = store_id(store)
    by_id: dict[str, Run] = {}
    pipelines = set(pipelines)
    marks = _read_marks(store, context.runs)
    runs = {name: _add_mark_number(run, marks[name]) for name, run in context.runs.items()}
    versions = RegisteredVersions()
    read_tasks: set[str] = set()
    names_with_records: set[str] = set()
    parents: dict[str, str] = {}  # id of the record of a trial → id of the record of its sweep

    for pipeline in pipelines:
        found = list(_list_with_trials(pipeline, ANY_WORKFLOW))
        parents.update({record.id: _parent_id(record) for record in found})
        records = [
            record
            for record in _without_trials(pipeline, found)
            if record.tags.get(STORE_TAG, own_id) == own_id
        ]

        compared = _find_compared_ids(records)
        own_names = {record.name for record in records if STORE_TAG in record.tags}
        marks.update(_read_marks(store, own_names - marks.keys()))

        for record in records:
            name = record.name
            recorded_run = context.runs.get(name)
            uses = _find_used_tasks(record) | _find_tasks_of_source(
                store, record.params.get("data.source", "")
            )
            run = runs.get(name)

            if not recorded_run:
                mark = marks.get(name)
                if mark:
                    run = _make_run(record, pipeline, mark, context.resumable_s)
                else:
                    run = None

            # an active run, or a run of another store: protect what it uses
            if not run:
                read_tasks.update(uses)
                continue

            has_tag = not recorded_run and record.tags.get(tracking.EMPTIED) == "removed"
            # the tag alone does not prove that the artifacts are gone, since every client of MLflow
            # can set it
            is_emptied = has_tag and not ownership.has_artifacts(store, RunName(name))
            is_compared = record.id in compared
            run = replace(run, uses=run.uses | uses, compared=is_compared, emptied=is_emptied)
            runs[name] = _combine_records(runs[name], run) if name in names_with_records else run
            names_with_records.add(name)
            by_id[record.id] = runs[name]

    releases = list(_list_releases(store, own_id, by_id, context, versions))
    referred_ids = versions.run_ids(releases)
    # a trial is removed together with the record of its sweep
    referred_ids.update([parents[run_id] for run_id in referred_ids & parents.keys()])
    for run_id in referred_ids & by_id.keys():
        name = by_id[run_id].name
        runs[name] = replace(runs[name], compared=True)

    claimed = (
        frozenset(claims.claimed_tasks(store, context.claim_s))
        | _find_data_tasks(store, pipelines)
        | read_tasks
        | context.needed
    )

    removable = releases if context.targets else []
    return Listing([*runs.values()], removable, entries.read_entries(store), claimed)


def make_inputs_function(
    store: Store, releases: Iterable[Release]
) -> Callable[[Release], Iterator[str]]:
    """Return a function that, for a release, returns the prefixes of the other releases that
    `rekindle reproduce` reads.

    These are the release with its initial weights and, for a refreshed champion, the champion that
    was refreshed.
    """
    versions = {(release.model, str(release.version)): release for release in releases}

    def inputs(release: Release) -> Iterator[str]:
        with suppress(NotFound):
            start = _parse_object(store.get(f"{release.prefix}model.json")).get("start", "")
            yield f"{str(start).rstrip('/')}/"
            champion = str(
                _parse_object(store.get(f"{release.prefix}{origin.FILE}")).get("champion", "")
            )
            previous = versions.get((release.model, champion))
            if previous and previous.sha256 == release.sha256:
                yield previous.prefix

    return inputs


def has_alias(model: str, version: str) -> bool:
    """Return True if an alias refers to the version."""
    answer = request("GET", "mlflow/registered-models/get", ModelAnswer, params={"name": model})
    return any(alias.version == version for alias in answer.registered_model.aliases)


def has_other_version(store: Store, release: Release) -> bool:
    """Return True if another version, of this or any other model, has the same files."""
    return RegisteredVersions().refer_to(
        store, release.prefix, (release.model, str(release.version))
    )


class RegisteredVersions:
    """All versions of all models in MLflow, and the addresses of their files."""

    def __init__(self) -> None:
        pages = _search_all("model-versions", VersionsPage)
        self.rows = [row for page in pages for row in page.model_versions]

    def by_model(self) -> dict[str, list[ModelVersion]]:
        """Return the versions by the name of their model."""
        models: dict[str, list[ModelVersion]] = {}
        for row in self.rows:
            models.setdefault(row.name, []).append(row)
        return models

    def refer_to(self, store: Store, prefix: str, except_version: tuple[str, str]) -> bool:
        """Return True if a version other than `except_version` has files below `prefix`, or in a
        folder that contains `prefix`."""
        return any(
            _contains(address, prefix) or _is_above(address, store, prefix)
            for row in self.rows
            if (row.name, row.version) != except_version
            for address in list_addresses(row)
        )

    def run_ids(self, releases: Iterable[Release]) -> set[str]:
        """Return the ids of the MLflow runs to which versions other than `releases` refer."""
        released = {(release.model, str(release.version)) for release in releases}
        rows = [row for row in self.rows if (row.name, row.version) not in released]
        ids = {row.run_id for row in rows}
        return ids.union(
            *(RUN_ID.findall(address) for row in rows for address in list_addresses(row))
        )


def list_addresses(row: ModelVersion) -> set[str]:
    """Return all addresses of a version's files: those in its record, and the address that MLflow
    resolves them to."""
    found = {row.source, row.tags.get(tracking.URI, "")}
    if split_address(row.source).scheme in ("models", "runs"):
        found.add(_download_address(row.name, row.version))
    return {text for address in found - {""} for text in (address, unquote(address))}


@cache
def _download_address(model: str, version: str) -> str:
    """Return the address of a version's files, as MLflow resolves it; "" if the version was
    deleted. An address never changes, so it is cached."""
    try:
        answer = request(
            "GET",
            "mlflow/model-versions/get-download-uri",
            DownloadAddress,
            params={"name": model, "version": version},
        )
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return ""

    return answer.artifact_uri


def _contains(address: str, prefix: str) -> bool:
    """Return True if an address is `prefix` or below it.

    Servers and buckets are not compared, since several addresses can refer to one object store.
    """
    return f"/{prefix.strip('/')}/" in f"/{address}/"


def _is_above(address: str, store: Store, prefix: str) -> bool:
    """Return True if an address is the bucket, or a folder of it that contains `prefix`."""
    parts = parse_s3_address(address)
    if not parts or parts.bucket != store.bucket:
        return False
    return not parts.key or prefix.startswith(f"{parts.key.rstrip('/')}/")


def find_trial_ids(run_id: str, run: RunName, recorded_ids: Iterable[str]) -> list[str]:
    """Return the ids of the MLflow runs of a sweep's trials. `run_id`, `run`: id and name of the
    sweep's own run; `recorded_ids`: ids in the mark of the sweep.

    A trial must have the right name, parent tag and id in the mark. Name and tag alone are not
    enough, since every client of MLflow can set them.
    """
    known_ids = set(recorded_ids)
    if not known_ids:
        return []

    answer = request("GET", "mlflow/runs/get", RunAnswer, params={"run_id": run_id})
    experiment = answer.run.info.experiment_id
    records = _search_runs([experiment], condition(f"tags.`{tracking.PARENT}`", run_id))
    trial_name = re.compile(rf"{re.escape(run)}\.trial-[0-9]+")
    return [
        record.id
        for record in records
        if record.id in known_ids and trial_name.fullmatch(record.name)
    ]


def find_record_id(pipeline: str, run: RunName, recorded_id: str, own_id: str) -> str:
    """Return the id of a run's record in MLflow; "" if it does not exist or is ambiguous.

    `recorded_id`: the MLflow id in the mark of the run, or "" if the run has not reported its end.
    `own_id`: id of the object store.
    """
    found = _list_with_trials(pipeline, condition(f"tags.`{tracking.WORKFLOW}`", run))
    records = _without_trials(pipeline, found)
    # runs of other stores may have the same name
    run_ids = [record.id for record in records if record.tags.get(STORE_TAG, own_id) == own_id]

    if recorded_id:
        if recorded_id in run_ids:
            return recorded_id
        return ""

    if len(run_ids) > 1:
        say(
            f"{len(run_ids)} records of {run} in MLflow stay: only one of them can be the record of"
            " the run"
        )

    if len(run_ids) == 1:
        return run_ids[0]

    return ""


def _list_with_trials(experiment: str, run_filter: str) -> Iterator[Record]:
    """Yield the runs of an experiment, newest first, with the trials of sweeps. `run_filter`
    requires the tag tracking.WORKFLOW."""
    try:
        answer = request(
            "GET",
            "mlflow/experiments/get-by-name",
            ExperimentAnswer,
            params={"experiment_name": experiment},
        )
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return

    for record in _search_runs([answer.experiment.experiment_id], run_filter):
        if not record.name:
            raise _unfiltered(record, tracking.WORKFLOW)
        yield record


def _parent_id(record: Record) -> str:
    """Return the MLflow id of the sweep of a trial; "" for another run."""
    return record.tags.get(tracking.PARENT, "")


def _without_trials(experiment: str, records: Iterable[Record]) -> Iterator[Record]:
    """Yield the runs with valid names that are not trials of a sweep."""
    for record in records:
        if tracking.PARENT in record.tags:
            continue

        if RunName.matches(record.name):
            yield record
        else:
            say(
                f"a run of {show(experiment)} in MLflow is skipped: {show(record.name)} is not"
                " the name of a run"
            )


def _find_data_tasks(store: Store, pipelines: Set[str]) -> frozenset[str]:
    """Return the RUN/TASK of all artifacts that runs of other pipelines read as data.source."""
    ids = [
        experiment.experiment_id
        for page in _search_all("experiments", ExperimentsPage)
        for experiment in page.experiments
        if experiment.name not in pipelines
    ]
    condition = f"{ANY_WORKFLOW} AND params.`data.source` ILIKE '{store.uri('')}%'"
    sources = set[str]()

    for record in _search_runs(ids, condition) if ids else ():
        source = record.params.get("data.source", "")
        if not parse_s3_address(source):
            raise _unfiltered(record, "data.source")
        sources.add(source)

    return frozenset().union(*(_find_tasks_of_source(store, source) for source in sources))


def _unfiltered(record: Record, name: str) -> TrackingError:
    """Return the error to raise if MLflow returned a run that its filter should exclude. Without a
    valid `name`, the artifacts that it uses could not be protected."""
    return TrackingError(
        f"MLflow answered mlflow/runs/search with the run {record.id}, whose {name} does not match"
        f" the filter of the search. {SERVER_REMEDY}"
    )


def _search_runs(experiments: list[str], run_filter: str) -> Iterator[Record]:
    search: dict[str, Any] = {
        "experiment_ids": experiments,
        "filter": run_filter,
        "max_results": PAGE,
        "order_by": ["attributes.start_time DESC"],
    }

    for page in _request_pages("POST", "mlflow/runs/search", RunsPage, "json", search):
        for run in page.runs:
            yield Record(
                id=ObjectId(run.info.run_id, "MLflow"),
                name=run.data.tags.get(tracking.WORKFLOW, ""),
                info=run.info,
                params=run.data.params,
                tags=run.data.tags,
            )


def _read_marks(store: Store, names: Iterable[str]) -> dict[str, Mark | None]:
    """Read the marks of runs."""
    run_names = [RunName(name) for name in names]
    with ThreadPoolExecutor(claims.THREADS) as pool:
        marks = pool.map(partial(ownership.read, store), run_names)
        return dict(zip(run_names, marks, strict=True))


def _add_mark_number(run: Run, mark: Mark | None) -> Run:
    return replace(run, number=mark.number if mark else 0)


def _make_run(record: Record, pipeline: str, mark: Mark, resumable_s: float) -> Run | None:
    """Return the run described by a record in MLflow and by its mark; None if the mark is of
    another pipeline.

    A run has ended only if both its record and its mark say so. A failed run counts as active as
    long as it may be resumed.
    """
    if mark.pipeline != pipeline:
        return None

    info = record.info
    ended = mark.ended
    if info.status == "RUNNING":
        ended = None
    if ended is not None:
        ended = max(ended, info.end_time / 1000)

    succeeded = mark.succeeded and info.status == "FINISHED"
    if ended is not None and not succeeded and time.time() - ended < resumable_s:
        ended = None

    # check both, since every client can remove the tag, and marks of earlier versions lack the
    # field
    counted = mark.counted and tracking.BACKFILL not in record.tags
    return Run(record.name, pipeline, ended, succeeded, counted, number=mark.number)


def _combine_records(run: Run, other: Run) -> Run:
    """Combine two records of a run in MLflow. Either record may be forged, so the result protects
    everything that either of them protects."""
    return replace(
        run,
        ended=None if run.ended is None or other.ended is None else max(run.ended, other.ended),
        succeeded=run.succeeded and other.succeeded,
        counted=run.counted and other.counted,
        uses=run.uses | other.uses,
        compared=run.compared or other.compared,
        emptied=run.emptied and other.emptied,
    )


def _find_used_tasks(record: Record) -> frozenset[str]:
    """Return the RUN/TASK of artifacts of other runs that a run reads in place."""
    if tracking.REFERS not in record.tags:
        return frozenset()
    values = (value for tag, value in record.tags.items() if tag.startswith(tracking.CACHED))
    return frozenset(task for value in values if (task := TaskReference.or_none(value)))


def _find_compared_ids(records: list[Record]) -> set[str]:
    """Return the MLflow ids of the runs that later runs will be compared with. `records`: newest
    first."""
    newest: dict[str, str] = {}
    for record in records:
        for tag in COMPARED_TAGS:
            if tag in record.tags and record.info.status == "FINISHED":
                newest.setdefault(tag, record.id)
    return {*newest.values()}


def _find_tasks_of_source(store: Store, uri: str) -> frozenset[str]:
    """Return the RUN/TASK of all artifacts that the address in data.source covers.

    `uri`, the value of data.source, may be the folder of a run, a pattern such as `RUN/*/out`, or
    all objects whose keys begin with a text such as `RUN/prep`.
    """
    address = parse_s3_address(uri)
    if not address or address.bucket != store.bucket:
        return frozenset()

    literal = PATTERN.split(address.key)[0]
    folders = literal.split("/")
    task = TaskReference.or_none("/".join(folders[:2]))
    if task and len(folders) > 2:
        return frozenset({task})

    run = RunName.or_none(folders[0])
    if not run or not ownership.read(store, run):
        return frozenset()
    # list objects, because the prefix may end in the middle of a task's name
    prefix = literal if "/" in literal else f"{run}/"
    names = {"/".join(item.key.split("/")[:2]) for item in store.list(prefix)}
    return frozenset(name for name in names if TaskReference.matches(name))


def _list_releases(
    store: Store,
    own_id: str,
    records: Mapping[str, Run],
    context: Context,
    versions: RegisteredVersions,
) -> Iterator[Release]:
    """Yield the versions whose files are in this store.

    `records`: runs by the id of their record in MLflow. A version belongs to the pipeline of its
    run.
    """
    claimed = claims.claimed_tasks(store, context.resumable_s, claims.RELEASES)
    models = {
        model.name: model.aliases
        for page in _search_all("registered-models", ModelsPage)
        for model in page.registered_models
    }

    for model, rows in versions.by_model().items():
        name = ModelName.or_none(model)
        if not name or not any(tracking.URI in row.tags for row in rows):
            continue

        needed = {alias.version for alias in models.get(name, [])}
        if context.targets and any(row.run_id in records for row in rows):
            targets = context.targets(name)
            if targets is None:
                targets = {row.version for row in rows}
            needed |= targets | promotion.list_versions_in_use(store, name)

        for row in rows:
            release = _make_release(store, own_id, row, records.get(row.run_id))
            if release:
                is_needed = row.version in needed or release.prefix.rstrip("/") in claimed
                yield replace(release, needed=is_needed)


def _make_release(store: Store, own_id: str, row: ModelVersion, run: Run | None) -> Release | None:
    """Return the release of a version; None if the version does not belong to this store.

    A version whose removal has begun is also returned if its files are already removed, or belong
    to a new version.
    """
    key = ArtifactKey.or_none(row.tags.get(tracking.URI, "").rstrip("/"))
    number = Version(row.version, "MLflow")
    if not key or not is_release(key):
        return None

    owner = read_owner(store, key.prefix)
    has_files = owner is not None and (owner.name, owner.version) == (row.name, number)

    is_marked = row.tags.get(tracking.REMOVED) == own_id
    if not has_files and not is_marked:
        return None

    return Release(
        model=row.name,
        version=number.number,
        prefix=key.prefix,
        pipeline=run.pipeline if run else "",
        sha256=owner.model_sha256 if owner else "",
        run=run.name if run else "",
        created=row.creation_timestamp / 1000,
        # as long as the files exist, the tag alone does not prove that their removal has begun
        marked=is_marked and (not has_files or (owner is not None and owner.removed)),
    )


def _search_all(resource: str, model: type[P]) -> Iterator[P]:
    """Yield the pages of all objects of a kind."""
    path = f"mlflow/{resource}/search"
    return _request_pages("GET", path, model, "params", {"max_results": PAGE})


def _request_pages(
    method: str, path: str, model: type[P], content: str, search: Mapping[str, Any]
) -> Iterator[P]:
    """Yield the pages of MLflow's answer to a search. `content`: "json" or "params".

    Raises TrackingError if a page token repeats, because the pages would not end.
    """
    tokens = set[str]()
    page = dict(search)

    while True:
        answer = request(method, path, model, **{content: page})
        yield answer

        token = answer.next_page_token
        if not token:
            return
        if token in tokens:
            raise TrackingError(
                f"MLflow answers {path} with the page token {show(token)} again, so its pages do"
                f" not end. {SERVER_REMEDY}"
            )

        tokens.add(token)
        page["page_token"] = token


def _parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a file of a release; {} for anything else."""
    with suppress(ValueError):
        value = loads(data)
        if isinstance(value, dict):
            return value
        return {}
    return {}
