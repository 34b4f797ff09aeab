"""Take the pictures of docs/page.md from a run that has a training.

python -m tests.docs.page_pictures HOME RUN        takes docs/page_run.png and docs/page_training.png
"""

import sys
from pathlib import Path

from playwright.sync_api import Browser

from tests.browser import PageServer, start_browser, start_page
from tests.commands import ROOT

# file name of a picture → tab that the picture shows
PICTURES = {"page_run.png": "overview", "page_training.png": "training"}
SIZE = {"width": 1120, "height": 760}


def take_pictures(server: PageServer, browser: Browser, run: str, folder: Path) -> list[Path]:
    """Take all pictures of a run, and return the paths of the pictures."""
    paths: list[Path] = []
    for name, tab in PICTURES.items():
        page = server.open(browser, f"/runs/{run}/{tab}", viewport=SIZE, color_scheme="light")
        paths.append(folder / name)
        page.screenshot(path=paths[-1])
        page.context.close()
    return paths


if __name__ == "__main__":
    with start_page(Path(sys.argv[1]), "rekindle") as server, start_browser() as browser:
        for path in take_pictures(server, browser, sys.argv[2], ROOT / "docs"):
            print(path)
