"""Tests of the step `prepare` as a process, as in a pod: its exit code, its outputs and its MLflow
run."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from rekindle import tracking
from rekindle.cache.key import data_digest
from rekindle.step import encode_parameter
from rekindle.storage import Store
from rekindle.workload import read_dataset_digest
from tests.steps.bills import make_workload
from tests.steps.fraud.written import Written
from tests.waiting import until


def run_prepare(
    tmp_path: Path, workflow: str, more: tuple[str, ...] = (), **data: Any
) -> subprocess.CompletedProcess[str]:
    """Run the step `prepare`; each output is a file of its name in `tmp_path`."""
    outputs = [
        f"--output={name}={tmp_path / name}"
        for name in ("dataset", "digest", "source_digest", "rows", "run_id", "warnings")
    ]

    flags = [
        "--workload=steps.fraud",
        f"--workflow={workflow}",
        f"--data={json.dumps(data)}",
        "--experiment=prepare",
        *more,
    ]

    command = [sys.executable, "-m", "rekindle", "step", "steps.prepare", *flags, *outputs]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir(exist_ok=True)

    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.usefixtures("mlflow_server")
@pytest.mark.parametrize("retried", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_run_records_its_dataset(tmp_path: Path, retried: bool) -> None:
    source = "simulate://5?cards=60&terminals=120&days=75"
    if retried:  # the second attempt writes to the same MLflow run, without duplicates
        assert run_prepare(tmp_path, "prepare-1", source=source).returncode == 0

    completed = run_prepare(tmp_path, "prepare-1", source=source)
    assert completed.returncode == 0, completed.stderr
    facts = Written(tmp_path / "dataset").facts
    digest = read_dataset_digest(tmp_path / "dataset")
    assert digest == (tmp_path / "digest").read_text()
    assert facts["rows"] == int((tmp_path / "rows").read_text()) > 0
    assert f"prepared {facts['rows']:,} rows, 0 rejected" in completed.stderr
    assert (tmp_path / "source_digest").read_text() == source
    run_id = (tmp_path / "run_id").read_text()
    assert tracking.find_run("prepare", "prepare-1") == run_id

    from mlflow import MlflowClient

    run = MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run(run_id)
    assert run.data.params["data.source"] == source
    assert run.data.params["data.digest"] == digest
    assert run.inputs
    [used] = run.inputs.dataset_inputs
    assert used.dataset.digest == digest[:36]
    assert json.loads(str(used.dataset.profile))["rows"] == facts["rows"]
    assert json.loads(used.dataset.source) == {"uri": source}
    share = facts["train_frauds"] / facts["train_rows"]
    assert run.data.metrics == {"rows": facts["rows"], "rejected": 0, "fraud_share": share}


@pytest.mark.slow
def test_a_failed_preparation_has_recorded_config_manifest_and_columns(
    tmp_path: Path, mlflow_server: str
) -> None:
    """The config, the manifest and the columns are recorded first, because without them, a failed
    run can be neither compared nor repeated."""
    config = {
        "data": {"source": "nowhere.parquet"},
        "train": {"lr": 0.003, "pods": {"gpu": 1}, "exact": True},
        "n": [],
    }

    more = (f"--config={json.dumps(config)}", f"--manifest={encode_parameter('kind: Workflow')}")
    workflow = f"w-{uuid4().hex[:8]}"
    assert run_prepare(tmp_path, workflow, more, source="nowhere.parquet").returncode == 65
    from mlflow import MlflowClient

    client = MlflowClient(mlflow_server)
    run_id = str(tracking.find_run("prepare", workflow))
    run = client.get_run(run_id)

    flat = {
        "data.source": "nowhere.parquet",
        "train.lr": "0.003",
        "train.pods.gpu": "1",
        "train.exact": "true",
    }

    assert run.data.params == flat | {"n": "[]"}
    tags = client.get_experiment(run.info.experiment_id).tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    shown = json.loads(tags["mlflow.sharedViewState.rekindle"])["selectedColumns"]
    assert shown[:4] == ["metrics.`ap`", "metrics.`auc`", "metrics.`cp100`", "tags.`verdict`"]
    manifest, resolved = (
        client.download_artifacts(run_id, name) for name in ("manifest.yaml", "config.yaml")
    )
    assert Path(manifest).read_text() == "kind: Workflow"
    assert yaml.safe_load(Path(resolved).read_text()) == config


@pytest.mark.usefixtures("mlflow_server")
@pytest.mark.slow
def test_a_share_that_changed_since_the_last_run_is_a_warning(tmp_path: Path) -> None:
    import polars as pl

    from steps.fraud.data.simulate import simulate
    from steps.fraud.data.simulation_uri import World
    from steps.fraud.fraud_config import Columns

    rows = simulate(World(seed=5, cards=60, terminals=120, days=75)).rename(Columns().model_dump())
    more_frauds = pl.when(pl.col("TRANSACTION_ID") % 4 == 0).then(1).otherwise("TX_FRAUD")
    rows.with_columns(TX_FRAUD=more_frauds).write_parquet(tmp_path / "more.parquet")
    experiment_flags = ("--experiment=changed",)

    assert (
        run_prepare(
            tmp_path,
            "changed-1",
            experiment_flags,
            source="simulate://5?cards=60&terminals=120&days=75",
        ).returncode
        == 0
    )

    completed = run_prepare(
        tmp_path, "changed-2", experiment_flags, source=str(tmp_path / "more.parquet")
    )
    assert completed.returncode == 0, completed.stderr
    # another warning concerns the labels
    [warning] = [
        line
        for line in completed.stderr.splitlines()
        if line.startswith("warning: fraud_share is 2")
    ]
    assert "in the last run" in warning
    from mlflow import MlflowClient

    tags = (
        MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
        .get_run((tmp_path / "run_id").read_text())
        .data.tags
    )

    assert warning.removeprefix("warning: ") in tags["data.warnings"]


def prepare_week(tmp_path: Path, day: str, *more: str, **data: Any) -> tuple[str, dict[str, str]]:
    """Return the warning of a run that was scheduled for `day`, and the tags of its MLflow run."""
    experiment = f"--experiment=weeks-{tmp_path.name}"
    completed = run_prepare(
        tmp_path, f"{tmp_path.name}-{day}", (experiment, f"--scheduled={day}", *more), **data
    )
    assert completed.returncode == 0, completed.stderr
    warnings = json.loads((tmp_path / "warnings").read_text())
    assert [line for line in completed.stderr.splitlines() if "warning" in line] == [
        f"warning: {text}" for text in warnings
    ]
    from mlflow import MlflowClient

    run = MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run((tmp_path / "run_id").read_text())
    assert run.data.tags.get("data.warnings", "") == " ".join(warnings)

    return " ".join(warnings), run.data.tags


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_server")
def test_a_source_without_newer_rows_is_a_warning(tmp_path: Path) -> None:
    data = {
        "source": "simulate://5?cards=60&terminals=120&days=100&start=2024-01-01",
        "window": "8w",
        "test_weeks": 1,
    }

    assert prepare_week(tmp_path, "2024-04-08", **data)[0] == "", "the data ends on 04-09"
    assert prepare_week(tmp_path, "2024-04-10", **data)[0] == "", "two days more"
    rows = int((tmp_path / "rows").read_text())
    warning, tags = prepare_week(tmp_path, "2024-04-15", **data)
    remaining = int((tmp_path / "rows").read_text())
    assert remaining < rows
    assert tags["data.newest"].startswith("2024-04-09T23:")
    assert tags["data.newest"] in warning
    assert warning.endswith(
        f"this run has {remaining:,} rows; the run for 2024-04-10 had {rows:,}."
    )
    assert prepare_week(tmp_path, "2024-04-15", **data)[0] == warning, "a retried step"
    assert prepare_week(tmp_path, "2024-04-15T04", **data)[0] == warning, (
        "another run of that day with the same window"
    )
    assert (
        f"the run for 2024-04-15 had {remaining:,}."
        in prepare_week(tmp_path, "2024-04-22", **data)[0]
    )
    assert prepare_week(tmp_path, "2024-04-08T04", **data)[0] == "", "a past week"
    assert prepare_week(tmp_path, "2024-04-29", **data | {"window": "9w"})[0] == "", (
        "another window"
    )


PREPARE = """
(out / "rows").write_text(f"{data.count}")
return Prepared(rows=data.count)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_server")
def test_a_shrinking_window_is_a_warning_for_any_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "bills.py").write_text(make_workload("count: int", PREPARE))
    monkeypatch.chdir(tmp_path)
    data = {"source": "bills.csv", "window": "4w"}
    assert prepare_week(tmp_path, "2024-05-06", "--workload=bills", count=1000, **data)[0] == ""
    assert prepare_week(tmp_path, "2024-05-13", "--workload=bills", count=950, **data)[0] == ""
    warning, _ = prepare_week(tmp_path, "2024-05-20", "--workload=bills", count=800, **data)
    assert warning == "this run has 800 rows; the run for 2024-05-13 had 950."


READ_SLOWLY = """
import time
from pathlib import Path
folder = Path(data.source).parent
with open(data.source) as file:
    first = file.readline()
    (folder / "reading").touch()
    while not (folder / "changed").exists():
        time.sleep(0.01)
    rows = [first, *file]
(out / "rows").write_text("".join(rows))
return Prepared(rows=len(rows))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_server")
def test_data_that_changes_while_it_is_read_is_a_warning_and_not_reused(
    tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "bills.py").write_text(make_workload("", READ_SLOWLY))
    source = tmp_path / "bills.csv"
    source.write_text("1\n")
    monkeypatch.chdir(tmp_path)
    name = tmp_path.name.replace("_", "-")

    def run(workflow: str) -> tuple[str, list[str], str]:
        flags = ("--workload=bills", f"--entry={name}-{workflow}/prepare", "--reuse=yes")
        completed = run_prepare(tmp_path, f"{name}-{workflow}", flags, source=str(source))
        assert completed.returncode == 0, completed.stderr
        s3.upload(tmp_path / "dataset", f"{name}-{workflow}/prepare/dataset")
        return (
            completed.stderr,
            json.loads((tmp_path / "warnings").read_text()),
            (tmp_path / "source_digest").read_text(),
        )

    def change() -> None:
        until("prepare reads the data", (tmp_path / "reading").exists)
        with source.open("a") as file:
            file.write("2\n")
        (tmp_path / "changed").touch()

    with ThreadPoolExecutor() as pool:
        changed = pool.submit(change)
        output, warnings, digest = run("first")
        changed.result()

    assert digest == ""
    assert len(warnings) == 1
    assert f"{source} changed while it was read" in warnings[0]
    assert "no later run reuses the outputs" in output
    output, *facts = run("second")
    assert facts == [[], data_digest(str(source))], output
    assert "cached" not in output, output
    output, *facts = run("third")
    assert facts == [[], data_digest(str(source))], output
    assert f"cached: outputs of {name}-second" in output, output


@pytest.mark.fast_cases(2)
@pytest.mark.usefixtures("mlflow_server")
@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        ({"source": "nowhere.parquet"}, 65, "error: nowhere.parquet does not exist"),
        ({"source": "simulate://x"}, 78, "error: data.source is 'simulate://x'"),
        ({"sauce": "simulate://7"}, 78, "error: data.sauce is not a known key. Did you mean"),
        ({"test_weeks": 0}, 78, "error: data.test_weeks is 0"),
    ],
)
def test_permanent_errors_have_exit_codes_and_one_sentence(
    tmp_path: Path, data: dict[str, Any], code: int, message: str
) -> None:
    completed = run_prepare(tmp_path, "prepare-2", **data)
    assert completed.returncode == code
    assert completed.stderr.startswith(message)
    assert "Traceback" not in completed.stderr
    assert not (tmp_path / "dataset").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
