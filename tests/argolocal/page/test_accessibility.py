"""Every address of the page can be read with a screen reader, used by keyboard, and fits on a
phone."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext
from playwright.sync_api import Page as BrowserPage

from tests.argolocal.page.running import start_run
from tests.browser import PageServer, start_page

LOOKS: list[tuple[int, Literal["light", "dark"]]] = [(380, "light"), (1280, "dark")]
# further window widths and themes, which only the slow tests check, because the page differs little
# in them
SLOW_LOOKS: list[tuple[int, Literal["light", "dark"]]] = [
    (1280, "light"),
    (380, "dark"),
    (2560, "light"),
]
TAB_KEY_LIMIT = 80
# the elements that the tab key reaches: links, fields, buttons and regions that scroll
FOCUSABLE = "a[href], button, input:not([type=hidden]), select, summary, [tabindex='0']"
FOCUS_IS_VISIBLE = """element => {
    // the links of the graph have a thick frame in place of an outline
    if (element.namespaceURI.endsWith("svg")) {
        return parseFloat(getComputedStyle(element.querySelector("rect.box, rect")).strokeWidth) >= 3;
    }
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 && box.width > 0;
}"""


def find_addresses(page: PageServer, tab: BrowserPage, run: str) -> list[str]:
    """Return the addresses of the main navigation, of the tabs of a run, and of an error page."""
    tab.goto(f"{page.root}/runs/{run}")
    links = tab.locator("nav[aria-label=Main] a, nav#tabs a")
    addresses = [link.get_attribute("href") or "" for link in links.all()]
    # the address /mlflow is the page of MLflow, which is not part of this program
    sections = [address for address in addresses if address != "/mlflow"]
    return [*dict.fromkeys(sections), f"/runs/{run}/logs?find=a", "/runs/nothing"]


def find_violations(tab: BrowserPage) -> dict[str, Any]:
    """Return the rules of axe-core that the current page violates, with the elements."""
    violations = Axe().run(tab).response["violations"]
    return {
        violation["id"]: [node["html"][:200] for node in violation["nodes"]]
        for violation in violations
    }


def open_context(browser: Browser, page: PageServer, width: int, scheme: Any) -> BrowserContext:
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
    )
    tab = context.new_page()
    tab.goto(page.login)
    tab.wait_for_url(lambda url: "token" not in url)
    tab.close()
    return context


def check(page: PageServer, browser: Browser, runs: list[str], width: int, scheme: Any) -> None:
    context = open_context(browser, page, width, scheme)
    tab = context.new_page()
    problems: dict[str, Any] = {}
    for address in {address for run in runs for address in find_addresses(page, tab, run)}:
        tab.goto(f"{page.root}{address}")
        violations = find_violations(tab)
        if violations:
            problems[address] = violations
        content_width = tab.evaluate("document.documentElement.scrollWidth")
        if content_width > width:
            problems[f"{address} is too wide"] = content_width
    context.close()
    assert problems == {}


@pytest.mark.parametrize(
    ("width", "scheme"), [LOOKS[0], pytest.param(*LOOKS[1], marks=pytest.mark.slow)]
)
def test_nothing_is_inaccessible(
    page: PageServer, browser: Browser, width: int, scheme: Literal["light", "dark"]
) -> None:
    check(page, browser, ["bad-run"], width, scheme)


@pytest.fixture(scope="module")
def rekindle_page(home: Path) -> Iterator[PageServer]:
    # argolocal has created this home, so Rekindle does not trust it yet
    subprocess.run([sys.executable, "-m", "rekindle", "trust", str(home)], check=True)
    with start_page(home, "rekindle") as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "scheme"), [*LOOKS, *SLOW_LOOKS])
def test_nothing_of_any_run_is_inaccessible(
    home: Path,
    rekindle_page: PageServer,
    browser: Browser,
    width: int,
    scheme: Literal["light", "dark"],
) -> None:
    with start_run(home, f"live-{scheme}-{width}") as run:
        check(rekindle_page, browser, ["good-run", "bad-run", run.name], width, scheme)


@pytest.mark.slow
def test_every_control_is_reached_by_keyboard_and_shows_it(
    page: PageServer, browser: Browser
) -> None:
    context = open_context(browser, page, 1280, "light")
    tab = context.new_page()
    for address in find_addresses(page, tab, "bad-run"):
        tab.goto(f"{page.root}{address}")
        controls = tab.locator(FOCUSABLE).locator("visible=true")
        count = controls.count()
        reached = 0
        for _ in range(min(count, TAB_KEY_LIMIT)):
            tab.keyboard.press("Tab")
            focused = tab.evaluate_handle("document.activeElement").as_element()
            assert focused
            assert focused.evaluate(FOCUS_IS_VISIBLE), (
                address,
                focused.evaluate("e => e.outerHTML"),
            )
            reached += focused.evaluate(f"element => element.matches({FOCUSABLE!r})")
        assert reached == min(count, TAB_KEY_LIMIT), address
    context.close()
