"""Tests of the trials of one pod, as real processes: each trial is trained once, even if the pod is
restarted."""

import json
import signal
from collections.abc import Sequence

import pytest

from rekindle.storage import Store
from rekindle.training.launch import notice
from rekindle.training.sweep.halving import Trial
from rekindle.training.sweep.study import SweepStudy
from rekindle.training.sweep.sweep_config import Sweep
from rekindle.training.sweep.trials import make_training_spec
from tests.rekindle.training.crew import DATASET, DIGEST, TOY, Crew
from tests.rekindle.training.launch.metadata import EVENT, Metadata
from tests.waiting import until

TRAIN = {
    "batch_size": 8,
    "virtual_workers": 7,
    "steps": 30,
    "validation": 0.1,
    "validation_steps": 5,
}
SPACE = {"train": {"learning_rate": [0.01, 0.02, 1e30]}}
COMMON = {
    "workload": TOY,
    "family": "",
    "dataset": DATASET,
    "digest": DIGEST,
    "train": TRAIN,
    "model": {},
}


def make_study(
    s3: Store, root: str, rungs: int, widths: Sequence[int] = ()
) -> tuple[SweepStudy, list[str]]:
    """Return a study of three trials (the last one diverges), and the command of its only pod;
    `widths`: the width of each trial's model."""
    space = SPACE | ({"model": {"width": list(widths)}} if widths else {})
    sweep = Sweep.model_validate(
        {"space": space, "trials": 3, "rungs": rungs, "sampler": "grid", "parallel": 1}
    )
    study = SweepStudy(s3, root, sweep)

    for number, rate in enumerate((0.01, 0.02, 1e30)):
        settings: dict[str, float] = {"train.learning_rate": rate}
        if widths:
            settings["model.width"] = widths[number]
        record = {"trial": number, "rung": 0, "pod": 0, "settings": settings, "attrs": {}}
        s3.put(f"{root}/jobs/{number:05d}.json", json.dumps(record).encode())

    values = {"sweep": sweep.model_dump(mode="json"), "root": root, **COMMON}
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
    }
    return study, ["steps.search.trial", *(f"--{name}={text}" for name, text in texts.items())]


@pytest.mark.slow
def test_a_restarted_pod_continues_and_a_failed_trial_does_not_stop_the_others(
    crew: Crew, s3: Store
) -> None:
    undisturbed_study, argv = make_study(s3, "calm/search", 2)
    pod = crew._start("calm", argv, {})
    assert pod.wait_for_exit_code() == 0, pod.read_log()
    study, argv = make_study(s3, "struck/search", 2)

    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        pod = crew._start("struck", argv, {"TOY_HOLD": "25"})
        crew.wait_until_held(25, pod)
        pod.send(number)
        crew.release(25)
        assert pod.wait_for_exit_code() == code, pod.read_log()
        (crew.logs / "25").unlink()

    pod = crew._start("struck", argv, {})
    assert pod.wait_for_exit_code() == 0, pod.read_log()
    assert study.read() == undisturbed_study.read()
    assert study.trials()[0].sha256
    assert [trial.failure[:15] for trial in study.trials()] == ["", "", "the gradient of"]
    second_process = crew._start("again", argv, {})
    assert second_process.wait_for_exit_code() == 0
    assert "trial 0" not in second_process.read_log()


@pytest.mark.slow
def test_a_notice_of_the_cloud_interrupts_a_trial(crew: Crew, s3: Store, cloud: Metadata) -> None:
    study, argv = make_study(s3, "noticed/search", 1)
    pod = crew._start(
        "noticed", argv, {"TOY_HOLD": "25", notice.REKINDLE_NOTICE: f"aws {cloud.address}"}
    )
    crew.wait_until_held(25, pod)
    cloud.events = [EVENT]
    until("the notice", lambda: "about to be interrupted" in pod.read_log(), 30)
    crew.release(25)
    assert pod.wait_for_exit_code() == 143, pod.read_log()
    assert not study.read()[0].values
    assert "left after step" in pod.read_log(), pod.read_log()


@pytest.mark.slow
def test_a_trial_whose_process_crashes_again_and_again_fails_and_the_sweep_continues(
    crew: Crew, s3: Store
) -> None:
    study, argv = make_study(s3, "crashed/search", 1, widths=(8, -1, 16))
    pod = crew._start("crashed", argv, {})
    assert pod.wait_for_exit_code() == 0, pod.read_log()
    assert "crashed 3 times" in study.read()[1].failure
    assert study.find_winner().number == 0


def test_a_trial_is_trained_with_its_own_settings_by_one_process(s3: Store) -> None:
    study, _ = make_study(s3, "settings/search", 1)
    spec = make_training_spec(
        study, Trial(1, {"train.learning_rate": 0.5, "model.width": 9}), 0, COMMON
    )
    assert spec.learning_rate == 0.5
    assert spec.model == {"width": 9}
    assert spec.workers == 1
    assert spec.until == 1.0
    assert spec.out == "settings/search/trials/1/rung-0"
    assert spec.checkpoints == "settings/search/trials/1/checkpoints"
