"""Requests since the last scrape are counted once, even if a server restarted."""

from collections.abc import Iterator
from typing import Any

import pytest

from rekindle.errors import ConfigError, RekindleError
from rekindle.release.watch import scrape as module
from rekindle.release.watch.scores import SCORE_METRIC
from rekindle.release.watch.scrape import ServerWatch, scrape_counts, subtract_counts
from tests.http_server import Answer, HttpServer, Request


class Pods(HttpServer):
    """The `/metrics` pages of two servers, by address; an address without a page is answered with
    503."""

    def __init__(self) -> None:
        super().__init__(self.metrics, "0.0.0.0")
        self.pages: dict[str, str] = {}
        self.endpoint = f"http://pods:{self.port}"

    def metrics(self, request: Request) -> Answer:
        page = self.pages.get(request.headers["Host"].partition(":")[0])
        if page is None:
            return Answer(503)
        return Answer(200, page)


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pods]:
    monkeypatch.setenv("PODS_SERVICE_ENDPOINTS", "127.0.0.1,127.0.0.2")
    with Pods() as server:
        yield server


def make_metrics_page(requests: int, start: float = 1) -> str:
    return (
        f"process_start_time_seconds {start}\nrekindle_instances_sum {requests}\n"
        f'rekindle_requests_total{{version="7",status="200"}} {requests}\n'
    )


def make_counts(rows: int, *scores: int) -> dict[str, Any]:
    return {"rows": rows, "scores": {"p": list(scores)}, "features": {}}


def test_the_increments_of_all_servers_are_added() -> None:
    earlier = {
        "a since 1": make_counts(10, 4, 6),
        "b since 1": make_counts(5, 5, 0),
        "gone since 1": make_counts(7, 7, 0),
    }
    # b restarted
    now = {
        "a since 1": make_counts(13, 5, 8),
        "b since 2": make_counts(2, 1, 1),
        "c since 3": make_counts(1, 0, 1),
    }
    assert subtract_counts(now, earlier) == make_counts(3 + 2 + 1, 1 + 1 + 0, 2 + 1 + 1)


def test_scraping_missing_or_unreachable_servers_raises_an_error() -> None:
    with pytest.raises(RekindleError, match="does not have servers"):
        scrape_counts("http://nobody.invalid:8080", "1", {})
    with pytest.raises(RekindleError, match="cannot be read"):
        scrape_counts("http://127.0.0.1:9", "1", {"http://127.0.0.1:9 since 1": make_counts(1, 1)})


def test_the_password_of_an_endpoint_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REKINDLE_ENDPOINT", "http://ann:hunter2@127.0.0.1:9")
    with pytest.raises(ConfigError, match="REKINDLE_ENDPOINT") as error:
        scrape_counts("http://pods:8080", "1", {})
    assert "hunter2" not in str(error.value)


def test_a_server_that_one_check_cannot_read_is_not_counted_twice(pods: Pods) -> None:
    seen = dict[str, Any]()
    rows = []
    for first_count, second_count in ((2, 2), (3, 0), (4, 6)):  # with 0, the server does not answer
        pods.pages = (
            {
                "127.0.0.1": make_metrics_page(first_count),
                "127.0.0.2": make_metrics_page(second_count),
            }
            if second_count
            else {"127.0.0.1": make_metrics_page(first_count)}
        )
        now = scrape_counts(pods.endpoint, "7", seen)
        rows.append(subtract_counts(now, seen)["rows"])
        seen = now
    assert rows == [4, 1, 1 + 4]


def test_requests_before_the_watch_do_not_count_if_a_server_misses_its_first_scrape(
    pods: Pods,
) -> None:
    pods.pages = {"127.0.0.1": make_metrics_page(5)}
    watch = ServerWatch(pods.endpoint)
    pods.pages = {"127.0.0.1": make_metrics_page(6), "127.0.0.2": make_metrics_page(6000)}
    watch.scrape()
    pods.pages = {"127.0.0.1": make_metrics_page(8), "127.0.0.2": make_metrics_page(6001)}
    assert watch.scrape()["", "7"].requests == 3 + 1


def test_all_requests_of_a_server_that_starts_during_the_watch_count(pods: Pods) -> None:
    pods.pages = {"127.0.0.1": make_metrics_page(5)}
    watch = ServerWatch(pods.endpoint)
    pods.pages["127.0.0.2"] = make_metrics_page(7, watch.start_time + 1)
    stats = watch.scrape()["", "7"]
    assert stats.requests == 7
    assert stats.crashes == 0


def test_a_restart_is_noticed_after_a_scrape_of_the_loading_server(pods: Pods) -> None:
    pods.pages = {"127.0.0.1": make_metrics_page(5)}
    watch = ServerWatch(pods.endpoint)
    pods.pages = {"127.0.0.1": "process_start_time_seconds 2\n"}
    watch.scrape()
    pods.pages = {"127.0.0.1": make_metrics_page(1, 2)}
    watch.scrape()
    stats = watch.scrape()["", "7"]
    assert stats.requests == 1
    assert stats.crashes == 1


@pytest.mark.parametrize(
    "line",
    [
        'rekindle_requests_total{version="7"} 1',
        'rekindle_requests_total{version="7",status="200"} NaN',
        'rekindle_request_seconds_bucket{version="7"} 1',
        'rekindle_request_seconds_bucket{version="7",le="soon"} 1',
        f'{SCORE_METRIC}_bucket{{version="7",le="0.1"}} 1',
        f'{SCORE_METRIC}_bucket{{version="7",output="x",le="0.1"}} 1',
        "rekindle_instances_sum +Inf",
        "process_start_time_seconds NaN",
        "rekindle_instances_sum many",
    ],
)
def test_a_server_with_malformed_metrics_is_unreadable_and_no_bug(
    pods: Pods, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pods.pages = {"127.0.0.1": f"{make_metrics_page(5)}{line}\n"}
    with pytest.raises(RekindleError, match="is the model deployed"):
        scrape_counts(pods.endpoint, "7", {})
    assert not ServerWatch(pods.endpoint).scrape()
    assert "127.0.0.1" in capsys.readouterr().err


def test_a_server_whose_data_has_an_unknown_age_is_counted(pods: Pods) -> None:
    pods.pages = {"127.0.0.1": make_metrics_page(0)}
    watch = ServerWatch(pods.endpoint)
    pods.pages = {"127.0.0.1": f"{make_metrics_page(5)}rekindle_data_age_seconds NaN\n"}
    assert watch.scrape()["", "7"].requests == 5


def test_a_watch_names_a_server_that_it_cannot_read_once(
    pods: Pods, capsys: pytest.CaptureFixture[str]
) -> None:
    pods.pages = {"127.0.0.1": make_metrics_page(0)}
    watch = ServerWatch(pods.endpoint)
    watch.scrape()
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 1
    assert "127.0.0.2" in messages[0]


def test_metrics_without_an_end_are_not_read(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", 10)
    pods.pages = {"127.0.0.1": make_metrics_page(5), "127.0.0.2": make_metrics_page(5)}
    with pytest.raises(RekindleError, match="more than 10 bytes"):
        scrape_counts(pods.endpoint, "7", {})
