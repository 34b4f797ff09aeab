"""Tests of the access control of the embedded MLflow, as a real server: requests of MLflow's
client, of browsers and of other users."""

import http.client
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.common import homes
from rekindle.local.services.services import Services
from tests.rekindle.local.services.service_processes import (
    PLAIN_ENVIRONMENT,
    kill_service,
    record_services,
)

CREATE = "/api/2.0/mlflow/experiments/create"
SEARCH = "/api/2.0/mlflow/experiments/search?max_results=10"


class Mlflow:
    """The embedded MLflow server, and requests to this server with exact headers."""

    def __init__(self, services: Services) -> None:
        services.start()
        services.ready()
        self.services, self.port = services, record_services(services, "mlflow").port
        self.token = services.login()["MLFLOW_TRACKING_TOKEN"]
        self.host = f"127.0.0.1:{self.port}"
        self.bearer = {"Authorization": f"Bearer {self.token}"}

    def ask(
        self,
        path: str,
        headers: dict[str, str] | None = None,
        method: str = "GET",
        body: Any = None,
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        fields = {"Host": self.host, "Content-Type": "application/json"} | (headers or {})
        connection.request(method, path, json.dumps(body) if body else None, fields)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers

    def status(self, *request: Any, **options: Any) -> int:
        return self.ask(*request, **options)[0]


@pytest.fixture(scope="module")
def mlflow(services: Services) -> Mlflow:
    return Mlflow(services)


@pytest.fixture
def own_services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path / "home", PLAIN_ENVIRONMENT)
    yield services
    services.down()


PATHS = (
    "/",
    "/version",
    "/static-files/index.html",
    SEARCH,
    "/ajax-api/2.0/mlflow/experiments/search?max_results=10",
    "/get-artifact?path=a&run_id=x",
    "/model-versions/get-artifact?path=a&name=a&version=1",
    "/graphql",
    "/api/2.0/mlflow-artifacts/artifacts?path=",
    "/api/3.0/mlflow/server-info",
    "/api/2.0/mlflow/webhooks",
    "//health",
    "/health/../version",
    "/?token=",
    "/?token=x&token=y",
)


def test_a_client_without_the_token_can_only_read_the_health(mlflow: Mlflow) -> None:
    cookies = (f"rekindle-mlflow-{mlflow.port}={mlflow.token}", "a=b", "")
    wrong = [
        {"Authorization": value} for value in ("Bearer x", f"Basic {mlflow.token}", "Bearer ", "")
    ]
    wrong += [{}, *({"Cookie": cookie} for cookie in cookies)]

    for path in PATHS:
        for headers in wrong:
            status, body, _ = mlflow.ask(path, headers)
            assert status == 401, (path, headers)
            assert b"rekindle ui --mlflow" in body, (path, headers)

    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        assert mlflow.status(CREATE, method=method, body={"name": "theirs"}) == 401

    assert mlflow.ask("/health")[:2] == (200, b"OK")
    assert b"theirs" not in mlflow.ask(SEARCH, mlflow.bearer)[1]


@pytest.mark.slow
def test_mlflows_client_needs_only_the_variables_of_rekindle_env(
    mlflow: Mlflow, tmp_path: Path
) -> None:
    program = """
import mlflow, pathlib
mlflow.set_experiment("notebook")
with mlflow.start_run() as run:
    mlflow.log_metric("loss", 1.5)
    for name, content in (("empty", ""), ("full", "x" * 3_000_000)):
        pathlib.Path(name).write_text(content)
        mlflow.log_artifact(name)
print(mlflow.get_run(run.info.run_id).data.metrics["loss"])
print(len(mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/full")))
"""

    env = {
        **os.environ,
        "MLFLOW_TRACKING_URI": f"http://{mlflow.host}",
        "MLFLOW_TRACKING_TOKEN": mlflow.token,
    }

    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert re.findall(r"^[\d.]+$", result.stdout, re.MULTILINE) == ["1.5", "3000000"], result.stderr


def test_a_browser_logs_in_by_the_printed_address_and_keeps_a_cookie(mlflow: Mlflow) -> None:
    address = mlflow.services.make_login_url(f"http://{mlflow.host}/#/experiments/1")
    assert address == f"http://{mlflow.host}/?token={mlflow.token}#/experiments/1"
    status, page, headers = mlflow.ask(f"/?token={mlflow.token}", {"Sec-Fetch-Site": "cross-site"})

    assert status == 200
    assert b"location.replace" in page
    assert headers["Cache-Control"] == "no-store"

    cookie, _, attributes = headers["Set-Cookie"].partition(";")
    assert attributes == " Path=/; HttpOnly; SameSite=Strict"
    assert mlflow.token not in cookie
    login = {"Cookie": f"other=1; {cookie}"}
    assert b"<html" in mlflow.ask("/", login | {"Sec-Fetch-Site": "same-origin"})[1]
    assert mlflow.status(SEARCH, login | {"Sec-Fetch-Site": "same-origin"}) == 200
    from_page = login | {"Origin": f"http://{mlflow.host}", "Sec-Fetch-Site": "same-origin"}
    assert mlflow.status(CREATE, from_page, method="POST", body={"name": "by the page"}) == 200

    link = {
        "Sec-Fetch-Site": "same-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }

    # the link is in a notebook on another port
    assert mlflow.status("/", login | link) == 200


def test_other_pages_cannot_use_the_login_of_a_browser(mlflow: Mlflow) -> None:
    cookie = mlflow.ask(f"/?token={mlflow.token}")[2]["Set-Cookie"].partition(";")[0]
    for login_headers in ({"Cookie": cookie}, mlflow.bearer):
        for origin in (
            "http://127.0.0.1:1",
            f"http://localhost:{mlflow.port}",
            "http://evil.example",
            "null",
            f"https://{mlflow.host}",
            f"http://{mlflow.host}.evil.example",
        ):
            for method, path in (("GET", SEARCH), ("POST", CREATE), ("OPTIONS", CREATE)):
                status, _, headers = mlflow.ask(
                    path, login_headers | {"Origin": origin}, method, {"name": "theirs"}
                )
                assert status == 403, origin
                assert headers["Access-Control-Allow-Origin"] is None, origin

        for host in (
            "evil.example",
            "10.evil.example",
            f"10.0.0.1:{mlflow.port}",
            "192.168.evil.example",
            "",
            f"127.0.0.1.evil.example:{mlflow.port}",
            "localhost.:1",
            f"{mlflow.host}, evil",
        ):
            assert mlflow.status(SEARCH, login_headers | {"Host": host}) == 403, host

    for site in ("same-site", "cross-site", "same-site,same-origin", "x"):
        assert mlflow.status(SEARCH, {"Cookie": cookie, "Sec-Fetch-Site": site}) == 401
        frame = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
        assert mlflow.status("/", {"Cookie": cookie} | frame) == 401

    # the request has a target with another host
    with socket.create_connection(("127.0.0.1", mlflow.port), timeout=60) as connection:
        connection.sendall(
            f"GET http://evil.example{SEARCH} HTTP/1.1\r\nHost: {mlflow.host}\r\n"
            f"Authorization: Bearer {mlflow.token}\r\n\r\n".encode()
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 403 ")


def test_artifact_locations_outside_the_root_are_rejected(mlflow: Mlflow, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("precious")
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts/link").symlink_to(tmp_path)

    locations = [
        str(tmp_path),
        f"file://{tmp_path}",
        f"{tmp_path}/artifacts/link",
        "s3://rekindle/releases",
        "./x",
        "http://127.0.0.1:1/x",
        "mlflow-artifacts://evil/x",
        "mlflow-artifacts:x",
        "runs:/x",
    ]
    for location in locations:
        for field in ("artifact_location", "artifactLocation"):
            body: Any = {"name": f"{field} {location}", field: location}
            for form in (body, json.dumps(body)):  # older clients encode the path twice
                status, answer, _ = mlflow.ask(CREATE, mlflow.bearer, "POST", form)
                assert status == 400, (location, answer)

    source = {"name": "m", "source": str(tmp_path)}
    mlflow.ask("/api/2.0/mlflow/registered-models/create", mlflow.bearer, "POST", {"name": "m"})

    for location in (
        str(tmp_path),
        f"file://{tmp_path}",
        "http://127.0.0.1:1/x",
        "mlflow-artifacts://evil.example/x",
    ):
        create = "/api/2.0/mlflow/model-versions/create"
        assert mlflow.status(create, mlflow.bearer, "POST", source | {"source": location}) == 400, (
            location
        )

    assert (tmp_path / "key").read_text() == "precious"


def test_artifact_locations_in_an_old_database_are_not_followed(
    mlflow: Mlflow, tmp_path: Path
) -> None:
    """The database contains an experiment of another user, whose artifact location is a folder of
    this user."""
    experiment = json.loads(mlflow.ask(CREATE, mlflow.bearer, "POST", {"name": "old"})[1])
    create = "/api/2.0/mlflow/runs/create"
    run = json.loads(mlflow.ask(create, mlflow.bearer, "POST", experiment | {"start_time": 1})[1])[
        "run"
    ]["info"]["run_id"]
    (tmp_path / "key").write_text("precious")

    with sqlite3.connect(mlflow.services.home / "mlflow.db") as database:
        database.execute(
            "update runs set artifact_uri = ? where run_uuid = ?", (str(tmp_path), run)
        )

    read = mlflow.ask(f"/get-artifact?path=key&run_id={run}", mlflow.bearer)
    assert read[0] >= 400
    assert b"precious" not in read[1]
    upload = f"/ajax-api/2.0/mlflow/upload-artifact?run_uuid={run}&path=key"
    assert mlflow.status(upload, mlflow.bearer, "POST", {"a": 1}) >= 400
    assert (tmp_path / "key").read_text() == "precious"


def test_the_token_changes_if_another_process_may_have_received_it(own_services: Services) -> None:
    """After `down`, clients may still send the old token to a new process on the same port."""
    first_login = own_services.login()
    assert (own_services.folder / "mlflow-token.json").stat().st_mode & 0o777 == 0o600
    kill_service(own_services, "mlflow")
    own_services.restart_dead()
    assert own_services.login() == first_login, "running pods have this token"
    own_services.down()
    second_login = own_services.login()
    assert second_login != first_login

    port = kill_service(own_services, "mlflow").port
    with socket.create_server(("127.0.0.1", port)):
        own_services.start("mlflow")
        assert record_services(own_services, "mlflow").port != port
        assert own_services.login() not in (first_login, second_login)


def test_many_slow_clients_without_the_token_do_not_delay_other_requests(mlflow: Mlflow) -> None:
    held = []
    try:
        for number in range(400):
            connection = socket.create_connection(("127.0.0.1", mlflow.port), timeout=60)
            body = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
            connection.sendall((b"GET / HTTP/1.1\r\nHos", body, b"")[number % 3])
            held.append(connection)

        assert mlflow.status(SEARCH, mlflow.bearer) == 200
        answers: list[int] = []

        asking = [
            threading.Thread(target=lambda: answers.append(mlflow.status(SEARCH, mlflow.bearer)))
            for _ in range(40)
        ]
        for thread in asking:
            thread.start()

        for thread in asking:
            thread.join()

        assert answers == [200] * 40
        log = (mlflow.services.folder / "mlflow.log").read_text()
        assert mlflow.token not in log
        assert "Traceback" not in log
    finally:
        for connection in held:
            connection.close()


def test_no_command_line_contains_the_token(mlflow: Mlflow, tmp_path: Path) -> None:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert mlflow.token.encode() not in process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
    link = Path(
        homes.write_redirect_page(
            mlflow.services.home, mlflow.services.make_login_url(f"http://{mlflow.host}/#/a?b&c")
        )
    )
    assert link.stat().st_mode & 0o777 == 0o600
    assert f"{mlflow.token}#/a?b&amp;c" in link.read_text()
