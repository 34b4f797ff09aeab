"""The model of an identical earlier training is reused: the coordinator needs no worker."""

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rekindle import project
from rekindle.keys import UNCOVERED_CODE
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


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("statement", "is_reusable"),
    [("importlib.import_module('hid' + 'den')", False), ("import hidden", True)],
)
def test_a_model_is_not_reused_if_its_key_does_not_cover_code_that_the_training_has_loaded(
    statement: str, is_reusable: bool, crew: "Crew", s3: Store, tmp_path: Path
) -> None:
    (tmp_path / "hidden.py").write_text("")
    imports = "import importlib\nfrom tests.rekindle.training.toy import *\n"
    (tmp_path / "shapes.py").write_text(imports + statement)
    variables = {project.PATH_VARIABLE: str(tmp_path)}
    prefix = f"w-{uuid.uuid4().hex[:6]}/train"
    argv = make_flags(prefix, workload="shapes", steps=5, workers=1, reuse="no")
    coordinator = crew.start_coordinator(argv, **variables)
    launcher = crew.start_launcher("only", argv, **variables)
    assert coordinator.wait_for_exit_code() == 0, coordinator.read_log() + launcher.read_log()

    is_recorded = any(prefix.encode() in s3.get(entry.key) for entry in s3.list("cache/"))
    assert is_recorded == is_reusable, launcher.read_log()
    if not is_reusable:
        reason = f"{tmp_path}/hidden.py was loaded, but the cache key does not cover it"
        assert reason in launcher.read_log()
        assert reason in s3.get(f"{prefix}/{UNCOVERED_CODE}").decode()
