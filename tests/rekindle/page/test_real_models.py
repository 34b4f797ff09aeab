"""Tests of the page of a real project: a canary, a rollback and a scaling that are started by a
click, a backfill, a sweep.

The tests share one home, and must run in the order of this file: the first test releases the first
version."""

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from argolocal.state.journal import RunFiles
from argolocal.view.runs import list_run_names
from tests.browser import PageServer, start_page
from tests.ports import free_port
from tests.rekindle.cli.user_project import run_make
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("real-models")]

CANARY = "{steps: [50, 100], minutes: 0.05, requests: 20, wait_minutes: 5, slower: 1000,"
CANARY += " score_shift: 0.99}"
# a busy machine may need long for a step
STEP_TIMEOUT_MS = 240_000
# exit codes of a run: the model was released, or it was not released
RUN_CODES = (0, 3)


class Shop:
    """A user's project with a home (directory of runs) of its own. The trainings of the shop
    project wait for the file `go`."""

    def __init__(self, folder: Path, go: Path) -> None:
        self.folder = folder
        self.home = folder / ".rekindle"
        self.go = go
        self.port = free_port()
        removed_prefixes = ("S3_", "AWS_", "MLFLOW_", "REKINDLE_")
        kept_variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(removed_prefixes)
        }
        self.environ = kept_variables | {
            "KUBECONFIG": "/none",
            "REKINDLE_HOME": str(self.home),
            "REKINDLE_SERVE__PORT": str(self.port),
            "REKINDLE_GATE__TOLERANCE": "1000",
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "rekindle", *arguments],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> str:
        """Run a command that must succeed, and return the output of the command."""
        output, code = self.end(self.start(*arguments))
        assert code == 0, output
        return output

    def end(self, process: "subprocess.Popen[str]") -> tuple[str, int]:
        try:
            output, _ = process.communicate(timeout=600)
        finally:
            process.kill()
        return output, process.returncode

    def wait_for_run(self, known_runs: set[str]) -> str:
        """Return the name of a run that has just started."""
        return until("a run starts", lambda: set(list_run_names(self.home)) - known_runs, 180).pop()

    def served_version(self) -> str:
        """Return the version of the model that answers requests."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/ready") as answer:
            return json.load(answer)["version"]

    @contextmanager
    def requests(self) -> Iterator[None]:
        """Send requests to the model until the `with` block ends."""
        address = f"http://127.0.0.1:{self.port}/v1/models/shop"
        is_over = Event()

        def ask() -> None:
            while not is_over.wait(0.02):
                try:
                    with urllib.request.urlopen(f"{address}/example", timeout=10) as answer:
                        request = urllib.request.Request(f"{address}:predict", answer.read())
                    urllib.request.urlopen(request, timeout=10).close()
                except OSError:
                    # the servers of the model are changing
                    continue

        threads = [Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    # the folder is not in /tmp, because each pod has its own /tmp
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory_folder:
        shop = Shop(tmp_path_factory.mktemp("real") / "shop", Path(memory_folder) / "go")
        run_make(shop.folder, shop.go)
        shop.go.touch()
        shop.run("run", "configs/shop.yaml", "--set", "train.seed=1")
        yield shop
        shop.run("down")


@pytest.fixture(scope="module")
def page(shop: Shop) -> Iterator[PageServer]:
    # the commands of the page's actions run in the folder of the project
    with start_page(shop.home, "rekindle", environ=shop.environ, folder=shop.folder) as server:
        yield server


def read_model(page: PageServer) -> dict[str, Any]:
    (model,) = page.get("/models").json()["models"]
    return model


def test_a_canary_is_shown_while_it_gets_requests_and_after_it(
    shop: Shop, page: PageServer, browser: Browser
) -> None:
    known_runs = set(list_run_names(shop.home))
    setting = f"serve.canary={CANARY}"
    process = shop.start("run", "configs/shop.yaml", "--set", "train.seed=2", "--set", setting)
    name = shop.wait_for_run(known_runs)
    tab = page.open(browser, f"/runs/{name}/canary")
    expect(tab.get_by_text("The canary has not started.")).to_be_visible()
    until_served = tab.get_by_text("Version 2 gets 50 % of the requests now.")
    expect(until_served).to_be_visible(timeout=STEP_TIMEOUT_MS)
    overview = page.get(f"/runs/{name}/overview").json()
    assert overview["headlines"][0].startswith("Passed the gate, the release is in progress.")
    until("MLflow answers", lambda: not page.get("/models").json()["is_starting"], 120)
    servers = read_model(page)["servers"]
    assert sorted(server["has_traffic"] for server in servers) == [False, True, True]

    with shop.requests():
        output, code = shop.end(process)
    assert code == 0, output
    expect(tab.get_by_text("Version 2 passed at all shares, at last 50 % of the")).to_be_visible()
    (step,) = page.get(f"/runs/{name}/canary").json()["steps"]
    assert step["outcome"] == "passed"
    for model in ("candidate", "champion"):
        assert step[model]["requests"] >= 20
        assert step[model]["errors"] == 0
    row = tab.get_by_role("row", name="50 %")
    expect(row).to_contain_text(f"{step['candidate']['requests']:.0f}")
    assert shop.served_version() == "2"


def test_a_click_rolls_back_to_the_earlier_release(
    shop: Shop, page: PageServer, browser: Browser
) -> None:
    until("MLflow answers", lambda: not page.get("/models").json()["is_starting"], 120)
    earlier_model = read_model(page)
    assert (earlier_model["champion"], earlier_model["rollback_targets"]) == ("2", ["1"])

    tab = page.open(browser, "/models")
    tab.get_by_role("link", name="Roll back to 1").click()
    expect(tab.get_by_text("rekindle rollback shop 1")).to_be_visible()
    assert shop.served_version() == "2"
    tab.get_by_role("button", name="Roll back shop").click()
    expect(tab.get_by_text("Version 1 of shop is serving.").or_(tab.get_by_text("are starting"))).to_be_visible(timeout=60_000)  # fmt: skip

    until("version 1 serves", lambda: shop.served_version() == "1", 240)
    until("the champion has changed", lambda: read_model(page)["champion"] == "1", 120)
    tab.goto(f"{page.root}/models")
    expect(tab.get_by_role("row", name=re.compile("^1 champion"))).to_be_visible()
    model = read_model(page)
    assert model["since"] >= earlier_model["since"]
    assert model["rollback_targets"] == ["2"]


def test_a_click_scales_a_training_that_runs(
    shop: Shop, page: PageServer, browser: Browser
) -> None:
    shop.go.unlink()
    known_runs = set(list_run_names(shop.home))
    process = shop.start("run", "configs/shop.yaml", "--set", "train.seed=3", "--no-cache")
    try:
        name = shop.wait_for_run(known_runs)
        logs = RunFiles(shop.home, name).logs
        until("a worker waits", lambda: (logs / f"{name}-train-worker-0.log").exists(), 240)
        tab = page.open(browser, f"/runs/{name}")
        tab.get_by_role("link", name="Scale").click(timeout=60_000)
        expect(tab.get_by_text(f"rekindle scale {name} WORKERS --task train")).to_be_visible()
        tab.get_by_label("number of workers").fill("0")
        tab.get_by_role("button", name="Scale").click()
        expect(tab.get_by_text("it must be a number from 1 to 4096")).to_be_visible()

        tab.go_back()
        tab.get_by_label("number of workers").fill("2")
        tab.get_by_role("button", name="Scale").click()
        expect(tab.get_by_text("train changes from 1 to 2 workers.")).to_be_visible()
        second_log = logs / f"{name}-train-worker-1.log"
        until("the second worker starts", second_log.exists, 120)
    finally:
        shop.go.touch()
        output, code = shop.end(process)
    assert code in RUN_CODES, output
    # the second worker may have started after the last of the few steps
    logs_of_page = page.get(f"/runs/{name}/logs").json()
    assert f"{name}-train-worker-1" in str(logs_of_page)


def test_the_weeks_of_a_backfill_are_shown(shop: Shop, page: PageServer, browser: Browser) -> None:
    known_runs = set(list_run_names(shop.home))
    arguments = ("--from", "2026-03-02", "--to", "2026-03-15", "-o", "json")
    process = shop.start("backfill", "configs/shop.yaml", *arguments)
    name = shop.wait_for_run(known_runs)
    tab = page.open(browser, f"/runs/{name}/weeks")
    output, code = shop.end(process)
    assert code == 0, output

    expect(tab.get_by_text("2 of 2 runs that have started were successful")).to_be_visible()
    weeks = page.get(f"/runs/{name}/weeks").json()["weeks"]
    assert [week["scheduled"][:10] for week in weeks] == ["2026-03-02", "2026-03-09"]
    for week in weeks:
        row = tab.get_by_role("row", name=week["scheduled"][:10])
        expect(row).to_contain_text("succeeded")
        expect(row).to_contain_text(f"{week['metrics']['rmse']:.4g}")
        # in the list, each run has the time of its week
        rows = page.get(f"/?q={week['run']}").json()["rows"]
        assert rows[0]["facts"]["Scheduled"] == week["scheduled"]


def test_the_trials_of_a_sweep_are_shown_while_it_runs_and_after_it(
    shop: Shop, page: PageServer, browser: Browser
) -> None:
    known_runs = set(list_run_names(shop.home))
    process = shop.start("sweep", "configs/sweep.yaml", "--set", f"serve.port={free_port()}")
    name = shop.wait_for_run(known_runs)
    tab = page.open(browser, f"/runs/{name}/trials")
    expect(tab.get_by_text("No trial has started yet.")).to_be_visible()
    expect(tab.get_by_text("trials were started")).to_be_visible(timeout=STEP_TIMEOUT_MS)
    output, code = shop.end(process)
    assert code in RUN_CODES, output

    expect(tab.get_by_text("is the best: loss")).to_be_visible()
    trials_tab = page.get(f"/runs/{name}/trials").json()
    assert (trials_tab["planned"], len(trials_tab["trials"])) == (5, 5)
    best = trials_tab["trials"][0]
    assert best["is_best"]
    assert best["state"] == "trained to the end"
    assert trials_tab["currency"] == "USD"
    assert all(trial["cost"] > 0 for trial in trials_tab["trials"])
    assert [rung["trials"] for rung in trials_tab["rungs"]] == [5, 1]
    row = tab.locator("tr.best")
    expect(row).to_contain_text(f"{best['settings']['train.learning_rate']:.5g}")
    expect(tab.get_by_role("img", name=re.compile("by share of the steps"))).to_be_visible()
