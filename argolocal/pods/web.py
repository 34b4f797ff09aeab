"""Send HTTP and HTTPS requests as Go's client does. A redirection does not leak credentials to
another host.

    with request("https://example.com/a", headers=[("Authorization", "...")]) as response: ...

After a redirection to another host, LOGIN_HEADERS are sent only if the new host is a subdomain of
the first host. The comparison of the hosts ignores their ports. The behaviour follows Go's
net/http/client.go (redirectBehavior, makeHeadersCopier, shouldCopyHeaderOnRedirect, refererForURL).
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

from argolocal.common.addresses import format_address, hide_address_values

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
REDIRECT_CODES = (301, 302, 303, 307, 308)
PASSWORD_IN_URL = re.compile(r"(//[^/?#@:]*:)[^/?#]*@")
Headers = Iterable[tuple[str, str]]


class WebError(Exception):
    """A request has failed, or its response is incomplete. `url` is the URL of the request, without
    its password. `cause`: exception or text about the failure."""

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

    `timeout`: seconds, or None to wait for ever. `verify`: check the certificate of the server.
    `proxies`: use the proxies of the environment. `leave_host`: follow redirections to other hosts;
    with False, such a redirection itself is the response.
    """
    ssl_context = None
    if not verify:
        ssl_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ssl_context.check_hostname = False
        ssl_context.verify_mode = ssl.CERT_NONE

    first_url_parts = _split_url(url)
    referer_url = ""
    remaining_headers = {
        header_name.lower(): (header_name, header_value) for header_name, header_value in headers
    }

    for _ in range(MAX_REDIRECTS + 1):
        sent_headers = dict(remaining_headers.values())
        if referer_url and "referer" not in remaining_headers:
            sent_headers["Referer"] = referer_url

        response = _send(url, method, sent_headers, body, timeout, ssl_context, proxies)

        location = response.headers.get("Location")
        if response.status not in REDIRECT_CODES or not location:
            return response

        previous_url = url
        url = _redirect_target(url, location)
        previous_url_parts = _split_url(previous_url)

        url_parts = _split_url(url)
        if not leave_host and url_parts.hostname != previous_url_parts.hostname:
            return response

        response.close()
        if _is_same_or_subdomain(url_parts, first_url_parts):
            dropped_headers = ()
        else:
            dropped_headers = LOGIN_HEADERS

        if response.status < 307:
            method = method if method in ("GET", "HEAD") else "GET"
            body = None
            dropped_headers += BODY_HEADERS

        if urllib.parse.urlsplit(_quote_location(location)).netloc:
            dropped_headers += ("host",)

        remaining_headers = {
            lower_case_name: header
            for lower_case_name, header in remaining_headers.items()
            if lower_case_name not in dropped_headers
        }
        if (previous_url_parts.scheme, url_parts.scheme) != ("https", "http"):
            referer_url = _without_user(previous_url)
        else:
            referer_url = ""

    raise WebError(hide_password(url), f"stopped after {MAX_REDIRECTS} redirects")


def copy_body(response: HTTPResponse, file: BinaryIO, max_bytes: int) -> None:
    """Write the body of a response to a file. Raises OSError for a file that cannot be written, and
    WebError if the body is incomplete or too long."""
    written_bytes = 0
    for chunk in iter(lambda: _read_chunk(response), b""):
        written_bytes += file.write(chunk)
        if written_bytes > max_bytes:
            raise WebError(
                hide_password(response.url), f"the response has more than {max_bytes / 1e6:,.0f} MB"
            )


def _read_chunk(response: HTTPResponse) -> bytes:
    """Return the next part of a response, or b"" at its end. Raises WebError."""
    try:
        chunk = response.read(1 << 20)
        if not chunk and response.length:
            raise WebError(hide_password(response.url), "unexpected EOF")
    except (OSError, ValueError, HTTPException) as error:
        raise WebError(hide_password(response.url), error) from error
    return chunk


def _send(
    url: str,
    method: str,
    headers: dict[str, str],
    body: bytes | None,
    timeout_seconds: float | None,
    ssl_context: ssl.SSLContext | None,
    uses_proxies: bool,
) -> HTTPResponse:
    """Send one request, without following redirections. Raises WebError."""
    url_parts = _split_url(url)
    if url_parts.username is not None and not any(
        header_name.lower() == "authorization" for header_name in headers
    ):
        user_name, password = (
            urllib.parse.unquote(credential or "")
            for credential in (url_parts.username, url_parts.password)
        )
        headers = headers | {
            "Authorization": "Basic "
            + base64.b64encode(f"{user_name}:{password}".encode()).decode()
        }

    # urllib's default opener would also open files, follow redirections, and raise errors for some
    # statuses
    opener = urllib.request.OpenerDirector()
    handlers: list[Any] = [
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl_context),
    ]
    if uses_proxies and not _is_local(url_parts.hostname or ""):
        handlers.append(urllib.request.ProxyHandler())

    for handler in handlers:
        opener.add_handler(handler)

    try:
        http_request = urllib.request.Request(
            _without_user(url), body, {"User-Agent": "Go-http-client/1.1"}, method=method
        )
        for header_name, header_value in headers.items():
            http_request.add_header(header_name, header_value)

        return opener.open(http_request, timeout=timeout_seconds)
    except (OSError, ValueError, HTTPException) as error:
        raise WebError(hide_password(url), getattr(error, "reason", error)) from error


def _redirect_target(url: str, location: str) -> str:
    """Return the URL to which the header Location redirects. Raises WebError."""
    try:
        return urllib.parse.urljoin(url, _quote_location(location))
    except ValueError as error:
        raise WebError(
            hide_password(url), f"failed to parse Location header {location!r}: {error}"
        ) from None


def _quote_location(location: str) -> str:
    return urllib.parse.quote(location, safe=string.punctuation, encoding="latin-1")


def _split_url(url: str) -> SplitResult:
    """Parse a web address. Raises WebError for an address that is neither http nor https."""
    try:
        url_parts = urllib.parse.urlsplit(url)
        # `port` raises ValueError for an invalid port
        _ = url_parts.port
    except ValueError:
        # do not show the error, because it contains the port, which may be part of a password
        raise WebError(hide_password(url), "invalid host or port") from None
    if url_parts.scheme not in ("http", "https"):
        raise WebError(hide_password(url), f'unsupported protocol scheme "{url_parts.scheme}"')
    if not url_parts.hostname:
        raise WebError(hide_password(url), "no Host in request URL")
    return url_parts


def _is_same_or_subdomain(url_parts: SplitResult, first_url_parts: SplitResult) -> bool:
    """Return True if the host of `url_parts` is the host of `first_url_parts` or a subdomain of
    it. An IPv6 address has no subdomains."""
    host = url_parts.hostname or ""
    first_host = first_url_parts.hostname or ""
    return host == first_host or (not set(":%") & set(host) and host.endswith(f".{first_host}"))


def _is_local(host: str) -> bool:
    """Return True if Go's client never uses a proxy for this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_user(url: str) -> str:
    url_parts = urllib.parse.urlsplit(url)
    return url_parts._replace(netloc=url_parts.netloc.rpartition("@")[2]).geturl()


def hide_password(url: str) -> str:
    """Replace the password in a URL by ***, as Go does. The query of the URL is hidden, too,
    although Go would show it."""
    shown_url = PASSWORD_IN_URL.sub(r"\1***@", url)
    if shown_url == url:
        return format_address(url)
    return hide_address_values(shown_url)
