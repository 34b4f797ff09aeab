"""Tests of the list of runs: its filter, its rows, and its speed with many runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from argolocal.common.json_text import to_json
from argolocal.page.run_list import RowReader, RunRows
from argolocal.page.sources import LocalRuns
from tests.argolocal.page.conftest import make_page_workflow, run_workflow
from tests.browser import PageServer, start_page
from tests.effort import count_calls

RUN_COUNT = 220


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home (a directory of runs) with 220 runs of ten steps."""
    home = tmp_path_factory.mktemp("many") / "home"
    run_workflow(home, make_page_workflow("newest", [{"name": "first", "template": "say"}]))
    tasks = [{"name": f"step-{number}", "template": "say"} for number in range(10)]

    for number in range(RUN_COUNT - 1):
        name = f"many-{number:05d}"
        phase = "Failed" if number == 7 else "Succeeded"
        folder = home / "runs" / name
        folder.mkdir(parents=True)
        manifest = make_page_workflow(name, tasks)
        manifest["metadata"]["generateName"] = "many-"
        (folder / "manifest.yaml").write_text(to_json(manifest))
        nodes = [
            _make_node(name, ""),
            *(_make_node(name, f".{task['name']}", phase) for task in tasks),
        ]
        status = {"phase": phase, "startedAt": "2026-01-01T00:00:00Z", "message": "x"}
        workflow_status = {"status": status, "nodes": {node["id"]: node for node in nodes}}
        (folder / "journal.jsonl").write_text(to_json(workflow_status) + "\n")
        (folder / "lock").touch()

    return home


def _make_node(run: str, suffix: str, phase: str = "Succeeded") -> dict[str, str]:
    return {
        "id": run + suffix,
        "name": run + suffix,
        "displayName": suffix.strip(".") or run,
        "type": "Pod" if suffix else "DAG",
        "phase": phase,
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:09Z",
        "message": "" if phase == "Succeeded" else "it broke",
    }


@pytest.fixture(scope="module")
def many_page(many_runs: Path) -> Iterator[PageServer]:
    with start_page(many_runs) as server:
        yield server


def test_the_first_list_of_many_runs_reads_only_the_runs_that_it_shows(many_runs: Path) -> None:
    rows = RunRows(LocalRuns(many_runs), RowReader())
    all_rows = RunRows(LocalRuns(many_runs), RowReader())
    assert count_calls(lambda: rows.find({})) < 0.7 * count_calls(all_rows.all)

    runs = rows.find({})
    assert runs.count == RUN_COUNT
    assert len(runs.rows) == 100


def test_the_next_list_reads_no_run_again(many_runs: Path) -> None:
    rows = RunRows(LocalRuns(many_runs), RowReader())
    first = count_calls(rows.all)
    assert count_calls(rows.all) < first / 3


def test_a_filter_finds_a_run_on_the_last_page(many_page: PageServer) -> None:
    answer = many_page.get("/?state=failed").json()
    assert [(row["name"], row["pipeline"]) for row in answer["rows"]] == [("many-00007", "many")]
    assert answer["count"] == 1
    assert many_page.get("/?q=00210&page=9").json()["page"] == 1


def test_older_runs_are_on_further_pages(many_page: PageServer, browser: Browser) -> None:
    tab = many_page.open(browser)
    expect(tab.get_by_text("page 1 of 3")).to_be_visible()
    tab.get_by_role("link", name="Older").click()
    expect(tab.get_by_text("page 2 of 3")).to_be_visible()


def test_the_row_of_a_failed_run_names_its_step_and_cause(page: PageServer) -> None:
    rows = {row["name"]: row for row in page.get("/").json()["rows"]}
    assert rows["bad-run"]["message"].startswith("second: ")
    assert rows["bad-run"]["pipeline"] == "bad-run"
    assert rows["good-run"]["message"] == ""


def test_a_filter_without_a_match_leads_back_to_all_runs(
    page: PageServer, browser: Browser
) -> None:
    tab = page.open(browser, "/?q=nothing-like-this")
    tab.get_by_role("link", name="All runs").click()
    expect(tab.get_by_role("row", name="bad-run")).to_be_visible()


def test_the_list_is_readable_on_a_small_screen(page: PageServer, browser: Browser) -> None:
    tab = page.open(browser, "/", viewport={"width": 380, "height": 800})
    width = tab.evaluate("document.documentElement.scrollWidth")
    assert width <= 380
    expect(tab.locator(".state.failed").first).to_be_in_viewport()
