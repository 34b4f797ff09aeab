"""http templates: one request, whose response decides the phase of the node.

    phase, message, outputs = send(template["http"], cluster.secret)

The response body is `outputs.result`. Source: Argo's workflow/executor/agent.go (executeHTTPTemplate), v4.1.
"""

import base64
import errno
import ipaddress
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rekindle.argo.language.expr import ExprError, truth

Answer = tuple[str, str, dict[str, Any] | None]  # phase, message, outputs
FALSE = "successCondition '{}' evaluated false"
Secret = Callable[[str], Mapping[str, str]]


def send(http: Mapping[str, Any], secret: Secret) -> Answer:
    """Sends the request and checks the response. Without `timeoutSeconds` there is no timeout, as in Argo."""
    try:
        headers = [(header["name"], _value(header, secret)) for header in http.get("headers") or []]
        status, body, response_headers = _send(http, headers)
    except KeyError as error:
        return "Failed", f"secrets {error} not found", None
    except (OSError, ValueError) as error:
        method = (http.get("method") or "GET").capitalize()
        return "Failed", f'{method} "{http["url"]}": {_go_error(getattr(error, "reason", error), http["url"])}', None
    outputs = {"result": body}
    condition = http.get("successCondition")
    if not condition:
        succeeded = 200 <= status < 300
        return (
            ("Succeeded", "", outputs)
            if succeeded
            else ("Failed", f"received non-2xx response code: {status}", outputs)
        )
    request = {key: http.get(key, "") for key in ("method", "url", "body")} | {"headers": _canonical(headers)}
    response = {"statusCode": status, "body": body, "headers": _canonical(response_headers)}
    try:
        succeeded = truth(condition, {"request": request, "response": response})
    except ExprError as error:
        return "Failed", str(error), None
    return ("Succeeded", "", outputs) if succeeded else ("Failed", FALSE.format(condition), outputs)


def _send(http: Mapping[str, Any], headers: list[tuple[str, str]]) -> tuple[int, str, list[tuple[str, str]]]:
    context = ssl.create_default_context()
    if http.get("insecureSkipVerify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    handlers: list[Any] = [urllib.request.HTTPSHandler(context=context)]
    if _is_local(urllib.parse.urlsplit(http["url"]).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    source = (http.get("bodyFrom") or {}).get("bytes")
    body = base64.b64decode(source) if source else (http.get("body") or "").encode() or None
    request = urllib.request.Request(http["url"], body, dict(headers), method=http.get("method") or "GET")
    request.add_header("User-Agent", dict(_lower(headers)).get("user-agent", "Go-http-client/1.1"))
    timeout = http.get("timeoutSeconds")
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout and float(timeout)) as response:
            return response.status, response.read().decode(errors="replace"), response.getheaders()
    except urllib.error.HTTPError as error:  # a response like any other
        return error.code, error.read().decode(errors="replace"), list(error.headers.items())


def _go_error(error: object, url: str) -> str:
    """Go's message for an invalid URL or a failed connection: retry policies match it."""
    if "unknown url type" in str(error):
        return f'unsupported protocol scheme "{urllib.parse.urlsplit(url).scheme}"'
    if not isinstance(error, OSError) or error.errno not in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return str(error)
    parts = urllib.parse.urlsplit(url)
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    return f"dial tcp {parts.hostname}:{port}: connect: {os.strerror(error.errno).lower()}"


def _is_local(host: str) -> bool:
    """Whether Go bypasses proxies for this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _value(header: Mapping[str, Any], secret: Secret) -> str:
    reference = (header.get("valueFrom") or {}).get("secretKeyRef")
    return secret(reference["name"])[reference["key"]] if reference else header.get("value") or ""


def _lower(headers: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    return ((name.lower(), value) for name, value in headers)


def _canonical(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """As Go's http.Header: `Content-Type` → all its values."""
    canonical: dict[str, list[str]] = {}
    for name, value in headers:
        canonical.setdefault("-".join(part.capitalize() for part in name.split("-")), []).append(value)
    return canonical
