"""Tests of the list of runs and the page of a run, as a browser shows them and as JSON."""

import re
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.argolocal.page.conftest import MARKUP, make_page_workflow, run_workflow
from tests.browser import PageServer, start_page
from tests.ports import free_port


def test_the_list_shows_runs_with_their_state(page: PageServer, browser: Browser) -> None:
    tab = page.open(browser)
    expect(tab.get_by_role("row", name="bad-run")).to_contain_text("failed")
    expect(tab.get_by_role("row", name="good-run")).to_contain_text("succeeded")


def test_the_list_is_filtered_by_text_and_state(page: PageServer) -> None:
    assert [row["name"] for row in page.get("/?state=failed").json()["rows"]] == ["bad-run"]
    assert [row["name"] for row in page.get("/?q=GOOD").json()["rows"]] == ["good-run"]
    answer = page.get("/?state=broken")
    assert answer.status_code == 400
    assert "failed" in answer.json()["error"]


def test_a_run_that_starts_appears_without_a_reload(home: Path, browser: Browser) -> None:
    with start_page(home) as server:
        tab = server.open(browser)
        expect(tab.get_by_role("row", name="late-run")).to_have_count(0)
        run_workflow(home, make_page_workflow("late-run", [{"name": "first", "template": "say"}]))
        expect(tab.get_by_role("row", name="late-run")).to_contain_text("succeeded")


def test_markup_in_a_run_is_shown_as_text(page: PageServer, browser: Browser) -> None:
    tab = page.open(browser, "/runs/bad-run")
    expect(tab.get_by_role("row", name=re.compile("^second "))).to_contain_text("failed")
    expect(tab.get_by_role("row", name="third")).to_contain_text("because second failed")
    assert tab.title().startswith("bad-run")
    assert MARKUP not in page.get("/runs/bad-run", "text/html").text


def test_an_unknown_run_or_tab_is_named(page: PageServer) -> None:
    for path in ("/runs/nothing", "/runs/..%2f..", "/runs/bad-run/nothing"):
        answer = page.get(path)
        assert answer.status_code == 404, path


def test_an_open_page_reconnects_to_a_server_that_was_killed(home: Path, browser: Browser) -> None:
    port = ("--port", str(free_port()))
    with start_page(home, "argolocal", *port) as server:
        tab = server.open(browser)
        server.process.kill()
        server.process.wait()
        expect(tab.get_by_role("status")).to_have_text("not connected")
        with start_page(home, "argolocal", *port):
            expect(tab.get_by_role("status")).to_have_text("", timeout=20_000)
            name = "run-after-restart"
            run_workflow(home, make_page_workflow(name, [{"name": "first", "template": "say"}]))
            expect(tab.get_by_role("row", name=name)).to_contain_text("succeeded")
