"""What a user would lose if a run noticed the death of its runner; see kills.py."""

import pytest

from tests.pipelines.local.kills import Plan, Stage, overlaps, workflows


@pytest.fixture(scope="module")
def stage(s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("kills"), s3_environment)


@pytest.mark.parametrize("seed", [1, 4, 5, 6], ids=lambda seed: f"{Plan.of(seed).name}-{seed}")
def test_a_run_whose_runner_is_killed_ends_as_if_it_had_lived(stage: Stage, seed: int) -> None:
    assert stage.play(Plan.of(seed)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_moments(stage: Stage) -> None:
    assert {seed: problems for seed in range(100, 200) if (problems := stage.play(Plan.of(seed)))} == {}


def test_a_pod_that_runs_beside_its_successor_would_be_found() -> None:
    assert overlaps(["begin a 1", "begin a 2", "end a 2"]) == []
    assert overlaps(["begin a 1", "begin a 2", "end a 1"]) == ["a: process 1 ended after 2 had begun"]
    assert {Plan.of(seed).name for seed in range(7)} == set(workflows())
