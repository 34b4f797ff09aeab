"""Run http templates: send one HTTP request, whose response determines the phase of the node.

    phase, message, outputs = run_http_template(template["http"], cluster.secret)

The body of the HTTP response becomes `outputs.result`. The behaviour follows Argo's
workflow/executor/agent.go (executeHTTPTemplate), v4.1.
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

# maximum size of a response body; for comparison, an entire Workflow object in a cluster has less
# than two million bytes
MAX_BODY_BYTES = 10_000_000
# (phase, message, outputs) of a node
Result = tuple[str, str, dict[str, Any] | None]
ReadSecret = Callable[[str], Mapping[str, str]]


def run_http_template(http_template: Mapping[str, Any], read_secret: ReadSecret) -> Result:
    """Send the request and check the response. Return the phase, message and outputs of the http
    template's node. Without `timeoutSeconds`, wait for ever, as Argo does."""
    try:
        headers = [
            (header["name"], _resolve_header_value(header, read_secret))
            for header in http_template.get("headers") or []
        ]
        status_code, response_body, response_headers = _send_request(http_template, headers)
    except KeyError as error:
        return "Failed", f"secrets {error} not found", None
    except (web.WebError, ValueError) as error:
        # any other error is a ValueError, which means that bodyFrom is not base64
        if isinstance(error, web.WebError):
            web_error = error
        else:
            web_error = web.WebError(web.hide_password(http_template["url"]), error)

        method = (http_template.get("method") or "GET").capitalize()
        return "Failed", f'{method} "{web_error.url}": {_format_as_go_error(web_error)}', None

    success_condition = http_template.get("successCondition")
    if not success_condition:
        has_succeeded = 200 <= status_code < 300
        reason = f"received non-2xx response code: {status_code}"
    else:
        request_scope = {
            request_field: http_template.get(request_field, "")
            for request_field in ("method", "url", "body")
        } | {"headers": _canonical_headers(headers)}
        response_scope = {
            "statusCode": status_code,
            "body": response_body,
            "headers": _canonical_headers(response_headers),
        }
        try:
            has_succeeded = evaluate_bool(
                success_condition, {"request": request_scope, "response": response_scope}
            )
        except ExprError as error:
            return "Failed", str(error), None

        reason = f"successCondition '{success_condition}' evaluated false"

    if has_succeeded:
        return "Succeeded", "", {"result": response_body}
    return "Failed", reason, {"result": response_body}


def _send_request(
    http_template: Mapping[str, Any], headers: list[tuple[str, str]]
) -> tuple[int, str, list[tuple[str, str]]]:
    """Send the request. Return the status code, the body and the headers of the response. Raises
    WebError, and ValueError if bodyFrom is not base64."""
    encoded_body = (http_template.get("bodyFrom") or {}).get("bytes")
    if encoded_body:
        request_body = base64.b64decode(encoded_body)
    else:
        request_body = (http_template.get("body") or "").encode() or None
    timeout_text = http_template.get("timeoutSeconds")
    verifies_certificate = not http_template.get("insecureSkipVerify")
    method = http_template.get("method") or "GET"
    timeout_seconds = timeout_text and float(timeout_text)
    with web.request(
        http_template["url"], method, headers, request_body, timeout_seconds, verifies_certificate
    ) as response:
        body_buffer = io.BytesIO()
        web.copy_body(response, body_buffer, MAX_BODY_BYTES)
        body_text = body_buffer.getvalue().decode(errors="replace")
        return response.status, body_text, response.getheaders()


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
    url_parts = urllib.parse.urlsplit(web_error.url)
    port = url_parts.port or {"https": 443}.get(url_parts.scheme, 80)
    return f"dial tcp {url_parts.hostname}:{port}: connect: {os.strerror(error.errno).lower()}"


def _resolve_header_value(header: Mapping[str, Any], read_secret: ReadSecret) -> str:
    secret_reference = (header.get("valueFrom") or {}).get("secretKeyRef")
    if secret_reference:
        return read_secret(secret_reference["name"])[secret_reference["key"]]
    return header.get("value") or ""


def _canonical_headers(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the headers in the form of Go's http.Header: canonical name → all values."""
    values_by_name: dict[str, list[str]] = {}
    for header_name, header_value in headers:
        canonical_name = "-".join(word.capitalize() for word in header_name.split("-"))
        values_by_name.setdefault(canonical_name, []).append(header_value)

    return values_by_name
