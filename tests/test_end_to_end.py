"""A test of a user's data, from a CSV file with other column names to a champion that is
deployed."""

import base64
import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from rekindle.local.services.services import Services
from steps.fraud.data.simulate import simulate
from steps.fraud.data.simulation_uri import parse
from tests.commands import ROOT, Shell, list_commands, open_shell, write_files
from tests.ports import free_port
from tests.waiting import until


def write_payments(path: Path) -> None:
    """Write realistic data: column names of the README, an extra column, text ids, and two invalid
    rows."""
    rows = simulate(parse("simulate://3?cards=150&terminals=300&days=70&start=2025-03-01"))

    table = rows.select(
        payment="P" + pl.col("id").cast(pl.String),
        at=pl.col("time").dt.to_string("%Y-%m-%dT%H:%M:%S"),
        card="C" + pl.col("card").cast(pl.String),
        shop=pl.col("terminal"),
        euros="amount",
        fraud="fraud",
        branch=pl.lit("north"),
    )

    invalid_rows = table.head(2).with_columns(
        payment=pl.lit("broken-") + pl.col("card"), euros=pl.lit(-1.0)
    )
    pl.concat([table, invalid_rows]).write_csv(path)


# these tests execute whole runs; only test_first_run.py is in the fast tests
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# password of MLflow
PASSWORD = "hunter-45871"


@contextmanager
def watch_processes(command_lines: set[str]) -> Iterator[None]:
    """Collect the command lines of all processes, as `ps` shows them."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            command_lines.update(
                " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])
            )

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def command_lines() -> set[str]:
    """Command lines of all processes that ran during `finished_run`."""
    return set()


@pytest.fixture(scope="module")
def finished_run(
    tmp_path_factory: pytest.TempPathFactory,
    s3_environment: dict[str, str],
    services: Services,
    command_lines: set[str],
) -> Iterator[tuple[Shell, dict[str, Any]]]:
    """Run `rekindle run mine.yaml` of the README; yield the shell and the result of the command."""
    folder = tmp_path_factory.mktemp("mine")
    write_files(ROOT / "README.md", folder)
    write_payments(folder / "payments.csv")
    mlflow = services.url("mlflow")
    services.ready()
    # this run uses the embedded services through their addresses, like services of a cluster
    service_variables = {**s3_environment, "MLFLOW_TRACKING_URI": mlflow}

    service_variables.update(
        {
            **services.login(),
            "MLFLOW_TRACKING_USERNAME": "ann",
            "MLFLOW_TRACKING_PASSWORD": PASSWORD,
        }
    )

    with open_shell(folder, **service_variables, REKINDLE_TRAIN__EPOCHS="1") as run_command:
        with watch_processes(command_lines):
            completed = run_command("rekindle run mine.yaml -o json")

        assert completed.returncode == 0, completed.stderr
        yield run_command, json.loads(completed.stdout)


def read_served_sha256(result: dict[str, Any]) -> str:
    """Return the sha256 of the served model."""
    with urllib.request.urlopen(result["endpoint"] + "/health/ready") as answer:
        return json.load(answer)["sha256"]


def test_a_model_of_the_users_data_becomes_the_champion(finished_run: tuple[Shell, dict[str, Any]]):
    _, result = finished_run
    assert result["phase"] == "Succeeded"
    assert result["verdict"] == "release"
    assert 0 < result["metrics"]["ap"] <= 1
    assert 0.5 < result["metrics"]["auc"] <= 1
    assert read_served_sha256(result) == result["model_sha256"]


def post_body(url: str, body: dict[str, Any]) -> Any:
    """Return the predictions of a server; None while the server starts."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["predictions"]
    except urllib.error.URLError:
        return None


def test_mlflow_serves_the_released_model_as_documented(finished_run: tuple[Shell, dict[str, Any]]):
    run_command, result = finished_run
    model_url = f"{result['endpoint']}/v1/models/mine"
    with urllib.request.urlopen(f"{model_url}/example") as answer:
        example = json.load(answer)

    port = str(free_port())
    (documented,) = (
        line for line in list_commands(ROOT / "docs/tracking.md") if "mlflow models serve" in line
    )

    command = [
        "bash",
        "-c",
        documented.replace("models:/demo@", "models:/mine@").replace("5001", port),
    ]

    log = run_command.folder / "mlflow.log"
    conflicting_variables = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    # remove user and password, which would take precedence over the token, or conflict with it
    environment = {
        name: value
        for name, value in run_command.environ.items()
        if name not in conflicting_variables
    }
    params = {name: json.dumps(value) for name, value in example.items() if name != "instances"}
    body = {"dataframe_records": example["instances"], "params": params}

    with log.open("w") as log_file:
        server = subprocess.Popen(
            command,
            cwd=run_command.folder,
            env=environment,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )

    try:
        invocations = f"http://127.0.0.1:{port}/invocations"
        answer = until(
            "MLflow to serve", lambda: post_body(invocations, body), 120, evidence=log.read_text
        )
        assert answer == post_body(f"{model_url}:predict", example)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def test_no_secret_is_in_a_log_in_mlflow_or_in_a_command_line(
    finished_run: tuple[Shell, dict[str, Any]],
    command_lines: set[str],
    s3_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
):
    from mlflow import MlflowClient

    run_command, result = finished_run
    token = run_command.environ["MLFLOW_TRACKING_TOKEN"]
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)

    secrets = {
        token,
        PASSWORD,
        s3_environment["AWS_SECRET_ACCESS_KEY"],
        s3_environment["AWS_ACCESS_KEY_ID"],
    }

    secret_path = (
        run_command.folder / f".rekindle/objects/Secret/{result['workflow']}-train-transformer.json"
    )
    encoded = json.loads(secret_path.read_text())["data"]["secret"]
    secrets.update({encoded, base64.b64decode(encoded).decode()})
    logs = run_command(f"rekindle logs {result['workflow']}").stdout
    run_text = str(
        MlflowClient(run_command.environ["MLFLOW_TRACKING_URI"])
        .get_run(result["run_id"])
        .to_dictionary()
    )
    all_command_lines = "\n".join(command_lines)
    assert "rekindle.training" in all_command_lines
    assert "rekindle.workflow" in run_text
    assert len(logs) > 100
    files = [path for path in (run_command.folder / ".rekindle").rglob("*") if path.is_file()]

    text_by_file = {
        str(path): path.read_text(errors="replace")
        for path in files
        if path.suffix in (".log", ".jsonl", ".json", ".yaml") and path != secret_path
    }

    assert len(text_by_file) > 5
    text_by_place = {
        "command lines": all_command_lines,
        "MLflow": run_text,
        "logs": logs,
    } | text_by_file
    assert [
        place for place, text in text_by_place.items() if any(secret in text for secret in secrets)
    ] == []


def test_the_champion_keeps_serving_if_the_next_run_misses_the_minimum(
    finished_run: tuple[Shell, dict[str, Any]],
):
    run_command, result = finished_run
    # trees do not depend on the seed
    settings = (
        "--set families='[transformer]' --set gate.minimum='{auc: 0.9999}' --set train.seed=9"
    )
    rejected_run = run_command(f"rekindle run mine.yaml {settings} -o json")
    assert rejected_run.returncode == 3, rejected_run.stderr
    assert json.loads(rejected_run.stdout)["verdict"] == "keep", rejected_run.stderr
    assert read_served_sha256(result) == result["model_sha256"]
