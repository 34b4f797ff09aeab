"""MLflow has one run per workflow and one version per release, even if a step is retried."""

import uuid
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rekindle import mlflow_api, tracking
from rekindle.errors import TrackingError
from rekindle.mlflow_api import Answer as MlflowAnswer
from rekindle.names import InvalidName
from tests.http_server import Answer, HttpServer, Request
from tests.proxy import Proxy, Write
from tests.rekindle.duplicate_version import leave_duplicate

if TYPE_CHECKING:
    from mlflow import MlflowClient


@pytest.fixture
def client(mlflow_server: str) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(mlflow_server, mlflow_server)


@pytest.fixture
def name() -> str:
    return f"m-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def run_id(client: "MlflowClient", name: str) -> str:
    return tracking.start_run(name, f"{name}-1")


def find_version(client: "MlflowClient", name: str, alias: str) -> str:
    return client.get_model_version_by_alias(name, alias).version


def test_a_retried_step_finds_the_run_of_its_workflow(
    client: "MlflowClient", name: str, run_id: str
) -> None:
    assert tracking.start_run(name, f"{name}-1") == run_id == tracking.find_run(name, f"{name}-1")
    assert tracking.start_run(name, f"{name}-2", {"color": "red"}) != run_id
    assert tracking.find_run(name, "another") is tracking.find_run("nowhere", "another") is None
    assert client.get_run(run_id).info.run_name == f"{name}-1"


def test_logging_the_same_values_twice_changes_nothing(
    client: "MlflowClient", run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("hello")

    for _ in range(2):
        tracking.log_to_run(
            run_id,
            run_params={f"p{n}": n for n in range(150)},
            run_metrics={"ap": 0.5},
            run_tags={"digest": "abc"},
        )
        tracking.log_folder(run_id, tmp_path, "report")

    tracking.log_metrics(
        run_id, ((name, 1 / (step + 1), step) for step in range(700) for name in ("loss", "rate"))
    )
    run = client.get_run(run_id)
    assert len(run.data.params) == 150
    assert run.data.metrics["ap"] == 0.5
    assert run.data.tags["digest"] == "abc"
    assert [m.step for m in client.get_metric_history(run_id, "loss")] == list(range(700))
    assert [f.path for f in client.list_artifacts(run_id, "report/deep")] == ["report/deep/a.txt"]


def test_a_release_registered_twice_is_one_version(
    client: "MlflowClient", name: str, run_id: str
) -> None:
    assert tracking.champion(name) is None
    first_version, repeated_version, other = (
        tracking.register_version(
            name, f"releases/{n}/", f"s3://b/releases/{n}/", n * 32, run_id, {"git_sha": "1"}
        )
        for n in ("aa", "aa", "bb")
    )

    assert first_version == repeated_version == tracking.Release("1", "releases/aa/", "aa" * 32)
    assert other.version == "2"
    assert find_version(client, name, "candidate") == "2"
    assert tracking.champion(name) is None
    tracking.record_champion(name, "1", "cards-1")
    assert tracking.champion(name) == replace(first_version, deployment="cards-1")
    assert [release.version for release in tracking.promoted_releases(name)] == ["1"]
    assert client.get_model_version(name, "1").tags["git_sha"] == "1"


def test_the_version_that_a_dead_process_registered_twice_is_deleted_by_the_next_release(
    client: "MlflowClient", mlflow_server: str, name: str
) -> None:
    uri = "releases/a/"
    source = "s3://b/releases/a/"
    leave_duplicate(mlflow_server, name, uri, source)
    # versions that other clients have registered, and versions with other files, stay
    client.create_model_version(name, source, tags={tracking.URI: uri})
    tracking.register_version(name, "releases/b/", "s3://b/releases/b/", "0" * 64, "", {})

    assert tracking.register_version(name, uri, source, "0" * 64, "", {}).version == "1"
    versions = client.search_model_versions(f"name = '{name}'")
    assert sorted(version.version for version in versions) == ["1", "3", "4"]
    assert not any(tracking.UNCONFIRMED in version.tags for version in versions)


def test_a_release_whose_registration_was_interrupted_is_one_version(
    client: "MlflowClient", mlflow_server: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = (name, "releases/a/", "s3://b/releases/a/", "0" * 64, "", {})
    with Proxy(mlflow_server) as proxy:

        def lose_answer(write: Write) -> None:
            proxy.away = write.path.endswith("model-versions/create")

        proxy.after = lose_answer
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.url)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(TrackingError, match="does not answer"):
            tracking.register_version(*files)

        proxy.away = False
        assert tracking.register_version(*files).version == "1"
    assert tracking.UNCONFIRMED not in client.get_model_version(name, "1").tags


def test_a_champion_registered_by_hand_is_rejected(client: "MlflowClient", name: str) -> None:
    client.create_registered_model(name)
    client.create_model_version(name, "s3://elsewhere/model")
    client.set_registered_model_alias(name, "champion", "1")
    with pytest.raises(TrackingError, match=f'version 1 of the model "{name}" lacks the tag'):
        tracking.champion(name)


def test_a_deleted_experiment_is_explained(client: "MlflowClient", name: str, run_id: str) -> None:
    client.delete_experiment(client.get_run(run_id).info.experiment_id)
    with pytest.raises(
        TrackingError, match=r"is deleted in MLflow, but keeps its name\. Restore it"
    ):
        tracking.start_run(name, "w")


def test_the_error_has_the_answer_of_mlflow(run_id: str) -> None:
    tracking.log_to_run(run_id, run_params={"rate": 1})
    with pytest.raises(TrackingError, match=r"refused: .*Changing param values is not allowed"):
        tracking.log_to_run(run_id, run_params={"rate": 2})


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            401,
            "You are not authenticated.",
            "answered 401 Unauthorized: 'You are not authenticated.'. Set MLFLOW_TRACK",
        ),
        (
            200,
            "<html><style>a{}</style><h1>Log in</h1></html>",
            "answered 200 OK: 'Log in'. Check MLFLOW_TRACKING_URI",
        ),
        (503, '{"a": 1}', "answered 503 Service Unavailable: '{\"a\": 1}'"),
        (404, "", "answered 404 Not Found: 'nothing'"),
        (
            403,
            '{"error_code": "PERMISSION_DENIED", "message": "not yours"}',
            "refused: PERMISSION_DENIED: not yours",
        ),
        (500, "\x1b[2J oops", "answered 500 Internal Server Error: '\\\\u001b[2J oops'"),
    ],
)
def test_the_error_quotes_the_answer_of_another_server(
    status: int, body: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HttpServer(lambda _: Answer(status, body)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

        with pytest.raises(TrackingError) as raised:
            tracking.champion("x")

    assert message in str(raised.value)


REDIRECTS = ["127.0.0.1", "127.0.0.1", "localhost"]


@pytest.mark.parametrize("login", [{"TOKEN": "ours"}, {"USERNAME": "ours", "PASSWORD": "ours"}])
def test_netrc_does_not_replace_the_login_and_another_host_gets_none(
    login: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(_: Request) -> Answer:
        number = len(server.requests)
        if number == len(REDIRECTS):
            return Answer(body="{}")
        return Answer(307, "{}", {"Location": f"http://{REDIRECTS[number]}:{server.port}/next"})

    netrc = tmp_path / "netrc"
    netrc.write_text("default login other password other\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for name, value in login.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)

    with HttpServer(answer) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        # requests with the same settings use the same session
        mlflow_api._create_session.cache_clear()
        mlflow_api.send_request("GET", "mlflow/experiments/search", MlflowAnswer)

    received = [request.headers["Authorization"] for request in server.requests]
    basic = "Basic " + b64encode(b"ours:ours").decode()
    own_authorization = "Bearer ours" if "TOKEN" in login else basic
    assert received == [own_authorization, own_authorization, None]


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    yield "http://127.0.0.1:9"


def test_the_error_of_an_unreachable_server_has_the_remedy(unreachable: str) -> None:
    with pytest.raises(
        TrackingError, match=f"MLflow at {unreachable} does not answer .*Connection refused.*curl"
    ):
        tracking.champion("x")


def test_the_error_without_an_address_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(TrackingError, match="MLFLOW_TRACKING_URI is not set"):
        tracking.find_run("a", "b")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("tag", "value"),
    [
        (tracking.URI, "../raw"),
        (tracking.URI, ""),
        (tracking.DEPLOYMENT, "169.254.169.254:80/x?="),
        (tracking.DEPLOYMENT, "kube-dns; reboot"),
        pytest.param(tracking.KEEP_RELEASES, "9" * 4999, id="keep_releases"),
    ],
)
def test_the_tags_of_a_version_are_names_only_after_they_were_parsed(
    mlflow_server: str, tag: str, value: str
) -> None:
    name = f"tags-{uuid.uuid4().hex[:6]}"
    versions: list[str] = []
    for number in ("a", "b"):
        prefix = f"releases/{name}/{number * 12}/"
        versions.append(
            tracking.register_version(name, prefix, "s3://x/y", "0" * 64, "", {}).version
        )
        tracking.record_champion(name, versions[-1], f"{name}-{number}")

    # if the answer to a request came too late, the request was repeated, and the repeated request
    # used a second version number
    first_version, last_version = versions
    tracking.tag_version(name, last_version, tag, value)

    if tag == tracking.KEEP_RELEASES:
        champion = tracking.champion(name)
        assert champion
        assert champion.keep_releases is None
        return
    for read in (tracking.champion, lambda name: tracking.find_version(name, last_version)):
        with pytest.raises(InvalidName, match=f"the tag {tag} of version {last_version}"):
            read(name)
    assert [found.version for found in tracking.promoted_releases(name)] == [first_version]
