"""What a user of an Argo server would lose: a submit because of somebody else's workflow, and who is to blame."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rekindle.cli import commands
from rekindle.cluster import workflows
from rekindle.cluster.argo_server import ArgoServer
from rekindle.errors import ConfigError, RekindleError
from tests.rekindle.cluster.server import ApiServer
from tests.rekindle.cluster.test_workflows import manifest

AT = "/api/v1/workflows/models"
FOREIGN = {"metadata": {"name": "x"}, "spec": {"templates": [{"name": "m", "container": {"image": 5}}]}}


@pytest.fixture
def argo(server: ApiServer) -> ArgoServer:
    return ArgoServer(f"http://ann:hunter2@127.0.0.1:{server.port}", "models")


@pytest.fixture
def ours() -> dict[str, Any]:
    return workflows.submission(manifest(), {}, "models")


def test_a_workflow_of_others_that_hera_does_not_know_hides_no_equal_run(
    server: ApiServer, argo: ArgoServer, ours: dict[str, Any]
):
    server.refuse("GET", AT, 200, {"metadata": {}, "items": [FOREIGN]})
    server.refuse("GET", AT, 200, {"metadata": {}, "items": [FOREIGN, ours]})
    assert argo.find_duplicate(ours) is None
    assert argo.find_duplicate(ours) == ours["metadata"]["name"]


def test_what_was_taken_is_no_failure_whatever_hera_makes_of_the_answer(
    server: ApiServer, argo: ArgoServer, ours: dict[str, Any]
):
    server.refuse("POST", AT, 200, FOREIGN)
    argo.submit(ours)
    assert [body["workflow"] for method, _, body in server.requests if method == "POST"] == [ours]


def test_with_yes_nothing_is_asked(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "workflow.yaml"
    file.write_text(json.dumps(manifest(templates=[{"name": "main", "container": {"image": "a:1", "command": ["b"]}}])))
    server.refuse("POST", AT, 200, {"metadata": {"name": "x"}, "spec": {}})
    command = ["submit", "--manifest", str(file), "-n", "models", "--yes"]
    done = CliRunner().invoke(commands, [*command, "--argo-server", f"http://127.0.0.1:{server.port}"])
    assert not done.exception, done.output
    assert [(method, path) for method, path, _ in server.requests] == [("POST", AT)]


@pytest.mark.parametrize(
    "code, body, kind, words",
    [
        (400, {"code": 3, "message": "templates.main is bad"}, ConfigError, "refuses the workflow: .*main is bad"),
        (401, {"message": "token not valid"}, RekindleError, "Set ARGO_TOKEN"),
        (500, "oops", RekindleError, "failed: 500.*oops.*again"),
        (502, {}, RekindleError, "failed: 502"),
        (200, "<html>login</html>", RekindleError, "does not answer as an Argo server"),
    ],
)
def test_the_servers_trouble_is_not_said_to_be_the_workflows(
    server: ApiServer, argo: ArgoServer, ours: dict[str, Any], code: int, body: Any, kind: type, words: str
):
    server.refuse("POST", AT, code, body)
    with pytest.raises(kind, match=words) as error:
        argo.submit(ours)
    assert isinstance(error.value, ConfigError) == (code == 400)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("token", ["Bearer hunter2\nx", "hunter2\x1b"])
def test_a_token_that_cannot_be_sent_is_not_printed(token: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARGO_TOKEN", token)
    with pytest.raises(ConfigError, match="ARGO_TOKEN must be one line") as error:
        ArgoServer("http://argo", "models")
    assert "hunter2" not in str(error.value)
