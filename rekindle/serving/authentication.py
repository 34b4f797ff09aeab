"""Rejects requests to a model server without a valid bearer token in the header Authorization (RFC
6750)."""

import hmac
import os

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.errors import ConfigError
from rekindle.kubernetes_names import REKINDLE_TOKEN
from rekindle.serving.openapi import UNAUTHENTICATED_PATHS


def read_tokens() -> tuple[str, ...]:
    """Return the accepted tokens in REKINDLE_TOKEN; () if the variable is not set. Raises
    ConfigError if REKINDLE_TOKEN contains no valid token."""
    tokens_text = os.environ.get(REKINDLE_TOKEN)
    if tokens_text is None:
        return ()
    accepted_tokens = tuple(tokens_text.split())
    if not accepted_tokens or not tokens_text.isascii():
        raise ConfigError(
            f"{REKINDLE_TOKEN} contains no token or other characters than ASCII: it must be one"
            " or more tokens, separated by spaces or lines (openssl rand -hex 32 generates one)."
        )
    return accepted_tokens


class Authentication:
    """ASGI middleware that answers 401 unless a request has one of the tokens."""

    def __init__(self, app: ASGIApp, accepted_tokens: tuple[str, ...]) -> None:
        self.app = app
        self.tokens = [accepted_token.encode() for accepted_token in accepted_tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"] in UNAUTHENTICATED_PATHS
            or self._has_accepted_token(Headers(scope=scope))
        ):
            await self.app(scope, receive, send)
            return

        error_message = "this server needs a token: send the header `Authorization: Bearer TOKEN`."
        await JSONResponse({"error": error_message}, 401, {"www-authenticate": "Bearer"})(
            scope, receive, send
        )

    def _has_accepted_token(self, request_headers: Headers) -> bool:
        authentication_scheme, _, token_text = request_headers.get("authorization", "").partition(
            " "
        )
        token_bytes = token_text.strip().encode()
        # compare all tokens, so that the response time reveals nothing about the tokens
        return (
            sum(hmac.compare_digest(token_bytes, accepted_token) for accepted_token in self.tokens)
            > 0
            and authentication_scheme.lower() == "bearer"
        )
