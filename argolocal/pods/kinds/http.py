"""Run http templates: send one HTTP request. Its response determines the phase of the node.

    phase, message, outputs = send(template["http"], cluster.secret)

The response body is `outputs.result`. Source: Argo's workflow/executor/agent.go
(executeHTTPTemplate), v4.1.
"""

import base64
import errno
import io
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from argolocal.language.expr import ExprError, evaluate_bool
from argolocal.pods import web

# for comparison: a cluster stores fewer than two million bytes for an entire workflow
MAX_BODY_BYTES = 10_000_000
Result = tuple[str, str, dict[str, Any] | None]  # (phase, message, outputs) of a node
ReadSecret = Callable[[str], Mapping[str, str]]


def send(http: Mapping[str, Any], read_secret: ReadSecret) -> Result:
    """Send the request and check the response. Without `timeoutSeconds`, wait for ever, as Argo
    does."""
    try:
        headers = [
            (header["name"], _header_value(header, read_secret))
            for header in http.get("headers") or []
        ]
        status, body, response_headers = _send(http, headers)
    except KeyError as error:
        return "Failed", f"secrets {error} not found", None
    except (web.WebError, ValueError) as error:  # a ValueError means that bodyFrom is not base64
        if isinstance(error, web.WebError):
            web_error = error
        else:
            web_error = web.WebError(web.hide_password(http["url"]), error)

        method = (http.get("method") or "GET").capitalize()
        return "Failed", f'{method} "{web_error.url}": {_format_as_go_error(web_error)}', None

    condition = http.get("successCondition")
    if not condition:
        succeeded = 200 <= status < 300
        reason = f"received non-2xx response code: {status}"
    else:
        request = {key: http.get(key, "") for key in ("method", "url", "body")} | {
            "headers": _canonical(headers)
        }
        response = {"statusCode": status, "body": body, "headers": _canonical(response_headers)}
        try:
            succeeded = evaluate_bool(condition, {"request": request, "response": response})
        except ExprError as error:
            return "Failed", str(error), None

        reason = f"successCondition '{condition}' evaluated false"

    if succeeded:
        return ("Succeeded", "", {"result": body})

    return ("Failed", reason, {"result": body})


def _send(
    http: Mapping[str, Any], headers: list[tuple[str, str]]
) -> tuple[int, str, list[tuple[str, str]]]:
    source = (http.get("bodyFrom") or {}).get("bytes")
    if source:
        body = base64.b64decode(source)
    else:
        body = (http.get("body") or "").encode() or None
    seconds = http.get("timeoutSeconds")
    verify = not http.get("insecureSkipVerify")
    method = http.get("method") or "GET"
    timeout = seconds and float(seconds)
    with web.request(http["url"], method, headers, body, timeout, verify) as response:
        buffer = io.BytesIO()
        web.copy(response, buffer, MAX_BODY_BYTES)
        text = buffer.getvalue().decode(errors="replace")
        return response.status, text, response.getheaders()


def _format_as_go_error(web_error: web.WebError) -> str:
    """Return Go's message about a failed connection, because Argo's retry policies search for Go's
    messages."""
    error = web_error.cause
    if not isinstance(error, OSError) or error.errno not in (
        errno.ECONNREFUSED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
    ):
        return str(error)
    parts = urllib.parse.urlsplit(web_error.url)
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    return f"dial tcp {parts.hostname}:{port}: connect: {os.strerror(error.errno).lower()}"


def _header_value(header: Mapping[str, Any], read_secret: ReadSecret) -> str:
    reference = (header.get("valueFrom") or {}).get("secretKeyRef")
    if reference:
        return read_secret(reference["name"])[reference["key"]]
    return header.get("value") or ""


def _canonical(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the headers as Go's http.Header does: canonical name → all values."""
    values_by_name: dict[str, list[str]] = {}
    for name, value in headers:
        values_by_name.setdefault(
            "-".join(word.capitalize() for word in name.split("-")), []
        ).append(value)
    return values_by_name
