"""Send HTTP and HTTPS requests as Go's client does. Redirections do not leak credentials.

    with request("https://example.com/a", headers=[("Authorization", "...")]) as response: ...

After a redirection to another host that is not a subdomain of the first host, LOGIN_HEADERS are no
longer sent. Ports are not compared. Source: Go's net/http/client.go (redirectBehavior,
makeHeadersCopier, shouldCopyHeaderOnRedirect, refererForURL).
"""

import base64
import ipaddress
import re
import ssl
import string
import urllib.parse
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException, HTTPResponse
from typing import Any, BinaryIO
from urllib.parse import SplitResult

from argolocal.common.addresses import format_address, hide_values

MAX_REDIRECTS = 10
LOGIN_HEADERS = (
    "authorization",
    "www-authenticate",
    "cookie",
    "cookie2",
    "proxy-authorization",
    "proxy-authenticate",
)
BODY_HEADERS = ("content-encoding", "content-language", "content-location", "content-type")
REDIRECTS = (301, 302, 303, 307, 308)
PASSWORD_PATTERN = re.compile(r"(//[^/?#@:]*:)[^/?#]*@")
Headers = Iterable[tuple[str, str]]


class WebError(Exception):
    """A request failed or its response was incomplete. `url`: URL that failed, without its
    password. `cause`: exception or text."""

    def __init__(self, url: str, cause: object) -> None:
        super().__init__(f"{url}: {cause}")
        self.url = url
        self.cause = cause


def request(
    url: str,
    method: str = "GET",
    headers: Headers = (),
    body: bytes | None = None,
    timeout: float | None = None,
    verify: bool = True,
    proxies: bool = True,
    leave_host: bool = True,
) -> HTTPResponse:
    """Send a request and return the response, even if its status is an error. Raises WebError.

    `leave_host`: True follows redirections to other hosts; False returns the redirection itself as
    the response.
    """
    context = None
    if not verify:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE

    first_parts = _split(url)
    referer = ""
    remaining_headers = {name.lower(): (name, value) for name, value in headers}

    for _ in range(MAX_REDIRECTS + 1):
        sent_headers = dict(remaining_headers.values()) | (
            {} if "referer" in remaining_headers or not referer else {"Referer": referer}
        )
        response = _send(url, method, sent_headers, body, timeout, context, proxies)

        location = response.headers.get("Location")
        if response.status not in REDIRECTS or not location:
            return response

        previous_url = url
        url = _redirect_target(url, location)
        previous_parts = _split(previous_url)

        parts = _split(url)
        if not leave_host and parts.hostname != previous_parts.hostname:
            return response

        response.close()
        if _is_same_or_subdomain(parts, first_parts):
            dropped_headers = ()
        else:
            dropped_headers = LOGIN_HEADERS

        if response.status < 307:
            method = method if method in ("GET", "HEAD") else "GET"
            body = None
            dropped_headers += BODY_HEADERS

        if urllib.parse.urlsplit(_quote(location)).netloc:
            dropped_headers += ("host",)

        remaining_headers = {
            name: header
            for name, header in remaining_headers.items()
            if name not in dropped_headers
        }
        if (previous_parts.scheme, parts.scheme) != ("https", "http"):
            referer = _without_user(previous_url)
        else:
            referer = ""

    raise WebError(hide_password(url), f"stopped after {MAX_REDIRECTS} redirects")


def copy(response: HTTPResponse, file: BinaryIO, max_bytes: int) -> None:
    """Write the body of a response to a file. Raises OSError, and WebError if the body is
    incomplete or too long."""
    size = 0
    while data := _read(response):
        size += file.write(data)
        if size > max_bytes:
            raise WebError(
                hide_password(response.url), f"the response has more than {max_bytes / 1e6:,.0f} MB"
            )


def _read(response: HTTPResponse) -> bytes:
    try:
        data = response.read(1 << 20)
        if not data and response.length:
            raise WebError(hide_password(response.url), "unexpected EOF")
    except (OSError, ValueError, HTTPException) as error:
        raise WebError(hide_password(response.url), error) from error
    return data


def _send(
    url: str,
    method: str,
    headers: dict[str, str],
    body: bytes | None,
    timeout: float | None,
    context: ssl.SSLContext | None,
    proxies: bool,
) -> HTTPResponse:
    parts = _split(url)
    if parts.username is not None and not any(name.lower() == "authorization" for name in headers):
        user, password = (
            urllib.parse.unquote(text or "") for text in (parts.username, parts.password)
        )
        headers = headers | {
            "Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        }

    # urllib's default opener would also open files, follow redirections, and raise errors for some
    # statuses
    opener = urllib.request.OpenerDirector()
    handlers: list[Any] = [
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=context),
    ]
    if proxies and not _is_local(parts.hostname or ""):
        handlers.append(urllib.request.ProxyHandler())

    for handler in handlers:
        opener.add_handler(handler)

    try:
        http_request = urllib.request.Request(
            _without_user(url), body, {"User-Agent": "Go-http-client/1.1"}, method=method
        )
        for name, value in headers.items():
            http_request.add_header(name, value)

        return opener.open(http_request, timeout=timeout)
    except (OSError, ValueError, HTTPException) as error:
        raise WebError(hide_password(url), getattr(error, "reason", error)) from error


def _redirect_target(url: str, location: str) -> str:
    try:
        return urllib.parse.urljoin(url, _quote(location))
    except ValueError as error:
        raise WebError(
            hide_password(url), f"failed to parse Location header {location!r}: {error}"
        ) from None


def _quote(location: str) -> str:
    return urllib.parse.quote(location, safe=string.punctuation, encoding="latin-1")


def _split(url: str) -> SplitResult:
    """Parse a web address. Raises WebError for an address that is neither http nor https."""
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError:
        # do not show the error, because it contains the port, which may be part of a password
        raise WebError(hide_password(url), "invalid host or port") from None
    if parts.scheme not in ("http", "https"):
        raise WebError(hide_password(url), f'unsupported protocol scheme "{parts.scheme}"')
    if not parts.hostname:
        raise WebError(hide_password(url), "no Host in request URL")
    return parts


def _is_same_or_subdomain(parts: SplitResult, first_parts: SplitResult) -> bool:
    """Return True if the host of `parts` is the host of `first_parts` or a subdomain of it. IPv6
    addresses have no subdomains."""
    host = parts.hostname or ""
    parent = first_parts.hostname or ""
    return host == parent or (not set(":%") & set(host) and host.endswith(f".{parent}"))


def _is_local(host: str) -> bool:
    """Return True if Go's client never uses a proxy for this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_user(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def hide_password(url: str) -> str:
    """Replace the password in a URL by ***, as Go does. Also hide the query, which Go would
    show."""
    shown_url = PASSWORD_PATTERN.sub(r"\1***@", url)
    if shown_url == url:
        return format_address(url)
    return hide_values(shown_url)
