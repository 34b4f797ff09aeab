"""The model of an identical earlier training is reused: the coordinator needs no worker."""

import json
import uuid
from typing import TYPE_CHECKING

import pytest

from rekindle.storage import Store
from tests.rekindle.training.crew import make_flags

if TYPE_CHECKING:
    from tests.rekindle.training.crew import Crew


@pytest.mark.slow
def test_a_coordinator_reuses_the_model_of_an_identical_training(crew: "Crew", s3: Store) -> None:
    seed = uuid.uuid4().int % 10**9
    first = f"w-{uuid.uuid4().hex[:6]}/train"
    second = f"w-{uuid.uuid4().hex[:6]}/train"
    argv = make_flags(first, seed=seed, steps=5, workers=1, reuse="yes")
    coordinator = crew.start_coordinator(argv)
    crew.start_worker("only", argv)
    assert coordinator.wait_for_exit_code() == 0, coordinator.read_log()

    other = crew.start_coordinator(
        make_flags(second, seed=seed, steps=5, workers=3, max_workers=3, reuse="yes")
    )
    assert other.wait_for_exit_code() == 0, other.read_log()
    assert f"cached: the same training as {first}" in other.read_log()
    models = [
        json.loads(s3.get(f"{prefix}/model/model.json"))["sha256"] for prefix in (first, second)
    ]
    assert models[0] == models[1]
    assert s3.get(f"{second}/cached").decode() == first
    assert s3.get(f"{first}/model/model.safetensors") == s3.get(f"{second}/model/model.safetensors")
