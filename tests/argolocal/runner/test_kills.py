"""A run must survive the death of its runner, which kills.py ends at random moments."""

import fcntl
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.argolocal.runner.killed import (
    Run,
    find_overlaps,
    find_problems,
    find_restarts,
    make_workflows,
)
from tests.argolocal.runner.kills import Plan, Stage


@pytest.fixture(scope="module")
def stage(s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("kills"), s3_environment)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [9], ids=lambda seed: f"{Plan.of(seed).name}-{seed}")
def test_a_run_with_a_killed_runner_has_the_same_outcome(stage: Stage, seed: int) -> None:
    assert stage.play(Plan.of(seed)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moment_number", range(12), ids=lambda number: Plan.of(number).name)
def test_each_workflow_has_the_same_outcome_after_each_of_ten_kills(
    stage: Stage, moment_number: int
) -> None:
    seeds = range(1200 + moment_number, 1320 + moment_number, 12)
    assert {seed: found for seed in seeds if (found := stage.play(Plan.of(seed)))} == {}


def start_orphan(run: Run) -> Callable[[], Any]:
    return subprocess.Popen(["sleep", "60"], env={"HOME_OF_ALL": str(run.notes)}).kill


def write(path: Path, text: str) -> Callable[[], Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.unlink


def hold_lock(run: Run) -> Callable[[], Any]:
    write(run.home / "locks/x/0", "")
    lock = (run.home / "locks/x/0").open()
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock.close


def remove_object(run: Run) -> Callable[[], Any]:
    data = run.store.get("parts/1")
    run.store.delete(["parts/1"])
    return lambda: run.store.put("parts/1", data)


def remove_output(run: Run) -> Callable[[], Any]:
    node = next(node for node in run.status()["nodes"].values() if node["displayName"] == "use")
    journal = run.files.root / "journal.jsonl"
    text = journal.read_text()
    journal.write_text(text + json.dumps({"nodes": {node["id"]: {**node, "outputs": {}}}}) + "\n")
    return lambda: journal.write_text(text)


JOB = {"kind": "PyTorchJob", "metadata": {"name": "left", "annotations": {}}}
FAULTS_BY_NAME: dict[str, Callable[[Run], Callable[[], Any]]] = {
    "orphan": start_orphan,
    "locked": hold_lock,
    "stored.parts/1": remove_object,
    "nodes.files.use.outputs": remove_output,
    "objects is": lambda run: write(run.home / "objects/PyTorchJob/left.json", json.dumps(JOB)),
    "directories is": lambda run: write(run.files.pods / "left", ""),
    "left behind": lambda run: write(run.files.resume_request, "{}"),
}


@pytest.mark.slow
def test_the_check_of_a_killed_run_finds_lost_and_leftover_files(stage: Stage) -> None:
    expected, _ = stage.undisturbed("files")
    run = stage.run("files", "tampered")
    assert run.start_and_kill()
    assert find_problems(run, expected) == []

    for what, tamper in FAULTS_BY_NAME.items():
        undo = tamper(run)
        assert [problem for problem in find_problems(run, expected) if problem.startswith(what)], (
            what
        )
        undo()

    ended_pods = run.ended_pods()
    with (run.notes / "marks").open("a") as marks:
        marks.write(f"begin {next(iter(ended_pods))} 1\n")

    assert find_restarts(ended_pods, run.starts()) == [
        f"{next(iter(ended_pods))} was over and began again"
    ]


def test_the_check_of_a_killed_run_finds_a_pod_that_overlaps_its_successor() -> None:
    assert find_overlaps(["begin a 1", "begin a 2", "end a 2"]) == []
    assert find_overlaps(["begin a 1", "begin a 2", "end a 1"]) == [
        "a: process 1 ended after 2 had begun"
    ]
    assert {Plan.of(seed).name for seed in range(12)} == set(make_workflows())
