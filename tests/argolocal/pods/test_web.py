"""Tests of redirected requests: secrets are sent only to the host that they belong to, and local
files are not read."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from argolocal.pods import artifacts, web
from argolocal.pods.artifacts import ArtifactError
from argolocal.pods.kinds import http
from tests.http_server import Answer, HttpServer, Request

LOGIN = {
    "Authorization": "Bearer s3cr3t",
    "Cookie": "a=s3cr3t",
    "Proxy-Authorization": "s3cr3t",
    "X-Mine": "kept",
}


class Proxy(HttpServer):
    """A proxy for all hosts that answers by address."""

    def __init__(self) -> None:
        super().__init__(self.answer_of_address)
        # address → (HTTP status, header Location)
        self.answers: dict[str, tuple[int, str]] = {}

    def answer_of_address(self, request: Request) -> Answer:
        status, location = self.answers.get(request.path, (200, ""))
        headers = {"Location": location} if location else {}
        return Answer(status, "hello", headers)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Proxy() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        yield proxy


@pytest.mark.parametrize(
    "location, stays",
    [
        ("http://example.com/b", True),
        ("/b", True),
        ("http://example.com:8080/b", True),
        ("http://sub.example.com/b", True),
        ("http://evil.example/b", False),
        ("http://notexample.com/b", False),
        ("http://example.com.evil.example/b", False),
        ("//com/b", False),
        ("http://example.com@evil.example/b", False),
    ],
)
def test_login_headers_are_not_sent_to_another_host_after_a_redirection(
    proxy: Proxy, location: str, stays: bool
):
    proxy.answers["http://example.com/a"] = (302, location)
    with web.request("http://example.com/a", headers=LOGIN.items()) as answer:
        assert answer.read() == b"hello"
    _, first_headers = (request.headers for request in proxy.requests)
    assert first_headers["X-Mine"] == "kept"
    assert first_headers["Host"] == urlsplit(proxy.requests[1].path).netloc
    assert ("s3cr3t" in "".join(first_headers.values())) == stays
    assert stays == all(
        first_headers.get(name.capitalize()) == value for name, value in list(LOGIN.items())[:2]
    )


def test_a_header_removed_by_a_redirection_is_not_sent_again(proxy: Proxy):
    proxy.answers["http://a.example/"] = (307, "http://b.example/")
    proxy.answers["http://b.example/"] = (307, "http://a.example/b")
    web.request("http://a.example/", headers=LOGIN.items()).close()
    assert ["Authorization" in request.headers for request in proxy.requests] == [
        True,
        False,
        False,
    ]


def test_the_password_of_an_address_is_sent_to_its_host_only(proxy: Proxy):
    proxy.answers["http://a.example/"] = (302, "http://b.example/")
    web.request("http://me:s3cr3t@a.example/").close()
    assert [request.headers["Authorization"] for request in proxy.requests] == [
        "Basic bWU6czNjcjN0",
        None,
    ]
    assert proxy.requests[1].headers["Referer"] == "http://a.example/"
    proxy.answers["http://b.example/"] = (302, "file:///etc/passwd")
    for url in ("http://me:s3cr3t@a.example/", "ftp://me:s3cr3t@a.example/"):
        with pytest.raises(web.WebError, match="unsupported protocol scheme") as caught:
            web.request(url)
        assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cr3t/x@a.example/",
        "http://:9/?X-Amz-Signature=s3cr3t",
        "ftp://a.example/?sig=s3cr3t",
        "//me:s3cr3t@a.example/",
        "ftp://me:pw@a.example/?sig=s3cr3t",
    ],
)
def test_the_error_of_a_wrong_address_shows_no_secret(url: str):
    with pytest.raises(web.WebError) as caught:
        web.request(url)
    assert "s3cr3t" not in str(caught.value)


def test_the_error_of_a_failed_request_shows_no_signature():
    with pytest.raises(web.WebError, match=r"http://127\.0\.0\.1:9/a…: .*refused") as caught:
        web.request("http://127.0.0.1:9/a?X-Amz-Signature=s3cr3t")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "method, status, next_method, body",
    [
        *(("POST", status, "GET", "") for status in (301, 302, 303)),
        *(("PUT", status, "PUT", "hi") for status in (307, 308)),
        *(("HEAD", status, "HEAD", "") for status in (302, 307)),
    ],
)
def test_a_redirection_changes_the_method_as_in_go(
    proxy: Proxy, method: str, status: int, next_method: str, body: str
):
    proxy.answers["http://a.example/"] = (status, "/b")
    sent = None if method == "HEAD" else b"hi"
    web.request("http://a.example/", method, [("Content-Type", "text/plain")], sent).close()
    second_request = proxy.requests[1]
    assert second_request.method == next_method
    assert second_request.body.decode() == body
    assert ("Content-Type" in second_request.headers) == (status >= 307)


def test_the_number_of_redirections_is_limited_and_each_needs_an_address(proxy: Proxy):
    proxy.answers["http://a.example/"] = (302, "/")
    with pytest.raises(web.WebError, match=r"http://a\.example/: stopped after 10 redirects"):
        web.request("http://a.example/")
    assert len(proxy.requests) == 11
    proxy.answers["http://a.example/"] = (302, "")
    assert web.request("http://a.example/").status == 302
    proxy.answers["http://a.example/"] = (302, "http://[")
    with pytest.raises(web.WebError, match="failed to parse Location header"):
        web.request("http://a.example/")
    proxy.answers["http://a.example/"] = (302, "http://[::1\x1825.a.example]/")
    with pytest.raises(web.WebError, match="control characters"):
        web.request("http://a.example/")


@pytest.mark.parametrize("scheme", ["file", "ftp", "data", "FILE", "gopher", ""])
def test_neither_an_http_artifact_nor_an_http_template_reads_a_local_file(
    tmp_path: Path, proxy: Proxy, scheme: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ftp_proxy", proxy.url)
    monkeypatch.setenv("file_proxy", proxy.url)
    (tmp_path / "secret").write_text("precious")
    url = f"{scheme}://{tmp_path}/secret"
    proxy.answers["http://a.example/"] = (302, url)

    for address in (url, "http://a.example/") if scheme else (url,):
        phase, message, outputs = http.run_http_template({"url": address}, lambda name: {})
        assert phase == "Failed"
        assert outputs is None
        assert message.lower() == f'get "{url}": unsupported protocol scheme "{scheme}"'.lower()

        with pytest.raises(
            ArtifactError,
            match=f'artifact a failed to load: .*unsupported protocol scheme "{scheme.lower()}"',
        ):
            artifacts.load({"name": "a", "http": {"url": address}}, tmp_path / "in", lambda _: None)

    assert {request.path for request in proxy.requests} <= {"http://a.example/"}
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx",
    ],
)
@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cr3t@a.example/x",
        "http://a.example:x/",
        "http://[/",
        "http:///x",
        "http://a.example/\x01",
    ],
)
def test_an_invalid_answer_or_address_fails_only_its_node(
    tmp_path: Path, answer: bytes, url: str, monkeypatch: pytest.MonkeyPatch
):
    with HttpServer(lambda _: answer) as server:
        monkeypatch.setenv("http_proxy", server.url)
        phase, message, _ = http.run_http_template({"url": url}, lambda name: {})
        assert phase == "Failed"
        assert message.startswith('Get "http:')
        assert "s3cr3t" not in message

        with pytest.raises(ArtifactError, match="artifact a failed to load: http:"):
            artifacts.load({"name": "a", "http": {"url": url}}, tmp_path / "in", lambda _: None)


def test_a_probe_follows_redirections_only_within_its_host(proxy: Proxy):
    proxy.answers["http://a.example/"] = (302, "/b")
    proxy.answers["http://a.example/b"] = (302, "http://b.example/")
    assert web.request("http://a.example/", headers=LOGIN.items(), leave_host=False).status == 302
    assert [request.path for request in proxy.requests] == [
        "http://a.example/",
        "http://a.example/b",
    ]


def test_an_oversized_answer_fails_only_its_node(proxy: Proxy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 4)
    phase, message, _ = http.run_http_template(
        {"url": "http://me:s3cr3t@a.example/"}, lambda name: {}
    )
    assert phase == "Failed"
    assert message.startswith('Get "http://a.example/": the response has more than')
