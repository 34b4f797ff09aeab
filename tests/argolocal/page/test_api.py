"""Tests of the page's JSON API, its description, and the metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from argolocal.errors import ArgolocalError, ConfigError, NotFound, StorageError
from argolocal.page.application import Page, Parts, RunDocument
from argolocal.page.metrics import format_metrics
from argolocal.page.run_list import RunRow
from argolocal.page.sources import LocalRuns, Run
from argolocal.page.tabs.timeline import TimelineTab
from argolocal.state.journal import Busy
from tests.browser import PageServer


def test_the_api_is_described_by_openapi(page: PageServer) -> None:
    description = page.get("/openapi.json").json()
    validate(description)
    assert "/runs/{run}/overview" in description["paths"]
    assert "error" in description["components"]["schemas"]["ErrorAnswer"]["properties"]
    row = description["components"]["schemas"]["RunRow"]
    assert row["properties"].keys() == page.get("/").json()["rows"][0].keys()


@pytest.mark.parametrize("path", ["/", "/runs/{run}/overview", "/runs/{run}/actions"])
def test_an_answer_has_the_described_fields(page: PageServer, path: str) -> None:
    description = page.get("/openapi.json").json()
    answer = page.get(path.replace("{run}", "bad-run")).json()
    success = description["paths"][path]["get"]["responses"]["200"]
    schema = success["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    assert description["components"]["schemas"][name]["properties"].keys() == answer.keys()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("the value is wrong"), 400),
        (NotFound("the file is missing"), 404),
        (Busy("the run is being run by process 7"), 409),
        (StorageError("the store is down"), 502),
    ],
)
def test_the_status_says_whose_mistake_it_was(
    home: Path, error: ArgolocalError, status: int
) -> None:
    def build(run: Run) -> dict[str, object]:
        raise error

    parts = Parts(
        LocalRuns(home), [TimelineTab()], documents=[RunDocument("failing", "A document", build)]
    )
    client = TestClient(Page(parts).application())
    answer = client.get("/runs/bad-run/failing", headers={"Accept": "application/json"})
    assert (answer.status_code, answer.json()) == (status, {"error": str(error)})


def test_the_status_is_the_object_of_the_command(page: PageServer, home: Path) -> None:
    command = [sys.executable, "-m", "argolocal", "status", "bad-run", "-o", "json"]
    environ = {**os.environ, "ARGOLOCAL_HOME": str(home)}
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert page.get("/runs/bad-run/status").json() == json.loads(printed.stdout)


def test_prometheus_reads_the_metrics_of_the_runs(page: PageServer) -> None:
    answer = page.get("/metrics", "text/plain")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, sample.labels["pipeline"], sample.labels.get("state")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["argolocal_runs", "bad-run", "failed"] == 1
    assert samples["argolocal_runs", "bad-run", "succeeded"] == 0
    assert samples["argolocal_runs_running", "good-run", None] == 0
    assert samples["argolocal_runs_last_success_timestamp_seconds", "good-run", None] > 1e9
    assert 0 < samples["argolocal_runs_last_duration_seconds", "bad-run", None] < 60


def test_a_pipeline_name_with_quotes_and_line_breaks_stays_one_label() -> None:
    name = 'a"b\\c\nd'
    text = format_metrics("argolocal", [RunRow("x", name, "failed")])
    families = list(text_string_to_metric_families(text))
    assert {sample.labels["pipeline"] for family in families for sample in family.samples} == {name}
