"""Tests of http templates, data templates and probes, for example with lost answers and with
servers that are not ready yet."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.pods import filesystem
from argolocal.pods.kinds import data, http
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import DEFAULT_BUCKET
from tests.argolocal.running import execute_manifest
from tests.builders import make_workflow
from tests.http_server import Answer, HttpServer, Request
from tests.ports import free_port


def answer_with_request(request: Request) -> Answer:
    """Answer a request with its own content as JSON; the path /404 gets an error."""
    received = {
        "method": request.method,
        "body": request.body.decode(),
        "token": request.headers["X-Token"],
    }
    status = 404 if request.path == "/404" else 200
    return Answer(status, json.dumps(received), {"x-kind": "a test"})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HttpServer(answer_with_request) as server:
        yield server.url


def find_secret(name: str) -> dict[str, str]:
    return {"mine": {"token": "s3cr3t"}}[name]


def test_a_request_has_its_method_its_body_and_its_headers_which_may_be_secrets(url: str) -> None:
    header = {"name": "X-Token", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "token"}}}
    phase, _, outputs = http.run_http_template(
        {"url": url, "method": "POST", "body": "hi", "headers": [header]}, find_secret
    )
    assert outputs
    assert phase == "Succeeded"
    assert json.loads(outputs["result"]) == {"method": "POST", "body": "hi", "token": "s3cr3t"}
    _, _, outputs = http.run_http_template(
        {"url": url, "method": "PUT", "bodyFrom": {"bytes": "aGk="}}, find_secret
    )
    assert outputs
    assert json.loads(outputs["result"])["body"] == "hi"


@pytest.mark.parametrize(
    ("path", "condition", "phase", "message"),
    [
        ("/", "", "Succeeded", ""),
        ("/404", "", "Failed", "received non-2xx response code: 404"),
        ("/404", "response.statusCode == 404", "Succeeded", ""),
        ("/", 'response.body contains "GET"', "Succeeded", ""),
        ("/", 'response.headers["X-Kind"][0] == "a test"', "Succeeded", ""),
        (
            "/",
            'request.method == "GET"',
            "Failed",
            "successCondition 'request.method == \"GET\"' evaluated false",
        ),
        ("/", "response.body", "Failed", "unable to cast expression result"),
    ],
)
def test_the_answer_to_a_request_decides_the_phase_of_the_node(
    url: str, path: str, condition: str, phase: str, message: str
) -> None:
    request = {"url": url + path} | ({"successCondition": condition} if condition else {})
    actual_phase, actual_message, _ = http.run_http_template(request, find_secret)
    assert actual_phase == phase
    assert actual_message[: len(message)] == message


def test_a_missing_server_or_secret_fails_the_node() -> None:
    phase, message, _ = http.run_http_template({"url": "http://127.0.0.1:9/x"}, find_secret)
    assert phase == "Failed"
    assert (
        message == 'Get "http://127.0.0.1:9/x": dial tcp 127.0.0.1:9: connect: connection refused'
    )
    header = {"name": "a", "valueFrom": {"secretKeyRef": {"name": "none", "key": "b"}}}
    assert http.run_http_template({"url": "http://127.0.0.1:9", "headers": [header]}, find_secret)[
        :2
    ] == (
        "Failed",
        "secrets 'none' not found",
    )


def run_template(home: Path, *templates: dict[str, Any], **more: Any) -> dict[str, Any]:
    return execute_manifest(make_workflow(*templates, **more), {}, LocalCluster(home))


def test_the_body_of_an_answer_is_the_result_of_its_step(url: str, tmp_path: Path) -> None:
    arguments = {"parameters": [{"name": "x", "value": "{{steps.ask.outputs.result}}"}]}
    ask = {
        "name": "ask",
        "inputs": {"parameters": [{"name": "b", "value": "hi"}]},
        "http": {"url": url, "method": "POST", "body": "{{inputs.parameters.b}}"},
    }

    use = {"name": "use", "inputs": {"parameters": [{"name": "x"}]}, "suspend": {"duration": "0s"}}
    steps = [
        [{"name": "ask", "template": "ask"}],
        [{"name": "use", "template": "use", "arguments": arguments}],
    ]
    status = run_template(tmp_path, {"name": "main", "steps": steps}, ask, use)
    node = next(node for node in status["nodes"].values() if node["type"] == "HTTP")
    assert status["phase"] == "Succeeded"
    assert node["phase"] == "Succeeded"

    received = [
        n["inputs"]["parameters"][0]["value"]
        for n in status["nodes"].values()
        if n["type"] == "Suspend"
    ]

    assert json.loads(received[0])["body"] == "hi"


def test_a_failed_request_is_retried_and_then_fails_the_run(tmp_path: Path) -> None:
    http = {"url": "http://127.0.0.1:9", "timeoutSeconds": 1}
    status = run_template(tmp_path, {"name": "main", "http": http, "retryStrategy": {"limit": 1}})
    assert status["phase"] == "Failed"
    assert status["message"] == "No more retries left"
    assert [n["phase"] for n in status["nodes"].values() if n["type"] == "HTTP"] == [
        "Failed",
        "Failed",
    ]


class Bucket:
    """A store with the keys of one bucket."""

    keys = ("logs/a/main.log", "logs/b/main.log", "logs/b/other.txt", "logs/dir/")

    def list(self, prefix: str) -> Iterator[Any]:
        return (type("Entry", (), {"key": key}) for key in self.keys if key.startswith(prefix))


def test_a_data_template_lists_keys_and_transforms_them() -> None:
    source = {"artifactPaths": {"name": "x", "s3": {"bucket": "b", "key": "logs/"}}}
    steps = [
        {"expression": "filter(data, {# endsWith 'main.log'})"},
        {"expression": "map(data, {# + '!'})"},
    ]
    phase, _, outputs = data.run_data_template(
        {"source": source, "transformation": steps}, lambda s3: Bucket()
    )
    assert outputs == {"result": '["logs/a/main.log!","logs/b/main.log!"]', "exitCode": "0"}
    assert phase == "Succeeded"
    phase, message, _ = data.run_data_template(
        {"source": source, "transformation": [{"expression": "nope(data)"}]}, lambda s3: Bucket()
    )
    assert phase == "Failed"
    assert "error processing data step 0" in message
    source = {"artifactPaths": {"name": "x", "s3": {"bucket": "b", "key": "none"}}}
    assert (
        "no key found of name none"
        in data.run_data_template({"source": source}, lambda s3: Bucket())[1]
    )
    # the default bucket of artifacts is not used
    source = {"artifactPaths": {"name": "x", "s3": {"key": "none"}}}
    assert (
        "Bucket name cannot be empty"
        in data.run_data_template({"source": source}, lambda s3: Bucket())[1]
    )


def test_the_files_of_a_bucket_are_the_items_of_a_loop(tmp_path: Path) -> None:
    source = {"artifactPaths": {"name": "logs", "s3": {"bucket": DEFAULT_BUCKET, "key": "in"}}}
    listing = {
        "name": "list",
        "data": {"source": source, "transformation": [{"expression": "data"}]},
    }
    output = {"name": "x", "path": "/tmp/x", "archive": {"none": {}}, "s3": {"key": "in/one.log"}}
    make = {"image": "busybox", "command": ["sh", "-c", "echo one > /tmp/x"]}
    use = {"name": "use", "template": "use", "withParam": "{{steps.list.outputs.result}}"}
    steps = [[{"name": "make", "template": "make"}], [{"name": "list", "template": "list"}], [use]]
    cluster = LocalCluster(tmp_path)

    try:
        templates = (
            {"name": "make", "container": make, "outputs": {"artifacts": [output]}},
            {"name": "use", "suspend": ZERO},
        )
        status = run_template(tmp_path, {"name": "main", "steps": steps}, listing, *templates)
    finally:
        cluster.down()

    assert status["phase"] == "Succeeded", status
    assert [n["displayName"] for n in status["nodes"].values() if n["type"] == "Suspend"] == [
        "use(0:in/one.log)"
    ]


def test_a_missing_bucket_fails_the_node(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    source = {"artifactPaths": {"name": "x", "s3": {"bucket": "nobodys", "key": "in"}}}

    try:
        status = run_template(
            tmp_path,
            {
                "name": "main",
                "data": {"source": source, "transformation": [{"expression": "data"}]},
            },
        )
    finally:
        cluster.down()

    assert status["phase"] == "Failed"
    assert status["nodes"]["w"]["outputs"] == {"exitCode": "64"}
    assert (
        'unable to source artifact paths: the bucket "nobodys" does not exist' in status["message"]
    )


ZERO = {"duration": "0s"}
SERVER = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def make_daemon(port: int, probe: dict[str, Any]) -> dict[str, Any]:
    container = {
        "image": "python",
        "command": ["python", "-c", SERVER, str(port)],
        "readinessProbe": probe,
    }
    return {
        "name": "db",
        "daemon": True,
        "container": container | {"ports": [{"name": "web", "containerPort": port}]},
    }


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["httpGet", "tcpSocket", "exec"])
def test_dependents_of_a_daemon_start_when_its_probe_passes(
    tmp_path: Path, port: int, kind: str
) -> None:
    asks = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/')"
    probe = {
        "httpGet": {"httpGet": {"port": "web", "path": "/"}},
        "tcpSocket": {"tcpSocket": {"port": port}},
        "exec": {"exec": {"command": ["python", "-c", asks]}, "timeoutSeconds": 20},
    }[kind]
    use = {"name": "use", "container": {"image": "python", "command": ["python", "-c", asks]}}
    steps = [[{"name": "db", "template": "db"}], [{"name": "use", "template": "use"}]]
    status = run_template(tmp_path, {"name": "main", "steps": steps}, make_daemon(port, probe), use)
    assert status["phase"] == "Succeeded", status


@pytest.mark.skipif(not filesystem.supports_namespaces(), reason="needs mount namespaces")
def test_a_probe_can_read_the_files_of_its_daemon_and_writes_no_log(tmp_path: Path) -> None:
    probe = {"exec": {"command": ["sh", "-c", "echo asked; cat /serving"]}}
    container = {
        "image": "busybox",
        "command": ["sh", "-c", "sleep 0.2; echo up > /serving; sleep 60"],
    }
    db = {"name": "db", "daemon": True, "container": container | {"readinessProbe": probe}}

    status = run_template(
        tmp_path,
        {"name": "main", "steps": [[{"name": "db", "template": "db"}]]},
        db,
        activeDeadlineSeconds=9,
    )

    assert status["phase"] == "Succeeded", status
    assert [log.read_text() for log in tmp_path.glob("runs/*/logs/*")] == [""]


def test_a_daemon_that_exits_before_it_is_ready_fails(tmp_path: Path, port: int) -> None:
    db = make_daemon(port, {"tcpSocket": {"port": port}})
    db["container"]["command"] = ["python", "-c", "raise SystemExit(3)"]
    status = run_template(
        tmp_path, {"name": "main", "steps": [[{"name": "db", "template": "db"}]]}, db
    )
    node = next(node for node in status["nodes"].values() if node["type"] == "Pod")
    assert status["phase"] == "Failed"
    assert node["phase"] == "Failed"
    assert node["message"] == "main: Error (exit code 3)"


def test_an_unsupported_probe_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"readinessProbe has 0 of exec, httpGet, tcpSocket"):
        run_template(tmp_path, make_daemon(1, {"periodSeconds": 1}))
    with pytest.raises(
        ConfigError, match=r"tcpSocket\.port must be a number or the name of a container port"
    ):
        run_template(tmp_path, make_daemon(1, {"tcpSocket": {"port": "db"}}))
