"""Each tab of a training shows its content in words, in a browser and as JSON."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import Services
from tests.browser import PageServer
from tests.rekindle.page.tabs.recorded_runs import MARKUP, record_events, record_run
from tests.steps.finished_training import EVENTS

TABS = (
    "power-bbbbb/training",
    "power-bbbbb/curves?with=power-aaaaa&scale=log",
    "power-bbbbb/verdict",
    "power-bbbbb/changes",
    "power-bbbbb/cost",
    "search-ccccc/trials",
    "weekly-1-abc/weeks",
    "served-ddddd/canary",
)


def read(page: PageServer, path: str) -> Any:
    answer = page.get(f"/runs/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
@pytest.mark.parametrize("path", TABS)
def test_a_tab_can_be_read_by_everybody(page: PageServer, browser: Browser, path: str) -> None:
    tab = page.open(browser, f"/runs/{path}")
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        violations = Axe().run(tab).response["violations"]
        assert [(item["id"], item["nodes"][0]["html"][:200]) for item in violations] == []

    # check that in a window 380 px wide, only tables and graphs scroll sideways
    tab.set_viewport_size({"width": 380, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 380


@pytest.mark.parametrize("path", TABS)
def test_markup_in_a_training_is_shown_as_text(page: PageServer, path: str) -> None:
    answer = page.get(f"/runs/{path}", "text/html")
    assert answer.status_code == 200, answer.text
    assert MARKUP not in answer.text


def test_reading_a_training_starts_no_service(page: PageServer, home: Path) -> None:
    assert read(page, "power-bbbbb/training")["problem"] == ""
    record = Services(home).find("s3")
    assert record
    assert not record.alive
    assert Services(home).find("mlflow") is None


def test_a_tab_is_shown_only_if_the_run_has_it(page: PageServer, browser: Browser) -> None:
    tab = page.open(browser, "/runs/search-ccccc/trials")
    names = tab.get_by_role("navigation", name="Tabs of the run").get_by_role("link")
    expect(names.filter(has_text="Trials")).to_have_count(1)
    for absent in ("Training", "Curves", "Verdict", "Canary", "Backfill", "Cost"):
        expect(names.filter(has_text=absent)).to_have_count(0)


def test_a_lost_worker_is_named_with_its_reason_and_its_cost(
    page: PageServer, browser: Browser
) -> None:
    training_tab = read(page, "power-bbbbb/training")
    training = training_tab["trainings"][0]
    assert "1 worker was lost (connection closed)" in training["losses"]
    assert training["workers_lost"] == 1
    lane = next(lane for lane in training["lanes"] if lane["worker"] == "worker-1")
    assert [mark["kind"] for mark in lane["marks"]] == ["joined", "lost"]
    assert [item["members"] for item in training["generations"]] == [2, 1]

    tab = page.open(browser, "/runs/power-bbbbb/training")
    expect(tab.get_by_text("1 worker was lost")).to_be_visible()
    expect(tab.get_by_role("img", name="worker-1: trained")).to_be_visible()


def test_curves_of_two_runs_are_drawn_over_one_another(page: PageServer) -> None:
    tab = read(page, "power-bbbbb/curves?with=power-aaaaa&scale=log")
    loss = next(chart for chart in tab["charts"] if chart["title"] == "loss")
    assert [line["name"] for line in loss["series"]] == ["power-bbbbb train", "power-aaaaa train"]
    assert loss["series"][0]["points"][0] == [1.0, 1.0]
    assert loss["is_logarithmic"]
    assert "steps per second" in [chart["title"] for chart in tab["charts"]]


@pytest.mark.parametrize(
    "query",
    ["scale=cubic", "with=search-ccccc", "with=..%2F..", "with=nothing"],
)
def test_an_address_with_another_run_or_scale_is_rejected(page: PageServer, query: str) -> None:
    answer = page.get(f"/runs/power-bbbbb/curves?{query}")
    assert answer.status_code == 400
    assert "must be one of" in answer.json()["error"] or "choose one of" in answer.json()["error"]


def test_the_verdict_says_by_how_much_the_new_model_is_worse(page: PageServer) -> None:
    (evaluation,) = read(page, "power-bbbbb/verdict")["evaluations"]
    assert evaluation["headline"] == (
        "Not released, the current model stays: the new model is worse than the champion"
        " (version 3) by 0.5000 kWh rmse (95% interval -0.7000 to -0.3000)."
    )
    champion, baseline = evaluation["intervals"]
    assert (champion["gain"], champion["low"], champion["high"]) == (-0.5, -0.7, -0.3)
    assert baseline["gain"] == 1.5
    assert [(rule["text"], rule["is_met"], rule["margin"]) for rule in evaluation["rules"]] == [
        ("rmse 2.5000, maximum 3", True, "0.5000 better than required"),
        ("share 0.800, minimum 0.7", True, "0.100 better than required"),
        (
            "worse than the champion by at most 0.1 (gate.tolerance)",
            False,
            "0.4000 worse than required",
        ),
    ]
    assert [family["name"] for family in evaluation["families"]] == ["trees", "linear"]
    assert evaluation["rows"] == 1200


def test_changes_since_the_last_run_are_listed_with_the_cached_steps(page: PageServer) -> None:
    tab = read(page, "power-bbbbb/changes")
    assert tab["earlier"] == "power-aaaaa"
    assert tab["words"] == "Since power-aaaaa, the code and 1 setting changed. The data is equal."
    changes = {change["name"]: change for change in tab["changes"]}
    assert changes["train.learning_rate"]["previous"] == "0.01"
    assert changes["train.learning_rate"]["now"] == "0.02"
    assert tab["cached"] == [{"step": "prepare", "run": "power-aaaaa", "earlier_step": "prepare"}]

    first_page = read(page, "power-aaaaa/changes")
    assert first_page["words"] == "This is the first run of power."


def test_the_best_trial_is_marked_and_the_failed_one_explained(page: PageServer) -> None:
    tab = read(page, "search-ccccc/trials")
    assert tab["words"].startswith("Trial 1 is the best: loss 0.3 with train.learning_rate 0.02.")
    states = {trial["number"]: trial["state"] for trial in tab["trials"]}
    assert states == {1: "trained to the end", 0: "stopped early", 2: "failed"}
    assert [(rung["trials"], rung["failed"]) for rung in tab["rungs"]] == [(3, 1), (1, 0)]
    assert [round(rung["best"], 9) for rung in tab["rungs"]] == [0.4, 0.3]


def test_the_weeks_of_a_backfill_are_listed_with_their_results(page: PageServer) -> None:
    tab = read(page, "weekly-1-abc/weeks")
    assert [(week["run"], week["gate"]) for week in tab["weeks"]] == [
        ("weekly-0-abc", "release"),
        ("weekly-1-abc", "keep"),
    ]
    assert [week["is_this"] for week in tab["weeks"]] == [False, True]
    assert tab["charts"][0]["series"][0]["points"] == [[0.0, 2.0], [7.0, 3.0]]


def test_a_canary_says_why_it_was_rolled_back(page: PageServer) -> None:
    tab = read(page, "served-ddddd/canary")
    assert tab["words"].startswith("Version 4 was rolled back: version 4 with 25 %")
    assert [step["percent"] for step in tab["steps"]] == [5, 25]
    assert tab["steps"][1]["candidate"]["requests"] == 100
    assert tab["steps"][1]["champion"]["errors"] is None
    assert tab["planned"] == [5, 25, 100]


def test_a_running_training_is_updated_on_the_screen(
    page: PageServer, home: Path, browser: Browser
) -> None:
    """The ledger changes, while the journal of the run does not."""
    name = "power-eeeee"
    cluster = LocalCluster(home)
    cluster.services.start("s3")
    try:
        record_run(home, name, {"name": "power"}, phase="Running", trainings=["train"])
        record_events(cluster.store(), name, "train", EVENTS[:5])
        tab = page.open(browser, f"/runs/{name}/training")
        expect(tab.get_by_text("Nothing was lost")).to_be_visible()
        record_events(cluster.store(), name, "train", EVENTS[5:])
        expect(tab.get_by_text("1 worker was lost (connection closed)")).to_be_visible()
    finally:
        cluster.services.down()
        shutil.rmtree(home / "runs" / name)
