"""Who may use the embedded MLflow, which has no users: whoever knows the token of this home.

MLflow's client sends it by itself (MLFLOW_TRACKING_TOKEN). A browser brings it once, in the address that `rekindle ui`
prints, and gets a cookie that is good for as long as this process lives. The head of a request decides, before MLflow
sees a byte of it. A page of another origin, also one at another port of this machine or one whose name was made to lead
here (DNS rebinding), gets nothing from a browser that is logged in.
"""

import hmac
import json
import re
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs

from rekindle.local.services.connections import response

Headers = Mapping[str, list[str]]
HOST = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]{1,5})?")  # any port: that of `ssh -L` is another one
WAY_IN = "open the address that `rekindle ui` prints, or set MLFLOW_TRACKING_TOKEN to what `rekindle env` prints."
# a redirection would still count as one from elsewhere, and a strict cookie would not be sent; the fragment is the page
ENTER = "<!doctype html><script>location.replace(location.pathname + location.hash)</script>"


class Login:
    """Decides about requests by their heads."""

    def __init__(self, token: str, port: int) -> None:
        self.token = token
        self.cookie = f"rekindle-mlflow-{port}"  # cookies do not tell ports apart
        self.session = secrets.token_urlsafe(32)

    def answer(self, head: bytes) -> bytes | None:
        """The answer to a request that MLflow must not see; None for one that it may. The lines of `head` are sound."""
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
            return _refusal(403, f"the host is {', '.join(hosts)[:80]!r}: it must be localhost or 127.0.0.1.")
        if others := [origin for origin in headers.get("origin", []) if origin != f"http://{hosts[0]}"]:
            return _refusal(403, f"a page of {others[0][:80]!r} asks, and only MLflow's own may.")
        if self._has_token(headers) or (self._has_cookie(headers) and not _from_elsewhere(method, headers)):
            return None
        given = parse_qs(query).get("token", []) if (method, path) == ("GET", "/") else []
        if len(given) == 1 and _equal(given[0], self.token):
            cookie = f"Set-Cookie: {self.cookie}={self.session}; Path=/; HttpOnly; SameSite=Strict\r\n"
            keep = "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"
            return response(200, ENTER, cookie + keep, "text/html")
        return _refusal(401, f"this MLflow is its user's: {WAY_IN}")

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", [""])[0].partition(" ")
        return scheme.lower() == "bearer" and _equal(token.strip(), self.token)

    def _has_cookie(self, headers: Headers) -> bool:
        pairs = (pair.strip().partition("=") for pair in ";".join(headers.get("cookie", [])).split(";"))
        return any(name == self.cookie and _equal(value, self.session) for name, _, value in pairs)


def _from_elsewhere(method: str, headers: Headers) -> bool:
    """True if a browser says that another page made this request, other than by a link that was followed."""
    site, mode, purpose = (",".join(headers.get(f"sec-fetch-{name}", [])) for name in ("site", "mode", "dest"))
    followed = method == "GET" and (mode, purpose) == ("navigate", "document")
    return site not in ("", "same-origin", "none") and not followed


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _refusal(status: int, message: str) -> bytes:
    """In the form of MLflow's own errors, which its client shows."""
    code = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}[status]
    return response(status, json.dumps({"error_code": code, "message": message}), "", "application/json")
