"""The page of a run shows its training from the first process to the verdict."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from argolocal.view.runs import list_run_names
from tests.browser import start_page
from tests.commands import ROOT
from tests.docs.page_pictures import take_pictures
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home (directory of runs) whose services end with the test."""
    home = tmp_path / "home"
    yield home
    command = [sys.executable, "-m", "rekindle", "down"]
    subprocess.run(command, env={**os.environ, "REKINDLE_HOME": str(home)}, check=False)


def test_a_training_is_shown_while_it_runs_and_after_it(home: Path, browser: Browser) -> None:
    command = [sys.executable, "-m", "rekindle", "run", "configs/demo.yaml", "--yes"]
    environ = {**os.environ, "REKINDLE_HOME": str(home)}
    settings = ["--set", "train.epochs=2", "--no-cache"]
    with subprocess.Popen(
        [*command, *settings],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        until("the run exists", lambda: home.exists() and list_run_names(home), 120)
        (name,) = list_run_names(home)
        with start_page(home, "rekindle") as server:
            tab = server.open(browser, f"/runs/{name}/training")
            expect(tab.get_by_text("No worker has trained yet.")).to_be_visible(timeout=60_000)
            expect(tab.get_by_role("img", name="transformer-worker-0")).to_be_visible(
                timeout=240_000
            )
            output, _ = process.communicate()
            assert process.returncode in (0, 3), output.decode()

            expect(tab.get_by_text("Nothing was lost")).to_be_visible()
            verdict = server.get(f"/runs/{name}/verdict").json()["evaluations"][0]
            assert verdict["rows"] > 1000
            assert verdict["intervals"][0]["model"] == "baseline"

            charts = server.get(f"/runs/{name}/curves").json()["charts"]
            titles = {chart["title"]: len(chart["series"]) for chart in charts}
            # the page has curves of the training and of the validation
            assert titles["loss"] == 2
            assert {"learning rate", "steps per second"} <= titles.keys()

            cost = server.get(f"/runs/{name}/cost").json()
            workers = next(pod for pod in cost["pods"] if pod["role"] == "worker")
            assert workers["count"] == 2

            pictures = take_pictures(server, browser, name, home.parent)
            # a picture that shows only a background is much smaller
            assert [path.stat().st_size > 30_000 for path in pictures] == [True, True]
