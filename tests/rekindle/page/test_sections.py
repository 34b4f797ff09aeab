"""Accessibility of the pages that are not tabs of a run."""

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from tests.browser import start_page


@pytest.mark.slow
def test_a_screen_reader_and_the_keyboard_reach_everything(
    tmp_path: Path, browser: Browser
) -> None:
    with start_page(tmp_path / "home", "rekindle") as server:
        for scheme in ("light", "dark"):
            for path in ("/", "/models", "/schedules", "/models/demo/rollback/1"):
                tab = server.open(browser, path, color_scheme=scheme)
                assert Axe().run(tab).response["violations"] == [], path
