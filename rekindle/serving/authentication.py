"""Rejects requests without a valid token in `Authorization: Bearer TOKEN` (RFC 6750)."""

import hmac
import os

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.errors import ConfigError
from rekindle.kubernetes_names import REKINDLE_TOKEN
from rekindle.serving.openapi import OPEN_PATHS


def read_tokens() -> tuple[str, ...]:
    """Read the accepted tokens from REKINDLE_TOKEN; () if it is not set. Raises ConfigError if it
    is empty."""
    text = os.environ.get(REKINDLE_TOKEN)
    if text is None:
        return ()
    values = tuple(text.split())
    if not values or not text.isascii():
        raise ConfigError(
            f"{REKINDLE_TOKEN} contains no token or other characters than ASCII: it must be one"
            " or more tokens, separated by spaces or lines (openssl rand -hex 32 generates one)."
        )
    return values


class Authentication:
    """ASGI middleware that answers 401 unless a request has one of the tokens."""

    def __init__(self, app: ASGIApp, tokens: tuple[str, ...]) -> None:
        self.app, self.tokens = app, [token.encode() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"] in OPEN_PATHS
            or self._accepts(Headers(scope=scope))
        ):
            return await self.app(scope, receive, send)
        error = "this server needs a token: send the header `Authorization: Bearer TOKEN`."
        await JSONResponse({"error": error}, 401, {"www-authenticate": "Bearer"})(
            scope, receive, send
        )

    def _accepts(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        value = token.strip().encode()
        # compare all tokens, so that the response time reveals nothing about them
        return (
            sum(hmac.compare_digest(value, each) for each in self.tokens) > 0
            and scheme.lower() == "bearer"
        )
