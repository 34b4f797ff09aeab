"""Requests since the last scrape are counted once, even if a server restarted."""

from typing import Any

import pytest

from rekindle.errors import RekindleError
from rekindle.release.watch.scrape import increments, scrape


def counts(rows: int, *scores: int) -> dict[str, Any]:
    return {"rows": rows, "scores": {"p": list(scores)}, "features": {}}


def test_the_increments_of_all_servers_are_added() -> None:
    earlier = {"a since 1": counts(10, 4, 6), "b since 1": counts(5, 5, 0), "gone since 1": counts(7, 7, 0)}
    now = {"a since 1": counts(13, 5, 8), "b since 2": counts(2, 1, 1), "c since 3": counts(1, 0, 1)}  # b restarted
    assert increments(now, earlier) == counts(3 + 2 + 1, 1 + 1 + 0, 2 + 1 + 1)


def test_scraping_missing_or_unreachable_servers_raises_an_error() -> None:
    with pytest.raises(RekindleError, match="does not have servers"):
        scrape("http://nobody.invalid:8080", "1")
    with pytest.raises(RekindleError, match="cannot be read"):
        scrape("http://127.0.0.1:9", "1")
