"""Fixture: a browser that all tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser import close_shared_browser, share_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = share_browser()
    yield browser
    for context in browser.contexts:
        context.close()


@pytest.hookimpl(trylast=True)  # after the end of all fixtures
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if (
        not isinstance(nextitem, pytest.Function)
        or not nextitem.path.is_relative_to(Path(__file__).parent)
        or hasattr(nextitem.module, "asyncio")
    ):
        close_shared_browser()
