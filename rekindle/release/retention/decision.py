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
    """A run. `ended`: Unix time of its end; None if the run is active or may be resumed.

    `number`: position in the order of the runs' last changes, which does not depend on clocks; 0 if
    it is not recorded.
    """

    name: str
    pipeline: str
    ended: float | None = None
    succeeded: bool = True
    # False: the run does not count towards `keep_runs`, for example in a backfill
    counted: bool = True
    uses: frozenset[str] = frozenset()  # RUN/TASK of other runs whose artifacts the run reads
    # True: its record in MLflow is needed, by comparisons of later runs or by a model version
    compared: bool = False
    emptied: bool = False  # True: only its record in MLflow still exists
    number: int = 0
    uid: str = ""  # uid of the Workflow; "": unknown


@dataclass(frozen=True)
class Release:
    """A version of a model. `needed`: it has an alias, or `rekindle rollback` can restore it."""

    model: str
    version: int
    prefix: str  # key prefix of its files
    pipeline: str  # pipeline of its run; "" if the run is not listed
    sha256: str = ""  # sha256 of the weights
    run: str = ""  # name of the run that released it
    created: float = 0.0
    needed: bool = False
    marked: bool = False  # True: its removal was interrupted


@dataclass(frozen=True)
class Listing:
    """All runs, releases and cache entries. `claimed`: RUN/TASK of the artifacts that active runs
    use."""

    runs: list[Run] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    claimed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RunRemoval:
    """The removal of a run. `kept_tasks`: RUN/TASK of artifacts to keep. If there are any, the
    run's records are kept, too."""

    run: Run
    kept_tasks: frozenset[str]
    keep_mlflow: bool  # True: the record in MLflow is not removed


@dataclass(frozen=True)
class Removal:
    """The releases, cache entries and runs to remove, in this order."""

    releases: list[Release] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    runs: list[RunRemoval] = field(default_factory=list)


def choose_removals(
    listing: Listing,
    limits: Mapping[str, RetentionConfig],
    now: float,
    inputs: Callable[[Release], Iterable[str]],
) -> Removal:
    """Choose the runs and releases that exceed the `limits` of their pipeline and are not needed.

    `limits`: by pipeline; a pipeline without limits keeps everything. `inputs(release)`: prefixes
    of the other releases that `rekindle reproduce` needs for `release`.
    """
    inputs_of = cache(lambda release: frozenset(inputs(release)))
    expired = {run.name for run in _surplus_runs(listing.runs, limits, now)}

    while True:
        unfinished = {
            run.name for run in listing.runs if run.name not in expired and not run.succeeded
        }
        removed_releases = _surplus_releases(listing.releases, unfinished, limits, inputs_of)
        released = {release.run for release in listing.releases if release not in removed_releases}
        readers = [run for run in listing.runs if run.name not in expired or run.name in released]
        needed_tasks = listing.claimed.union(*(run.uses for run in readers))
        sources = {task.partition("/")[0] for task in needed_tasks}

        # a failed run keeps all of its artifacts if any of them is needed, so that the run can be
        # resumed
        resumable = {
            run.name for run in listing.runs if run.name in expired & sources and not run.succeeded
        }
        if not resumable:
            break

        expired -= resumable

    removals = []
    for run in (run for run in listing.runs if run.name in expired):
        kept_tasks = frozenset(task for task in needed_tasks if task.startswith(f"{run.name}/"))
        keep_mlflow = bool(kept_tasks) or run.compared or run.name in released
        if not (run.emptied and keep_mlflow):
            removals.append(RunRemoval(run, kept_tasks, keep_mlflow))

    removed_entries = [
        e for e in listing.entries if e.workflow in expired and e.at not in needed_tasks
    ]
    return Removal(removed_releases, removed_entries, removals)


def _surplus_runs(
    runs: Iterable[Run], limits: Mapping[str, RetentionConfig], now: float
) -> list[Run]:
    surplus = []
    counts = Counter[str]()
    # sort by number first, since a clock that was set back would make a new run look old
    newest_first = sorted(runs, key=lambda run: (-run.number, -(run.ended or 0), run.name))
    ends = _increasing_ends(newest_first)
    has_newer: set[str] = set()

    for run in newest_first:
        limit = limits.get(run.pipeline, NO_LIMITS)
        if run.ended is None:
            continue

        is_counted = run.counted and not run.emptied
        if is_counted:
            counts[run.pipeline] += 1

        exceeds_number = (
            is_counted and limit.keep_runs is not None and counts[run.pipeline] > limit.keep_runs
        )
        is_old = limit.keep_days is not None and now - ends[run.name] > limit.keep_days * DAY_S
        if run.emptied or exceeds_number or (is_old and run.pipeline in has_newer):
            surplus.append(run)
        if not run.emptied:
            has_newer.add(run.pipeline)

    return surplus


def _increasing_ends(newest_first: Iterable[Run]) -> dict[str, float]:
    """Return the end times of the runs, made ascending: a time that is earlier than that of a
    previous run is raised to it."""
    ends: dict[str, float] = {}
    latest = 0.0
    for run in reversed([*newest_first]):
        if run.ended is not None:
            latest = max(latest, run.ended)
            ends[run.name] = latest
    return ends


def _surplus_releases(
    releases: Iterable[Release],
    unfinished: Set[str],
    limits: Mapping[str, RetentionConfig],
    inputs: Callable[[Release], Iterable[str]],
) -> list[Release]:
    """Return the releases that exceed the limits and are not needed. `unfinished`: names of runs
    that are active or can be resumed, whose releases are needed."""
    surplus = []
    kept = []
    counts = Counter[tuple[str, str]]()

    for release in sorted(releases, key=lambda release: -release.version):
        limit = limits.get(release.pipeline, NO_LIMITS).keep_releases
        owner = release.model, release.pipeline
        counts[owner] += not release.marked
        exceeds_number = limit is not None and counts[owner] > limit
        is_needed = release.needed or release.run in unfinished
        is_surplus = release.marked or (exceeds_number and not is_needed)
        (surplus if is_surplus else kept).append(release)

    if surplus:
        needed_prefixes = {prefix for release in kept for prefix in inputs(release)}
    else:
        needed_prefixes = set()

    return [
        release for release in surplus if release.marked or release.prefix not in needed_prefixes
    ]
