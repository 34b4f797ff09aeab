"""Access control for the embedded MLflow: every request needs the token of this home.

MLflow's client sends the token by itself (MLFLOW_TRACKING_TOKEN). A browser sends the token once,
in the address that `rekindle ui --mlflow` prints, and gets a cookie that is valid for the life of
this process. The head of each request is checked before MLflow reads any of the request.
"""

import secrets

from argolocal.common.json_text import to_json
from argolocal.page.login import Login, NewSession, Refusal
from rekindle.local.services.threaded_server import response

HINT = (
    "open the address that `rekindle ui --mlflow` prints, or set MLFLOW_TRACKING_TOKEN as"
    " `rekindle env` prints it."
)
# a page, because a request after an HTTP redirect would still count as cross-site and lack the
# SameSite=Strict cookie; the URL's fragment names MLflow's page
REDIRECT = "<!doctype html><script>location.replace(location.pathname + location.hash)</script>"


class MlflowLogin:
    """Accepts or rejects requests after reading only their heads."""

    def __init__(self, token: str, port: int) -> None:
        # the name contains the port, because browsers share cookies between ports
        self.login = Login(token, f"rekindle-mlflow-{port}", secrets.token_urlsafe(32), HINT)

    def answer(self, head: bytes) -> bytes | None:
        """Return the answer if MLflow must not receive the request, else None. `head`: head of the
        request, in which `find_fault` has found no error."""
        first, *lines = head.decode("latin-1").strip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        if target.partition("?")[0] == "/health":
            return response(200, "OK")

        headers: dict[str, list[str]] = {}
        for name, _, value in (line.partition(":") for line in lines):
            headers.setdefault(name.lower(), []).append(value.strip(" \t"))

        match self.login.check(method, target, headers):
            case NewSession(cookie):
                no_leaks = "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"
                return response(200, REDIRECT, f"Set-Cookie: {cookie}\r\n{no_leaks}", "text/html")
            case Refusal(status, message):
                return _refusal(status, message)
            case None:
                return None


def _refusal(status: int, message: str) -> bytes:
    """Return an error response in MLflow's format, so that MLflow's client shows its message."""
    code = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}[status]
    return response(
        status, to_json({"error_code": code, "message": message}), "", "application/json"
    )
