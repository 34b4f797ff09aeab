"""Access control for the embedded MLflow: every request needs the token that REKINDLE_HOME stores.

MLflow's client sends the token by itself (MLFLOW_TRACKING_TOKEN). A browser sends the token once,
in the address that `rekindle ui --mlflow` prints, and gets a cookie that is valid until this
process ends. The head of each request is checked before MLflow reads any part of the request.
"""

import secrets

from argolocal.common.json_text import to_json
from argolocal.page.login import Login, NewSession, Refusal
from rekindle.local.services.threaded_server import make_response

LOGIN_HINT = (
    "open the address that `rekindle ui --mlflow` prints, or set MLFLOW_TRACKING_TOKEN as"
    " `rekindle env` prints it."
)
# page that sends a browser to MLflow's page, which the fragment of the URL names. An HTTP redirect
# would not work: the redirected request would still count as cross-site, and lack the
# SameSite=Strict cookie
REDIRECT_PAGE = (
    "<!doctype html><script>location.replace(location.pathname + location.hash)</script>"
)


class MlflowLogin:
    """Accepts or rejects requests after reading only their heads."""

    def __init__(self, login_token: str, port: int) -> None:
        # the name of the cookie contains the port, because browsers share cookies between ports
        self.login = Login(
            login_token, f"rekindle-mlflow-{port}", secrets.token_urlsafe(32), LOGIN_HINT
        )

    def answer(self, request_head: bytes) -> bytes | None:
        """Return the answer to a request that MLflow must not receive; None for other requests.
        `request_head`: head of the request, in which `find_head_fault` has found no error."""
        request_line, *header_lines = request_head.decode("latin-1").strip("\r\n").split("\r\n")
        http_method, request_target, _ = request_line.split(" ")
        if request_target.partition("?")[0] == "/health":
            return make_response(200, "OK")

        headers: dict[str, list[str]] = {}
        for header_name, _, header_value in (
            header_line.partition(":") for header_line in header_lines
        ):
            headers.setdefault(header_name.lower(), []).append(header_value.strip(" \t"))

        match self.login.check(http_method, request_target, headers):
            case NewSession(cookie):
                privacy_headers = "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"
                return make_response(
                    200, REDIRECT_PAGE, f"Set-Cookie: {cookie}\r\n{privacy_headers}", "text/html"
                )
            case Refusal(status, message):
                return _make_refusal(status, message)
            case None:
                return None


def _make_refusal(http_status: int, refusal_message: str) -> bytes:
    """Return an error response in MLflow's format, so that MLflow's client shows its message."""
    error_code = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}[http_status]
    return make_response(
        http_status,
        to_json({"error_code": error_code, "message": refusal_message}),
        "",
        "application/json",
    )
