"""What servers saw since the last look is counted once, also if one of them began anew."""

from typing import Any

import pytest

from rekindle.errors import RekindleError
from rekindle.release.watch.scrape import look, since


def seen(rows: int, *scores: int) -> dict[str, Any]:
    return {"rows": rows, "scores": {"p": list(scores)}, "features": {}}


def test_all_servers_count_and_only_what_is_new() -> None:
    before = {"a since 1": seen(10, 4, 6), "b since 1": seen(5, 5, 0), "gone since 1": seen(7, 7, 0)}
    now = {"a since 1": seen(13, 5, 8), "b since 2": seen(2, 1, 1), "c since 3": seen(1, 0, 1)}  # b began anew
    assert since(now, before) == seen(3 + 2 + 1, 1 + 1 + 0, 2 + 1 + 1)


def test_servers_that_are_not_there_are_an_error_that_says_so() -> None:
    with pytest.raises(RekindleError, match="has no servers"):
        look("http://nobody.invalid:8080", "1")
    with pytest.raises(RekindleError, match="does not tell what it has seen"):
        look("http://127.0.0.1:9", "1")
