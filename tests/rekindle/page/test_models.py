"""Tests of the page's section of models: champion, servers, releases and rollback, also while
services are down."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from rekindle import tracking
from rekindle.kubernetes_names import INSTANCE_LABEL, NAME_LABEL
from rekindle.page.models import select_measures
from tests.browser import PageServer, start_page
from tests.http_server import Answer, HttpServer, Request
from tests.rekindle.cluster.server import ApiServer
from tests.rekindle.mlflow_documents import DOCUMENTS, MODEL_VERSION, RUN
from tests.waiting import until

DEPLOYMENTS = "/apis/apps/v1/namespaces/models/deployments"
SERVICES = "/api/v1/namespaces/models/services"
MARKUP = "<img src=x onerror=document.title='hacked'>"


def make_documents() -> dict[str, Any]:
    """Return the answers of an MLflow with two releases and a check for drift."""
    documents = copy.deepcopy(DOCUMENTS)
    second_version: dict[str, Any] = {**MODEL_VERSION, "version": "2"}
    second_version["tags"] = copy.deepcopy(MODEL_VERSION["tags"])
    second_version["tags"][2] = {"key": tracking.DEPLOYMENT, "value": "demo-2"}
    documents["mlflow/model-versions/search"] = {"model_versions": [MODEL_VERSION, second_version]}
    documents["mlflow/model-versions/get"] = {"model_version": second_version}
    alias = {"alias": "champion", "version": "2"}
    model = {"name": "demo", "aliases": [alias]}
    documents["mlflow/registered-models/get"] = {"registered_model": model}

    run: dict[str, Any] = copy.deepcopy(RUN)
    measures = {"auc": 0.95, "baseline_auc": 0.9, "rows": 5.0}
    run["data"]["metrics"] = [
        {"key": key, "value": value, "timestamp": 1, "step": 0} for key, value in measures.items()
    ]
    documents["mlflow/runs/get"] = {"run": run}

    check: dict[str, Any] = copy.deepcopy(RUN)
    check["data"]["tags"] += [
        {"key": "verdict", "value": "drift"},
        {"key": "reason", "value": f"amount differs {MARKUP}"},
    ]
    documents["mlflow/runs/search"] = {"runs": [check]}
    return documents


def answer_as_mlflow(request: Request) -> Answer:
    path = request.path.partition("?")[0].removeprefix("/api/2.0/")
    document = make_documents().get(path)
    if document is None:
        return Answer(404, json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST"}))
    return Answer(200, json.dumps(document), {"Content-Type": "application/json"})


def make_deployment(name: str, replicas: int) -> dict[str, Any]:
    labels = {NAME_LABEL: "demo", INSTANCE_LABEL: name, "app.kubernetes.io/part-of": "rekindle"}
    pod = {"containers": [{"name": "main", "image": "demo:1"}]}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"replicas": replicas, "template": {"metadata": {"labels": labels}, "spec": pod}},
        "status": {"readyReplicas": replicas},
    }


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment with a cluster that serves a model, and with MLflow."""
    folder = tmp_path_factory.mktemp("api")
    with ApiServer(folder) as api, HttpServer(answer_as_mlflow) as mlflow:
        api.put(DEPLOYMENTS, make_deployment("demo-1", 0))
        api.put(DEPLOYMENTS, make_deployment("demo-2", 2))
        selector = {NAME_LABEL: "demo", INSTANCE_LABEL: "demo-2"}
        spec = {"selector": selector, "ports": [{"port": 8080}]}
        api.put(SERVICES, {"metadata": {"name": "demo"}, "spec": spec})
        yield {"KUBECONFIG": str(api.kubeconfig), "MLFLOW_TRACKING_URI": mlflow.url}


@pytest.fixture(scope="module")
def page(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    home = tmp_path_factory.mktemp("models") / "home"
    flags = ("--cluster", "--allow-actions")
    with start_page(home, "rekindle", *flags, environ=environ) as server:
        yield server


def test_the_champion_its_servers_and_rollback_targets_are_shown(page: PageServer) -> None:
    answer = page.get("/models").json()
    (model,) = answer["models"]
    assert answer["notes"] == []
    assert (model["champion"], model["since"]) == ("2", None)
    assert model["rollback_targets"] == ["1"]
    text = page.get("/models", "text/html").text
    assert "2 of 2 pods ready; answers the requests to <code>http://demo.models:8080" in text
    assert "0 of 0 pods ready; gets no requests" in text
    servers = {server["deployment"]: server for server in model["servers"]}
    assert servers["demo-2"] == {
        "deployment": "demo-2",
        "version": "2",
        "address": "http://demo.models:8080",
        "ready": 2,
        "pods": 2,
        "has_traffic": True,
    }
    assert servers["demo-1"]["ready"] == 0
    newest = model["releases"][0]
    assert (newest["run"], newest["metrics"]) == ("demo-4k2xp", {"auc": 0.95})
    assert model["drift"]["verdict"] == "drift"


def test_a_rollback_is_asked_for_with_its_command(page: PageServer, browser: Browser) -> None:
    tab = page.open(browser, "/models")
    expect(tab.get_by_text(MARKUP)).to_be_visible()
    tab.get_by_role("link", name="Roll back to 1").click()
    expect(tab.get_by_text("rekindle rollback demo 1 --cluster")).to_be_visible()
    tab.get_by_role("link", name="Cancel").click()
    expect(tab.get_by_role("heading", name="demo")).to_be_visible()
    assert not tab.title().startswith("hacked")


def test_a_name_that_is_no_version_is_not_rolled_back(page: PageServer) -> None:
    headers = {"Authorization": f"Bearer {page.token}"}
    for path in ("demo/rollback/--yes", "demo/rollback/0", "de:mo/rollback/1"):
        assert httpx.post(f"{page.root}/models/{path}", headers=headers).status_code == 404


def test_without_mlflow_the_page_says_so_and_shows_the_servers(
    environ: dict[str, str], tmp_path: Path
) -> None:
    unreachable_mlflow = {**environ, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    with start_page(
        tmp_path / "home", "rekindle", "--cluster", environ=unreachable_mlflow
    ) as server:
        answer = server.get("/models").json()
        assert "does not answer" in answer["notes"][0]
        assert "the champion is unknown without MLflow" in server.get("/models", "text/html").text
        assert [model["name"] for model in answer["models"]] == ["demo"]
        assert server.get("/").status_code == 200


def test_a_home_without_a_model_says_how_it_gets_one(tmp_path: Path) -> None:
    with start_page(tmp_path / "home", "rekindle", environ={"MLFLOW_TRACKING_URI": ""}) as server:
        answer = server.get("/models").json()
        assert answer["models"] == []
        assert "first training" in answer["notes"][0]
        assert not (tmp_path / "home/services").exists()


@pytest.mark.slow
def test_mlflow_starts_in_the_background(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with start_page(home, "rekindle", environ={"MLFLOW_TRACKING_URI": ""}) as server:
        (home / "mlflow.db").touch()
        assert server.get("/models").json()["is_starting"]
        text = server.get("/models", "text/html").text
        assert "MLflow is starting" in text
        assert "no champion" not in text
        until("MLflow answers", lambda: not server.get("/models").json()["is_starting"], 120)
        assert server.get("/models").json()["notes"] == []
    down_command = [sys.executable, "-m", "rekindle", "down"]
    subprocess.run(down_command, env={**os.environ, "REKINDLE_HOME": str(home)}, check=True)


def test_only_measures_of_an_evaluation_are_shown() -> None:
    metrics = {"auc": 0.9, "baseline_auc": 0.8, "f1": 0.7, "champion_f1": 0.6, "train/loss": 0.1}
    assert select_measures(metrics) == {"auc": 0.9, "f1": 0.7}
