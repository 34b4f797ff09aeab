"""A user's data: from a CSV file with other column names to a champion that serves."""

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
from tests.commands import ROOT, Shell, commands, shell, write_files
from tests.ports import free_port
from tests.waiting import until


def payments(path: Path) -> None:
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

    invalid = table.head(2).with_columns(
        payment=pl.lit("broken-") + pl.col("card"), euros=pl.lit(-1.0)
    )
    pl.concat([table, invalid]).write_csv(path)


# whole runs; only test_first_run.py is in the fast tests
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PASSWORD = "hunter-45871"  # password of MLflow


@contextmanager
def watch_processes(seen: set[str]) -> Iterator[None]:
    """Collect the command lines of all processes, like `ps`."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            seen.update(
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
def seen() -> set[str]:
    """Command lines of all processes while `started` ran."""
    return set()


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
    s3_environment: dict[str, str],
    services: Services,
    seen: set[str],
) -> Iterator[tuple[Shell, dict[str, Any]]]:
    """Run `rekindle run mine.yaml` of the README; yield the shell and its result."""
    folder = tmp_path_factory.mktemp("mine")
    write_files(ROOT / "README.md", folder)
    payments(folder / "payments.csv")
    mlflow = services.url("mlflow")
    services.ready()
    # for this run, the embedded services count as real services
    real = {**s3_environment, "MLFLOW_TRACKING_URI": mlflow}

    real.update(
        {
            **services.login(),
            "MLFLOW_TRACKING_USERNAME": "ann",
            "MLFLOW_TRACKING_PASSWORD": PASSWORD,
        }
    )

    with shell(folder, **real, REKINDLE_TRAIN__EPOCHS="1") as typed:
        with watch_processes(seen):
            done = typed("rekindle run mine.yaml -o json")

        assert done.returncode == 0, done.stderr
        yield typed, json.loads(done.stdout)


def served(result: dict[str, Any]) -> str:
    """Return the sha256 of the served model."""
    with urllib.request.urlopen(result["endpoint"] + "/health/ready") as answer:
        return json.load(answer)["sha256"]


def test_a_model_of_the_users_data_becomes_the_champion(started: tuple[Shell, dict[str, Any]]):
    _, result = started
    assert result["phase"] == "Succeeded"
    assert result["verdict"] == "release"
    assert 0 < result["metrics"]["ap"] <= 1
    assert 0.5 < result["metrics"]["auc"] <= 1
    assert served(result) == result["model_sha256"]


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the predictions of a server; None while it starts."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["predictions"]
    except urllib.error.URLError:
        return None


def test_mlflow_serves_the_released_model_as_documented(started: tuple[Shell, dict[str, Any]]):
    typed, result = started
    served = f"{result['endpoint']}/v1/models/mine"
    with urllib.request.urlopen(f"{served}/example") as answer:
        example = json.load(answer)

    port = str(free_port())
    (documented,) = (
        line for line in commands(ROOT / "docs/tracking.md") if "mlflow models serve" in line
    )

    command = [
        "bash",
        "-c",
        documented.replace("models:/demo@", "models:/mine@").replace("5001", port),
    ]

    log = typed.folder / "mlflow.log"
    rival = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    # user and password would take precedence over the token, or conflict with it
    environment = {name: value for name, value in typed.environ.items() if name not in rival}
    params = {name: json.dumps(value) for name, value in example.items() if name != "instances"}
    body = {"dataframe_records": example["instances"], "params": params}

    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            cwd=typed.folder,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )

    try:
        invocations = f"http://127.0.0.1:{port}/invocations"
        answer = until(
            "MLflow to serve", lambda: post(invocations, body), 120, evidence=log.read_text
        )
        assert answer == post(f"{served}:predict", example)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def test_no_secret_is_in_a_log_in_mlflow_or_in_a_command_line(
    started: tuple[Shell, dict[str, Any]],
    seen: set[str],
    s3_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
):
    from mlflow import MlflowClient

    typed, result = started
    token = typed.environ["MLFLOW_TRACKING_TOKEN"]
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)

    secrets = {
        token,
        PASSWORD,
        s3_environment["AWS_SECRET_ACCESS_KEY"],
        s3_environment["AWS_ACCESS_KEY_ID"],
    }

    of_run = typed.folder / f".rekindle/objects/Secret/{result['workflow']}-train-transformer.json"
    encoded = json.loads(of_run.read_text())["data"]["secret"]
    secrets.update({encoded, base64.b64decode(encoded).decode()})
    logs = typed(f"rekindle logs {result['workflow']}").stdout
    run = str(
        MlflowClient(typed.environ["MLFLOW_TRACKING_URI"]).get_run(result["run_id"]).to_dictionary()
    )
    lines = "\n".join(seen)
    assert "rekindle.training" in lines
    assert "rekindle.workflow" in run
    assert len(logs) > 100
    files = [each for each in (typed.folder / ".rekindle").rglob("*") if each.is_file()]

    kept = {
        str(each): each.read_text(errors="replace")
        for each in files
        if each.suffix in (".log", ".jsonl", ".json", ".yaml") and each != of_run
    }

    assert len(kept) > 5
    places = {"command lines": lines, "MLflow": run, "logs": logs} | kept
    assert [
        place for place, text in places.items() if any(secret in text for secret in secrets)
    ] == []


def test_the_champion_keeps_serving_if_the_next_run_misses_the_minimum(
    started: tuple[Shell, dict[str, Any]],
):
    typed, result = started
    # the trees have the same weights with each seed
    settings = (
        "--set families='[transformer]' --set gate.minimum='{auc: 0.9999}' --set train.seed=9"
    )
    kept = typed(f"rekindle run mine.yaml {settings} -o json")
    assert kept.returncode == 3, kept.stderr
    assert json.loads(kept.stdout)["verdict"] == "keep", kept.stderr
    assert served(result) == result["model_sha256"]
