"""Access control of a server that serves only one user of this machine.

Programs send the token of the home (the directory of runs) as a bearer token. A browser sends the
token only once, in the URL that a command prints, and receives a cookie. A page of another origin
cannot use the cookie of a browser that has logged in. Another origin may also be another port of
this machine, or a host name that resolves to this machine (DNS rebinding).
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

Headers = Mapping[str, list[str]]
# accept every port, because `ssh -L` may forward another port to the server
HOST = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Refusal:
    """The reason why the server must refuse a request. `status`: 401 for a request without a login,
    403 for a request with another host or origin."""

    status: int
    message: str


@dataclass(frozen=True)
class NewSession:
    """The login of a browser, whose request has the token in its URL. `cookie`: value of the
    Set-Cookie header for the response."""

    cookie: str


class Login:
    """Accepts or rejects requests based on their method, URL and headers."""

    def __init__(self, token: str, cookie: str, session: str, hint: str) -> None:
        """`cookie`, `session`: name and value of the cookie of browsers that have sent the token.
        `hint`: a sentence that tells the user how to log in."""
        self.token = token
        self.cookie = cookie
        self.session = session
        self.hint = hint

    def check(self, method: str, target: str, headers: Headers) -> Refusal | NewSession | None:
        """Return None if the server may process the request, a Refusal if it must refuse the
        request, and a NewSession if it must set the cookie.

        `target`: path and query of the request. `headers`: all values of each header, by the
        header's name in lower case.
        """
        hosts = headers.get("host", [])
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0]) or not target.startswith("/"):
            return Refusal(
                403, f"the host is {', '.join(hosts)[:80]!r}: it must be localhost or 127.0.0.1."
            )

        origins = [origin for origin in headers.get("origin", []) if origin != f"http://{hosts[0]}"]
        if origins:
            return Refusal(
                403,
                f"the origin is {origins[0][:80]!r}: only pages of this server may send requests.",
            )

        if self._has_token(headers) or (
            self._has_cookie(headers) and not _is_cross_site(method, headers)
        ):
            return None

        tokens: list[str] = []
        if method == "GET":
            tokens = parse_qs(target.partition("?")[2]).get("token", [])

        if len(tokens) == 1 and _equal(tokens[0], self.token):
            return NewSession(f"{self.cookie}={self.session}; Path=/; HttpOnly; SameSite=Strict")

        return Refusal(401, f"this server needs its user's token: {self.hint}")

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", [""])[0].partition(" ")
        return scheme.lower() == "bearer" and _equal(token.strip(), self.token)

    def _has_cookie(self, headers: Headers) -> bool:
        pairs = (
            pair.strip().partition("=") for pair in ";".join(headers.get("cookie", [])).split(";")
        )
        return any(name == self.cookie and _equal(value, self.session) for name, _, value in pairs)


def _is_cross_site(method: str, headers: Headers) -> bool:
    """Return True if, according to the browser's headers, a page of another site has sent this
    request , and that no user has followed a link."""
    site, mode, purpose = (
        ",".join(headers.get(f"sec-fetch-{name}", [])) for name in ("site", "mode", "dest")
    )
    user_followed_link = method == "GET" and (mode, purpose) == ("navigate", "document")
    return site not in ("", "same-origin", "none") and not user_followed_link


def _equal(actual: str, expected: str) -> bool:
    return hmac.compare_digest(actual.encode(), expected.encode())
