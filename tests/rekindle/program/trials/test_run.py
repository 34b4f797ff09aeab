"""Tests of the trials of a program in one pod, as real processes."""

import json
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.common import exit_codes
from rekindle.content.weights import verify_weights
from rekindle.documents import ResultFile
from rekindle.program.trials.run import make_program_spec
from rekindle.storage import Store
from rekindle.training.sweep.halving import Trial
from rekindle.training.sweep.study import SweepStudy
from rekindle.training.sweep.sweep_config import Sweep
from tests.rekindle.program.pods import PROGRAMS, Pod, preload_modules, run_module
from tests.waiting import until

PROGRAM: dict[str, Any] = {
    "command": [str(PROGRAMS / "line.py"), "{checkpoints}", "{model.rate}"],
    "resume": ["--resume", "{checkpoint}"],
    "result": "{checkpoints}/final.json",
    "marker": "done",
    "preload": [],
}
INPUTS = {
    "program": PROGRAM,
    "workload": "tests.rekindle.program.slopes",
    "dataset": "none",
    "digest": "0" * 64,
    "model": {"rate": 0.1, "degree": 1},
    "train": {"silence_seconds": 0.5, "epochs": 3},
}

StartPod = Callable[..., Pod]


def make_study(s3: Store, root: str, rates: list[float], metric: str = "final_error") -> SweepStudy:
    """Return a study with one decision for each rate, all for pod 0."""
    sweep = Sweep.model_validate(
        {
            "space": {"model": {"rate": rates or [0.1]}},
            "trials": len(rates) or 1,
            "sampler": "grid",
            "rungs": 1,
            "metric": metric,
        }
    )
    for number, rate in enumerate(rates):
        settings = {"model.rate": rate}
        record = {"trial": number, "rung": 0, "pod": 0, "settings": settings, "attrs": {}}
        s3.put(f"{root}/jobs/{number:05d}.json", json.dumps(record).encode())
    return SweepStudy(s3, root, sweep)


@pytest.fixture
def start_pod(s3_environment: dict[str, str], tmp_path: Path) -> Iterator[StartPod]:
    """Start the pod of a study's trials, which is killed at the end of the test."""
    preload_modules(["tests.rekindle.program.loaded"])
    context = multiprocessing.get_context("forkserver")
    pods: list[Pod] = []

    def start(study: SweepStudy, **program: Any) -> Pod:
        values = {
            **INPUTS,
            "program": {**PROGRAM, **program},
            "sweep": study.sweep.model_dump(mode="json"),
            "root": study.root,
        }
        texts = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }
        flags = ["steps.search.trial", *(f"--{name}={text}" for name, text in texts.items())]
        environment = {**s3_environment, "REKINDLE_CACHE": str(tmp_path / "cache")}
        log = tmp_path / f"pod-{len(pods)}.log"
        log.touch()

        arguments = ("rekindle.step", flags, environment, str(log))
        process = context.Process(target=run_module, args=arguments)
        process.start()
        pods.append(Pod("pod", process, log))
        return pods[-1]

    yield start
    for pod in pods:
        pod.process.kill()
        pod.process.join()


def has_stored(study: SweepStudy, trial: int, step: int) -> bool:
    """Return True if the checkpoint of a step is in the object store."""
    prefix = f"{study.make_checkpoint_prefix(trial)}/program/checkpoints/"
    return any(
        f"step-{step}" in study.store.get(entry.key).decode() for entry in study.store.list(prefix)
    )


def interrupt_trial(study: SweepStudy, pod: Pod, trial: int, signal_number: signal.Signals) -> int:
    """Send a signal to the pod once the trial has stored step 10, and return the exit code of the
    pod."""
    until("a checkpoint", lambda: has_stored(study, trial, 10), 60, evidence=lambda: pod.output)
    pod.send(signal_number)
    return pod.wait()


def test_a_trial_continues_from_its_checkpoint_although_its_pod_was_killed(
    s3: Store, start_pod: StartPod, tmp_path: Path
) -> None:
    rates = [0.1, 0.3, 0.2]
    study = make_study(s3, "line/search", rates)
    command = [*PROGRAM["command"], "--pause", "0.1"]
    pod = start_pod(study, command=command)
    assert interrupt_trial(study, pod, 0, signal.SIGKILL) == -signal.SIGKILL

    pod = start_pod(study, command=command)
    assert pod.wait() == 0, pod.output
    assert "rate 0.1 starts at step 10" in pod.output

    trials = study.read()
    assert [trial.failure for trial in trials] == ["", "", ""]
    errors = [2 * (1 - rate) ** 20 for rate in rates]
    assert [trial.value for trial in trials] == pytest.approx(errors)
    assert study.find_winner().number == 1

    folder = tmp_path / "model"
    s3.download(f"{study.make_output_prefix(1, 0)}/", folder)
    assert verify_weights(folder).model == {"rate": 0.3, "degree": 1}
    slope = json.loads((folder / "result/final.json").read_text())["slope"]
    assert slope == pytest.approx(2 - errors[1])


@pytest.mark.slow
def test_a_program_that_fails_does_not_stop_the_other_trials(
    s3: Store, start_pod: StartPod
) -> None:
    study = make_study(s3, "failed/search", [0.1, 5.0, 0.2])
    command = [*PROGRAM["command"], "--pause", "0.2"]
    pod = start_pod(study, command=command)
    assert interrupt_trial(study, pod, 2, signal.SIGTERM) == exit_codes.TERMINATED, pod.output

    pod = start_pod(study, command=command)
    assert pod.wait() == 0, pod.output
    assert "rate 0.2 starts at step 10" in pod.output
    trials = study.read()
    assert [bool(trial.failure) for trial in trials] == [False, True, False]
    assert re.match(
        r"trial-1-pod-0 \(3 times without a newer step\): rank 0 of the program ended with exit code 1:"
        r" .*line.py:\d+: ValueError: the rate 5 is more than 1",
        trials[1].failure,
    )
    assert study.find_winner().number == 2


@pytest.mark.slow
def test_a_trial_without_the_metric_fails_and_its_metrics_are_listed(
    s3: Store, start_pod: StartPod
) -> None:
    study = make_study(s3, "missing/search", [0.1], "eval_loss")
    pod = start_pod(study)
    assert pod.wait() == 0, pod.output
    assert study.read()[0].failure == (
        "the program ended without the metric eval_loss (sweep.metric): it reported error,"
        " final_error, step, tokens. Set sweep.metric to a metric that the program reports, or let"
        ' it report eval_loss, such as by mlflow.log_metric("eval_loss", ...)'
    )


def test_a_program_gets_the_settings_of_its_trial(s3: Store) -> None:
    study = make_study(s3, "settings/search", [])
    spec = make_program_spec(study, Trial(1, {"model.rate": 0.5}), 0, INPUTS, "run")
    assert spec.model == {"rate": 0.5, "degree": 1}
    assert (spec.workers, spec.min_workers, spec.max_workers) == (1, 1, 1)
    assert spec.silence_seconds == 0.5
    assert spec.run_id == "run"
    assert spec.out == "settings/search/trials/1/rung-0"
    assert spec.checkpoints == "settings/search/trials/1/checkpoints"


def test_a_trial_is_finished_once_its_metric_is_recorded(s3: Store) -> None:
    study = make_study(s3, "recorded/search", [0.1, 0.2])
    result_fields = ResultFile(size=1, sha256="1" * 64).model_dump()
    model = {"sha256": "2" * 64, "step": 20, "files": {"final.json": result_fields}}
    for trial in range(2):
        s3.put(f"{study.make_output_prefix(trial, 0)}/model.json", json.dumps(model).encode())
    assert [trial.values for trial in study.read()] == [{}, {}]

    study.record_metric(0, 0, 0.5)
    study.record_metric(1, 0, None)
    first_trial, second_trial = study.read()
    assert (first_trial.value, first_trial.steps, first_trial.sha256) == (0.5, 20, "2" * 64)
    assert second_trial.failure.startswith("its final_error is not a number")
