"""Tests of requests that attack the API: without the token, from other pages, too large, too deep
or too many."""

import socket
import threading
from pathlib import Path
from urllib.parse import quote

import httpx
import psutil
import pytest

from argolocal.common import program
from argolocal.server.api.bodies import MAX_BODY_BYTES
from argolocal.server.api.streams import MAX_STREAMS
from tests.argolocal.server.api.running import (
    ApiServer,
    describe_error,
    make_gated_workflow,
    make_hello_workflow,
    make_stored_template,
    start_api,
)
from tests.waiting import until

PATHS = ("/api/v1/workflows/argo", "/api/v1/info", "/artifacts/argo/w/n/x", "/api/v1/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_a_request_without_the_token_is_refused(api: ApiServer, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": api.token}):
        answer = httpx.get(f"{api.url}{path}", headers=headers)
        status, code, message = describe_error(answer)
        assert (status, code) == (401, 16)
        assert "token" in message


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
    ],
)
def test_a_request_of_another_host_or_page_is_refused(
    api: ApiServer, headers: dict[str, str]
) -> None:
    for method in ("GET", "POST"):
        answer = api.send(
            method, "/workflows/argo", {"workflow": make_hello_workflow()}, headers=headers
        )
        assert describe_error(answer)[:2] == (403, 7)


def test_a_form_of_another_page_cannot_use_the_login_of_a_browser(api: ApiServer) -> None:
    login = httpx.get(f"{api.url}/?token={api.token}")
    cookie = login.headers["set-cookie"].partition(";")[0]
    headers = {"Cookie": cookie, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    answer = httpx.post(f"{api.url}/api/v1/workflows/argo", headers=headers, json={})
    assert describe_error(answer)[:2] == (401, 16)


def test_a_large_body_is_refused_without_reading_it(api: ApiServer) -> None:
    memory = psutil.Process().memory_info().rss
    with socket.create_connection(("127.0.0.1", api.port)) as connection:
        connection.sendall(
            f"POST /api/v1/workflows/argo HTTP/1.1\r\nHost: 127.0.0.1:{api.port}\r\n"
            f"Authorization: Bearer {api.token}\r\nContent-Length: {100 << 20}\r\n\r\n".encode()
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")

    def chunks():
        for _ in range(100):
            yield b" " * (1 << 20)

    try:
        answer = api.client.post("/api/v1/workflows/argo", content=chunks())
        assert describe_error(answer)[:2] == (413, 8)
    except (httpx.WriteError, httpx.RemoteProtocolError):
        # the server has closed the connection before the whole body was sent
        pass
    assert psutil.Process().memory_info().rss - memory < 50 << 20


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"workflow":' * 5000 + b"1" + b"}" * 5000,
        b'{"workflow": {"metadata": {"name": ' + b"9" * 10_000 + b"}}}",
        b'{"workflow": NaN}',
        b"\xff\xfe",
        b'{"a": 1, "a": 2}',
        b'{"workflow": {"spec": {"templates": [1, null, "x", {"container": []}]}}}',
        b'{"workflow": {"metadata": {"labels": ["x"]}, "spec": []}}',
        b'{"workflow": {"metadata": [], "spec": {}}}',
    ],
)
def test_a_malformed_body_is_refused(api: ApiServer, body: bytes) -> None:
    for path in ("/workflows/argo", "/workflows/argo/lint", "/workflows/argo/submit"):
        answer = api.client.post(f"/api/v1{path}", content=body)
        assert describe_error(answer)[:2] == (400, 3), answer.text
    for folder in ("workflow-templates/argo", "cron-workflows/argo", "cluster-workflow-templates"):
        answer = api.client.post(f"/api/v1/{folder}", content=body)
        assert describe_error(answer)[:2] == (400, 3), answer.text
    assert len(body) < MAX_BODY_BYTES


def make_example(name: str) -> dict[str, object]:
    return {**make_stored_template(name), "metadata": {"name": name}}


@pytest.mark.parametrize("name", ["..", "../../x", "..%2f..%2fpage-token", "%00", "a" * 300, "A b"])
def test_a_name_from_outside_cannot_leave_the_folder_of_the_runs(api: ApiServer, name: str) -> None:
    segment = name if "%" in name else quote(name, safe="").replace(".", "%2e")
    earlier_names = sorted(path.name for path in api.home.parent.iterdir())
    for path in (
        f"/workflows/argo/{segment}",
        f"/workflows/argo/{segment}/log",
        f"/workflow-templates/argo/{segment}",
        f"/archived-workflows/{segment}",
    ):
        for method in ("GET", "DELETE", "PUT"):
            answer = api.send(method, path, {} if method == "PUT" else None)
            assert answer.status_code in (400, 404, 405, 501), (path, answer.text)
    for field, folder in (("workflow", "workflows/argo"), ("template", "workflow-templates/argo")):
        manifest = make_example(name) if field == "template" else make_hello_workflow(name)
        answer = api.send("POST", f"/{folder}", {field: manifest})
        assert describe_error(answer)[:2] == (400, 3)
    assert (api.home / "page-token").read_text() == api.token
    assert sorted(path.name for path in api.home.parent.iterdir()) == earlier_names


def test_labels_from_outside_are_data(api: ApiServer) -> None:
    manifest = make_hello_workflow("labelled")
    manifest["metadata"]["labels"] = {"../x": "<script>"}
    answer = api.send("POST", "/workflows/argo", {"workflow": manifest})
    assert describe_error(answer)[:2] == (400, 3)
    body = {"resourceKind": "WorkflowTemplate", "resourceName": "labels-of-it"}
    api.change(
        "POST", "/workflow-templates/argo", {"template": make_stored_template("labels-of-it")}
    )
    for labels in ("novalue", "=x", "a b=c", "../x=y"):
        options = {"submitOptions": {"labels": labels}}
        answer = api.send("POST", "/workflows/argo/submit", body | options)
        assert answer.status_code in (400, 500), answer.text
        assert describe_error(answer)[1] in (3, 13)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/event-sources/argo"),
        ("POST", "/events/argo/push"),
        ("GET", "/sensors/argo"),
        ("GET", "/sync/argo/key"),
        ("GET", "/workflow-event-bindings/argo"),
        ("PATCH", "/workflows/argo/x"),
        ("GET", "/nothing"),
    ],
)
def test_an_address_that_does_not_exist_here_says_so(
    api: ApiServer, method: str, path: str
) -> None:
    status, code, message = describe_error(api.send(method, path))
    assert (status, code) == (501, 12)
    assert message.startswith(f"{program.name} server")


def test_many_idle_watches_are_bounded(tmp_path: Path) -> None:
    """Other tests show that a further watch is refused; this test measures the threads and memory
    of many watches."""
    count = 200
    with start_api(tmp_path / "home") as server:
        name = server.submit(make_gated_workflow())
        server.wait_until_suspended(name)
        memory = psutil.Process().memory_info().rss
        sockets = [open_watch(server) for _ in range(count)]
        until("all watches", lambda: all(watch.recv(1, socket.MSG_PEEK) for watch in sockets))
        used = psutil.Process().memory_info().rss - memory
        threads = threading.active_count()
        for item in sockets:
            item.close()
    assert used / count < 200_000
    assert used / count * MAX_STREAMS < 200 << 20
    assert threads < 100


def open_watch(server: ApiServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(
        f"GET /api/v1/workflow-events/argo HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Authorization: Bearer {server.token}\r\n\r\n".encode()
    )
    return connection
