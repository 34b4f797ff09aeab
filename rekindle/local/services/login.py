"""Access control for the embedded MLflow: every request needs the token of this home.

MLflow's client sends the token by itself (MLFLOW_TRACKING_TOKEN). A browser sends the token once,
in the address that `rekindle ui` prints, and gets a cookie that is valid for the life of this
process. The head of each request is checked before MLflow reads any of the request. Pages of other
origins, including other ports of this machine and host names that were redirected to this machine
(DNS rebinding), cannot use the login of a browser.
"""

import hmac
import re
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs

from argolocal.common.json_text import to_json
from rekindle.local.services.threaded_server import response

Headers = Mapping[str, list[str]]
# any port is accepted, because `ssh -L` may forward another port
HOST = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]{1,5})?")
HINT = (
    "open the address that `rekindle ui` prints, or set MLFLOW_TRACKING_TOKEN as `rekindle env`"
    " prints it."
)
# a page, because a request after an HTTP redirect would still count as cross-site and lack the
# SameSite=Strict cookie; the URL's fragment names MLflow's page
REDIRECT = "<!doctype html><script>location.replace(location.pathname + location.hash)</script>"


class Login:
    """Accepts or rejects requests by their headers."""

    def __init__(self, token: str, port: int) -> None:
        self.token = token
        self.cookie = f"rekindle-mlflow-{port}"  # browsers share cookies between ports
        self.session = secrets.token_urlsafe(32)

    def answer(self, head: bytes) -> bytes | None:
        """Return the answer to a request that MLflow must not receive, else None. `head`: without
        the errors that `find_fault` finds."""
        first, *lines = head.decode("latin-1").strip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")

        path, _, query = target.partition("?")
        if path == "/health":
            return response(200, "OK")

        headers: dict[str, list[str]] = {}
        for name, _, value in (line.partition(":") for line in lines):
            headers.setdefault(name.lower(), []).append(value.strip(" \t"))

        hosts = headers.get("host", [])
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0]) or not target.startswith("/"):
            return _refusal(
                403, f"the host is {', '.join(hosts)[:80]!r}: it must be localhost or 127.0.0.1."
            )

        origins = [origin for origin in headers.get("origin", []) if origin != f"http://{hosts[0]}"]
        if origins:
            return _refusal(
                403,
                f"the origin is {origins[0][:80]!r}: only MLflow's own pages may send requests.",
            )

        if self._has_token(headers) or (
            self._has_cookie(headers) and not _is_cross_site(method, headers)
        ):
            return None

        if (method, path) == ("GET", "/"):
            tokens = parse_qs(query).get("token", [])
        else:
            tokens = []

        if len(tokens) == 1 and _equal(tokens[0], self.token):
            cookie = (
                f"Set-Cookie: {self.cookie}={self.session}; Path=/; HttpOnly; SameSite=Strict\r\n"
            )
            no_leaks = "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"
            return response(200, REDIRECT, cookie + no_leaks, "text/html")

        return _refusal(401, f"this MLflow needs its user's token: {HINT}")

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", [""])[0].partition(" ")
        return scheme.lower() == "bearer" and _equal(token.strip(), self.token)

    def _has_cookie(self, headers: Headers) -> bool:
        pairs = (
            pair.strip().partition("=") for pair in ";".join(headers.get("cookie", [])).split(";")
        )
        return any(name == self.cookie and _equal(value, self.session) for name, _, value in pairs)


def _is_cross_site(method: str, headers: Headers) -> bool:
    """Return True if, according to the browser, another site sent this request, unless the user
    followed a link."""
    site, mode, purpose = (
        ",".join(headers.get(f"sec-fetch-{name}", [])) for name in ("site", "mode", "dest")
    )
    user_followed_link = method == "GET" and (mode, purpose) == ("navigate", "document")
    return site not in ("", "same-origin", "none") and not user_followed_link


def _equal(actual: str, expected: str) -> bool:
    return hmac.compare_digest(actual.encode(), expected.encode())


def _refusal(status: int, message: str) -> bytes:
    """Return an error response in MLflow's format, so that MLflow's client shows its message."""
    code = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}[status]
    return response(
        status, to_json({"error_code": code, "message": message}), "", "application/json"
    )
