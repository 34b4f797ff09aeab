"""What a run left is reached from outside: by a notebook, a script, or a browser."""

import json
import os
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from rekindle import tracking
from rekindle.local.services.services import Services
from rekindle.storage import Store
from tests.rekindle.cli.test_cli import REKINDLE, rekindle


@pytest.fixture
def variables(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What `rekindle env` says of the embedded services."""
    for name in ("S3_ENDPOINT_URL", "S3_BUCKET", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REKINDLE_HOME", str(services.home))
    done = rekindle("env", "-o", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def run(variables: dict[str, str]) -> str:
    """A run with artifacts."""
    name = f"w-{uuid4().hex[:8]}"
    keys = (variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"])
    store = Store(variables["S3_BUCKET"], variables["S3_ENDPOINT_URL"], *keys)
    for path in ("report/verdict.json", "dataset/rejects.parquet", "dataset/shards/a.npy"):
        store.put(f"{name}/{path}", path.encode())
    return name


def test_the_variables_can_be_evaluated_by_a_shell(variables: dict[str, str], tmp_path: Path) -> None:
    command = f'eval "$({REKINDLE} env)"; for name in {" ".join(variables)}; do echo "${{!name}}"; done'
    lines = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    assert lines == list(variables.values())
    assert variables["MLFLOW_S3_ENDPOINT_URL"] == variables["S3_ENDPOINT_URL"]


def test_every_artifact_of_a_run_can_be_fetched_rejected_rows_included(run: str, tmp_path: Path) -> None:
    listed = json.loads(rekindle("get", run, "-o", "json", cwd=tmp_path).stdout)["artifacts"]
    assert [(row["artifact"], row["files"]) for row in listed] == [("dataset", 2), ("report", 1)]
    assert rekindle("get", run, "dataset/rejects.parquet", cwd=tmp_path).stdout == "rejects.parquet\n"
    assert (tmp_path / "rejects.parquet").read_text() == "dataset/rejects.parquet"
    assert rekindle("get", run, "dataset", "--to", "data", cwd=tmp_path).returncode == 0
    assert (tmp_path / "data/shards/a.npy").read_text() == "dataset/shards/a.npy"
    again = rekindle("get", run, "dataset", "--to", "data", cwd=tmp_path)
    assert again.returncode == 2 and "data exists already" in again.stderr
    wrong = rekindle("get", run, "reprot", cwd=tmp_path)
    assert wrong.returncode == 2 and 'Did you mean "report"? It has dataset, report' in wrong.stderr
    assert 'the run "nobody" has no artifacts' in rekindle("get", "nobody", cwd=tmp_path).stderr


def test_the_page_of_a_run_and_that_of_all_are_named(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "MLFLOW_TRACKING_URI", variables["MLFLOW_TRACKING_URI"])
    name = f"w-{uuid4().hex[:8]}"
    run_id = tracking.start_run("pages", name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    page = rekindle("ui", name, cwd=tmp_path).stdout.strip()
    assert page.startswith(variables["MLFLOW_TRACKING_URI"]) and page.endswith(f"/runs/{run_id}")
    assert rekindle("ui", cwd=tmp_path).stdout.strip().startswith(f"{variables['MLFLOW_TRACKING_URI']}/#/experiments/")
    assert f"no run of {name}-2" in rekindle("ui", f"{name}-2", cwd=tmp_path).stderr
