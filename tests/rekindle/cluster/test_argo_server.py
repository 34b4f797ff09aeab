"""Tests of submitting through an Argo server: workflows of other users do no harm, and errors name
their cause."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rekindle.cli import commands
from rekindle.cluster import argo_server, workflows
from rekindle.cluster.argo_server import ArgoServer
from rekindle.errors import ConfigError, RekindleError
from tests.argolocal.server.api.running import make_hello_workflow, start_api
from tests.http_server import Answer, HttpServer
from tests.rekindle.cluster.server import ApiServer
from tests.rekindle.cluster.workflows import make_manifest

WORKFLOWS_PATH = "/api/v1/workflows/models"
FOREIGN_WORKFLOW = {
    "metadata": {"name": "x"},
    "spec": {"templates": [{"name": "m", "container": {"image": 5}}]},
}


@pytest.fixture
def argo(server: ApiServer) -> ArgoServer:
    return ArgoServer(f"http://ann:hunter2@127.0.0.1:{server.port}", "models")


@pytest.fixture
def workflow() -> dict[str, Any]:
    return workflows.build_submission(make_manifest(), {}, "models")


def test_foreign_workflows_that_hera_rejects_do_not_hide_duplicates(
    server: ApiServer, argo: ArgoServer, workflow: dict[str, Any]
):
    created = {"creationTimestamp": "2026-11-21T20:00:00Z"}
    items = [
        each | {"metadata": each["metadata"] | created} for each in (FOREIGN_WORKFLOW, workflow)
    ]
    server.refuse("GET", WORKFLOWS_PATH, 200, {"metadata": {}, "items": items[:1]})
    server.refuse("GET", WORKFLOWS_PATH, 200, {"metadata": {}, "items": items})
    assert argo.find_duplicate(workflow) is None
    assert argo.find_duplicate(workflow) == workflow["metadata"]["name"]


def test_an_answer_that_hera_rejects_does_not_fail_a_submit(
    server: ApiServer, argo: ArgoServer, workflow: dict[str, Any]
):
    server.refuse("POST", WORKFLOWS_PATH, 200, FOREIGN_WORKFLOW)
    argo.submit(workflow)
    assert [body["workflow"] for method, _, body in server.requests if method == "POST"] == [
        workflow
    ]


def test_the_option_yes_skips_the_search_for_duplicates(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "workflow.yaml"
    file.write_text(
        json.dumps(
            make_manifest(
                templates=[{"name": "main", "container": {"image": "a:1", "command": ["b"]}}]
            )
        )
    )

    server.refuse("POST", WORKFLOWS_PATH, 200, {"metadata": {"name": "x"}, "spec": {}})
    command = ["submit", "--manifest", str(file), "-n", "models", "--yes"]
    result = CliRunner().invoke(
        commands, [*command, "--argo-server", f"http://127.0.0.1:{server.port}"]
    )
    assert not result.exception, result.output
    assert [(method, path) for method, path, _ in server.requests] == [("POST", WORKFLOWS_PATH)]


@pytest.mark.parametrize(
    "code, body, kind, words",
    [
        (
            400,
            {"code": 3, "message": "templates.main is bad"},
            ConfigError,
            "refuses the workflow: .*main is bad",
        ),
        (401, {"message": "token not valid"}, RekindleError, "Set ARGO_TOKEN"),
        (500, "oops", RekindleError, "failed: 500.*oops.*again"),
        (502, {}, RekindleError, "failed: 502"),
        (200, "<html>login</html>", RekindleError, "does not answer as an Argo server"),
    ],
)
def test_errors_of_the_server_are_not_blamed_on_the_workflow(
    server: ApiServer,
    argo: ArgoServer,
    workflow: dict[str, Any],
    code: int,
    body: Any,
    kind: type,
    words: str,
):
    server.refuse("POST", WORKFLOWS_PATH, code, body)
    with pytest.raises(kind, match=words) as error:
        argo.submit(workflow)
    assert isinstance(error.value, ConfigError) == (code == 400)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("token", ["Bearer hunter2\nx", "hunter2\x1b", "hunter2\u0142"])
def test_an_invalid_token_is_not_printed(token: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARGO_TOKEN", token)
    with pytest.raises(ConfigError, match="ARGO_TOKEN must be one line") as error:
        ArgoServer("http://argo", "models")
    assert "hunter2" not in str(error.value)


def test_netrc_does_not_replace_the_token(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login other password other\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("ARGO_TOKEN", "ours")

    with HttpServer(lambda _: Answer(body='{"items": []}')) as argo:
        ArgoServer(argo.url, "models").list_runs("a=b")

    assert argo.requests[0].headers["Authorization"] == "Bearer ours"


def test_an_answer_of_unlimited_size_is_one_error(
    argo: ArgoServer, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argo_server, "MAX_ANSWER_BYTES", 100)
    server.refuse("GET", WORKFLOWS_PATH, 200, {"items": [FOREIGN_WORKFLOW] * 10})
    with pytest.raises(RekindleError, match="its answer has more than 100 bytes"):
        argo.list_runs("a=b")


def test_a_workflow_is_submitted_to_the_server_of_another_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_api(tmp_path / "home") as api:
        monkeypatch.setenv("ARGO_TOKEN", f"Bearer {api.token}")
        client = ArgoServer.from_url(api.url, "argo")
        assert client
        workflow = make_hello_workflow("submitted")
        client.submit(workflow)
        api.wait("submitted")
        assert client.read("submitted")["status"]["phase"] == "Succeeded"
        names = [run["metadata"]["name"] for run in client.list_runs("")]
        assert names == ["submitted"]
        with pytest.raises(ConfigError, match="already exists"):
            client.submit(workflow)
