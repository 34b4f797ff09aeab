"""Tests of the actions of the page: a run is stopped, resumed, approved and started again from the
page, only by its user."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from argolocal.common.json_text import to_json
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from tests.argolocal.page.conftest import make_page_workflow, run_workflow
from tests.browser import PageServer, start_page
from tests.waiting import until

APPROVAL = {
    "name": "approval",
    "inputs": {
        "parameters": [
            {"name": "decision", "enum": ["YES", "NO"], "description": "Release the model?"},
            {"name": "reason", "default": "none"},
        ]
    },
    "outputs": {
        "parameters": [
            {"name": "decision", "valueFrom": {"supplied": {}}},
            {"name": "reason", "valueFrom": {"supplied": {}}},
        ]
    },
    "suspend": {},
}
WAIT = {"name": "wait", "container": {"image": "bash:5", "command": ["sleep", "600"]}}


def with_template(manifest: dict[str, Any], *templates: dict[str, Any]) -> dict[str, Any]:
    manifest["spec"]["templates"] += templates
    return manifest


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a run that failed and a successful run with a parameter."""
    home = tmp_path_factory.mktemp("actions") / "home"
    run_workflow(home, make_page_workflow("failed-run", [{"name": "second", "template": "fail"}]))
    greeting = {"parameters": [{"name": "greeting", "value": "hello"}]}
    arguments = {"parameters": [{"name": "text", "value": "{{workflow.parameters.greeting}}"}]}
    tasks = [{"name": "first", "template": "say", "arguments": arguments}]
    run_workflow(home, make_page_workflow("done-run", tasks, arguments=greeting))
    return home


@pytest.fixture(scope="module")
def page(home: Path) -> Iterator[PageServer]:
    with start_page(home) as server:
        yield server


class RunningWorkflow:
    """A run in a process of its own, started in the way that a user starts it in a terminal."""

    def __init__(self, home: Path, manifest: dict[str, Any]) -> None:
        self.home = home
        self.name = manifest["metadata"]["name"]
        file = home.parent / f"{self.name}.json"
        file.write_text(to_json(manifest))
        command = [sys.executable, "-m", "argolocal", "run", str(file), "--yes"]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "ARGOLOCAL_HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait_for_node(self, kind: str) -> None:
        def look() -> bool:
            files = RunFiles(self.home, self.name)
            nodes = files.load()[0]["nodes"].values()
            return any((n["type"], n["phase"]) == (kind, "Running") for n in nodes)

        until(f"{self.name} runs a {kind}", look)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def suspended_run(home: Path, request: pytest.FixtureRequest) -> Iterator[RunningWorkflow]:
    name = f"ask-{abs(hash(request.node.name)) % 100_000}"
    arguments = {"parameters": [{"name": "decision", "value": ""}]}
    tasks = [{"name": "ask", "template": "approval", "arguments": arguments}]
    run = RunningWorkflow(home, with_template(make_page_workflow(name, tasks), APPROVAL))
    run.wait_for_node("Suspend")
    yield run
    run.end()


def outputs_of(home: Path, name: str) -> dict[str, str]:
    nodes = runs.load_status(home, name)["nodes"].values()
    return {
        parameter["name"]: parameter.get("value")
        for node in nodes
        if node["type"] == "Suspend"
        for parameter in node["outputs"]["parameters"]
    }


def test_a_suspended_step_is_approved_with_its_values(
    page: PageServer, home: Path, browser: Browser, suspended_run: RunningWorkflow
) -> None:
    tab = page.open(browser, f"/runs/{suspended_run.name}")
    tab.get_by_role("link", name="Approve").click()
    expect(tab.get_by_text("Release the model?")).to_be_visible()
    expect(tab.get_by_text(f"argolocal resume {suspended_run.name} -p decision=")).to_be_visible()
    tab.get_by_label("decision").select_option("NO")
    tab.get_by_label("reason").fill("too <b>slow</b>")
    tab.get_by_role("button", name="Approve").click()
    expect(tab.get_by_text(f"{suspended_run.name} continues.")).to_be_visible()
    expect(tab.get_by_role("heading", name=suspended_run.name)).to_contain_text("succeeded")
    assert outputs_of(home, suspended_run.name) == {"decision": "NO", "reason": "too <b>slow</b>"}


def test_a_value_that_the_step_does_not_accept_is_refused(
    page: PageServer, home: Path, suspended_run: RunningWorkflow
) -> None:
    address = f"{page.root}/runs/{suspended_run.name}/actions/approve"
    for values, word in (({"decision": "MAYBE"}, "YES"), ({}, "missing"), ({"x": "y"}, "field")):
        answer = post_values(page, address, values)
        assert answer.status_code == 400
        assert word in answer.json()["error"]

    assert outputs_of(home, suspended_run.name)["decision"] is None


def post_values(page: PageServer, address: str, values: dict[str, str]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {page.token}", "Accept": "application/json"}
    return httpx.post(address, headers=headers, json=values, timeout=60)


def test_a_running_run_is_stopped_and_resumed(
    page: PageServer, home: Path, browser: Browser
) -> None:
    tasks = [{"name": "long", "template": "wait"}]
    run = RunningWorkflow(home, with_template(make_page_workflow("long-run", tasks), WAIT))
    run.wait_for_node("Pod")

    tab = page.open(browser, "/runs/long-run")
    tab.get_by_role("link", name="Stop").click()
    expect(tab.get_by_text("argolocal stop long-run")).to_be_visible()
    assert runs.load_status(home, "long-run")["phase"] == "Running"
    tab.get_by_role("button", name="Stop").click()
    expect(tab.get_by_text("long-run is being stopped.")).to_be_visible()
    expect(tab.get_by_role("heading", name="long-run")).to_contain_text("failed")
    run.end()

    tab.get_by_role("link", name="Resume").click()
    tab.get_by_role("button", name="Resume").click()
    expect(tab.get_by_role("heading", name="long-run")).to_contain_text("running")
    assert post_values(page, f"{page.root}/runs/long-run/actions/stop", {}).status_code == 200
    until("the resumed run ends", lambda: RunFiles(home, "long-run").runner() is None)


def test_a_run_starts_again_with_another_value(
    page: PageServer, home: Path, browser: Browser
) -> None:
    context_options = {"java_script_enabled": False}
    tab = page.open(browser, "/runs/done-run", **context_options)
    tab.get_by_role("link", name="Run again").click()
    tab.get_by_label("greeting").fill("good morning")
    tab.get_by_role("button", name="Run again").click()
    expect(tab.get_by_text("has started")).to_be_visible()

    name = tab.url.partition("/runs/")[2].partition("?")[0]
    assert name.startswith("done-run-")
    until(f"{name} ends", lambda: runs.load_status(home, name)["phase"] == "Succeeded")
    logs = RunFiles(home, name).logs.glob("*.log")
    assert "good morning" in "".join(path.read_text() for path in logs)
    assert page.get(f"/?q={name}").json()["rows"][0]["pipeline"] == "done-run"


def test_only_actions_that_apply_are_shown(page: PageServer) -> None:
    names = {
        run: [plan["name"] for plan in page.get(f"/runs/{run}/actions").json()["actions"]]
        for run in ("failed-run", "done-run")
    }
    assert names == {"failed-run": ["resume", "rerun"], "done-run": ["rerun"]}
    for action, status in (("stop", 409), ("nothing", 404)):
        answer = post_values(page, f"{page.root}/runs/done-run/actions/{action}", {})
        assert answer.status_code == status


def test_another_page_cannot_send_a_form(page: PageServer, home: Path) -> None:
    address = f"{page.root}/runs/done-run/actions/rerun"
    cookie = httpx.get(page.login).headers["set-cookie"].partition(";")[0]
    headers = {"Cookie": cookie, "Accept": "text/html"}
    run_count = len(runs.list_run_names(home))

    for more_headers, form in (
        ({"Origin": "http://evil.example"}, {}),
        ({"Sec-Fetch-Site": "cross-site"}, {}),
        ({}, {}),
        ({}, {"form_token": "x" * 64}),
    ):
        answer = httpx.post(address, headers=headers | more_headers, data=form)
        assert answer.status_code in (401, 403)

    assert len(runs.list_run_names(home)) == run_count


def test_looking_at_an_action_changes_nothing(page: PageServer, home: Path) -> None:
    run_count = len(runs.list_run_names(home))
    for _ in range(2):
        assert page.get("/runs/failed-run/actions/resume").json()["command"] == (
            "argolocal resume failed-run"
        )
    assert runs.load_status(home, "failed-run")["phase"] == "Failed"
    assert len(runs.list_run_names(home)) == run_count
