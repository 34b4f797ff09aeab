"""The details of a step: one panel shows its times, inputs, outputs, attempts and logs."""

from typing import Any
from urllib.parse import quote

import yaml
from playwright.sync_api import Browser, expect

from tests.argolocal.page.conftest import MARKUP
from tests.browser import PageServer


def get_details(page: PageServer, address: str, more: str = "", run: str = "zoo") -> dict[str, Any]:
    answer = page.get(f"/runs/{run}/overview?node={quote(address)}{more}")
    assert answer.status_code == 200, answer.text
    return answer.json()["node"]


def test_a_step_shows_inputs_outputs_and_its_manifest(zoo_page: PageServer) -> None:
    node = get_details(zoo_page, "nested.in-a")
    assert node["inputs"] == [{"name": "text", "value": "x"}]
    assert {"name": "exit code", "value": "0"} in node["outputs"]
    assert node["pod"].startswith("zoo-echo-")
    assert node["host"]
    task, template = node["manifest"].split("\ntemplate:")
    assert yaml.safe_load(task)["task"]["name"] == "in-a"
    assert yaml.safe_load(f"template:{template}")["template"]["name"] == "echo"


def test_a_retried_step_shows_its_attempts(zoo_page: PageServer) -> None:
    first_attempt, second_attempt = get_details(zoo_page, "flaky")["attempts"]
    assert (first_attempt["phase"], second_attempt["phase"]) == ("Failed", "Succeeded")
    assert first_attempt["message"] == "main: Error (exit code 1)"
    assert get_details(zoo_page, "flaky(0)")["name"] == "flaky"


def test_a_skipped_step_shows_the_condition_that_was_not_true(zoo_page: PageServer) -> None:
    node = get_details(zoo_page, "tails")
    assert node["unmet_condition"] == "flip.result == tails"
    assert node["condition"] == "after flip, if flip.result == tails"


def test_a_failed_item_shows_its_log(zoo_page: PageServer) -> None:
    node = get_details(zoo_page, "loop(3:3)")
    assert node["message"] == "main: Error (exit code 3)"
    assert node["log"] == ["line before", "error: three is bad"]


def test_the_items_of_a_loop_are_listed_with_failures_first(zoo_page: PageServer) -> None:
    node = get_details(zoo_page, "loop")
    assert node["counts"] == "4 of 5 succeeded, 1 failed"
    assert [item["label"] for item in node["items"]] == ["3", "0", "1", "2", "4"]
    assert get_details(zoo_page, "groups")["counts"] == "all 3 succeeded"


def test_a_step_that_has_not_started_has_details(zoo_page: PageServer) -> None:
    node = get_details(zoo_page, "last.deeper")
    assert node["phase"] == "Omitted"
    assert node["condition"] == "after deep"
    assert "template" in node["manifest"]


def test_markup_in_the_name_of_a_step_is_text(zoo_page: PageServer) -> None:
    address = f"groups[1].each(1:{MARKUP})"
    assert get_details(zoo_page, address)["inputs"] == [{"name": "text", "value": "x"}]
    html = zoo_page.get(f"/runs/zoo/overview?node={quote(address)}", "text/html").text
    assert MARKUP not in html


def test_the_panel_closes(zoo_page: PageServer, browser: Browser) -> None:
    tab = zoo_page.open(browser, "/runs/zoo?node=flip")
    expect(tab.get_by_role("heading", name="flip", exact=True)).to_be_visible()
    tab.get_by_role("link", name="Close the details").click()
    expect(tab.get_by_role("heading", name="flip", exact=True)).to_have_count(0)
