"""An open page that changes keeps what its user has opened, selected, scrolled and focused."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from playwright.sync_api import Page as BrowserPage

from tests.argolocal.page.conftest import MARKUP, make_page_workflow, run_workflow
from tests.browser import PageServer

# shows a page with the content FIRST, as if the server had sent it
SHOW = """html => {
    document.getElementById("main").innerHTML = `<div id="part" data-live>${html}</div>`;
}"""
# the update of the page when the server sends the content HTML
UPDATE = """html => {
    const text = `<title>new</title><main><div id="part" data-live>${html}</div></main>`;
    update(new DOMParser().parseFromString(text, "text/html"));
}"""
ROWS = "<table><tbody>{}</tbody></table>"


def make_row_html(name: str, state: str) -> str:
    return f'<tr><th><a href="/runs/{name}">{name}</a><td>{state}'


@pytest.fixture(scope="module")
def open_tab(page: PageServer, browser: Browser) -> BrowserPage:
    return page.open(browser)


@pytest.fixture
def tab(page: PageServer, open_tab: BrowserPage) -> Iterator[BrowserPage]:
    open_tab.goto(page.root)
    yield open_tab


def read_tab_html(tab: BrowserPage) -> str:
    return tab.locator("#part").inner_html()


def test_the_result_of_an_update_is_the_new_page(tab: BrowserPage) -> None:
    contents = [
        "<p>one</p>",
        "",
        "text <b>bold</b> text",
        "<p class='a' title='x'>one<p>two",
        "<p>two<p class='b'>one<ul><li>first<li>second</ul>",
        "<ul><li>second<li><a href='/x'>third</a></ul><!-- remark --><p>end",
        ROWS.format(make_row_html("a", "running") + make_row_html("b", "failed")),
        ROWS.format(
            make_row_html("c", "pending")
            + make_row_html("b", "failed")
            + make_row_html("a", "succeeded")
        ),
        # the list has several links with the same address
        ROWS.format(make_row_html("a", "1") + make_row_html("a", "2") + make_row_html("a", "3")),
        ROWS.format(make_row_html("a", "2") + make_row_html("a", "3")),
        "<svg viewBox='0 0 1 1'><g data-key='x'><text>x</text></g></svg>",
        "<svg viewBox='0 0 2 1'><g data-key='y'><text>y</text></g><g data-key='x'/></svg>",
    ]
    for first in contents:
        for second in contents:
            tab.evaluate(SHOW, second)
            expected = read_tab_html(tab)
            tab.evaluate(SHOW, first)
            tab.evaluate(UPDATE, second)
            assert read_tab_html(tab) == expected, (first, second)


def test_an_opened_detail_stays_open(tab: BrowserPage) -> None:
    details = "<details id='more'><summary>More</summary><p>{}</p></details>"
    tab.evaluate(SHOW, details.format("old"))
    tab.get_by_text("More").click()
    tab.evaluate(UPDATE, "<p>before</p>" + details.format("new"))
    expect(tab.get_by_text("new")).to_be_visible()


def test_the_focus_stays_on_a_row_that_moves(tab: BrowserPage) -> None:
    tab.evaluate(SHOW, ROWS.format(make_row_html("a", "running") + make_row_html("b", "running")))
    tab.get_by_role("link", name="b").focus()
    tab.evaluate(
        UPDATE,
        ROWS.format(
            make_row_html("new", "") + make_row_html("b", "failed") + make_row_html("a", "failed")
        ),
    )
    expect(tab.get_by_role("link", name="b")).to_be_focused()


def test_the_scroll_position_of_a_part_stays(tab: BrowserPage) -> None:
    frame = "<pre id='frame' tabindex='0'>{}</pre>"
    long_line = "x" * 2000
    tab.evaluate(SHOW, frame.format(long_line))
    scroll = "element => element.scrollLeft"
    tab.locator("#frame").evaluate("element => { element.scrollLeft = 300; }")
    tab.evaluate(UPDATE, "<p>before</p>" + frame.format(f"{long_line}\nsecond"))
    assert tab.locator("#frame").evaluate(scroll) == 300


def test_a_selected_text_that_has_not_changed_stays_selected(tab: BrowserPage) -> None:
    tab.evaluate(SHOW, "<p id='message'>the message</p><p>old</p>")
    tab.evaluate(
        "() => getSelection().selectAllChildren(document.getElementById('message'))",
    )
    tab.evaluate(UPDATE, "<p id='message'>the message</p><p>new</p>")
    assert tab.evaluate("() => getSelection().toString()") == "the message"


def test_parts_that_a_script_has_built_stay(tab: BrowserPage) -> None:
    tab.evaluate(SHOW, "<div id='lines' data-keep>built</div><p>old</p>")
    tab.evaluate(UPDATE, "<div id='lines' data-keep></div><p>new</p>")
    assert tab.locator("#lines").inner_text() == "built"
    expect(tab.get_by_text("new", exact=True)).to_be_visible()


def test_markup_in_an_update_runs_nothing(tab: BrowserPage) -> None:
    tab.evaluate(SHOW, "<p>old</p>")
    script = "<script>document.title='hacked'</script>"
    tab.evaluate(UPDATE, f"<p>{MARKUP}</p>{script}<p onclick=\"document.title='hacked'\">press</p>")
    tab.get_by_text("press").click()
    assert tab.title() == "new"


def test_an_open_page_says_that_its_run_was_removed(
    page: PageServer, home: Path, browser: Browser
) -> None:
    name = "short-lived"
    run_workflow(home, make_page_workflow(name, [{"name": "first", "template": "say"}]))
    run_tab = page.open(browser, f"/runs/{name}")
    list_tab = page.open(browser)
    expect(list_tab.get_by_role("row", name=name)).to_be_visible()

    shutil.rmtree(home / "runs" / name)
    expect(run_tab.get_by_role("status")).to_have_text("removed")
    # the page still shows the last state of the run
    expect(run_tab.get_by_role("heading", name=name)).to_contain_text("succeeded")
    expect(list_tab.get_by_role("row", name=name)).to_have_count(0)
    assert page.get(f"/runs/{name}").status_code == 404

    # a run with the same name starts later
    run_workflow(home, make_page_workflow(name, [{"name": "first", "template": "fail"}]))
    expect(run_tab.get_by_role("heading", name=name)).to_contain_text("failed")
    expect(run_tab.get_by_role("status")).to_have_text("")
