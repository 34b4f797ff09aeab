"""Fixture: a browser that all tests of this folder share."""

from pathlib import Path

import pytest

from tests.browser import browser as browser
from tests.browser import close_browser_after


# close the browser after the end of all fixtures
@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    close_browser_after(Path(__file__).parent, nextitem)
