"""A stateful data loader gives the same weights after kills, joins and restores."""

import json
import signal

from rekindle.storage import Store
from tests.rekindle.training.crew import Crew, flags


def test_a_stateful_loader_continues_from_its_state(crew: Crew, s3: Store) -> None:
    workload = "tests.rekindle.training.curriculum"
    undisturbed = crew.alone(flags("calm", workload=workload))
    argv = flags("wild", workload=workload, workers=2, checkpoint_steps=3, hot_seconds=1e-9)
    coordinator = crew.coordinator(argv)
    a, b = (crew.worker(name, argv, TOY_HOLD="20 60") for name in "ab")
    crew.held(20, a, b)
    a.send(signal.SIGKILL)  # in the middle of a step, which b repeats
    crew.release(20)
    crew.held(60, b)
    b.send(signal.SIGKILL)

    for member in (a, b):
        member.process.join()

    resumed = crew.worker("b", argv)  # from its own shared memory
    assert resumed.code() == 0, resumed.said()
    assert coordinator.code() == 0, resumed.said()
    assert "was found in shared memory" in resumed.said()
    assert undisturbed.code() == 0, undisturbed.said()
    sha256 = [json.loads(s3.get(f"{run}/model/model.json"))["sha256"] for run in ("calm", "wild")]
    assert sha256[0] == sha256[1]
    # from the object store
    again = crew.alone(flags("other", workload=workload, checkpoints="wild/checkpoints"))
    assert again.code() == 0, again.said()
    assert "resuming from step" in again.said(), again.said()
    assert json.loads(s3.get("other/model/model.json"))["sha256"] == sha256[0]
