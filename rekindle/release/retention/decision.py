"""Decides which runs, releases and cache entries to remove, without removing them.

An interrupted removal leaves no dangling references: a cache entry is deleted before its artifacts,
a version is marked before its files are removed, and the record of a run (MLflow, the folder of the
run, the Workflow) is removed last, so that the next removal finds the run again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cache

from rekindle.cache.entries import DAY_S, Entry
from rekindle.release.serve_config import RetentionConfig

NO_LIMITS = RetentionConfig.model_validate({})


@dataclass(frozen=True)
class Run:
    """A run. `ended`: the Unix time of the run's end; None if the run is active or may be resumed.

    `number`: position in the order of the runs' last changes, which does not depend on clocks; 0 if
    the position is not recorded.
    """

    name: str
    pipeline: str
    ended: float | None = None
    succeeded: bool = True
    # False if the run does not count towards `keep_runs`, for example in a backfill
    counted: bool = True
    # tasks of other runs (RUN/TASK) whose artifacts this run reads
    uses: frozenset[str] = frozenset()
    # True if a later run will be compared with this run, or if a model version refers to this run;
    # the run's record in MLflow is then kept
    compared: bool = False
    # True if only the run's record in MLflow still exists
    emptied: bool = False
    number: int = 0
    # uid of the run's Workflow; "" if unknown
    uid: str = ""


@dataclass(frozen=True)
class Release:
    """A version of a model. `needed` is True if the version has an alias, or if `rekindle rollback`
    can restore it."""

    model: str
    version: int
    # key prefix of the release's files
    prefix: str
    # pipeline of its run; "" if the run is not listed
    pipeline: str
    # sha256 of the weights
    sha256: str = ""
    # name of the run that released it
    run: str = ""
    created: float = 0.0
    needed: bool = False
    # True if the removal of the release has begun, but was interrupted
    marked: bool = False


@dataclass(frozen=True)
class Listing:
    """All runs, releases and cache entries. `claimed`: the tasks (RUN/TASK) whose artifacts active
    runs use."""

    runs: list[Run] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    claimed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RunRemoval:
    """The removal of a run. `kept_tasks`: the tasks (RUN/TASK) whose artifacts are kept. If
    `kept_tasks` is not empty, the run's records are kept, too."""

    run: Run
    kept_tasks: frozenset[str]
    # True if the run's record in MLflow is kept
    keep_mlflow: bool


@dataclass(frozen=True)
class Removal:
    """The releases, cache entries and runs to remove. Releases are removed first, then cache
    entries, then runs."""

    releases: list[Release] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    runs: list[RunRemoval] = field(default_factory=list)


def choose_removals(
    listing: Listing,
    limits_by_pipeline: Mapping[str, RetentionConfig],
    now_seconds: float,
    find_inputs: Callable[[Release], Iterable[str]],
) -> Removal:
    """Choose the runs and releases that exceed the limits of their pipeline and are not needed.

    A pipeline that is not in `limits_by_pipeline` keeps all its runs and releases.
    `find_inputs(release)`: key prefixes of the other releases that `rekindle reproduce` needs for
    `release`.
    """
    find_cached_inputs = cache(lambda release: frozenset(find_inputs(release)))
    expired_names = {
        run.name for run in _list_surplus_runs(listing.runs, limits_by_pipeline, now_seconds)
    }

    while True:
        unfinished_names = {
            run.name for run in listing.runs if run.name not in expired_names and not run.succeeded
        }
        removed_releases = _list_surplus_releases(
            listing.releases, unfinished_names, limits_by_pipeline, find_cached_inputs
        )
        released_names = {
            release.run for release in listing.releases if release not in removed_releases
        }
        reading_runs = [
            run
            for run in listing.runs
            if run.name not in expired_names or run.name in released_names
        ]
        needed_tasks = listing.claimed.union(*(run.uses for run in reading_runs))
        source_names = {task_reference.partition("/")[0] for task_reference in needed_tasks}

        # a failed run keeps all of its artifacts if any of them is needed, so that the run can be
        # resumed
        resumable_names = {
            run.name
            for run in listing.runs
            if run.name in expired_names & source_names and not run.succeeded
        }
        if not resumable_names:
            break

        expired_names -= resumable_names

    run_removals = []
    for run in listing.runs:
        if run.name not in expired_names:
            continue

        kept_tasks = frozenset(
            task_reference
            for task_reference in needed_tasks
            if task_reference.startswith(f"{run.name}/")
        )
        keeps_mlflow_record = bool(kept_tasks) or run.compared or run.name in released_names
        if not (run.emptied and keeps_mlflow_record):
            run_removals.append(RunRemoval(run, kept_tasks, keeps_mlflow_record))

    removed_entries = [
        cache_entry
        for cache_entry in listing.entries
        if cache_entry.workflow in expired_names and cache_entry.at not in needed_tasks
    ]
    return Removal(removed_releases, removed_entries, run_removals)


def _list_surplus_runs(
    runs: Iterable[Run], limits_by_pipeline: Mapping[str, RetentionConfig], now_seconds: float
) -> list[Run]:
    surplus_runs = []
    counts_by_pipeline = Counter[str]()
    # sort by number first, since a clock that was set back would make a new run look old
    runs_newest_first = sorted(runs, key=lambda run: (-run.number, -(run.ended or 0), run.name))
    end_times = _compute_end_times(runs_newest_first)
    pipelines_with_newer_runs: set[str] = set()

    for run in runs_newest_first:
        pipeline_limits = limits_by_pipeline.get(run.pipeline, NO_LIMITS)
        if run.ended is None:
            continue

        is_counted = run.counted and not run.emptied
        if is_counted:
            counts_by_pipeline[run.pipeline] += 1

        exceeds_number = (
            is_counted
            and pipeline_limits.keep_runs is not None
            and counts_by_pipeline[run.pipeline] > pipeline_limits.keep_runs
        )
        is_old = (
            pipeline_limits.keep_days is not None
            and now_seconds - end_times[run.name] > pipeline_limits.keep_days * DAY_S
        )
        if run.emptied or exceeds_number or (is_old and run.pipeline in pipelines_with_newer_runs):
            surplus_runs.append(run)
        if not run.emptied:
            pipelines_with_newer_runs.add(run.pipeline)

    return surplus_runs


def _compute_end_times(runs_newest_first: Iterable[Run]) -> dict[str, float]:
    """Return the end time of each run by its name. If a run ended earlier than the previous run in
    the order, it gets the end time of the previous run, since a clock may have been set back."""
    end_times: dict[str, float] = {}
    latest_end_seconds = 0.0
    for run in reversed([*runs_newest_first]):
        if run.ended is not None:
            latest_end_seconds = max(latest_end_seconds, run.ended)
            end_times[run.name] = latest_end_seconds
    return end_times


def _list_surplus_releases(
    releases: Iterable[Release],
    unfinished_names: Set[str],
    limits_by_pipeline: Mapping[str, RetentionConfig],
    find_inputs: Callable[[Release], Iterable[str]],
) -> list[Release]:
    """Return the releases of a pipeline that exceed the limits and are not needed.
    `unfinished_names`: names of runs that are active or can be resumed, whose releases are
    needed."""
    surplus_releases = []
    kept_releases = []
    counts_by_owner = Counter[tuple[str, str]]()

    for release in sorted(releases, key=lambda release: -release.version):
        keep_count = limits_by_pipeline.get(release.pipeline, NO_LIMITS).keep_releases
        owner_key = release.model, release.pipeline
        if not release.marked:
            counts_by_owner[owner_key] += 1

        exceeds_number = keep_count is not None and counts_by_owner[owner_key] > keep_count
        is_needed = release.needed or release.run in unfinished_names
        if release.marked or (exceeds_number and not is_needed):
            surplus_releases.append(release)
        else:
            kept_releases.append(release)

    if surplus_releases:
        needed_prefixes = {prefix for release in kept_releases for prefix in find_inputs(release)}
    else:
        needed_prefixes = set()

    return [
        release
        for release in surplus_releases
        if release.marked or release.prefix not in needed_prefixes
    ]
