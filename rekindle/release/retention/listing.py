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
from rekindle.errors import TrackingError, write_stderr
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
    format_condition,
    send_request,
)
from rekindle.names import (
    ArtifactKey,
    ModelName,
    ObjectId,
    RunName,
    TaskReference,
    Version,
    format_untrusted,
    parse_s3_address,
    split_address,
)
from rekindle.release import origin, promotion
from rekindle.release.release_files import read_owner
from rekindle.release.retention import ownership
from rekindle.release.retention.decision import Listing, Release, Run
from rekindle.release.retention.ownership import RunMark
from rekindle.storage import NotFound, Store, read_or_create_store_id
from rekindle.tracking import STORE_TAG

ANY_WORKFLOW_FILTER = f"tags.`{tracking.WORKFLOW}` != ''"  # MLflow filter: runs of workflows
PAGE_SIZE = 1000
GLOB_PATTERN = re.compile(r"[*?\[{]")  # start of a glob pattern
RUN_ID_PATTERN = re.compile("[0-9a-f]{32}")  # id of an MLflow run in an artifact address
# later runs are compared with the newest successful run that has such a tag
# (steps/monitoring/moving_window.py)
COMPARED_TAGS = (tracking.DIGEST, tracking.CODE, tracking.WINDOW_END)
P = TypeVar("P", bound=Page)


@dataclass(frozen=True)
class MlflowRecord:
    """The record of a run in MLflow. `name`: the tag tracking.WORKFLOW, which may be any text."""

    id: ObjectId
    name: str
    info: RunInfo
    params: Mapping[str, str]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class ListingContext:
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


def read_listing(
    object_store: Store, pipeline_names: Iterable[str], listing_context: ListingContext
) -> Listing:
    """List the runs and releases of `pipeline_names`, all runs of `listing_context`, and the
    entries of the cache.

    Raises StorageError, TrackingError.
    """
    own_store_id = read_or_create_store_id(object_store)
    runs_by_id: dict[str, Run] = {}
    pipeline_names = set(pipeline_names)
    marks_by_name = _read_marks(object_store, listing_context.runs)
    runs_by_name = {
        run_name: _add_mark_number(run, marks_by_name[run_name])
        for run_name, run in listing_context.runs.items()
    }
    registered_versions = RegisteredVersions()
    tasks_in_use: set[str] = set()
    names_with_records: set[str] = set()
    parent_ids: dict[str, str] = {}  # id of the record of a trial → id of the record of its sweep

    for pipeline_name in pipeline_names:
        found_records = list(_list_with_trials(pipeline_name, ANY_WORKFLOW_FILTER))
        parent_ids.update(
            {mlflow_record.id: _get_parent_id(mlflow_record) for mlflow_record in found_records}
        )
        mlflow_records = [
            mlflow_record
            for mlflow_record in _exclude_trials(pipeline_name, found_records)
            if mlflow_record.tags.get(STORE_TAG, own_store_id) == own_store_id
        ]

        compared_ids = _find_compared_ids(mlflow_records)
        own_names = {
            mlflow_record.name
            for mlflow_record in mlflow_records
            if STORE_TAG in mlflow_record.tags
        }
        marks_by_name.update(_read_marks(object_store, own_names - marks_by_name.keys()))

        for mlflow_record in mlflow_records:
            run_name = mlflow_record.name
            recorded_run = listing_context.runs.get(run_name)
            used_tasks = _find_used_tasks(mlflow_record) | _find_source_tasks(
                object_store, mlflow_record.params.get("data.source", "")
            )
            run = runs_by_name.get(run_name)

            if not recorded_run:
                run_mark = marks_by_name.get(run_name)
                if run_mark:
                    run = _make_run(
                        mlflow_record, pipeline_name, run_mark, listing_context.resumable_s
                    )
                else:
                    run = None

            # an active run, or a run of another store: protect what it uses
            if not run:
                tasks_in_use.update(used_tasks)
                continue

            has_emptied_tag = (
                not recorded_run and mlflow_record.tags.get(tracking.ARTIFACTS_EMPTIED) == "removed"
            )
            # the tag alone does not prove that the artifacts are gone, since every client of MLflow
            # can set it
            is_emptied = has_emptied_tag and not ownership.has_artifacts(
                object_store, RunName(run_name)
            )
            is_compared = mlflow_record.id in compared_ids
            run = replace(run, uses=run.uses | used_tasks, compared=is_compared, emptied=is_emptied)
            runs_by_name[run_name] = (
                _combine_records(runs_by_name[run_name], run)
                if run_name in names_with_records
                else run
            )
            names_with_records.add(run_name)
            runs_by_id[mlflow_record.id] = runs_by_name[run_name]

    releases = list(
        _list_releases(object_store, own_store_id, runs_by_id, listing_context, registered_versions)
    )
    referred_ids = registered_versions.list_run_ids(releases)
    # a trial is removed together with the record of its sweep
    referred_ids.update([parent_ids[run_id] for run_id in referred_ids & parent_ids.keys()])
    for run_id in referred_ids & runs_by_id.keys():
        run_name = runs_by_id[run_id].name
        runs_by_name[run_name] = replace(runs_by_name[run_name], compared=True)

    claimed_tasks = (
        frozenset(claims.claimed_tasks(object_store, listing_context.claim_s))
        | _find_data_tasks(object_store, pipeline_names)
        | tasks_in_use
        | listing_context.needed
    )

    removable_releases = releases if listing_context.targets else []
    return Listing(
        [*runs_by_name.values()],
        removable_releases,
        entries.read_entries(object_store),
        claimed_tasks,
    )


def make_inputs_function(
    object_store: Store, releases: Iterable[Release]
) -> Callable[[Release], Iterator[str]]:
    """Return a function that, for a release, returns the prefixes of the other releases that
    `rekindle reproduce` reads.

    These are the release with its initial weights and, for a refreshed champion, the champion that
    was refreshed.
    """
    releases_by_version = {(release.model, str(release.version)): release for release in releases}

    def inputs(release: Release) -> Iterator[str]:
        with suppress(NotFound):
            start_address = _parse_object(object_store.get(f"{release.prefix}model.json")).get(
                "start", ""
            )
            yield f"{str(start_address).rstrip('/')}/"
            champion_version = str(
                _parse_object(object_store.get(f"{release.prefix}{origin.FILE}")).get(
                    "champion", ""
                )
            )
            previous_release = releases_by_version.get((release.model, champion_version))
            if previous_release and previous_release.sha256 == release.sha256:
                yield previous_release.prefix

    return inputs


def has_alias(model_name: str, version: str) -> bool:
    """Return True if an alias refers to the version."""
    model_answer = send_request(
        "GET", "mlflow/registered-models/get", ModelAnswer, params={"name": model_name}
    )
    return any(
        model_alias.version == version for model_alias in model_answer.registered_model.aliases
    )


def has_other_version(object_store: Store, release: Release) -> bool:
    """Return True if another version, of this or any other model, has the same files."""
    return RegisteredVersions().has_other_reference(
        object_store, release.prefix, (release.model, str(release.version))
    )


class RegisteredVersions:
    """All versions of all models in MLflow, and the addresses of their files."""

    def __init__(self) -> None:
        version_pages = _search_all_pages("model-versions", VersionsPage)
        self.rows = [
            model_version
            for version_page in version_pages
            for model_version in version_page.model_versions
        ]

    def group_by_model(self) -> dict[str, list[ModelVersion]]:
        """Return the versions by the name of their model."""
        versions_by_model: dict[str, list[ModelVersion]] = {}
        for model_version in self.rows:
            versions_by_model.setdefault(model_version.name, []).append(model_version)
        return versions_by_model

    def has_other_reference(
        self, object_store: Store, key_prefix: str, except_version: tuple[str, str]
    ) -> bool:
        """Return True if a version other than `except_version` has files below `key_prefix`, or
        in a folder that contains `key_prefix`."""
        return any(
            _is_below_prefix(address, key_prefix)
            or _is_above_prefix(address, object_store, key_prefix)
            for model_version in self.rows
            if (model_version.name, model_version.version) != except_version
            for address in list_addresses(model_version)
        )

    def list_run_ids(self, releases: Iterable[Release]) -> set[str]:
        """Return the ids of the MLflow runs to which versions other than `releases` refer."""
        released_versions = {(release.model, str(release.version)) for release in releases}
        other_versions = [
            model_version
            for model_version in self.rows
            if (model_version.name, model_version.version) not in released_versions
        ]
        referred_ids = {model_version.run_id for model_version in other_versions}
        return referred_ids.union(
            *(
                RUN_ID_PATTERN.findall(address)
                for model_version in other_versions
                for address in list_addresses(model_version)
            )
        )


def list_addresses(model_version: ModelVersion) -> set[str]:
    """Return all addresses of a version's files: those in its record, and the address that MLflow
    resolves them to."""
    found_addresses = {model_version.source, model_version.tags.get(tracking.URI, "")}
    if split_address(model_version.source).scheme in ("models", "runs"):
        found_addresses.add(_fetch_download_address(model_version.name, model_version.version))
    return {
        address_text
        for address in found_addresses - {""}
        for address_text in (address, unquote(address))
    }


@cache
def _fetch_download_address(model_name: str, version: str) -> str:
    """Return the address of a version's files, as MLflow resolves it; "" if the version was
    deleted. An address never changes, so it is cached."""
    try:
        address_answer = send_request(
            "GET",
            "mlflow/model-versions/get-download-uri",
            DownloadAddress,
            params={"name": model_name, "version": version},
        )
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return ""

    return address_answer.artifact_uri


def _is_below_prefix(address: str, parent_prefix: str) -> bool:
    """Return True if an address is `parent_prefix` or below it.

    Servers and buckets are not compared, since several addresses can refer to one object store.
    """
    return f"/{parent_prefix.strip('/')}/" in f"/{address}/"


def _is_above_prefix(address: str, object_store: Store, child_prefix: str) -> bool:
    """Return True if an address is the bucket, or a folder of it that contains `child_prefix`."""
    s3_address = parse_s3_address(address)
    if not s3_address or s3_address.bucket != object_store.bucket:
        return False
    return not s3_address.key or child_prefix.startswith(f"{s3_address.key.rstrip('/')}/")


def find_trial_ids(run_id: str, run_name: RunName, recorded_ids: Iterable[str]) -> list[str]:
    """Return the ids of the MLflow runs of a sweep's trials. `run_id`, `run_name`: id and name of
    the sweep's own run; `recorded_ids`: ids in the mark of the sweep.

    A trial must have the right name, parent tag and id in the mark. Name and tag alone are not
    enough, since every client of MLflow can set them.
    """
    known_ids = set(recorded_ids)
    if not known_ids:
        return []

    run_answer = send_request("GET", "mlflow/runs/get", RunAnswer, params={"run_id": run_id})
    experiment_id = run_answer.run.info.experiment_id
    trial_records = _search_runs(
        [experiment_id], format_condition(f"tags.`{tracking.PARENT}`", run_id)
    )
    trial_name_pattern = re.compile(rf"{re.escape(run_name)}\.trial-[0-9]+")
    return [
        trial_record.id
        for trial_record in trial_records
        if trial_record.id in known_ids and trial_name_pattern.fullmatch(trial_record.name)
    ]


def find_record_id(
    pipeline_name: str, run_name: RunName, recorded_id: str, own_store_id: str
) -> str:
    """Return the id of a run's record in MLflow; "" if it does not exist or is ambiguous.

    `recorded_id`: the MLflow id in the mark of the run, or "" if the run has not reported its end.
    `own_store_id`: id of the object store.
    """
    found_records = _list_with_trials(
        pipeline_name, format_condition(f"tags.`{tracking.WORKFLOW}`", run_name)
    )
    run_records = _exclude_trials(pipeline_name, found_records)
    # runs of other stores may have the same name
    matching_ids = [
        run_record.id
        for run_record in run_records
        if run_record.tags.get(STORE_TAG, own_store_id) == own_store_id
    ]

    if recorded_id:
        if recorded_id in matching_ids:
            return recorded_id
        return ""

    if len(matching_ids) > 1:
        write_stderr(
            f"{len(matching_ids)} records of {run_name} in MLflow stay: only one of them can be"
            " the record of the run"
        )

    if len(matching_ids) == 1:
        return matching_ids[0]

    return ""


def _list_with_trials(experiment_name: str, run_filter: str) -> Iterator[MlflowRecord]:
    """Yield the runs of an experiment, newest first, with the trials of sweeps. `run_filter`
    requires the tag tracking.WORKFLOW."""
    try:
        experiment_answer = send_request(
            "GET",
            "mlflow/experiments/get-by-name",
            ExperimentAnswer,
            params={"experiment_name": experiment_name},
        )
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return

    for mlflow_record in _search_runs([experiment_answer.experiment.experiment_id], run_filter):
        if not mlflow_record.name:
            raise _make_filter_error(mlflow_record, tracking.WORKFLOW)
        yield mlflow_record


def _get_parent_id(mlflow_record: MlflowRecord) -> str:
    """Return the MLflow id of the sweep of a trial; "" for another run."""
    return mlflow_record.tags.get(tracking.PARENT, "")


def _exclude_trials(
    experiment_name: str, mlflow_records: Iterable[MlflowRecord]
) -> Iterator[MlflowRecord]:
    """Yield the runs with valid names that are not trials of a sweep."""
    for mlflow_record in mlflow_records:
        if tracking.PARENT in mlflow_record.tags:
            continue

        if RunName.matches(mlflow_record.name):
            yield mlflow_record
        else:
            write_stderr(
                f"a run of {format_untrusted(experiment_name)} in MLflow is skipped:"
                f" {format_untrusted(mlflow_record.name)} is not the name of a run"
            )


def _find_data_tasks(object_store: Store, pipeline_names: Set[str]) -> frozenset[str]:
    """Return the RUN/TASK of all artifacts that runs of other pipelines read as data.source."""
    experiment_ids = [
        experiment.experiment_id
        for experiments_page in _search_all_pages("experiments", ExperimentsPage)
        for experiment in experiments_page.experiments
        if experiment.name not in pipeline_names
    ]
    run_filter = f"{ANY_WORKFLOW_FILTER} AND params.`data.source` ILIKE '{object_store.uri('')}%'"
    source_uris = set[str]()

    for mlflow_record in _search_runs(experiment_ids, run_filter) if experiment_ids else ():
        source_uri = mlflow_record.params.get("data.source", "")
        if not parse_s3_address(source_uri):
            raise _make_filter_error(mlflow_record, "data.source")
        source_uris.add(source_uri)

    return frozenset().union(
        *(_find_source_tasks(object_store, source_uri) for source_uri in source_uris)
    )


def _make_filter_error(mlflow_record: MlflowRecord, filtered_name: str) -> TrackingError:
    """Return the error to raise if MLflow returned a run that its filter should exclude. Without a
    valid `filtered_name`, the artifacts that it uses could not be protected."""
    return TrackingError(
        f"MLflow answered mlflow/runs/search with the run {mlflow_record.id}, whose"
        f" {filtered_name} does not match the filter of the search. {SERVER_REMEDY}"
    )


def _search_runs(experiment_ids: list[str], run_filter: str) -> Iterator[MlflowRecord]:
    search_request: dict[str, Any] = {
        "experiment_ids": experiment_ids,
        "filter": run_filter,
        "max_results": PAGE_SIZE,
        "order_by": ["attributes.start_time DESC"],
    }

    for runs_page in _request_pages("POST", "mlflow/runs/search", RunsPage, "json", search_request):
        for mlflow_run in runs_page.runs:
            yield MlflowRecord(
                id=ObjectId(mlflow_run.info.run_id, "MLflow"),
                name=mlflow_run.data.tags.get(tracking.WORKFLOW, ""),
                info=mlflow_run.info,
                params=mlflow_run.data.params,
                tags=mlflow_run.data.tags,
            )


def _read_marks(object_store: Store, candidate_names: Iterable[str]) -> dict[str, RunMark | None]:
    """Read the marks of runs."""
    run_names = [RunName(candidate_name) for candidate_name in candidate_names]
    with ThreadPoolExecutor(claims.THREADS) as thread_pool:
        run_marks = thread_pool.map(partial(ownership.read, object_store), run_names)
        return dict(zip(run_names, run_marks, strict=True))


def _add_mark_number(run: Run, run_mark: RunMark | None) -> Run:
    return replace(run, number=run_mark.number if run_mark else 0)


def _make_run(
    mlflow_record: MlflowRecord, pipeline_name: str, run_mark: RunMark, resumable_seconds: float
) -> Run | None:
    """Return the run described by a record in MLflow and by its mark; None if the mark is of
    another pipeline.

    A run has ended only if both its record and its mark say so. A failed run counts as active as
    long as it may be resumed.
    """
    if run_mark.pipeline != pipeline_name:
        return None

    run_info = mlflow_record.info
    end_seconds = run_mark.ended
    if run_info.status == "RUNNING":
        end_seconds = None
    if end_seconds is not None:
        end_seconds = max(end_seconds, run_info.end_time / 1000)

    has_succeeded = run_mark.succeeded and run_info.status == "FINISHED"
    if (
        end_seconds is not None
        and not has_succeeded
        and time.time() - end_seconds < resumable_seconds
    ):
        end_seconds = None

    # check both, since every client can remove the tag, and marks of earlier versions lack the
    # field
    is_counted = run_mark.counted and tracking.BACKFILL not in mlflow_record.tags
    return Run(
        mlflow_record.name,
        pipeline_name,
        end_seconds,
        has_succeeded,
        is_counted,
        number=run_mark.number,
    )


def _combine_records(run: Run, other_run: Run) -> Run:
    """Combine two records of a run in MLflow. Either record may be forged, so the result protects
    everything that either of them protects."""
    return replace(
        run,
        ended=None
        if run.ended is None or other_run.ended is None
        else max(run.ended, other_run.ended),
        succeeded=run.succeeded and other_run.succeeded,
        counted=run.counted and other_run.counted,
        uses=run.uses | other_run.uses,
        compared=run.compared or other_run.compared,
        emptied=run.emptied and other_run.emptied,
    )


def _find_used_tasks(mlflow_record: MlflowRecord) -> frozenset[str]:
    """Return the RUN/TASK of artifacts of other runs that a run reads in place."""
    if tracking.REFERS_TO_RUNS not in mlflow_record.tags:
        return frozenset()
    tag_values = (
        tag_value
        for tag_name, tag_value in mlflow_record.tags.items()
        if tag_name.startswith(tracking.CACHED)
    )
    return frozenset(
        used_task
        for tag_value in tag_values
        if (used_task := TaskReference.parse_or_none(tag_value))
    )


def _find_compared_ids(records_newest_first: list[MlflowRecord]) -> set[str]:
    """Return the MLflow ids of the runs that later runs will be compared with.
    `records_newest_first`: newest first."""
    newest_ids: dict[str, str] = {}
    for mlflow_record in records_newest_first:
        for tag_name in COMPARED_TAGS:
            if tag_name in mlflow_record.tags and mlflow_record.info.status == "FINISHED":
                newest_ids.setdefault(tag_name, mlflow_record.id)
    return {*newest_ids.values()}


def _find_source_tasks(object_store: Store, source_uri: str) -> frozenset[str]:
    """Return the RUN/TASK of all artifacts that the address in data.source covers.

    `source_uri`, the value of data.source, may be the folder of a run, a pattern such as
    `RUN/*/out`, or all objects whose keys begin with a text such as `RUN/prep`.
    """
    s3_address = parse_s3_address(source_uri)
    if not s3_address or s3_address.bucket != object_store.bucket:
        return frozenset()

    literal_key = GLOB_PATTERN.split(s3_address.key)[0]
    folder_names = literal_key.split("/")
    source_task = TaskReference.parse_or_none("/".join(folder_names[:2]))
    if source_task and len(folder_names) > 2:
        return frozenset({source_task})

    run_name = RunName.parse_or_none(folder_names[0])
    if not run_name or not ownership.read(object_store, run_name):
        return frozenset()
    # list objects, because the prefix may end in the middle of a task's name
    key_prefix = literal_key if "/" in literal_key else f"{run_name}/"
    task_names = {
        "/".join(object_entry.key.split("/")[:2]) for object_entry in object_store.list(key_prefix)
    }
    return frozenset(task_name for task_name in task_names if TaskReference.matches(task_name))


def _list_releases(
    object_store: Store,
    own_store_id: str,
    runs_by_id: Mapping[str, Run],
    listing_context: ListingContext,
    registered_versions: RegisteredVersions,
) -> Iterator[Release]:
    """Yield the versions whose files are in this store.

    `runs_by_id`: runs by the id of their record in MLflow. A version belongs to the pipeline of its
    run.
    """
    claimed_prefixes = claims.claimed_tasks(
        object_store, listing_context.resumable_s, claims.RELEASES_CLAIM
    )
    aliases_by_model = {
        model.name: model.aliases
        for models_page in _search_all_pages("registered-models", ModelsPage)
        for model in models_page.registered_models
    }

    for model, model_versions in registered_versions.group_by_model().items():
        model_name = ModelName.parse_or_none(model)
        if not model_name or not any(
            tracking.URI in model_version.tags for model_version in model_versions
        ):
            continue

        aliased_versions = {
            model_alias.version for model_alias in aliases_by_model.get(model_name, [])
        }
        if listing_context.targets and any(
            model_version.run_id in runs_by_id for model_version in model_versions
        ):
            restorable_versions = listing_context.targets(model_name)
            if restorable_versions is None:
                restorable_versions = {model_version.version for model_version in model_versions}
            aliased_versions |= restorable_versions | promotion.list_versions_in_use(
                object_store, model_name
            )

        for model_version in model_versions:
            release = _make_release(
                object_store, own_store_id, model_version, runs_by_id.get(model_version.run_id)
            )
            if release:
                is_needed = (
                    model_version.version in aliased_versions
                    or release.prefix.rstrip("/") in claimed_prefixes
                )
                yield replace(release, needed=is_needed)


def _make_release(
    object_store: Store, own_store_id: str, model_version: ModelVersion, run: Run | None
) -> Release | None:
    """Return the release of a version; None if the version does not belong to this store.

    A version whose removal has begun is also returned if its files are already removed, or belong
    to a new version.
    """
    release_key = ArtifactKey.parse_or_none(model_version.tags.get(tracking.URI, "").rstrip("/"))
    version_number = Version(model_version.version, "MLflow")
    if not release_key or not is_release(release_key):
        return None

    release_owner = read_owner(object_store, release_key.prefix)
    has_files = release_owner is not None and (release_owner.name, release_owner.version) == (
        model_version.name,
        version_number,
    )

    is_marked = model_version.tags.get(tracking.REMOVED) == own_store_id
    if not has_files and not is_marked:
        return None

    return Release(
        model=model_version.name,
        version=version_number.number,
        prefix=release_key.prefix,
        pipeline=run.pipeline if run else "",
        sha256=release_owner.model_sha256 if release_owner else "",
        run=run.name if run else "",
        created=model_version.creation_timestamp / 1000,
        # as long as the files exist, the tag alone does not prove that their removal has begun
        marked=is_marked
        and (not has_files or (release_owner is not None and release_owner.removed)),
    )


def _search_all_pages(resource_name: str, page_type: type[P]) -> Iterator[P]:
    """Yield the pages of all objects of a kind."""
    api_path = f"mlflow/{resource_name}/search"
    return _request_pages("GET", api_path, page_type, "params", {"max_results": PAGE_SIZE})


def _request_pages(
    http_method: str,
    api_path: str,
    page_type: type[P],
    content_kind: str,
    search_request: Mapping[str, Any],
) -> Iterator[P]:
    """Yield the pages of MLflow's answer to a search. `content_kind`: "json" or "params".

    Raises TrackingError if a page token repeats, because the pages would not end.
    """
    seen_tokens = set[str]()
    page_request = dict(search_request)

    while True:
        page_answer = send_request(http_method, api_path, page_type, **{content_kind: page_request})
        yield page_answer

        next_token = page_answer.next_page_token
        if not next_token:
            return
        if next_token in seen_tokens:
            raise TrackingError(
                f"MLflow answers {api_path} with the page token {format_untrusted(next_token)}"
                " again, so its"
                f" pages do not end. {SERVER_REMEDY}"
            )

        seen_tokens.add(next_token)
        page_request["page_token"] = next_token


def _parse_object(json_bytes: bytes) -> dict[str, Any]:
    """Return the JSON object of a file of a release; {} for anything else."""
    with suppress(ValueError):
        json_value = loads(json_bytes)
        if isinstance(json_value, dict):
            return json_value
        return {}
    return {}
