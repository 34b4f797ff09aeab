"""ASGI middleware that checks the login of a browser, and adds headers that prevent injected code
from running."""

import hmac
from html import escape

from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argolocal.common import program
from argolocal.page.login import Login, NewSession, Refusal

# forbids inline scripts and other origins, so that markup in the texts of a run cannot execute code
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# HTTP status → gRPC code in the body: without it, clients of Argo take the response for a success
GRPC_CODES = {401: 16, 403: 7}
FORM_TOKEN = "form_token"  # key in the ASGI scope, and name of the form field  # nosec B105
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    # under the policy "no-referrer", browsers send forms of this page with the origin "null"
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Access:
    """ASGI middleware that forwards a request to `app` only if it contains the token, or the cookie
    of a browser that has sent the token before."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app = app
        # the value of the cookie is derived from the token, so that open pages continue to work
        # after a restart
        session = hmac.digest(token.encode(), b"session of the page", "sha256").hex()
        # each form contains this token, so that pages of other sites cannot submit the form
        self.form_token = hmac.digest(token.encode(), b"forms of the page", "sha256").hex()
        hint = f"open the address that `{program.name} ui` prints."
        self.login = Login(token, f"{program.name}-page-{port}", session, hint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        scope[FORM_TOKEN] = self.form_token
        response = self._respond(scope)
        await (response or self.app)(scope, receive, send_with_headers)

    def _respond(self, scope: Scope) -> Response | None:
        """Return the response to a request that must not be forwarded: a login or a refused
        request. Return None for a request to forward."""
        sent_headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            sent_headers.setdefault(name.decode("latin-1").lower(), []).append(
                value.decode("latin-1")
            )

        path = scope["raw_path"].decode("latin-1")
        target = f"{path}?{scope['query_string'].decode('latin-1')}"

        match self.login.check(scope["method"], target, sent_headers):
            case NewSession(cookie):
                # respond with a page that loads the address instead of an HTTP redirect: after a
                # redirect, the request would still count as cross-site, so that browsers would not
                # send the SameSite=Strict cookie
                address = escape(f"http://{sent_headers['host'][0]}{path}")
                page = f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">'
                # no referrer is sent, because the address of this request contains the token
                headers = {"Set-Cookie": cookie, "Referrer-Policy": "no-referrer"}
                return HTMLResponse(page, headers=headers)
            case Refusal(status, message):
                code = GRPC_CODES[status]
                return JSONResponse({"error": message, "code": code, "message": message}, status)
            case None:
                return None
