"""`rekindle ui` shows the runs in the home of Rekindle, the directory of runs."""

from pathlib import Path

import httpx

from tests.browser import start_page


def test_the_page_of_an_empty_home_says_how_to_start(tmp_path: Path) -> None:
    with start_page(tmp_path / "home", "rekindle") as server:
        assert "rekindle run" in server.get("/", "text/html").text
        assert server.get("/").json()["rows"] == []


def test_with_a_name_the_page_starts_with_this_run(tmp_path: Path) -> None:
    with start_page(tmp_path / "home", "rekindle", "some-run") as server:
        assert "/runs/some-run?token=" in server.login
        answer = httpx.get(server.login)
        assert f'url={server.root}/runs/some-run"' in answer.text
