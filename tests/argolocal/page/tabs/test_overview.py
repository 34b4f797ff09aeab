"""The first tab of a run shows without a click why the run has failed, and what it is waiting
for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from argolocal.page.failure import describe_failure, find_failure, find_location
from argolocal.page.log_files import LogFile, local_logs
from argolocal.page.sources import LocalRuns, Run
from argolocal.page.tabs.waiting import describe_waiting
from tests.argolocal.page.conftest import MARKUP
from tests.browser import PageServer
from tests.waiting import until


def get_overview(page: PageServer, query: str = "") -> dict[str, Any]:
    answer = page.get(f"/runs/zoo/overview{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def make_run(phase: str, *nodes: dict[str, Any], **spec: object) -> Run:
    """Return a run with some nodes; a node needs a name and a phase."""
    records = {
        node["name"]: {
            "id": node["name"],
            "displayName": node["name"].rpartition(".")[2],
            "type": "Pod",
            **node,
        }
        for node in nodes
    }
    return Run("run", {"spec": spec}, {"phase": phase, "nodes": records}, "1")


def write_log(folder: Path, pod: str, text: str) -> Mapping[str, LogFile]:
    (folder / f"{pod}.log").write_text(text)
    return local_logs(folder)


def test_a_failed_run_names_step_message_and_log_first(
    zoo_page: PageServer, browser: Browser
) -> None:
    failure = get_overview(zoo_page)["failure"]
    assert failure["step"] == "loop(3:3)"
    assert failure["cause"] == "three is bad"
    assert failure["log"] == ["line before", "error: three is bad"]
    assert failure["error_line"] == 1

    tab = zoo_page.open(browser, "/runs/zoo")
    section = tab.get_by_role("region", name="Failed in loop(3:3)")
    expect(section).to_contain_text("three is bad")
    section.get_by_role("link", name="loop(3:3)").click()
    expect(tab.get_by_role("heading", name="loop(3:3)", exact=True)).to_be_visible()


def test_the_list_names_the_step_of_a_failed_run(zoo_home: Path) -> None:
    source = LocalRuns(zoo_home)
    run = source.read("zoo")
    assert describe_failure(run) == "loop(3:3): main: Error (exit code 3)"
    sentence = describe_failure(run, source.logs("zoo"))
    assert sentence == "loop(3:3): three is bad (main: Error (exit code 3))"


def test_the_location_is_a_line_of_the_users_code(tmp_path: Path) -> None:
    traceback = """before
Traceback (most recent call last):
  File "/app/train.py", line 12, in <module>
    step()
  File "/usr/lib/python3.11/site-packages/torch/nn.py", line 99, in forward
    raise ValueError("<b>wrong shape</b>")
ValueError: <b>wrong shape</b>
"""
    node = {"id": "run-7", "name": "run.a", "phase": "Failed", "templateName": "a"}
    run = make_run("Failed", {**node, "message": "main: Error (exit code 1)"})
    pod = "run-a-7"
    failure = find_failure(run, write_log(tmp_path, pod, traceback))
    assert failure
    assert failure.location == "/app/train.py:12"
    assert failure.cause == "ValueError: <b>wrong shape</b>"
    assert failure.log[failure.error_line] == "ValueError: <b>wrong shape</b>"


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("KeyError: 'x' (prepare.py, line 7)", "prepare.py:7"),
        ("run.sh: line 3: nothing: command not found", "run.sh:3"),
        ('  File "/usr/lib/python3.11/json.py", line 4, in x', "/usr/lib/python3.11/json.py:4"),
        ('  File "/argo/staging/script", line 4, in <module>', "script:4"),
        ("/argo/staging/script: line 2: nothing: command not found", "script:2"),
        ("/argo/staging/script: 3: nothing: not found", "script:3"),
        ("exit code 1", ""),
    ],
)
def test_a_location_is_found_in_a_message(text: str, location: str) -> None:
    assert find_location(text) == location


def test_the_failure_that_ended_the_run_is_named_not_one_that_a_retry_repaired() -> None:
    flaky = {"name": "run.flaky", "type": "Retry", "phase": "Succeeded"}
    failed_attempt = {"name": "run.flaky(0)", "phase": "Failed", "finishedAt": "1"}
    exit_handler = {"name": "run.onExit", "phase": "Failed", "finishedAt": "2"}
    optional = {"name": "run.optional", "phase": "Failed", "finishedAt": "3"}
    real_node = {
        "name": "run.real",
        "phase": "Failed",
        "finishedAt": "4",
        "message": "out of memory",
    }
    tasks = [
        {"name": "optional", "template": "x", "continueOn": {"failed": True}},
        {"name": "real", "template": "x", "dependencies": ["optional"]},
    ]
    run = make_run(
        "Failed",
        flaky,
        failed_attempt,
        exit_handler,
        optional,
        real_node,
        templates=[{"name": "main", "dag": {"tasks": tasks}}],
    )
    failure = find_failure(run, {})
    assert failure
    assert (failure.step, failure.cause) == ("real", "out of memory")
    assert failure.other_failures == ["optional", "onExit"]
    assert find_failure(make_run("Succeeded", real_node), {}) is None


def test_waiting_is_explained() -> None:
    lock = {"waiting": "default/Mutex/gpu"}
    run = make_run(
        "Running",
        {
            "name": "run.train",
            "phase": "Pending",
            "message": "Lock status: 0/1",
            "synchronizationStatus": lock,
        },
        {"name": "run.pull", "phase": "Pending", "message": "the image is pulled"},
        {"name": "run.pause", "type": "Suspend", "phase": "Running"},
        {"name": "run.approve", "type": "Suspend", "phase": "Running"},
        {
            "name": "run.flaky",
            "type": "Retry",
            "phase": "Running",
            "message": "Backoff for 10 seconds",
            "children": ["a"],
        },
        {"name": "run.busy", "phase": "Running"},
    )
    text = "\n".join(describe_waiting(run, lambda name: "10m" if "pause" in name else ""))
    assert "train waits for the lock default/Mutex/gpu" in text
    assert "pull waits for its pod: the image is pulled" in text
    assert "pause waits for 10m, then continues." in text
    assert "approve waits: `" in text
    assert "resume run`" in text
    assert "flaky waits before attempt 2: Backoff for 10 seconds." in text
    assert "Running: busy." in text
    assert describe_waiting(make_run("Succeeded"), lambda name: "") == []
    assert "resume run" in describe_waiting(make_run("Interrupted"), lambda name: "")[0]


def test_the_table_contains_every_step(zoo_page: PageServer) -> None:
    rows = {row["name"]: row for row in get_overview(zoo_page)["steps"]}
    assert rows["tails"]["message"] == "not true: flip.result == tails"
    assert rows["flaky"]["message"] == "2 attempts: main: Error (exit code 1)"
    assert rows["loop(3:3)"]["depth"] == 1
    assert rows["nested.in-b"]["phase"] == "Succeeded"
    assert rows["onExit"]["phase"] == "Succeeded"


def test_markup_in_steps_and_logs_is_shown_as_text(zoo_page: PageServer, browser: Browser) -> None:
    address = f"groups[1].each(1:{MARKUP})"
    tab = zoo_page.open(browser, "/runs/zoo?open=groups+groups[1].each")
    expect(tab.get_by_role("link", name=f"1: {MARKUP}: succeeded", exact=False)).to_be_visible()
    tab.goto(f"{zoo_page.root}/runs/zoo?node={address.replace(' ', '%20')}")
    expect(tab.get_by_role("heading", name=MARKUP, exact=False)).to_be_visible()
    assert tab.title().startswith("zoo")


def test_a_query_that_names_nothing_is_refused(zoo_page: PageServer) -> None:
    for query in ("?node=nothing", "?root=flip", "?node=../../x", "?node=flip%2B9"):
        assert zoo_page.get(f"/runs/zoo/overview{query}").status_code == 400
    for query in ("?open=nothing+%25zz", "?page=x", "?page=99999999999", "?node=flip&items=-1"):
        assert zoo_page.get(f"/runs/zoo/overview{query}").status_code == 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1280])
def test_the_overview_is_accessible(
    zoo_page: PageServer, browser: Browser, scheme: str, width: int
) -> None:
    viewport = {"width": width, "height": 800}
    tab = zoo_page.open(
        browser, "/runs/zoo?node=loop&open=loop+nested", viewport=viewport, color_scheme=scheme
    )
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    result = Axe().run(tab)
    assert result.violations_count == 0, result.generate_report()


def test_the_graph_is_used_with_the_keyboard(zoo_page: PageServer, browser: Browser) -> None:
    tab = zoo_page.open(browser, "/runs/zoo")
    tab.get_by_role("link", name="flip: succeeded", exact=False).focus()
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("heading", name="flip", exact=True)).to_be_visible()


def test_a_suspended_run_says_how_to_continue(suspended_home: Path) -> None:
    source = LocalRuns(suspended_home)

    def list_sentences() -> list[str]:
        if "waits" not in source.names():
            return []
        run = source.read("waits")
        return describe_waiting(run, lambda name: "") if run.status["nodes"] else []

    [sentence] = until("the run waits for an approval", list_sentences)
    assert "resume waits`" in sentence
