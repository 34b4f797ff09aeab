"""What a user would lose if a run noticed the death of its runner; see kills.py."""

import fcntl
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.argolocal.runner.killed import Run, again, judged, overlaps, workflows
from tests.argolocal.runner.kills import Plan, Stage


@pytest.fixture(scope="module")
def stage(s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("kills"), s3_environment)


@pytest.mark.parametrize("seed", [9], ids=lambda seed: f"{Plan.of(seed).name}-{seed}")
def test_a_run_whose_runner_is_killed_ends_as_if_it_had_lived(stage: Stage, seed: int) -> None:
    assert stage.play(Plan.of(seed)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(12), ids=lambda number: Plan.of(number).name)
def test_ten_moments_of_each_workflow(stage: Stage, number: int) -> None:
    seeds = range(1200 + number, 1320 + number, 12)
    assert {seed: problems for seed in seeds if (problems := stage.play(Plan.of(seed)))} == {}


def orphan(run: Run) -> Callable[[], Any]:
    return subprocess.Popen(["sleep", "60"], env={"HOME_OF_ALL": str(run.notes)}).kill


def written(path: Path, text: str) -> Callable[[], Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.unlink


def locked(run: Run) -> Callable[[], Any]:
    written(run.home / "locks/x/0", "")
    lock = (run.home / "locks/x/0").open()
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock.close


def without_object(run: Run) -> Callable[[], Any]:
    data = run.store.get("parts/1")
    run.store.delete(["parts/1"])
    return lambda: run.store.put("parts/1", data)


def without_output(run: Run) -> Callable[[], Any]:
    node = next(node for node in run.status()["nodes"].values() if node["displayName"] == "use")
    journal = run.files.root / "journal.jsonl"
    before = journal.read_text()
    journal.write_text(before + json.dumps({"nodes": {node["id"]: {**node, "outputs": {}}}}) + "\n")
    return lambda: journal.write_text(before)


JOB = {"kind": "PyTorchJob", "metadata": {"name": "left", "annotations": {}}}
TAMPERED: dict[str, Callable[[Run], Callable[[], Any]]] = {
    "orphan": orphan,
    "locked": locked,
    "stored.parts/1": without_object,
    "nodes.files.use.outputs": without_output,
    "objects is": lambda run: written(run.home / "objects/PyTorchJob/left.json", json.dumps(JOB)),
    "directories is": lambda run: written(run.files.pods / "left", ""),
    "left behind": lambda run: written(run.files.resume_request, "{}"),
}


@pytest.mark.slow
def test_what_a_run_lost_or_left_behind_would_be_found(stage: Stage) -> None:
    expected, _ = stage.undisturbed("files")
    run = stage.run("files", "tampered")
    assert run.go() and judged(run, expected) == []
    for what, tamper in TAMPERED.items():
        undo = tamper(run)
        assert [problem for problem in judged(run, expected) if problem.startswith(what)], what
        undo()
    over = run.over()
    with (run.notes / "marks").open("a") as marks:
        marks.write(f"begin {next(iter(over))} 1\n")
    assert again(over, run.begun()) == [f"{next(iter(over))} was over and began again"]


def test_a_pod_that_runs_beside_its_successor_would_be_found() -> None:
    assert overlaps(["begin a 1", "begin a 2", "end a 2"]) == []
    assert overlaps(["begin a 1", "begin a 2", "end a 1"]) == ["a: process 1 ended after 2 had begun"]
    assert {Plan.of(seed).name for seed in range(12)} == set(workflows())
