"""Tests of the logs of a run: the end of a log, its pages, the search, the first error, and new
lines of a running step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, expect

from argolocal.page.log_files import LocalLog
from argolocal.page.logs.reading import (
    PAGE_BYTES,
    find_previous_page,
    read_end,
    read_page,
    search,
    split_lines,
)
from argolocal.page.logs.stream import MAX_EVENT_BYTES, read_new_lines
from tests.argolocal.page.conftest import MARKUP
from tests.argolocal.page.running import RunningRun, start_run
from tests.browser import PageServer, start_page
from tests.ports import free_port

RUN = "/runs/bad-run"
LINES = 10_000


@pytest.fixture(scope="module")
def big_log(home: Path, page: PageServer) -> str:
    """Add a log of several pages to a run, as a pod of a job would. Return the name of the pod."""
    name = "bad-run-first-worker-0"
    lines = [
        f"step {number} loss {number / 7:.3f} of a training that says much"
        for number in range(LINES)
    ]
    lines[5_000] = "Traceback (most recent call last):"
    lines[7_500] = "\x1b[31mNeedle\x1b[0m in red, \x1b[1mÜber\x1b[0m all"
    (home / f"runs/bad-run/logs/{name}.log").write_text("\n".join(lines) + "\n")
    return name


def get_tab(page: PageServer, query: str = "", tab: str = "logs") -> Any:
    answer = page.get(f"{RUN}/{tab}?{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def get_view(page: PageServer, query: str) -> Any:
    return get_tab(page, query)["views"][0]


def test_the_failed_step_is_shown_first(page: PageServer) -> None:
    logs = get_tab(page)
    assert logs["views"][0]["step"] == "second"
    assert [line["text"] for line in logs["views"][0]["lines"]] == [
        "about to fail",
        f"error: {MARKUP}",
    ]
    assert {choice["step"] for choice in logs["choices"]} >= {"first", "second"}


def test_a_log_opens_at_its_end_and_all_its_parts_can_be_reached(
    page: PageServer, big_log: str
) -> None:
    shown = get_view(page, f"pod={big_log}")
    assert shown["lines"][-1]["text"].startswith(f"step {LINES - 1} ")
    assert shown["lines"][-1]["number"] == LINES
    assert shown["is_end"]

    numbers = [line["number"] for line in shown["lines"]]
    while shown["older_page"]:
        shown = page.get(shown["older_page"]).json()["views"][0]
        numbers = [line["number"] for line in shown["lines"]] + numbers
    assert sorted(set(numbers)) == list(range(1, LINES + 1))

    numbers = [line["number"] for line in shown["lines"]]
    while shown["newer_page"]:
        shown = page.get(shown["newer_page"]).json()["views"][0]
        numbers += [line["number"] for line in shown["lines"]]
    assert numbers == list(range(1, LINES + 1))


def test_the_first_error_is_shown_with_the_lines_around_it(page: PageServer, big_log: str) -> None:
    shown = get_view(page, f"pod={big_log}&mark=error")
    marked_line = next(line for line in shown["lines"] if line["is_marked"])
    assert (marked_line["number"], marked_line["is_error"]) == (5_001, True)
    assert shown["lines"][0]["number"] < 5_001 < shown["lines"][-1]["number"]

    pods = [choice["pod"] for choice in get_tab(page)["choices"] if choice["step"] == "first"]
    quiet_pod = next(pod for pod in pods if "worker" not in pod)
    assert get_view(page, f"pod={quiet_pod}&mark=error")["missing_error"]


def test_a_search_ignores_case_and_colours_and_counts_further_matches(
    page: PageServer, big_log: str
) -> None:
    for text in ("needle IN", "über ALL"):
        found = get_tab(page, f"pod={big_log}&find={quote(text)}")["search"]
        assert [line["match"]["number"] for line in found["lines"]] == [7_501], text
        marked = page.get(found["lines"][0]["address"].partition("#")[0]).json()["views"][0]
        assert next(line["number"] for line in marked["lines"] if line["is_marked"]) == 7_501

    found = get_tab(page, "find=LOSS")["search"]
    assert len(found["lines"]) == 200
    assert len(found["lines"]) + found["more"] == LINES - 2


def test_a_browser_goes_from_a_match_to_its_line(
    page: PageServer, big_log: str, browser: Browser
) -> None:
    tab = page.open(browser, f"{RUN}/logs?pod={big_log}")
    expect(tab.get_by_text(f"step {LINES - 1} ")).to_be_in_viewport()
    tab.get_by_label("Text").fill("needle")
    tab.get_by_role("button", name="Search").click()
    tab.get_by_role("link", name="line 7,501").click()
    expect(tab.locator("#marked")).to_be_in_viewport()
    expect(tab.locator("#marked")).to_contain_text("Needle in red")
    tab.go_back()
    expect(tab.locator("#marked")).to_have_count(0)


def test_two_logs_are_shown_side_by_side(page: PageServer, big_log: str, browser: Browser) -> None:
    tab = page.open(browser, f"{RUN}/logs", viewport={"width": 1280, "height": 800})
    row = tab.get_by_role("row", name=big_log)
    row.get_by_role("link", name="next to the others").click()
    regions = tab.locator(".log")
    expect(regions).to_have_count(2)
    # read all positions in one call, because the page may scroll between two calls
    tops = regions.evaluate_all("logs => logs.map(log => log.getBoundingClientRect().top)")
    assert tops[0] == tops[1]

    tab.locator(".log-view").nth(1).get_by_role("link", name="Start").click()
    expect(tab.locator(".log").nth(1)).to_contain_text("step 0 ")
    expect(tab.locator(".log").nth(0)).to_contain_text("about to fail")


def test_a_log_that_does_not_belong_to_the_run_is_refused(page: PageServer) -> None:
    for name in ("nothing", "../journal", "..%2fjournal", "%00", "a" * 5000):
        assert page.get(f"{RUN}/logs?pod={name}").status_code == 400, name
        assert page.get(f"{RUN}/log-events?pod={name}").status_code == 404, name
        assert page.get(f"{RUN}/logs/{name}").status_code in (400, 404), name
    for query in ("offset=x", "offset=-1", "mark=1e9", f"offset={'9' * 40}"):
        pod = get_tab(page)["views"][0]["pod"]
        assert page.get(f"{RUN}/logs?pod={pod}&{query}").status_code == 400, query


def test_a_log_is_downloaded_as_plain_text(page: PageServer, big_log: str, home: Path) -> None:
    answer = page.get(f"{RUN}/logs/{big_log}")
    assert answer.content == (home / f"runs/bad-run/logs/{big_log}.log").read_bytes()
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["content-disposition"] == f'attachment; filename="{big_log}.log"'
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_markup_control_characters_and_invalid_text_are_shown_as_text(
    home: Path, page: PageServer, browser: Browser
) -> None:
    name = "bad-run-first-worker-1"
    log_text = f"{MARKUP}\n\x1b[31mred\x1b[0m\x07\n1%\r50%\r100%\n\xff\xfe\n{'x' * 5000}\n"
    (home / f"runs/bad-run/logs/{name}.log").write_bytes(log_text.encode("latin-1"))
    lines = get_view(page, f"pod={name}")["lines"]
    assert [line["text"] for line in lines[:4]] == [MARKUP, "red\\u0007", "100%", "��"]
    assert (len(lines[4]["text"]), lines[4]["cut"]) == (2000, 3000)

    tab = page.open(browser, f"{RUN}/logs?pod={name}")
    expect(tab.locator(".log")).to_contain_text(MARKUP)
    assert tab.title().startswith("bad-run")


@given(
    st.lists(st.sampled_from(["", "a", "é" * 9, "x" * 3 * PAGE_BYTES, "error: b"]), max_size=8),
    st.integers(0, 8 * PAGE_BYTES),
)
def test_every_part_of_a_log_has_whole_lines_and_leads_to_the_next_part(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], offset: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.log"
    path.write_text("\n".join(texts))
    log = LocalLog("a", path)
    log_bytes = path.read_bytes()

    parts = [read_page(log, offset)]
    while parts[-1].end < len(log_bytes):
        parts.append(read_page(log, parts[-1].end))
    assert log_bytes[parts[0].start :] == b"".join(part.data for part in parts)

    end = read_end(log)
    while end.start:
        previous_page = read_page(log, find_previous_page(log, end.start))
        assert (
            previous_page.start < end.start <= previous_page.end
            or len(max(texts, key=len)) > PAGE_BYTES
        )
        end = previous_page

    for part in parts:
        lines = split_lines(part, 1)
        texts_of_lines = {
            line.offset: line.text.encode() for line in lines if "\ufffd" not in line.text
        }
        assert all(log_bytes.startswith(text, start) for start, text in texts_of_lines.items())
    assert len(search(log, "ERROR").lines) == texts.count("error: b")


def test_a_viewer_who_is_far_behind_gets_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("0123456\n" * MAX_EVENT_BYTES + "rest")
    log = LocalLog("a", path)
    news = read_new_lines(log, 8, log.size())
    assert news
    assert news.skipped + news.lines[0].offset - news.skipped == news.lines[0].offset
    assert news.skipped == news.lines[0].offset - 8
    assert {line.text for line in news.lines} == {"0123456"}
    assert news.rest
    assert (news.rest.text, news.end) == ("rest", 8 * MAX_EVENT_BYTES)


@pytest.fixture(scope="module")
def live_run(home: Path) -> Iterator[RunningRun]:
    with start_run(home, "live-run") as run:
        yield run


def test_new_lines_appear_and_a_user_who_has_scrolled_up_stays(
    live_run: RunningRun, page: PageServer, browser: Browser
) -> None:
    live_run.print("".join(f"line {number}\n" for number in range(200)) + "half a li")
    tab = page.open(browser, f"/runs/{live_run.name}/logs")
    region = tab.locator(".log")
    expect(region).to_contain_text("half a li")
    live_run.print("ne\nlast\n")
    expect(tab.get_by_text("last", exact=True)).to_be_in_viewport(timeout=1000)
    expect(tab.get_by_text("half a line", exact=True)).to_have_count(1)
    assert region.locator(".line-number").last.text_content() == "202"

    region.evaluate("region => { region.scrollTop = -1000 }")
    button = tab.get_by_role("button", name="Follow")
    expect(button).to_have_attribute("aria-pressed", "false")
    first = "region => document.elementFromPoint(region.getBoundingClientRect().x + 80, region.getBoundingClientRect().y + 30).textContent"
    line = region.evaluate(first)
    live_run.print("another\n" * 30)
    expect(button).to_have_text("Follow (30 new lines)")
    assert region.evaluate(first) == line

    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(tab.get_by_text("another", exact=True).last).to_be_in_viewport()


@pytest.mark.slow
def test_no_line_is_lost_or_repeated_when_the_server_starts_again(
    home: Path, browser: Browser
) -> None:
    port = ("--port", str(free_port()))
    with (
        start_run(home, "restart-run") as run,
        start_page(home, "argolocal", *port) as server,
    ):
        run.print("first\n")
        tab = server.open(browser, f"/runs/{run.name}/logs")
        expect(tab.get_by_text("first", exact=True)).to_be_visible()
        server.process.kill()
        server.process.wait()
        run.print("second\n")
        with start_page(home, "argolocal", *port):
            expect(tab.get_by_text("second", exact=True)).to_be_visible(timeout=20_000)
            run.print("third\n")
            expect(tab.get_by_text("third", exact=True)).to_be_visible()
            assert tab.locator(".line-text").all_text_contents() == ["first", "second", "third"]


def test_new_lines_continue_after_the_last_event(live_run: RunningRun, page: PageServer) -> None:
    address = f"{page.root}/runs/{live_run.name}/log-events?pod={live_run.log.stem}&from=0"
    headers = {"Authorization": f"Bearer {page.token}", "Last-Event-ID": "7"}
    live_run.print("line 0\nline 1\n")
    with httpx.stream("GET", address, headers=headers) as stream:
        data = next(line for line in stream.iter_lines() if line.startswith("data: "))
    assert '"offset":0' not in data.replace(" ", "")
