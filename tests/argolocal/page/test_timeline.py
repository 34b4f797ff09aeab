"""The timeline of a run shows how long each step waited, started and ran."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.argolocal.page.conftest import make_page_workflow, run_workflow
from tests.browser import PageServer, start_page


@pytest.fixture(scope="module")
def timeline_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A page of a run with a loop, retries and a skipped step."""
    home = tmp_path_factory.mktemp("timeline") / "home"
    flaky = {
        "name": "flaky",
        "retryStrategy": {"limit": 2},
        "container": {"image": "bash:5", "command": ["bash", "-c", "sleep 0.1; exit 1"]},
    }
    nap = {"name": "nap", "container": {"image": "bash:5", "command": ["sleep", "0.2"]}}
    manifest = make_page_workflow(
        "slow-run",
        [
            {"name": "few", "template": "nap", "withSequence": {"count": "3"}},
            {"name": "many", "template": "say", "withSequence": {"count": "12"}},
            {"name": "never", "template": "say", "when": "1 == 2"},
            {"name": "flaky", "template": "flaky", "depends": "few && many"},
        ],
        parallelism=1,
    )
    manifest["spec"]["templates"] += [flaky, nap]
    run_workflow(home, manifest)
    with start_page(home) as server:
        yield server


def get_rows(page: PageServer, query: str = "") -> dict[str, Any]:
    timeline = page.get(f"/runs/slow-run/timeline{query}").json()
    return {row["name"]: row for row in timeline["rows"]}


def test_a_step_that_waits_for_its_turn_is_told_from_one_that_runs(
    timeline_page: PageServer,
) -> None:
    first_rows = get_rows(timeline_page)
    assert (
        first_rows["few(0:0)"]["waiting_seconds"] < 0.2 <= first_rows["few(2:2)"]["waiting_seconds"]
    )
    assert all(
        0.2 <= first_rows[f"few({index}:{index})"]["running_seconds"] < 2 for index in range(3)
    )


def test_every_attempt_of_a_retried_step_has_a_bar(timeline_page: PageServer) -> None:
    flaky = get_rows(timeline_page)["flaky"]
    bars = [bar for bar in flaky["bars"] if bar["stage"] == "running"]
    assert [bar["phase"] for bar in bars] == ["Failed"] * 3
    assert flaky["attempts"] == 3
    assert all(
        first_bar["x"] + first_bar["width"] <= second_bar["x"] + 0.01
        for first_bar, second_bar in pairwise(bars)
    )


def test_a_large_loop_is_one_row_that_opens(timeline_page: PageServer, browser: Browser) -> None:
    closed = get_rows(timeline_page)
    assert closed["many"]["count"] == 12
    assert "many(0:0)" not in closed
    assert {f"many({index}:{index})" for index in range(12)} <= get_rows(
        timeline_page, "?open=many"
    ).keys()
    assert closed["never"]["bars"] == []

    tab = timeline_page.open(browser, "/runs/slow-run/timeline")
    tab.get_by_role("link", name="many").click()
    expect(tab.get_by_role("row", name="(11:11)")).to_contain_text("succeeded")
    tab.get_by_role("link", name="many").click()
    expect(tab.get_by_role("row", name="(11:11)")).to_have_count(0)


def test_a_wrong_zoom_or_page_is_refused(timeline_page: PageServer) -> None:
    for query in ("zoom=3", "zoom=x", "page=-1"):
        assert timeline_page.get(f"/runs/slow-run/timeline?{query}").status_code == 400
    assert timeline_page.get("/runs/slow-run/timeline?page=99").json()["page"] == 1
