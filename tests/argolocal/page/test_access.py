"""Other users of the machine, pages of other origins and other host names get no content of the
page."""

import httpx
import pytest

from tests.browser import PageServer

PATHS = ("/", "/runs/bad-run", "/events", "/static/page.css", "/openapi.json", "/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_nothing_is_shown(page: PageServer, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer x"}, {"Cookie": "argolocal-page=x"}):
        answer = httpx.get(f"{page.root}{path}", headers=headers)
        assert answer.status_code == 401
        assert "argolocal ui" in answer.json()["error"]


@pytest.mark.parametrize("path", PATHS)
def test_another_host_name_or_origin_is_refused(page: PageServer, path: str) -> None:
    login = {"Authorization": f"Bearer {page.token}"}
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert httpx.get(f"{page.root}{path}", headers=login | headers).status_code == 403


def test_another_site_cannot_use_the_cookie_of_a_browser(page: PageServer) -> None:
    cookie = httpx.get(page.login).headers["set-cookie"]
    assert "HttpOnly; SameSite=Strict" in cookie
    headers = {"Cookie": cookie.partition(";")[0]}
    assert httpx.get(page.root, headers=headers).status_code == 200

    cross_site = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert httpx.get(page.root, headers=headers | cross_site).status_code == 401


def test_every_answer_forbids_inline_scripts_and_other_origins(page: PageServer) -> None:
    for path in ("/", "/runs/bad-run", "/nothing", "/static/page.js"):
        policy = page.get(path, "text/html").headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_the_login_leads_only_to_the_own_host(page: PageServer) -> None:
    answer = httpx.get(f"{page.root}//evil.example/?token={page.token}")
    assert f"url={page.root}//evil.example/" in answer.text
