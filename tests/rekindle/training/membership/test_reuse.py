"""The model of an identical earlier training is reused: the coordinator needs no worker."""

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle import project
from rekindle.storage import Store
from tests.rekindle.training.crew import ROOT, flags

if TYPE_CHECKING:
    from tests.rekindle.training.crew import Crew


def test_a_coordinator_reuses_the_model_of_an_identical_training(crew: "Crew", s3: Store) -> None:
    seed, first, second = uuid.uuid4().int % 10**9, f"w-{uuid.uuid4().hex[:6]}/train", f"w-{uuid.uuid4().hex[:6]}/train"
    argv = flags(first, seed=seed, steps=5, workers=1, reuse="yes")
    coordinator = crew.coordinator(argv)
    crew.worker("only", argv)
    assert coordinator.code() == 0, coordinator.said()

    other = crew.coordinator(flags(second, seed=seed, steps=5, workers=3, max_workers=3, reuse="yes"))
    assert other.code() == 0, other.said()
    assert f"cached: the same training as {first}" in other.said()
    models = [json.loads(s3.get(f"{prefix}/model/model.json"))["sha256"] for prefix in (first, second)]
    assert models[0] == models[1] and s3.get(f"{second}/cached").decode() == first
    assert s3.get(f"{first}/model/model.safetensors") == s3.get(f"{second}/model/model.safetensors")


def test_a_training_is_not_reused_if_its_worker_has_loaded_code_outside_of_its_key(
    crew: "Crew", s3: Store, tmp_path: Path
) -> None:
    text = "from importlib import import_module\nfrom tests.rekindle.training.toy import *\n{}\n"
    (tmp_path / "computed_workload.py").write_text(text.format("import_module('computed_' + 'part')"))
    (tmp_path / "computed_part.py").write_text("")
    seed, workload, variables = uuid.uuid4().int % 10**9, "computed_workload", {project.PATH: f"{tmp_path}:{ROOT}"}

    for task in (f"w-{uuid.uuid4().hex[:6]}/train", f"w-{uuid.uuid4().hex[:6]}/train"):
        argv = flags(task, seed=seed, steps=5, workers=1, reuse="yes", workload=workload)
        coordinator = crew.coordinator(argv, **variables)
        crew.launcher("only", argv, **variables)
        assert coordinator.code() == 0, coordinator.said()
        assert b"computed_part.py was loaded, but the cache key" in s3.get(f"{task}/not-covered")
        assert "cached:" not in coordinator.said()
