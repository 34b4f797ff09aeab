"""Interrupted rollbacks and releases that are repeated or resumed have the same result as rollbacks
and releases without interruption."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle import tracking
from rekindle.local.local_objects import LocalObjects
from rekindle.storage import Store
from tests.rekindle.serving.interrupted import releases, rollbacks
from tests.rekindle.serving.interrupted.disturbance import Moment

SEEDS = range(20)


@pytest.fixture
def project(tmp_path: Path, s3: Store, mlflow_server: str) -> Iterator[releases.Project]:
    with releases.Project(tmp_path / "project", os.environ) as project:
        yield project


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3])
def test_repeating_the_command_finishes_an_interrupted_rollback(
    seed: int, tmp_path: Path, s3: Store, mlflow_server: str
) -> None:
    log, problems = rollbacks.play(seed, tmp_path, os.environ)
    assert not problems, "\n".join([log, *problems])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_interrupted_rollbacks_have_the_result_of_an_uninterrupted_rollback(
    tmp_path: Path, s3: Store, mlflow_server: str
) -> None:
    played = [rollbacks.play(seed, tmp_path, os.environ) for seed in SEEDS]
    assert not [(log, problems) for log, problems in played if problems]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_before_its_switch_does_not_take_traffic_from_a_newer_release(
    project: releases.Project,
) -> None:
    log, run, problems = project.release(
        Moment(2, is_before=False, kill=True, name="registered-models/alias"), newer=True
    )
    # the command was killed at the first alias, which belongs to the candidate
    assert "killed" in log[0], log
    assert "newer" in log[1], log
    problems += project.problems(run)
    assert not problems, "\n".join([*log, *problems])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_new_servers_of_the_same_model_replace_its_old_servers_with_as_many_pods(
    project: releases.Project,
) -> None:
    pipeline = project.folder / "pipelines" / "tiny.py"
    pipeline.write_text(
        pipeline.read_text().replace('words="{{workflow.name}}"', 'words="the same weights"')
    )
    servers = set[str]()
    pods = list[int]()

    for limit in ("64", "65"):
        code, out, _ = project.type("run", "tiny.yaml", "--set", f"serve.max_waiting={limit}")
        champion = tracking.champion(project.model)
        assert code == 0, out
        assert champion, out
        assert champion.version == "1", out
        assert project.kinds["Deployment"].names() == [champion.deployment]
        servers.add(champion.deployment)
        deployment = project.kinds["Deployment"].read(champion.deployment)
        pods.append(deployment["spec"]["replicas"] if deployment else 0)
        LocalObjects(project.cluster).patch(
            "Deployment", champion.deployment, {"spec": {"replicas": 2}}
        )

    assert len(servers) == 2
    assert pods == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_interrupted_releases_have_the_result_of_an_uninterrupted_release(
    project: releases.Project,
) -> None:
    log, run, problems = project.release()
    assert not [*problems, *project.problems(run)], log
    played = [releases.play(seed, project) for seed in SEEDS]
    assert not [(log, problems) for log, problems in played if problems]
