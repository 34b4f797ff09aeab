"""Tests of a sweep as a user starts it, and of the same sweep when all its processes are killed."""

import json
import re
import shutil
import signal
import subprocess
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rekindle import tracking
from rekindle.storage import Store
from tests.commands import ROOT, Shell, open_shell
from tests.rekindle.cli.user_project import run_make
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # whole runs
SETS_27 = (
    "--set sweep.trials=27 --set sweep.rungs=3 --set train.checkpoint_steps=10 --set"
    " gate.minimum.accuracy=1"
)
NOT_RELEASED = 3
CHECKPOINT = re.compile(r"/trials/(\d+)/checkpoints/manifests/")


def read_metrics(server: str, run_id: str) -> dict[str, float]:
    """Return the newest value of each metric, read with MLflow's own client."""
    # imported here, because the import takes seconds, and each process of xdist imports this file
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=server).get_run(run_id).data.metrics


@pytest.fixture
def typed(tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str) -> Iterator[Shell]:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with open_shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as typed:
        yield typed


@pytest.fixture
def project_shell(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
) -> Iterator[Shell]:
    """A shell in a user's project, which uses the sweep pipeline of the reference project."""
    run_make(tmp_path / "shop")
    with open_shell(
        tmp_path / "shop", **s3_environment, MLFLOW_TRACKING_URI=mlflow_server
    ) as typed:
        yield typed


def test_sweep_rejects_other_pipelines_before_they_start(typed: Shell) -> None:
    result = typed("rekindle sweep configs/demo.yaml")
    assert result.returncode == 2, result.stderr
    assert "pipelines.training is not a sweep" in result.stderr
    assert "section `sweep`" in result.stderr
    assert "no runs" in typed("rekindle status").stdout


def test_the_best_trial_is_released_without_another_training(
    project_shell: Shell, s3: Store, mlflow_server: str
) -> None:
    name = f"sweep-{uuid.uuid4().hex[:6]}"
    shutil.copy(ROOT / "template/prices.yaml", project_shell.folder)
    completed = project_shell(f"rekindle sweep configs/sweep.yaml --set name={name} -o json")
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    trials = result["trials"]
    costs = [trial["cost"] for trial in trials]
    assert all(cost["currency"] == "USD" and 0 < cost["trained"] <= cost["total"] for cost in costs)
    assert Counter(trial["state"] for trial in trials) == {"trained": 1, "paused": 4}
    best = trials[0]
    released = json.loads(s3.get(f"{result['workflow']}/best/model/model.json"))

    with urllib.request.urlopen(f"{result['endpoint']}/v1/models/{name}") as answer:
        served = json.load(answer)

    assert released["sha256"] == best["sha256"] == served["sha256"]
    assert released["train"]["learning_rate"] == best["train.learning_rate"]
    assert not any(step["name"].startswith("train-") for step in result["steps"])
    parent = tracking.find_run(name, result["workflow"])
    child = tracking.find_run(name, f"{result['workflow']}.trial-{best['trial']}")
    assert parent
    assert child
    assert tracking.read_tags(child)["mlflow.parentRunId"] == parent
    assert float(tracking.read_params(child)["train.learning_rate"]) == best["train.learning_rate"]
    assert tracking.artifacts(parent, "search") == ["search/search.png"]
    logged = read_metrics(mlflow_server, parent)
    assert logged["cost/total"] == pytest.approx(sum(cost["total"] for cost in costs), abs=1e-8)
    shown = project_shell(f"rekindle sweep --of {result['workflow']}")
    title, *lines, empty, costs_line = shown.stdout.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith(str(best["trial"]))

    assert title.split()[-2:] == ["cost", "state"]
    assert not empty
    assert "of their pods, cost 0.0" in costs_line

    assert project_shell("rekindle sweep --of nothing").returncode == 2


LINE = {
    "pipeline": "pipelines.sweep",
    "workload": "slopes",
    "data": {"source": "simulate://0"},
    "program": {
        "command": ["line.py", "{checkpoints}", "{model.rate}", "--mlflow"],
        "resume": ["--resume", "{checkpoint}"],
        "result": "{checkpoints}/final.json",
        "marker": "done",
        "preload": [],
    },
    "sweep": {
        **{"trials": 3, "parallel": 2, "metric": "logged_error"},
        "space": {"model": {"rate": [0.1, 0.3, 5.0]}},
        "sampler": "grid",
    },
    "gate": {"maximum": {"error": 1}},
    "serve": {"min_replicas": 1},
}


def test_the_best_trial_of_a_program_is_released(
    project_shell: Shell, s3: Store, mlflow_server: str
) -> None:
    name = f"line-{uuid.uuid4().hex[:6]}"
    shutil.copy(ROOT / "tests/programs/line.py", project_shell.folder)
    shutil.copy(ROOT / "tests/rekindle/program/slopes.py", project_shell.folder)
    shutil.copy(ROOT / "template/prices.yaml", project_shell.folder)
    file = project_shell.folder / "configs/line.yaml"
    file.write_text(json.dumps({"name": name, **LINE}))

    completed = project_shell("rekindle sweep configs/line.yaml -o json")
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    best, second, failed = result["trials"]
    assert [best["state"], second["state"], failed["state"]] == ["trained", "trained", "failed"]
    assert [best["model.rate"], second["model.rate"], failed["model.rate"]] == [0.3, 0.1, 5]
    assert best["logged_error"] == pytest.approx(2 * 0.7**20)
    assert "line.py:" in failed["why"]
    assert "ValueError: the rate 5 is more than 1" in failed["why"]
    assert all(trial["cost"]["total"] > 0 for trial in (best, second))
    assert result["hours"] > 0

    released = json.loads(s3.get(f"{result['workflow']}/best/model/model.json"))
    assert released["sha256"] == best["sha256"]
    assert released["model"]["rate"] == 0.3
    with urllib.request.urlopen(f"{result['endpoint']}/v1/models/{name}") as answer:
        assert json.load(answer)["sha256"] == best["sha256"]

    parent = tracking.find_run(name, result["workflow"])
    child = tracking.find_run(name, f"{result['workflow']}.trial-{best['trial']}")
    assert parent
    assert child
    assert tracking.read_tags(child)["mlflow.parentRunId"] == parent
    assert tracking.read_params(child) == {"model.rate": "0.3"}
    metrics = read_metrics(mlflow_server, child)
    assert metrics["objective"] == metrics["logged_error"] == best["logged_error"]
    assert metrics["train/final_error"] == pytest.approx(best["logged_error"])

    shown = project_shell(f"rekindle sweep --of {result['workflow']}")
    title, *lines, empty, costs_line = shown.stdout.splitlines()
    assert title.split() == ["trial", "logged_error", "rate", "steps", "cost", "state"]
    assert [line.split()[-1] for line in lines] == ["trained", "trained", "failed"]
    assert not empty
    assert "of their pods, cost 0.0" in costs_line


def test_killing_every_trial_and_the_pods_while_they_decide_does_not_change_the_results(
    typed: Shell, tmp_path: Path, s3: Store
) -> None:
    undisturbed = json.loads(
        typed(f"rekindle sweep configs/sweep.yaml {SETS_27} --set name=calm -o json").stdout
    )
    command = f"exec rekindle sweep configs/sweep.yaml {SETS_27} --set name=killed -o json"
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        run = subprocess.Popen(
            ["bash", "-c", command], cwd=tmp_path, env=dict(typed.environ), stdout=out, stderr=err
        )
        killed_count = kill_everything(run, tmp_path, s3)

    assert run.returncode == NOT_RELEASED, (tmp_path / "err").read_text()
    assert killed_count["deciding"] == 2, killed_count
    assert killed_count.keys() >= {str(trial["trial"]) for trial in undisturbed["trials"]}, (
        killed_count
    )
    assert json.loads((tmp_path / "out").read_text())["trials"] == undisturbed["trials"]
    assert len(undisturbed["trials"]) == 27
    assert undisturbed["hours"] > 0
    assert not undisturbed["untried"]


def kill_everything(run: subprocess.Popen[bytes], folder: Path, s3: Store) -> Counter[str]:
    """Kill each trial of a sweep once, after its first checkpoint, and twice after a decision;
    return the number of kills of both kinds."""
    kills_by_kind: Counter[str] = Counter()
    decisions = 0

    def has_ended() -> bool:
        nonlocal decisions
        keys = [
            entry.key
            for run in folder.glob(".rekindle/runs/killed-*")
            for entry in s3.list(f"{run.name}/search/")
        ]

        fresh = set(CHECKPOINT.findall("\n".join(keys))) - kills_by_kind.keys()
        decided = sum("/jobs/" in key for key in keys)

        if fresh:
            kills_by_kind.update(fresh if kill(run) else ())
        elif decided > max(decisions, 5) and kills_by_kind["deciding"] < 2 and kill(run):
            kills_by_kind["deciding"] += 1

        decisions = decided
        return run.poll() is not None

    until("the end of the sweep", has_ended, 800)
    return kills_by_kind


def kill(run: subprocess.Popen[bytes]) -> int:
    """Send SIGKILL to the processes of the trials' pods, and return the number of the killed
    processes."""
    victims: list[Any] = []
    for process in (
        psutil.Process(run.pid).children(recursive=True) if psutil.pid_exists(run.pid) else []
    ):
        try:
            if "steps.search.trial" in process.cmdline() and process.name().startswith("python"):
                process.send_signal(signal.SIGKILL)
                victims.append(process)
        except psutil.Error:
            continue
    return len(victims)


def test_a_sweep_ends_at_its_budget(typed: Shell) -> None:
    sets = f"{SETS_27} --set sweep.parallel=1 --set name=short"
    full_report = json.loads(typed(f"rekindle sweep configs/sweep.yaml {sets} -o json").stdout)
    budget = 0.5 * full_report["hours"]
    ended = typed(
        f"rekindle sweep configs/sweep.yaml {sets} --set sweep.budget.hours={budget:.6f} --no-cache"
        " -o json"
    )
    result = json.loads(ended.stdout)
    steps = [trial["steps"] for trial in result["trials"]]
    assert sum(steps) <= 0.5 * sum(trial["steps"] for trial in full_report["trials"]) + 2 * max(
        steps
    )
    assert result["trials"][0]["state"] == "trained"
    assert result["hours"] < full_report["hours"]
    assert f"{len(steps)} of 27 trials were started" in result["untried"][0]
    shown = typed(f"rekindle sweep --of {result['workflow']}").stdout
    assert result["untried"][0] in shown
    run_id = tracking.find_run("short", result["workflow"])
    assert run_id
    assert result["untried"][0] in tracking.read_tags(run_id)["sweep.untried"]
