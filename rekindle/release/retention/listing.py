"""Lists the existing runs, releases and cache entries, from MLflow and the object store.

Several object stores may share one MLflow, to which other clients may also write. A run belongs to
an object store if the caller lists the run, or if the object store has the run's mark
(ownership.py). A model version belongs to an object store if the object store has the version's
release.json. Runs and versions of other object stores are never removed, and the artifacts and
files that they refer to are kept.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from argolocal.common.json_text import loads
from rekindle import tracking
from rekindle.cache import claims, entries
from rekindle.content.verified_release import is_release
from rekindle.mlflow_api import (
    ExperimentsPage,
    ModelsPage,
    ModelVersion,
)
from rekindle.names import (
    ArtifactKey,
    ModelName,
    RunName,
    TaskReference,
    Version,
    parse_s3_address,
)
from rekindle.release import origin, promotion
from rekindle.release.release_files import read_owner
from rekindle.release.retention import ownership
from rekindle.release.retention.decision import Listing, Release, Run
from rekindle.release.retention.mlflow_records import (
    MlflowRecord,
    exclude_trials,
    get_parent_id,
    list_with_trials,
    make_filter_error,
    search_all_pages,
    search_runs,
)
from rekindle.release.retention.ownership import RunMark
from rekindle.release.retention.registered_versions import RegisteredVersions
from rekindle.storage import NotFound, Store, read_or_create_store_id
from rekindle.tracking import STORE_TAG

# MLflow filter that selects the runs of workflows
ANY_WORKFLOW_FILTER = f"tags.`{tracking.WORKFLOW}` != ''"
# start of a glob pattern
GLOB_PATTERN = re.compile(r"[*?\[{]")
# later runs are compared with the newest successful run that has such a tag
# (steps/monitoring/moving_window.py)
COMPARED_TAGS = (tracking.DIGEST, tracking.CODE, tracking.WINDOW_END)


@dataclass(frozen=True)
class ListingContext:
    """Information that the caller provides, because MLflow and the object store lack it.

    `runs`: the runs of this machine or namespace, with exact phases. `claim_s`: number of seconds
    for which a claim of a cache entry protects the artifacts of the entry. `resumable_s`: number of
    seconds after its end during which a failed run that is not in `runs` may be resumed. `targets`:
    function that returns the versions of a model that `rekindle rollback` can restore; None if
    these versions are unknown, so that all versions are kept. If `targets` itself is None, no
    release is removed. `needed`: the tasks (RUN/TASK) of further artifacts to keep.
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
    pipeline_names = set(pipeline_names)
    run_collector = RunCollector(object_store, listing_context)
    registered_versions = RegisteredVersions()
    for pipeline_name in pipeline_names:
        run_collector.add_pipeline(pipeline_name)

    releases = list(
        _list_releases(
            object_store,
            run_collector.own_store_id,
            run_collector.runs_by_id,
            listing_context,
            registered_versions,
        )
    )
    run_collector.keep_records(registered_versions.list_run_ids(releases))

    claimed_tasks = (
        frozenset(claims.claimed_tasks(object_store, listing_context.claim_s))
        | _find_data_tasks(object_store, pipeline_names)
        | run_collector.tasks_in_use
        | listing_context.needed
    )

    removable_releases = releases if listing_context.targets else []
    return Listing(
        [*run_collector.runs_by_name.values()],
        removable_releases,
        entries.read_entries(object_store),
        claimed_tasks,
    )


class RunCollector:
    """Collects the runs of several pipelines from the caller and from their records in MLflow.

    `runs_by_name`: the runs that retention may remove. `runs_by_id`: the same runs by the id of
    their record in MLflow. `tasks_in_use`: the tasks (RUN/TASK) whose artifacts other runs use.
    """

    def __init__(self, object_store: Store, listing_context: ListingContext) -> None:
        self.store = object_store
        self.find_source_tasks = make_source_lookup(object_store)
        self.context = listing_context
        self.own_store_id = read_or_create_store_id(object_store)
        self.marks_by_name = _read_marks(object_store, listing_context.runs)
        self.runs_by_name = {
            run_name: _add_mark_number(run, self.marks_by_name[run_name])
            for run_name, run in listing_context.runs.items()
        }
        self.runs_by_id: dict[str, Run] = {}
        self.tasks_in_use: set[str] = set()
        self._names_with_records: set[str] = set()
        # id of the record of a trial → id of the record of its sweep
        self._parent_ids: dict[str, str] = {}

    def add_pipeline(self, pipeline_name: str) -> None:
        """Add the runs that MLflow records for a pipeline."""
        found_records = list(list_with_trials(pipeline_name, ANY_WORKFLOW_FILTER))
        self._parent_ids.update(
            {mlflow_record.id: get_parent_id(mlflow_record) for mlflow_record in found_records}
        )
        mlflow_records = [
            mlflow_record
            for mlflow_record in exclude_trials(pipeline_name, found_records)
            if mlflow_record.tags.get(STORE_TAG, self.own_store_id) == self.own_store_id
        ]
        # other records, such as the records of runs of other object stores, are not removed, but
        # their runs may read data of this object store
        own_ids = {mlflow_record.id for mlflow_record in mlflow_records}
        for mlflow_record in found_records:
            if mlflow_record.id not in own_ids and not get_parent_id(mlflow_record):
                self.tasks_in_use |= self.find_source_tasks(
                    mlflow_record.params.get("data.source", "")
                )

        compared_ids = _find_compared_ids(mlflow_records)
        own_names = {
            mlflow_record.name
            for mlflow_record in mlflow_records
            if STORE_TAG in mlflow_record.tags
        }
        self.marks_by_name.update(_read_marks(self.store, own_names - self.marks_by_name.keys()))

        for mlflow_record in mlflow_records:
            is_compared = mlflow_record.id in compared_ids
            self._add_record(pipeline_name, mlflow_record, is_compared)

    def _add_record(
        self, pipeline_name: str, mlflow_record: MlflowRecord, is_compared: bool
    ) -> None:
        """Add the run of a record in MLflow. If neither the caller nor a mark in the object store
        says that the run belongs to this object store and pipeline, only protect the artifacts that
        the run uses."""
        run_name = mlflow_record.name
        is_listed_by_caller = run_name in self.context.runs
        used_tasks = _find_used_tasks(mlflow_record) | self.find_source_tasks(
            mlflow_record.params.get("data.source", "")
        )

        run_mark = self.marks_by_name.get(run_name)
        if is_listed_by_caller:
            run = self.runs_by_name.get(run_name)
        elif run_mark:
            run = _make_run(mlflow_record, pipeline_name, run_mark, self.context.resumable_s)
        else:
            run = None

        if not run:
            self.tasks_in_use.update(used_tasks)
            return

        has_emptied_tag = (
            not is_listed_by_caller
            and mlflow_record.tags.get(tracking.ARTIFACTS_EMPTIED) == "removed"
        )
        # the tag alone does not prove that the artifacts were removed, since every client of MLflow
        # can set the tag
        is_emptied = has_emptied_tag and not ownership.has_artifacts(self.store, RunName(run_name))
        run = replace(run, uses=run.uses | used_tasks, compared=is_compared, emptied=is_emptied)

        if run_name in self._names_with_records:
            run = _combine_records(self.runs_by_name[run_name], run)
        self._names_with_records.add(run_name)
        self.runs_by_name[run_name] = run
        self.runs_by_id[mlflow_record.id] = run

    def keep_records(self, referred_ids: set[str]) -> None:
        """Keep the records in MLflow with these ids. For the record of a trial, keep the record of
        its sweep, because the records of a sweep and its trials are removed together."""
        sweep_ids = {self._parent_ids[run_id] for run_id in referred_ids & self._parent_ids.keys()}
        for run_id in (referred_ids | sweep_ids) & self.runs_by_id.keys():
            run_name = self.runs_by_id[run_id].name
            self.runs_by_name[run_name] = replace(self.runs_by_name[run_name], compared=True)


def make_inputs_function(
    object_store: Store, releases: Iterable[Release]
) -> Callable[[Release], Iterator[str]]:
    """Return a function that gets a release, and yields the key prefixes of the other releases that
    `rekindle reproduce` needs for it.

    The yielded releases are the release with the initial weights and, for a refreshed champion, the
    champion that was refreshed.
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


def _find_data_tasks(object_store: Store, pipeline_names: Set[str]) -> frozenset[str]:
    """Return the RUN/TASK of all artifacts that runs of other pipelines read as data.source."""
    experiment_ids = [
        experiment.experiment_id
        for experiments_page in search_all_pages("experiments", ExperimentsPage)
        for experiment in experiments_page.experiments
        if experiment.name not in pipeline_names
    ]
    bucket_uri = object_store.uri("").rstrip("/")
    run_filter = f"{ANY_WORKFLOW_FILTER} AND params.`data.source` ILIKE '{bucket_uri}%'"
    source_uris = set[str]()

    for mlflow_record in search_runs(experiment_ids, run_filter) if experiment_ids else ():
        source_uri = mlflow_record.params.get("data.source", "")
        if not parse_s3_address(source_uri):
            raise make_filter_error(mlflow_record, "data.source")
        source_uris.add(source_uri)

    return frozenset().union(
        *(find_source_tasks(object_store, source_uri) for source_uri in source_uris)
    )


def _read_marks(object_store: Store, candidate_names: Iterable[str]) -> dict[str, RunMark | None]:
    """Read the marks of runs (RUN/.rekindle.json) in the object store."""
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

    A run counts as ended only if its record in MLflow and its mark both contain its end. A failed
    run counts as active as long as it may be resumed.
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

    # check the mark and the tag, since every client can remove the tag, and marks of earlier
    # versions of Rekindle lack the field
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
    """Combine two records of a run in MLflow. Each of the two records may be forged, so the result
    protects everything that at least one of them protects."""
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
    used_tasks = map(TaskReference.parse_or_none, tag_values)
    return frozenset(used_task for used_task in used_tasks if used_task)


def _find_compared_ids(records_newest_first: list[MlflowRecord]) -> set[str]:
    """Return the MLflow ids of the runs with which later runs will be compared."""
    newest_ids: dict[str, str] = {}
    for mlflow_record in records_newest_first:
        for tag_name in COMPARED_TAGS:
            if tag_name in mlflow_record.tags and mlflow_record.info.status == "FINISHED":
                newest_ids.setdefault(tag_name, mlflow_record.id)
    return {*newest_ids.values()}


def make_source_lookup(object_store: Store) -> Callable[[str], frozenset[str]]:
    """Return `find_source_tasks` for an object store. The returned function looks up each address
    only once, since many runs of a pipeline read the same data."""
    return cache(partial(find_source_tasks, object_store))


def find_source_tasks(object_store: Store, source_uri: str) -> frozenset[str]:
    """Return the RUN/TASK of all artifacts that the address in data.source covers.

    `source_uri`, the value of data.source, may be the folder of a run, a pattern such as
    `RUN/*/out` or `demo-*/prepare/out`, all objects whose keys begin with a text such as `RUN/prep`
    or `demo-`, or the whole bucket.
    """
    s3_address = parse_s3_address(source_uri)
    if not s3_address or s3_address.bucket != object_store.bucket:
        return frozenset()

    literal_key = GLOB_PATTERN.split(s3_address.key)[0]
    folder_names = literal_key.split("/")
    source_task = TaskReference.parse_or_none("/".join(folder_names[:2]))
    if source_task and len(folder_names) > 2:
        return frozenset({source_task})

    # the address may end in the middle of the name of a run or a task, so list the folders
    if len(folder_names) == 1:
        found_folders = [folder.rstrip("/") for folder in object_store.list_folders(literal_key)]
        run_names = [folder for folder in found_folders if RunName.matches(folder)]
    else:
        run_names = list(filter(RunName.matches, folder_names[:1]))

    run_marks = _read_marks(object_store, run_names)
    task_names = {
        task_folder.rstrip("/")
        for run_name, run_mark in run_marks.items()
        if run_mark
        for task_folder in object_store.list_folders(
            f"{run_name}/{'' if len(folder_names) == 1 else folder_names[1]}"
        )
    }
    return frozenset(task_name for task_name in task_names if TaskReference.matches(task_name))


def _list_releases(
    object_store: Store,
    own_store_id: str,
    runs_by_id: Mapping[str, Run],
    listing_context: ListingContext,
    registered_versions: RegisteredVersions,
) -> Iterator[Release]:
    """Yield the model versions whose files are in this object store.

    `runs_by_id`: runs by the id of their record in MLflow. A model version belongs to the pipeline
    of the run that released it.
    """
    claimed_prefixes = claims.claimed_tasks(
        object_store, listing_context.resumable_s, claims.RELEASES_CLAIM
    )
    aliases_by_model = {
        model.name: model.aliases
        for models_page in search_all_pages("registered-models", ModelsPage)
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
    """Return the release of a model version; None if the version does not belong to this object
    store.

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
        # as long as the files of a release exist, the tag alone does not prove that their removal
        # has begun
        marked=is_marked
        and (not has_files or (release_owner is not None and release_owner.removed)),
    )


def _parse_object(json_bytes: bytes) -> dict[str, Any]:
    """Return the JSON object in a file of a release; {} if the file does not contain a JSON
    object."""
    with suppress(ValueError):
        json_value = loads(json_bytes)
        if isinstance(json_value, dict):
            return json_value
        return {}
    return {}
