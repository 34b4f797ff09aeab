"""Fixtures: a real S3 endpoint and a real MLflow server, one each for a test process."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from steps.storage import Store

THREADS = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ.update(THREADS)  # two test processes share two cores
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "S3_BUCKET": "rekindle"}


@pytest.fixture(scope="session")
def s3_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a running endpoint, for the processes that a test starts."""
    root = tmp_path_factory.mktemp("s3")
    command = [sys.executable, "-m", "pipelines.local.s3", "--root", str(root), "--bucket", KEYS["S3_BUCKET"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **KEYS}) as server:
        assert server.stdout
        yield {**KEYS, "S3_ENDPOINT_URL": server.stdout.readline().strip()}
        server.terminate()


@pytest.fixture
def s3(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> "Store":
    """The store of the endpoint; this process' environment points to it, too."""
    from steps.storage import Store

    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return Store.from_env()


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running MLflow server with its own database and artifacts."""
    root = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{root}/mlflow.db", "--artifacts-destination", str(root / "artifacts")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(command + store, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(uri + "/health", root / "log")
        yield uri
    finally:
        os.killpg(server.pid, 9)
        server.wait()


@pytest.fixture
def mlflow_server(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the MLflow server; this process' environment points to it, too."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    return mlflow_uri


def _wait(url: str, log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise AssertionError(f"{url} did not answer: {log.read_text()[-2000:]}")
