"""A model server with tokens answers only requests that contain one of these tokens."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.errors import ConfigError, DataError
from rekindle.release.model_client import ModelClient
from tests.rekindle.serving.running import MODEL, PREDICT, SERVER_PREFIX, RunningServer

ROOT = Path(__file__).parents[3]
INSTANCE = {"id": "a"}
TOKENS = "first-token\nsecond-token"


@pytest.fixture(scope="module")
def token_server(sha256: str) -> Iterator[RunningServer]:
    with RunningServer(f"--model={SERVER_PREFIX}", REKINDLE_TOKEN=TOKENS) as running:
        # probes need no token
        running.until_ready()
        yield running


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer first", "Basic first-token", "Bearer first-token,x", "first-token"],
)
def test_a_request_without_one_of_the_tokens_gets_no_answer_of_the_model(
    token_server: RunningServer, header: str
) -> None:
    headers = {"authorization": header} if header else {}
    for path in (
        MODEL,
        f"{MODEL}/example",
        "/v1/models",
        "/openapi.json",
        "/nowhere",
        f"{MODEL}/../echo",
    ):
        answer = token_server.client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer TOKEN" in answer.json()["error"]
        assert "model-sha256" not in answer.headers

    body = {"instances": [INSTANCE]}
    assert token_server.client.post(PREDICT, json=body, headers=headers).status_code == 401
    assert token_server.client.request("HEAD", MODEL, headers=headers).status_code == 401


def test_each_token_of_the_secret_is_accepted(token_server: RunningServer) -> None:
    for token in ("first-token", "second-token"):
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {token}"}
            assert (
                token_server.client.post(
                    PREDICT, json={"instances": [INSTANCE]}, headers=headers
                ).status_code
                == 200
            )

    document = token_server.client.get(
        "/openapi.json", headers={"authorization": "Bearer first-token"}
    ).json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            is_open = operation.get("security", document["security"]) == []
            assert (token_server.client.request(method, path).status_code != 401) == is_open, path


def test_probes_and_metrics_need_no_token_and_rejected_requests_do_not_count_as_failures(
    token_server: RunningServer,
) -> None:
    assert (
        token_server.client.get("/health/live").status_code
        == token_server.client.get("/health/ready").status_code
        == 200
    )
    assert token_server.predict(INSTANCE).status_code == 401
    assert 'status="401"' not in token_server.client.get("/metrics").text


def test_verify_sends_the_first_token(
    token_server: RunningServer, sha256: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ModelClient(token_server.url, "echo", sha256, deadline_seconds=0)
    with pytest.raises(DataError, match="answered 401"):
        client.wait()
    monkeypatch.setenv("REKINDLE_TOKEN", TOKENS)
    assert client.wait()["ready"]
    assert client.predict(client.example())


def test_credentials_of_another_kind_are_not_sent_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="REKINDLE_ENDPOINT") as error:
        ModelClient("http://ann:hunter2@127.0.0.1:9", "echo", "", deadline_seconds=0)
    assert "hunter2" not in str(error.value)

    monkeypatch.setenv("REKINDLE_TOKEN", "hunter2\u0142")
    with pytest.raises(ConfigError, match="REKINDLE_TOKEN must be one line") as error:
        ModelClient("http://127.0.0.1:9", "echo", "", deadline_seconds=0).wait()
    assert "hunter2" not in str(error.value)


def test_a_server_with_an_empty_token_does_not_start() -> None:
    with RunningServer(f"--model={SERVER_PREFIX}", REKINDLE_TOKEN=" \n", listens=False) as running:
        code, log = running.end()
    assert code == 78
    assert "REKINDLE_TOKEN contains no token" in log


def test_no_command_that_rekindle_shows_has_a_token_in_its_arguments() -> None:
    token_option = re.compile(r"""(-H|--header)[ =]["']?Authorization|curl .*(-u|--user) """)
    folders = [ROOT / name for name in ("argolocal", "rekindle", "docs", "template", "configs")]
    for path in (path for folder in folders for path in folder.rglob("*")):
        if path.suffix in (".py", ".html", ".js", ".md", ".yaml"):
            assert not token_option.search(path.read_text()), path
