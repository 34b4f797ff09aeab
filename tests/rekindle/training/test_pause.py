"""A training that pauses after a share of its steps and continues later gives the same weights."""

import json
import signal
from typing import Any

import pytest

from rekindle.storage import Store
from rekindle.training.spec import TrainingSpec
from tests.rekindle.training.crew import Crew, make_flags

SETTINGS: dict[str, Any] = {
    "validation": 0.1,
    "validation_steps": 4,
    "average": 0.9,
    "keep_best": "true",
    "patience": 9,
    "model": json.dumps({"statistics": True}),
    "checkpoint_steps": 0,
}


def read_model_file(s3: Store, prefix: str) -> dict[str, Any]:
    return json.loads(s3.get(f"{prefix}/model.json"))


def make_paused_flags(prefix: str, until: float, **settings: Any) -> list[str]:
    return make_flags(prefix, **SETTINGS, until=until, out=f"{prefix}/{until}", **settings)


@pytest.fixture
def straight(crew: Crew, s3: Store) -> dict[str, Any]:
    """Return model.json of a training by one process that never pauses."""
    member = crew.start_lone_worker(make_flags("pause-straight", **SETTINGS))
    assert member.wait_for_exit_code() == 0, member.read_log()
    return read_model_file(s3, "pause-straight/model")


def test_a_paused_training_ends_with_the_same_weights(
    crew: Crew, s3: Store, straight: dict[str, Any]
) -> None:
    # the training pauses before the end of its 30 steps
    for until, step in ((0.3, 8), (0.5, 16), (0.9, 28), (1, 30)):
        member = crew.start_lone_worker(make_paused_flags("pause-alone", until))
        assert member.wait_for_exit_code() == 0, member.read_log()
        assert read_model_file(s3, f"pause-alone/{until}")["step"] == step
        assert json.loads(s3.get(f"pause-alone/{until}/validation.json"))["step"] == step

        # a repetition of the paused training does nothing
        repetition = crew.start_lone_worker(make_paused_flags("pause-alone", until))
        assert repetition.wait_for_exit_code() == 0

    assert read_model_file(s3, "pause-alone/1") == straight
    assert not list(s3.list("pause-alone/0.5/model.safetensors"))
    assert list(s3.list("pause-alone/1/model.safetensors"))


@pytest.mark.slow
def test_workers_pause_together_and_any_number_of_workers_continues(
    crew: Crew, s3: Store, straight: dict[str, Any]
) -> None:
    for until, names in ((0.5, "ab"), (0.75, "c"), (1, "def")):
        argv = make_paused_flags("pause-several", until, workers=len(names))
        coordinator = crew.start_coordinator(argv)
        members = [crew.start_worker(name, argv) for name in names]
        assert coordinator.wait_for_exit_code() == 0, coordinator.read_log()
        assert [member.wait_for_exit_code() for member in members] == [0] * len(names)
    assert read_model_file(s3, "pause-several/1")["sha256"] == straight["sha256"]


@pytest.mark.slow
def test_a_kill_between_two_rungs_does_not_change_the_result(
    crew: Crew, s3: Store, straight: dict[str, Any]
) -> None:
    assert crew.start_lone_worker(make_paused_flags("whole-rung", 0.5)).wait_for_exit_code() == 0
    member = crew.start_lone_worker(make_paused_flags("killed-rung", 0.5), TOY_HOLD="60")
    crew.wait_until_held(60, member)
    member.send(signal.SIGKILL)
    member.process.join()
    assert crew.start_lone_worker(make_paused_flags("killed-rung", 0.5)).wait_for_exit_code() == 0
    assert s3.get("killed-rung/0.5/validation.json") == s3.get("whole-rung/0.5/validation.json")
    assert crew.start_lone_worker(make_paused_flags("killed-rung", 1)).wait_for_exit_code() == 0
    assert read_model_file(s3, "killed-rung/1")["sha256"] == straight["sha256"]


@pytest.mark.parametrize(("until", "step"), [(0, 0), (0.01, 4), (0.5, 16), (0.9, 28), (1, 0)])
@pytest.mark.parametrize("total", [29, 30, 31])
def test_a_pause_is_at_a_validation_and_never_at_the_end(
    until: float, step: int, total: int
) -> None:
    settings = {
        "workload": "toy",
        "dataset": "d",
        "digest": "d" * 64,
        "out": "o",
        "checkpoints": "c",
        "steps": total,
    }
    spec = TrainingSpec.model_validate(
        settings | {"until": until, "validation": 0.1, "validation_steps": 4}
    )
    assert spec.compute_pause_step(1000) == step
