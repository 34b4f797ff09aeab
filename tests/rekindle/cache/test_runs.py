"""A run reuses cached outputs without starting a process; a step of unknown key looks up the cache
itself."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.cache import entries
from rekindle.storage import Store
from tests.rekindle.cache.changed_pipeline import FIRST_STEP_CODE, PIPELINE, SECOND_STEP_CODE
from tests.rekindle.cli.processes import REKINDLE


@pytest.fixture
def run_pipeline(tmp_path: Path, s3: Store, s3_environment: dict[str, str]) -> Any:
    """Return a function that runs the pipeline of a project, with S3 as its object store, and
    returns its JSON."""
    for path, text in {
        "pipelines/pair.py": PIPELINE,
        "steps/first.py": FIRST_STEP_CODE,
        "steps/second.py": SECOND_STEP_CODE,
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)

    config = {
        "name": "pair",
        "pipeline": "pipelines.pair",
        "workload": "steps.digits",
        "data": {},
        "model": {},
    }

    (tmp_path / "pair.yaml").write_text(json.dumps(config))
    environment = {**os.environ, **s3_environment}
    # the run does not use MLflow, but MLflow must be reachable
    environment["MLFLOW_TRACKING_URI"] = s3_environment["S3_ENDPOINT_URL"]
    environment["REKINDLE_HOME"] = str(tmp_path / "home")
    environment.pop("REKINDLE_PATH", None)

    def run(*more: str) -> dict[str, Any]:
        command = [REKINDLE, "run", "pair.yaml", "-o", "json", *more]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout) | {"stderr": result.stderr}

    return run


def test_a_second_run_starts_no_process_for_cached_steps(run_pipeline: Any, s3: Store) -> None:
    first_run = run_pipeline("--set", "train.seed=5")
    second_run = run_pipeline("--set", "train.seed=5", "--set", "gate.tolerance=0.3")
    phases = {step["name"]: (step["phase"], step["message"]) for step in second_run["steps"]}
    assert phases["first"] == ("Cached", f"by {first_run['workflow']}/first")
    assert phases["inner.second"][0] == "Succeeded"
    assert f"first ({first_run['workflow']}/first)" in second_run["stderr"]
    assert not list(s3.list(f"{second_run['workflow']}/first/"))


@pytest.mark.slow
def test_a_pod_looks_up_the_cache_itself(run_pipeline: Any, s3: Store) -> None:
    first_run = run_pipeline("--set", "train.seed=5")
    late_run = run_pipeline(
        "--set",
        "train.seed=5",
        "-p",
        "cached=" + json.dumps({"first": {"task": "first", "at": ""}, "reuse": "yes"}),
    )
    # the pod of the step has found the cache entry
    assert {step["phase"] for step in late_run["steps"]} == {"Succeeded"}
    assert (
        s3.get(f"{late_run['workflow']}/first/cached").decode() == f"{first_run['workflow']}/first"
    )
    assert s3.get(f"{late_run['workflow']}/first/folder/number") == b"5"


@pytest.mark.slow
def test_another_input_or_no_cache_starts_the_process_of_every_step(run_pipeline: Any) -> None:
    run_pipeline("--set", "train.seed=5")
    for settings in (["--set", "train.seed=6"], ["--set", "train.seed=5", "--no-cache"]):
        assert {step["phase"] for step in run_pipeline(*settings)["steps"]} == {"Succeeded"}


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [{}, {"text": "it's 5", "folder": "x"}])
def test_an_entry_that_does_not_fit_the_step_is_replaced(
    run_pipeline: Any, s3: Store, outputs: dict[str, str]
) -> None:
    seed = 70 + len(outputs)
    first_run = run_pipeline("--set", f"train.seed={seed}")
    (recorded,) = [
        each for each in entries.read_entries(s3) if each.at == f"{first_run['workflow']}/first"
    ]
    entries.record_entry(s3, replace(recorded, outputs=outputs))
    second_run = run_pipeline("--set", f"train.seed={seed}")
    assert {step["phase"] for step in second_run["steps"]} == {"Succeeded"}
    assert entries.read_entry(s3, recorded.key).outputs == {"text": f"it's {seed}"}  # type: ignore[union-attr]
