"""Start a real browser and a real server for tests of the page of runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from playwright.sync_api import Page as BrowserPage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# a busy machine is not a failure
expect.set_options(timeout=60_000)
NO_CHROMIUM = "chromium is not installed (Debian: apt-get install chromium)"


@contextmanager
def start_browser() -> Iterator[Browser]:
    """Start a headless Chromium. Skip the test if Chromium is not installed."""
    if not CHROMIUM:
        pytest.skip(NO_CHROMIUM)
    with sync_playwright() as playwright:
        # the sandbox of Chromium does not work for root
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


_shared = ExitStack()


@cache
def share_browser() -> Browser:
    """Return the browser of all test files of a folder, ; the first test file starts the browser,
    because a start takes seconds."""
    return _shared.enter_context(start_browser())


def close_shared_browser() -> None:
    """Close the browser of a folder; before this call, this process cannot call `asyncio.run`."""
    _shared.close()
    share_browser.cache_clear()


class PageServer:
    """The process of `argolocal ui` or `rekindle ui`, and requests to it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        self.process = process
        # the first line; "" if the process has ended
        self.login = process.stdout.readline().strip()
        address = urlsplit(self.login)
        self.root = f"{address.scheme}://{address.netloc}"
        self.port = address.port
        self.token = address.query.removeprefix("token=")

    def get(self, path: str, accept: str = "application/json") -> httpx.Response:
        """Send a GET request with the token to a path of the server."""
        headers = {"Authorization": f"Bearer {self.token}", "Accept": accept}
        # `verify` reads all certificates, which takes longer than the answer
        return httpx.get(f"{self.root}{path}", headers=headers, timeout=60, verify=False)

    def open(self, browser: Browser, path: str = "/", **options: object) -> BrowserPage:
        """Return a page of a browser that has logged in. Errors of scripts fail the test."""
        page = browser.new_context(**options).new_page()  # type: ignore[arg-type]
        page.on("pageerror", lambda error: pytest.fail(f"a script failed: {error}"))
        page.goto(self.login)
        page.wait_for_url(lambda url: "token" not in url)
        page.goto(f"{self.root}{path}")
        return page

    def end(self) -> None:
        """End the server with SIGINT, as Ctrl-C does."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)


@contextmanager
def start_page(
    home: Path,
    program: str = "argolocal",
    *flags: str,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[PageServer]:
    """Start the page of a home (directory of all runs) as a process, and end the process after the
    test. `folder`: the working directory of the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", program, "ui", *flags],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, f"{program.upper()}_HOME": str(home), **(environ or {})},
    )
    server = PageServer(process)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser that all tests of a folder share, without the contexts of other test files."""
    shared_browser = share_browser()
    yield shared_browser
    for context in shared_browser.contexts:
        context.close()


def close_browser_after(folder: Path, next_item: pytest.Item | None) -> None:
    """Close the shared browser, unless the next test is in `folder` and may use the browser. Tests
    with asyncio may not use the shared browser, because playwright runs an event loop in its
    thread."""
    if (
        not isinstance(next_item, pytest.Function)
        or not next_item.path.is_relative_to(folder)
        or hasattr(next_item.module, "asyncio")
    ):
        close_shared_browser()
