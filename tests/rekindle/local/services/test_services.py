"""Tests of the embedded services as real processes."""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from argolocal.common.processes import read_start_ticks
from rekindle.errors import ConfigError, StorageError, TrackingError
from rekindle.local.services.services import Services, is_answering
from rekindle.storage import Store
from tests.ports import free_port
from tests.rekindle.local.services.service_processes import (
    PLAIN_ENVIRONMENT,
    kill_service,
    record_services,
)
from tests.waiting import until


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path, PLAIN_ENVIRONMENT)
    yield services
    services.down()


def open_store(services: Services) -> Store:
    return Store("rekindle", services.url("s3"), *services.credentials().values())


@pytest.mark.slow
def test_a_command_killed_while_it_records_a_service_leaves_no_orphan(services: Services) -> None:
    command = (
        "import os, signal, sys; from pathlib import Path; from rekindle.local.services.services"
        " import Services\nsys.addaudithook(lambda event, args: event == 'os.rename' and"
        " os.kill(os.getpid(), signal.SIGKILL))\nServices(Path(sys.argv[1]), {}).start('s3')"
    )

    assert (
        subprocess.run([sys.executable, "-c", command, services.home]).returncode == -signal.SIGKILL
    )
    # an orphan would hold the lock of the service's folder
    open_store(services).put("key", b"value")
    until(
        "the orphan to exit",
        lambda: [record_services(services, "s3").pid] == find_endpoint_pids(services),
    )
    services.start("s3")
    assert [record_services(services, "s3").pid] == find_endpoint_pids(services)
    assert services.down() == ["s3"]


def find_endpoint_pids(services: Services) -> list[int]:
    """Return the pids of S3 endpoints for this home (REKINDLE_HOME)."""
    lines = (
        (process.pid, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    )
    return [pid for pid, line in lines if str(services.home / "s3") in " ".join(line)]


def test_two_commands_at_once_start_one_service(tmp_path: Path) -> None:
    command = (
        "import sys; from pathlib import Path; from rekindle.local.services.services import"
        " Services; s = Services(Path(sys.argv[1]), {}); s.start('s3'); print(s.url('s3'),"
        " s.credentials())"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", command, tmp_path], stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    assert len({racer.communicate()[0] for racer in racers}) == 1
    assert Services(tmp_path, PLAIN_ENVIRONMENT).down() == ["s3"]


def test_a_killed_store_restarts_on_its_port_with_its_objects(services: Services) -> None:
    objects = open_store(services)
    objects.put("a/b", b"kept")
    port = kill_service(services, "s3").port
    services.restart_dead()
    assert record_services(services, "s3").port == port
    assert objects.get("a/b") == b"kept"
    assert stat.S_IMODE((services.folder / "credentials.json").stat().st_mode) == 0o600


def test_a_service_restarts_on_another_port_if_its_own_is_occupied(services: Services) -> None:
    services.start("s3")
    port = kill_service(services, "s3").port
    with socket.create_server(("127.0.0.1", port)):
        services.start("s3")
        assert record_services(services, "s3").port != port
        open_store(services).put("a", b"1")


def test_down_stops_all_processes_and_keeps_the_data(services: Services) -> None:
    open_store(services).put("a", b"1")
    stopped = record_services(services, "s3")
    assert services.down() == ["s3"]
    assert read_start_ticks(stopped.pid) != stopped.since
    assert services.down() == []
    services.restart_dead()
    assert not record_services(services, "s3").alive, "it was stopped on purpose"
    assert open_store(services).get("a") == b"1"


def test_services_used_by_a_run_restart_with_a_message_even_after_down(
    services: Services, capfd: pytest.CaptureFixture[str]
) -> None:
    services.start("s3")
    assert Services(services.home, PLAIN_ENVIRONMENT).down() == ["s3"]  # another command
    services.restart_dead()
    assert record_services(services, "s3").alive
    assert "the embedded s3 service has died: restarting it" in capfd.readouterr().err


def test_only_the_owner_can_read_a_home(tmp_path: Path) -> None:
    """The test also uses an existing directory that others may read, because a home gets objects,
    logs and MLflow's database."""
    for home in (tmp_path / "new/.rekindle", tmp_path / "old/.rekindle", tmp_path / "named"):
        if home.parent.name != "new":
            home.mkdir(parents=True, mode=0o755)
        Services(home, PLAIN_ENVIRONMENT).credentials()
        assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_down_stops_a_service_even_if_the_disk_is_full(services: Services) -> None:
    services.start("s3")
    s3 = record_services(services, "s3")
    # this folder makes the write of the service's record fail
    (services.folder / "s3.json.new").mkdir()
    assert services.down() == ["s3"]
    assert read_start_ticks(s3.pid) != s3.since


@pytest.mark.slow
def test_the_next_start_creates_the_database_after_a_full_disk(tmp_path: Path) -> None:
    code = (
        "from rekindle.local.services.mlflow import create_database;"
        " create_database('sqlite:///mlflow.db')"
    )
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # noqa: E731
    make = [sys.executable, "-c", code]
    result = subprocess.run(make, cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True)
    assert result.returncode, result.stderr[-2000:]
    assert "mlflow.db" not in os.listdir(tmp_path), result.stderr[-2000:]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert database.execute("SELECT count(*) FROM experiments").fetchone() == (0,)


@pytest.mark.slow
def test_services_exit_when_their_home_is_deleted(services: Services) -> None:
    services.start("s3")
    s3 = record_services(services, "s3")
    shutil.rmtree(services.home)
    until("the service to notice that its home was deleted", lambda: not s3.alive)


@pytest.mark.slow
def test_runs_and_artifacts_survive_a_kill_of_mlflow(services: Services) -> None:
    services.start()
    services.ready()
    env = services.environment()

    def call(path: str, body: dict | bytes | None = None, method: str = "POST") -> dict:
        if isinstance(body, bytes):
            data = body
        else:
            data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"{env['MLFLOW_TRACKING_URI']}/api/2.0/{path}", data, method=method
        )
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {services.login()['MLFLOW_TRACKING_TOKEN']}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"{}")

    run = call("mlflow/runs/create", {"experiment_id": "0", "start_time": 1})["run"]["info"]
    folder = run["artifact_uri"].removeprefix("mlflow-artifacts:/")
    call(f"mlflow-artifacts/artifacts/{folder}/a/b.txt", b"hello", "PUT")
    assert open_store(services).get(f"mlflow/{folder}/a/b.txt") == b"hello"
    pid = kill_service(services, "mlflow").pid
    assert services.environment() == env, "running pods have this address"
    assert record_services(services, "mlflow").pid != pid
    # the request need not wait, because the socket exists before the server runs
    stored = call(f"mlflow/runs/get?run_id={run['run_id']}", method="GET")["run"]
    assert stored["info"]["status"] == "RUNNING"
    children = subprocess.run(
        ["pgrep", "-g", str(record_services(services, "mlflow").pid)],
        capture_output=True,
        text=True,
    )
    assert len(children.stdout.split()) == 1


def test_a_service_that_cannot_start_shows_the_end_of_its_log(services: Services) -> None:
    (services.home / "s3").write_text("not a folder")
    with pytest.raises(
        StorageError, match=r"(?s)s3 service ended with code 1.*s3\.log ends:.*Error"
    ):
        services.ready()


def test_an_address_that_does_not_answer_names_its_variable(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(
        StorageError, match=r"S3_ENDPOINT_URL is http://127.0.0.1.*unset S3_ENDPOINT_URL"
    ):
        Services(tmp_path, {"S3_ENDPOINT_URL": f"http://127.0.0.1:{port}"}).url("s3")
    with pytest.raises(TrackingError, match=r"MLFLOW_TRACKING_URI is http://127.0.0.1"):
        Services(tmp_path, {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}).url("mlflow")
    assert not (tmp_path / "services").exists(), "nothing was started"


def test_addresses_of_real_services_are_used_unchanged(services: Services, tmp_path: Path) -> None:
    real = {
        **services.credentials(),
        "S3_ENDPOINT_URL": services.url("s3"),
        "MLFLOW_TRACKING_URI": "databricks",
    }

    other = Services(tmp_path / "other", {**real, "S3_BUCKET": "mine"})

    expected = {
        "S3_ENDPOINT_URL": services.url("s3"),
        "S3_BUCKET": "mine",
        "AWS_REGION": "us-east-1",
        "MLFLOW_TRACKING_URI": "databricks",
    }

    assert other.environment() == expected
    assert other.credentials() == services.credentials()
    assert not (tmp_path / "other").exists()
    assert is_answering(services.url("s3"))


def test_the_token_of_one_command_is_the_token_of_the_processes_that_others_have_started(
    tmp_path: Path,
) -> None:
    # the server has been running since an earlier command
    supervisor = Services(tmp_path, PLAIN_ENVIRONMENT)
    generated = supervisor.serving_token()
    Services(tmp_path, PLAIN_ENVIRONMENT).store_serving_token()
    assert supervisor.serving_token() == generated
    Services(
        tmp_path, PLAIN_ENVIRONMENT | {"REKINDLE_TOKEN": "first\n second\n"}
    ).store_serving_token()
    assert supervisor.serving_token() == {"REKINDLE_TOKEN": "first second"}
    assert stat.S_IMODE((tmp_path / "services/token").stat().st_mode) == 0o600
    header = supervisor.authorization_file
    assert header.read_text() == "Authorization: Bearer first\n"
    assert stat.S_IMODE(header.stat().st_mode) == 0o600

    for value in ("", " \n", "gehe\u00efm"):
        with pytest.raises(
            ConfigError, match="REKINDLE_TOKEN contains no token or other characters"
        ):
            Services(tmp_path, {"REKINDLE_TOKEN": value}).store_serving_token()


def test_services_do_not_inherit_the_secrets_of_the_user(tmp_path: Path) -> None:
    secrets = {"HF_TOKEN": "t", "DB_PASSWORD": "p", "NOTIFY_URL": "u", "REKINDLE_TOKEN": "r"}
    services = Services(tmp_path / "home", os.environ | secrets)

    try:
        services.start()
        for name, needed in (("s3", "AWS_SECRET_ACCESS_KEY"), ("mlflow", "MLFLOW_TRACKING_TOKEN")):
            environment = (
                Path(f"/proc/{record_services(services, name).pid}/environ")
                .read_bytes()
                .split(b"\0")
            )
            variables = {assignment.partition(b"=")[0].decode() for assignment in environment}
            assert needed in variables
            assert "PATH" in variables
            assert not variables & secrets.keys()
            assert ("MLFLOW_TRACKING_TOKEN" in variables) == (name == "mlflow")
    finally:
        services.down()
