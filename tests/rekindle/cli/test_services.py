"""Notebooks, scripts and browsers can access the data, models and records of runs."""

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from rekindle import tracking
from rekindle.local.services.services import Services
from rekindle.storage import Store
from tests.rekindle.cli.processes import REKINDLE, make_shell_workflow, run_rekindle, write_manifest
from tests.waiting import until


@pytest.fixture
def variables(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The variables that `rekindle env` prints for the embedded services."""
    for name in ("S3_ENDPOINT_URL", "S3_BUCKET", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REKINDLE_HOME", str(services.home))
    result = run_rekindle("env", "-o", "json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def run(variables: dict[str, str]) -> str:
    """A run with artifacts."""
    name = f"w-{uuid4().hex[:8]}"
    keys = (variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"])
    store = Store(variables["S3_BUCKET"], variables["S3_ENDPOINT_URL"], *keys)
    for path in (
        "evaluate/report/a.json",
        "prepare/dataset/rejects.parquet",
        "prepare/dataset/shards/a.npy",
    ):
        store.put(f"{name}/{path}", path.encode())
    return name


def test_down_is_refused_during_a_run(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "w.yaml", make_shell_workflow(("wait", "sleep 60")))
    run = subprocess.Popen(
        [REKINDLE, "run", "--manifest", manifest, "--yes"], cwd=tmp_path, stdout=subprocess.PIPE
    )

    try:
        until("the step to begin", lambda: list(tmp_path.glob(".rekindle/runs/four/logs/*.log")))
        refused = run_rekindle("down", cwd=tmp_path)
        assert refused.returncode == 1
        assert (
            "four must end before `rekindle down` stops the deployments and services."
            in refused.stderr
        )
        assert "`rekindle stop four` first" in refused.stderr
    finally:
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=20)

    assert run_rekindle("down", cwd=tmp_path).returncode == 0


def test_a_shell_can_evaluate_the_variables(variables: dict[str, str], tmp_path: Path) -> None:
    command = (
        f'eval "$({shlex.quote(REKINDLE)} env)"; for name in {" ".join(variables)}; do echo'
        ' "${!name}"; done'
    )
    lines = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True
    ).stdout.splitlines()
    assert lines == list(variables.values())
    assert variables["MLFLOW_S3_ENDPOINT_URL"] == variables["S3_ENDPOINT_URL"]


def test_put_stores_data_and_prints_its_uri(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("S3_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, variables[name])

    (tmp_path / "months").mkdir()
    (tmp_path / "months/may.csv").write_text("a,b")

    bucket = variables["S3_BUCKET"]
    for arguments, uri in (
        ((), f"s3://{bucket}/data/months"),
        ((f"s3://{bucket}/raw/x",), f"s3://{bucket}/raw/x"),
        ((f"s3://{bucket}/raw/x#1?y",), f"s3://{bucket}/raw/x#1?y"),
    ):
        result = run_rekindle("put", "months", *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"{uri}\n", result.stderr
        store = Store(bucket, variables["S3_ENDPOINT_URL"])
        assert store.get(f"{uri.removeprefix(f's3://{bucket}/')}/may.csv") == b"a,b"

    wrong = run_rekindle("put", "month", cwd=tmp_path)
    assert wrong.returncode == 2
    assert 'month does not exist: give a file or a folder. Did you mean "months"?' in wrong.stderr
    other = run_rekindle("put", "months", "s3://elsewhere/x", cwd=tmp_path)
    assert other.returncode == 2
    assert f"it must be s3://{bucket}/KEY" in other.stderr


def test_get_fetches_every_artifact_including_rejected_rows(run: str, tmp_path: Path) -> None:
    artifacts = json.loads(run_rekindle("get", run, "-o", "json", cwd=tmp_path).stdout)["artifacts"]
    assert [(row["artifact"], row["files"]) for row in artifacts] == [
        ("evaluate/report", 1),
        ("prepare/dataset", 2),
    ]
    assert (
        run_rekindle("get", run, "prepare/dataset/rejects.parquet", cwd=tmp_path).stdout
        == "rejects.parquet\n"
    )
    assert (tmp_path / "rejects.parquet").read_text() == "prepare/dataset/rejects.parquet"
    assert run_rekindle("get", run, "prepare/dataset", "--to", "data", cwd=tmp_path).returncode == 0
    assert (tmp_path / "data/shards/a.npy").read_text() == "prepare/dataset/shards/a.npy"
    second_output = run_rekindle("get", run, "prepare/dataset", "--to", "data", cwd=tmp_path)
    assert second_output.returncode == 2
    assert "data exists already" in second_output.stderr
    wrong = run_rekindle("get", run, "evaluate/reprot", cwd=tmp_path)
    assert wrong.returncode == 2
    assert (
        'Did you mean "evaluate/report"? The run has evaluate/report, prepare/dataset'
        in wrong.stderr
    )
    assert (
        'the run "nobody" does not have artifacts'
        in run_rekindle("get", "nobody", cwd=tmp_path).stderr
    )


def test_ui_prints_the_pages_of_one_run_and_of_all_runs(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = variables["MLFLOW_TRACKING_URI"]
    name = f"w-{uuid4().hex[:8]}"
    with monkeypatch.context() as variables_patch:
        variables_patch.setenv("MLFLOW_TRACKING_URI", uri)
        variables_patch.setenv("MLFLOW_TRACKING_TOKEN", variables["MLFLOW_TRACKING_TOKEN"])
        run_id = tracking.start_run("pages", name)

    result = run_rekindle("ui", name, "--mlflow", cwd=tmp_path)
    page = result.stdout.strip()
    assert page.startswith(f"{uri}/?token={variables['MLFLOW_TRACKING_TOKEN']}#/"), result.stderr
    assert f"/runs/{run_id}?" in page, result.stderr
    newest = run_rekindle(
        "ui", "--mlflow", cwd=tmp_path
    ).stdout  # any experiment and run match, because the newest run may belong to another test
    assert re.search(r"/\?token=[^/]+#/experiments/\d+/runs\?workflowType=machine_learning", newest)
    assert f"the run {name}-2" in run_rekindle("ui", f"{name}-2", "--mlflow", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("prune --keep-days nan", "Invalid value for '--keep-days': nan is not a finite number."),
        ("prune --keep-runs -1", "Invalid value for '--keep-runs': -1 is not in the range x>=0."),
        ("cache prune --days=-1", "Invalid value for '--days': -1.0 is not in the range x>=0."),
        ("rollback demo --seconds=-1", "Invalid value for '--seconds': -1.0 is not in the range"),
        (
            "rollback demo latest",
            "Invalid value for '[VERSION]': 'latest' is not a valid integer range.",
        ),
    ],
)
def test_options_with_impossible_numbers_are_refused(
    command: str, message: str, tmp_path: Path
) -> None:
    result = run_rekindle(*command.split(), cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
