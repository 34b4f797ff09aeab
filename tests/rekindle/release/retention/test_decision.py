"""The decision removes nothing that is needed, and after an interrupted removal, the next removal
finds everything that is left."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.cache.entries import Entry
from rekindle.release.retention.decision import Listing, Release, Removal, Run, choose_removals
from rekindle.release.serve_config import RetentionConfig

NOW = 1e9
DAY = 86400.0
PIPELINES = ("cards", "power")
TASKS = ("prepare", "train")


@dataclass
class World:
    """All runs and releases: `artifacts` contains names RUN/TASK, and `inputs` the releases that a
    reproduction reads."""

    runs: dict[str, Run]
    releases: dict[tuple[str, int], Release]
    files: set[str]
    entries: dict[str, Entry]
    artifacts: set[str]
    inputs: dict[str, set[str]]
    claimed: frozenset[str] = frozenset()

    def listing(self) -> Listing:
        return Listing(
            [*self.runs.values()], [*self.releases.values()], [*self.entries.values()], self.claimed
        )

    def decide(self, limits: dict[str, RetentionConfig]) -> Removal:
        return choose_removals(
            self.listing(), limits, NOW, lambda release: self.inputs[release.prefix]
        )

    def apply(self, removal: Removal) -> Iterator[None]:
        """Remove the chosen runs and releases one after the other, in the order of removal.py."""
        for release in removal.releases:
            key = release.model, release.version
            self.releases[key] = replace(release, marked=True)
            yield

            if all(
                other.prefix != release.prefix or other.marked for other in self.releases.values()
            ):
                self.files.discard(release.prefix)
                yield

            del self.releases[key]
            yield

        for run_removal in removal.runs:
            for key, entry in [*self.entries.items()]:
                if entry in removal.entries and entry.workflow == run_removal.run.name:
                    del self.entries[key]
                    yield

            for task in [
                task for task in self.artifacts if task.startswith(f"{run_removal.run.name}/")
            ]:
                if task not in run_removal.kept_tasks:
                    self.artifacts.discard(task)
                    yield

            if run_removal.kept_tasks:
                continue

            if run_removal.keep_mlflow:
                self.runs[run_removal.run.name] = replace(
                    run_removal.run, emptied=True, uses=run_removal.run.uses
                )
            else:
                del self.runs[run_removal.run.name]

            yield

    def check(self) -> None:
        """Check that every reference refers to something that still exists."""
        assert {entry.at for entry in self.entries.values()} <= self.artifacts
        assert all(
            release.prefix in self.files for release in self.releases.values() if not release.marked
        )
        for run in self.runs.values():
            assert run.ended or f"{run.name}/prepare" in self.artifacts, (
                "an active run has lost artifacts"
            )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    runs: dict[str, Run] = {}
    for number in range(draw(st.integers(0, 9))):
        ended = draw(st.none() | st.floats(0, 40).map(lambda days: NOW - days * DAY))
        sources = st.sampled_from(
            [f"{name}/{task}" for name in runs for task in TASKS] or ["other/prepare"]
        )
        uses = frozenset(draw(st.lists(sources, max_size=2)))
        flags = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
        name = f"r-{number}"
        runs[name] = Run(
            name, draw(st.sampled_from(PIPELINES)), ended, flags[0], flags[1], uses, flags[2]
        )

    releases = {}
    inputs = {}
    names = st.sampled_from([*runs, "gone"])

    for number in range(1, draw(st.integers(0, 6)) + 1):
        model = draw(st.sampled_from(PIPELINES))
        prefix = f"releases/{number}/"
        flags = draw(st.tuples(st.booleans(), st.integers(0, 9)))
        run = draw(names)
        releases[model, number] = Release(
            model, number, prefix, model, "", run, 0.0, flags[0], flags[1] == 0
        )
        inputs[prefix] = set(draw(st.lists(st.sampled_from([*inputs, prefix]), max_size=1)))

    entries = {}
    for name in runs:
        for task in TASKS if draw(st.booleans()) else ():
            entries[f"{name}/{task}"] = Entry(
                f"{name}{task}", f"{name}/{task}", {}, {}, {}, 1.0, NOW
            )

    artifacts = {f"{name}/{task}" for name in runs for task in TASKS}
    if artifacts:
        claimed = draw(st.frozensets(st.sampled_from(sorted(artifacts)), max_size=4))
    else:
        claimed = frozenset[str]()

    return World(runs, releases, {*inputs}, entries, artifacts, inputs, claimed)


limits_of_pipelines = st.fixed_dictionaries(
    {},
    optional={
        name: st.builds(
            RetentionConfig,
            keep_runs=st.none() | st.integers(1, 4),
            keep_days=st.none() | st.floats(1, 30),
            keep_releases=st.none() | st.integers(1, 3),
        )
        for name in PIPELINES
    },
)


@given(worlds(), limits_of_pipelines)
@settings(max_examples=300)
def test_nothing_that_is_needed_is_removed(
    world: World, limits: dict[str, RetentionConfig]
) -> None:
    earlier_world = World(
        dict(world.runs),
        dict(world.releases),
        set(world.files),
        dict(world.entries),
        set(world.artifacts),
        {},
    )

    removal = world.decide(limits)
    for _ in world.apply(removal):
        pass

    world.check()
    removed_names = {run_removal.run.name for run_removal in removal.runs}

    for name, run in earlier_world.runs.items():
        limit = limits.get(run.pipeline, RetentionConfig())
        later = [
            other
            for other in earlier_world.runs.values()
            if other.pipeline == run.pipeline
            and other.ended
            and other.counted
            and other.ended > (run.ended or 0)
        ]

        is_within_number = (
            limit.keep_runs is None or not run.counted or len(later) < limit.keep_runs
        )
        is_within = is_within_number and (
            limit.keep_days is None or NOW - (run.ended or NOW) <= limit.keep_days * DAY
        )

        equal_ends = len({other.ended for other in earlier_world.runs.values()}) < len(
            earlier_world.runs
        )
        if run.ended is None or (is_within and not equal_ends):
            assert name not in removed_names

        if name not in removed_names and not run.emptied:
            assert run.uses & earlier_world.artifacts <= world.artifacts, (
                "a kept run reuses these artifacts"
            )

    assert world.claimed <= world.artifacts, "a run has claimed these artifacts"
    for key, release in earlier_world.releases.items():
        newer = [
            other for other in earlier_world.releases if other[0] == key[0] and other[1] > key[1]
        ]
        keep = limits.get(release.pipeline, RetentionConfig()).keep_releases
        run = earlier_world.runs.get(release.run)

        is_resumable = (
            run and not run.succeeded and not run.emptied and run.name not in removed_names
        )
        if not release.marked and (
            release.needed or is_resumable or keep is None or len(newer) < keep
        ):
            assert key in world.releases
            assert release.prefix in world.files
            assert release.run not in earlier_world.runs or release.run in world.runs, (
                "the record of a release's run"
            )
            gone = {other.prefix for other in earlier_world.releases.values() if other.marked}
            assert world.inputs[release.prefix] <= world.files | gone, (
                "`rekindle reproduce` reads these releases"
            )


@pytest.mark.slow
@given(worlds(), limits_of_pipelines, st.integers(0, 30))
@settings(max_examples=300)
def test_a_removal_that_is_interrupted_anywhere_is_completed_by_the_next(
    world: World, limits: dict[str, RetentionConfig], parts: int
) -> None:
    other = World(
        dict(world.runs),
        dict(world.releases),
        set(world.files),
        dict(world.entries),
        set(world.artifacts),
        world.inputs,
        world.claimed,
    )
    for _ in world.apply(world.decide(limits)):
        pass

    for _, _ in zip(range(parts), other.apply(other.decide(limits)), strict=False):
        other.check()

    for _ in range(2):
        for _ in other.apply(other.decide(limits)):
            other.check()

    for _ in world.apply(world.decide(limits)):
        pass

    assert other.runs == world.runs
    assert other.releases == world.releases
    assert other.files == world.files
    assert other.entries == world.entries
    assert other.artifacts == world.artifacts

    second_decision = world.decide(limits)
    assert not second_decision.releases
    assert not second_decision.entries
    assert all(run_removal.kept_tasks for run_removal in second_decision.runs), (
        "only runs whose artifacts are still needed"
    )
