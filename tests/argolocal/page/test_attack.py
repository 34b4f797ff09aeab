"""Attacks by another user of the machine, by a hostile page, and by hostile or broken records of
runs. The tests send real requests to a real server, which shows them nothing, runs nothing, and
keeps working."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, expect

from argolocal.common.json_text import to_json
from argolocal.page import server as server_module
from argolocal.state.journal import JOURNAL_FILE, MANIFEST_FILE
from tests.argolocal.page.conftest import MARKUP, make_page_workflow, run_workflow
from tests.browser import PageServer, start_page
from tests.waiting import until

TABS = ("overview", "logs", "timeline", "artifacts")
# hostile values for all fields of a manifest or a status
HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, 1, -1e308, "x", "9" * 3000, MARKUP, "\ud800"),
    *([], {}, ["x"], {"x": 1}, [None]),
)


def send(page: PageServer, request: bytes, ends: bool = False) -> bytes:
    """Send bytes to the server, and return its complete answer. The value True of `ends` to close
    this end of the connection, so that the server does not wait for the rest of a request."""
    with closing(socket.create_connection(("127.0.0.1", page.port or 0), timeout=30)) as client:
        client.sendall(request)
        if ends:
            client.shutdown(socket.SHUT_WR)
        answer = bytearray()
        while chunk := client.recv(65_536):
            answer += chunk
    return bytes(answer)


def get_raw(page: PageServer, target: str, *headers: str) -> bytes:
    login = f"Authorization: Bearer {page.token}"
    lines = [f"GET {target} HTTP/1.1", *headers, login, "Connection: close", "", ""]
    return send(page, "\r\n".join(lines).encode())


@pytest.mark.parametrize(
    "headers",
    [
        ("Host: 127.0.0.1.evil.example",),
        ("Host: localhost@evil.example",),
        ("Host: evil.example", "Host: 127.0.0.1"),
        ("Host: 127.0.0.1", "Host: evil.example"),
        ("Host:",),
        ("X-Forwarded-Host: 127.0.0.1",),
        ("Host: 127.0.0.1:7070, evil.example",),
    ],
)
def test_a_redirected_host_name_sees_nothing(page: PageServer, headers: tuple[str, ...]) -> None:
    answer = get_raw(page, "/", *headers)
    assert answer.split()[1] in (b"400", b"403")
    assert b"bad-run" not in answer


@pytest.mark.parametrize(
    "target",
    [
        "//evil.example/runs/bad-run",
        "/static/../../page-token",
        "/static/..%2f..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static//etc/passwd",
        "/runs/bad-run/logs/..%2f..%2f..%2fpage-token",
        "/runs/bad-run/logs/%2e%2e",
        "/runs/..%2f..%2fpage-token/overview",
        "/runs/bad-run/artifact?artifact=..%2f..%2fpage-token",
        "/runs/bad-run/logs?pod=..%2f..%2f..%2fpage-token",
        "/runs/bad-run/log-events?pod=..%2fmanifest.yaml",
    ],
)
def test_no_address_leads_out_of_the_runs(page: PageServer, target: str) -> None:
    answer = get_raw(page, target, f"Host: 127.0.0.1:{page.port}")
    assert answer.split()[1] in (b"400", b"403", b"404"), answer[:200]
    for secret in (page.token.encode(), b"import uvicorn", b"root:"):
        assert secret not in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Length: 5\r\n\r\n0\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"GET /\x00\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_a_malformed_request_is_refused_and_the_next_one_is_answered(
    page: PageServer, request_bytes: bytes
) -> None:
    try:
        answer = send(page, request_bytes, ends=True)
    except ConnectionError:
        answer = b""
    assert b" 200 " not in answer[:20]
    assert page.get("/").status_code == 200


def test_the_token_is_in_no_page_and_in_no_referrer(page: PageServer, browser: Browser) -> None:
    tab = browser.new_context().new_page()
    requests: list[dict[str, str]] = []
    tab.on("request", lambda request: requests.append(request.headers))
    tab.goto(page.login)
    tab.wait_for_url(lambda url: "token" not in url)
    tab.goto(f"{page.root}/runs/bad-run")
    tab.get_by_role("link", name="Timeline").click()
    expect(tab.get_by_role("region", name="Timeline")).to_be_visible()

    assert not [headers for headers in requests if page.token in headers.get("referer", "")]
    assert page.token not in tab.content()
    cookies = tab.context.cookies()
    assert [cookie["httpOnly"] and cookie["sameSite"] for cookie in cookies] == ["Strict"]
    # the cookie does not contain the token, so it cannot be used in place of the token
    headers = {"Authorization": f"Bearer {cookies[0]['value']}"}
    assert httpx.get(page.root, headers=headers).status_code == 401
    tab.context.close()


def test_a_page_of_another_origin_can_do_nothing(page: PageServer, browser: Browser) -> None:
    """The hostile page is on another port of this machine, which a browser treats as the same
    site."""
    tab = page.open(browser)
    hostile = f"""<body><img id=picture src="{page.root}/static/icon.svg">
      <iframe id=frame src="{page.root}/runs/bad-run"></iframe>
      <script src="{page.root}/metrics"></script>
      <form id=form method=post action="{page.root}/runs/bad-run/actions/resume"></form>"""
    tab.route("http://127.0.0.1:9/*", lambda route: route.fulfill(body=hostile, content_type="text/html"))  # fmt: skip
    tab.goto("http://127.0.0.1:9/")
    read = f"fetch('{page.root}/', {{credentials: 'include'}}).then(a => a.text(), e => 'refused')"
    assert tab.evaluate(read) == "refused"
    send_json = f"""fetch('{page.root}/runs/bad-run/actions/resume', {{method: 'POST', body: '{{}}',
        credentials: 'include', headers: {{'Content-Type': 'application/json'}}}})
        .then(a => a.status, e => 'refused')"""
    assert tab.evaluate(send_json) == "refused"
    send_text = send_json.replace("application/json", "text/plain").replace(
        "credentials", "mode: 'no-cors', credentials"
    )
    assert tab.evaluate(send_text) in (0, "refused")
    assert tab.evaluate("document.querySelector('#picture').naturalWidth") == 0
    assert tab.frames[1].url != f"{page.root}/runs/bad-run" or not tab.frames[1].content().count(
        "bad-run"
    )

    tab.evaluate("document.querySelector('#form').submit()")
    expect(tab.get_by_text("only pages of this server may send requests")).to_be_visible()
    assert page.get("/?q=bad-run").json()["rows"][0]["state"] == "failed"
    tab.context.close()


@contextmanager
def hold_connections(
    page: PageServer, count: int, first_bytes: bytes
) -> Iterator[list[socket.socket]]:
    """Open connections that never send a complete request."""
    with ExitStack() as stack:
        clients: list[socket.socket] = []
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", page.port or 0), timeout=30)
            stack.enter_context(closing(client))
            client.sendall(first_bytes)
            clients.append(client)
        yield clients


@pytest.mark.parametrize("first_bytes", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_connections_without_a_request_keep_nobody_out(
    home: Path, browser: Browser, first_bytes: bytes
) -> None:
    with start_page(home) as server:
        limit = server_module.MAX_WAITING_CONNECTIONS
        process = psutil.Process(server.process.pid)
        tab = server.open(browser, "/runs/bad-run")
        with hold_connections(server, 3 * limit, first_bytes):
            assert server.get("/").status_code == 200
            assert process.num_fds() < limit + 100
            expect(tab.get_by_role("status")).to_have_text("")
        until("the connections are closed", lambda: process.num_fds() < 100)


@pytest.mark.slow
def test_a_connection_that_waits_is_closed_after_a_while(home: Path) -> None:
    with (
        start_page(home) as server,
        hold_connections(server, 1, b"GET / HTTP/1.1\r\n") as (client,),
    ):
        client.settimeout(4 * server_module.REQUEST_TIMEOUT_S)
        with pytest.raises(ConnectionResetError):
            assert client.recv(1) == b""
            raise ConnectionResetError


@pytest.mark.slow
def test_two_thousand_event_streams_get_the_change(home: Path) -> None:
    count = 2000
    with start_page(home) as server, ExitStack() as stack:
        lines = [
            "GET /events HTTP/1.1",
            "Host: 127.0.0.1",
            f"Authorization: Bearer {server.token}",
            "",
            "",
        ]
        clients: list[socket.socket] = []
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", server.port or 0), timeout=60)
            clients.append(stack.enter_context(closing(client)))
            client.sendall("\r\n".join(lines).encode())
        for client in clients:
            read_until(client, b"event: version")

        run_workflow(
            home, make_page_workflow("many-viewers", [{"name": "first", "template": "say"}])
        )
        for client in clients:
            read_until(client, b"event: version")
        assert server.get("/?q=many-viewers").json()["count"] == 1
        memory = psutil.Process(server.process.pid).memory_info().rss
        assert memory < 300_000_000

    assert server.process.returncode in (0, -15)


def read_until(client: socket.socket, text: bytes) -> None:
    data = b""
    while text not in data:
        chunk = client.recv(4096)
        assert chunk, data
        data += chunk


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a document; in a list, only the paths of the first two
    values."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, item in value.items():
            yield from list_paths(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            yield from list_paths(item, (*path, index))


def replace_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = json.loads(to_json(document))
    parent = changed
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = value
    return changed


@pytest.fixture
def broken_home(home: Path, tmp_path: Path) -> Path:
    """A copy of the home (the directory of runs), whose runs a test may change."""
    home_copy = tmp_path / "home"
    shutil.copytree(home / "runs", home_copy / "runs")
    subprocess.run([sys.executable, "-m", "argolocal", "trust", str(home_copy)], check=True)
    return home_copy


def list_changes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name of a file, its changed content): each value of a run replaced by a hostile
    value."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    state: dict[str, Any] = {"status": {}, "nodes": {}}
    for line in (folder / JOURNAL_FILE).read_text().splitlines():
        journal_entry = json.loads(line)
        state["status"] = journal_entry.get("status", state["status"])
        state["nodes"] |= journal_entry.get("nodes", {})

    for name, document in ((MANIFEST_FILE, manifest), (JOURNAL_FILE, state)):
        for number, path in enumerate(list_paths(document)):
            # each path of a value gets three of the hostile values, so that each value occurs at
            # many paths
            for offset in range(0, 12, 4):
                value = HOSTILE_VALUES[(number + offset) % len(HOSTILE_VALUES)]
                text = json.dumps(replace_value(document, path, value))
                yield name, f"{text}\n"


def check_broken_run(home: Path, server: PageServer, name: str, text: str) -> None:
    """Replace a file of a run; check that the list and the other run stay readable."""
    file = home / "runs/bad-run" / name
    original_bytes = file.read_bytes()
    file.write_text(text)
    try:
        rows = server.get("/").json()["rows"]
        assert {row["name"] for row in rows} >= {"bad-run", "good-run"}
        assert server.get("/metrics").status_code == 200
        for tab in TABS:
            answer = server.get(f"/runs/bad-run/{tab}", "text/html")
            assert answer.status_code in (200, 400, 404, 500), (name, text[:500])
            assert "Traceback" not in answer.text
            assert MARKUP not in answer.text
            if answer.status_code == 500:
                assert "unexpected form" in answer.text, (name, answer.text[-500:])
        assert server.get("/runs/good-run").status_code == 200
    finally:
        file.write_bytes(original_bytes)


FILES = {
    "empty": "",
    "no JSON": "{",
    "a list": "[]",
    "deep": '{"nodes": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}",
    "a number": "9" * 100_000,
    "binary": "\x00\x01",
    "wrong templates": '{"metadata": {"name": "bad-run"}, "spec": {"templates": [null, 1]}}',
    "no spec": '{"metadata": {"name": "bad-run"}}',
}


@pytest.mark.parametrize("name", [MANIFEST_FILE, JOURNAL_FILE])
def test_a_broken_file_of_a_run_hides_no_other_run(broken_home: Path, name: str) -> None:
    with start_page(broken_home) as server:
        for text in FILES.values():
            check_broken_run(broken_home, server, name, f"{text}\n")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_any_value_of_a_run_can_be_hostile(broken_home: Path) -> None:
    with start_page(broken_home) as server:
        for name, text in list_changes(broken_home / "runs/bad-run"):
            check_broken_run(broken_home, server, name, text)
