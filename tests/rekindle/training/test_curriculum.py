"""A stateful data loader gives the same weights after kills, joins and restores."""

import json
import signal

from rekindle.storage import Store
from tests.rekindle.training.crew import Crew, make_flags


def test_a_stateful_loader_continues_from_its_state(crew: Crew, s3: Store) -> None:
    workload = "tests.rekindle.training.curriculum"
    undisturbed = crew.start_lone_worker(make_flags("calm", workload=workload))
    argv = make_flags("wild", workload=workload, workers=2, checkpoint_steps=3, hot_seconds=1e-9)
    coordinator = crew.start_coordinator(argv)
    a, b = (crew.start_worker(name, argv, TOY_HOLD="20 60") for name in "ab")
    crew.wait_until_held(20, a, b)
    # in the middle of a step, which worker b repeats
    a.send(signal.SIGKILL)
    crew.release(20)
    crew.wait_until_held(60, b)
    b.send(signal.SIGKILL)

    for member in (a, b):
        member.process.join()

    # the training resumes from the snapshot in shared memory
    resumed = crew.start_worker("b", argv)
    assert resumed.wait_for_exit_code() == 0, resumed.read_log()
    assert coordinator.wait_for_exit_code() == 0, resumed.read_log()
    assert "was found in shared memory" in resumed.read_log()
    assert undisturbed.wait_for_exit_code() == 0, undisturbed.read_log()
    sha256 = [json.loads(s3.get(f"{run}/model/model.json"))["sha256"] for run in ("calm", "wild")]
    assert sha256[0] == sha256[1]
    # the training resumes from the object store
    resumed_worker = crew.start_lone_worker(
        make_flags("other", workload=workload, checkpoints="wild/checkpoints")
    )
    assert resumed_worker.wait_for_exit_code() == 0, resumed_worker.read_log()
    assert "resuming from step" in resumed_worker.read_log(), resumed_worker.read_log()
    assert json.loads(s3.get("other/model/model.json"))["sha256"] == sha256[0]
