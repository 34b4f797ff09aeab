"""Errors of the API server, as messages with a remedy."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rekindle.errors import ConfigError, RekindleError

if TYPE_CHECKING:
    from rekindle.documents import KubernetesStatus


class ApiError(RekindleError):
    """The API server rejected a request, or did not answer (`code` 0). `code`: HTTP status;
    `reason`: the `reason` field of the Kubernetes Status."""

    def __init__(self, message: str, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class BadObject(ApiError, ConfigError):
    """The request itself is wrong, so a retry cannot help."""


class MalformedObject(ApiError):
    """The API server answered with an object that is not of its type."""


PLATFORM = "`rekindle platform render --namespace {namespace} | kubectl apply -f -`"
# Rules: (HTTP status, pattern of the server's message, template of our message, which may use
# groups of the pattern). The first matching rule applies.
ERROR_RULES: tuple[tuple[int, str, str], ...] = (
    (
        401,
        "",
        (
            "{server} rejects the credentials of context {context!r}: they are wrong or have"
            " expired. Log in again (your provider's `get-credentials`), or choose another"
            " --context."
        ),
    ),
    (
        403,
        r"exceeded quota: (?P<quota>[^,]+), (?P<what>.*)",
        (
            "the quota {quota!r} of namespace {namespace} is used up ({what}): wait for other runs"
            " to end, lower the requests of the config (cluster.pods), or have the ResourceQuota"
            " raised."
        ),
    ),
    (
        403,
        r"violates PodSecurity (?P<what>.*)",
        "namespace {namespace} enforces PodSecurity, and the pod violates {what}.",
    ),
    (
        403,
        r"because it is being terminated",
        "namespace {namespace} is being deleted: choose another --namespace.",
    ),
    (
        403,
        (
            r'User "(?P<user>[^"]*)" cannot (?P<may>\S+) resource "(?P<what>[^"]+)" in API group'
            r' "(?P<group>[^"]*)"'
        ),
        "{user} may not {may} {what} in namespace {namespace}: a Role must grant {may}. "
        + PLATFORM
        + " creates the roles that Rekindle needs; an administrator of the cluster must bind one to"
        " you.",
    ),
    (
        404,
        r'namespaces "(?P<what>[^"]+)" not found',
        "namespace {what} does not exist: create it with "
        + PLATFORM
        + ", or choose another --namespace.",
    ),
    (
        404,
        r"page not found|could not find the requested resource",
        (
            "{server} does not have the kind {kind}: {provider} is not installed in the cluster, or"
            " has another version. `rekindle doctor --cluster` shows all missing kinds."
        ),
    ),
    (
        404,
        "",
        (
            "{kind} {name!r} does not exist in namespace {namespace}: `rekindle status --cluster`"
            " lists all runs."
        ),
    ),
    (
        409,
        "already exists",
        (
            "{kind} {name!r} exists already in namespace {namespace}: delete it, or use another "
            "name (metadata.generateName creates one for each run)."
        ),
    ),
    (409, "", "{kind} {name!r} was changed by another client at the same time: try again."),
    (
        413,
        "",
        (
            "the object is larger than Kubernetes accepts (about 1.5 MB): split the pipeline or"
            " shorten its texts."
        ),
    ),
    (
        500,
        r'failed calling webhook "(?P<hook>[^"]+)"(?P<what>.*)',
        (
            "the webhook {hook} does not answer{what}. The webhook's pods must run again (`kubectl"
            " get pods -A`); `rekindle doctor --cluster` checks the webhook."
        ),
    ),
    (
        500,
        "request is too large",
        "the object is larger than etcd accepts (about 1.5 MB): split the pipeline.",
    ),
)
WEBHOOK_DENIAL = re.compile(
    r'admission webhook "(?P<hook>[^"]+)" denied the request:?\s*(?P<what>.*)', re.DOTALL
)
PROVIDERS = {
    "argoproj.io": "Argo Workflows",
    "kubeflow.org": "the Kubeflow training operator",
    "trainer.kubeflow.org": "Kubeflow Trainer",
}
VALIDATION_REGEX = re.compile(
    r",? (regex used for validation is|in body should match) '.*?'(?=[),]|$)"
)
MAX_MESSAGE_CHARS = 10_000  # the patterns of this module search in a part of a longer message
PERMANENT_CODES = (400, 404, 409, 413, 422)
# messages of errors that are permanent, whatever the HTTP status is
PERMANENT_MESSAGE = re.compile("denied the request|violates PodSecurity|request is too large")


def api_error(
    code: int, body: bytes, path: str, server: str, context: str, namespace: str
) -> ApiError:
    """Return the error for a response with HTTP status `code`."""
    status = _parse_status(body)
    text = (status.message or body.decode(errors="replace")[:500]).strip()
    message = _without_regex(text[:MAX_MESSAGE_CHARS])
    facts = _describe_target(path) | {"server": server, "context": context, "namespace": namespace}

    if code in PERMANENT_CODES or PERMANENT_MESSAGE.search(message):
        error_type = BadObject
    else:
        error_type = ApiError

    return error_type(_describe(code, message, status, facts), code, status.reason or "")


def _describe(code: int, message: str, status: "KubernetesStatus", facts: Mapping[str, str]) -> str:
    match = WEBHOOK_DENIAL.search(message)
    if match:
        return (
            f"the webhook {match['hook']} refuses {facts['kind']} {facts['name']!r}:"
            f" {match['what'].strip()}"
        )

    details = status.details
    if code == 422 and details and details.causes:
        fields = [
            f"{cause.field or '?'}: {_without_regex(str(cause.message)[:MAX_MESSAGE_CHARS])}"
            for cause in details.causes
        ]
        return (
            f"{facts['server']} refuses {facts['kind']} {facts['name']!r}; change"
            f" {'; '.join(fields)}"
        )

    for rule_code, pattern, template in ERROR_RULES:
        if rule_code == code and (match := re.search(pattern, message, re.DOTALL)):
            return template.format(**facts, **match.groupdict())

    return f"{facts['server']} answered {code} for {facts['kind']} {facts['name']!r}: {message}"


def _without_regex(message: str) -> str:
    """Remove regular expressions from a message of Kubernetes, because it usually also states the
    rule in words."""
    return VALIDATION_REGEX.sub(
        lambda match: " has the wrong form" if match[1].startswith("in body") else "", message
    )


def _parse_status(body: bytes) -> "KubernetesStatus":
    """Parse a response as a Kubernetes Status object; return an empty Status if it is another text,
    such as the error page of a proxy."""
    # imported in this function, because pydantic would slow down `rekindle --help`
    from rekindle.documents import KubernetesStatus, validate

    try:
        return validate(KubernetesStatus, body)
    except ValueError:
        return KubernetesStatus()


def _describe_target(path: str) -> dict[str, str]:
    """Return the kind and name of the object at an API path, and the software that provides this
    kind.

    An example of a path is `/apis/argoproj.io/v1alpha1/namespaces/models/workflows/demo-4k2xp`.
    """
    parts = path.strip("/").split("/")

    if parts[0] == "apis" and len(parts) > 3:
        group = parts[1]
        parts = parts[3:]
    else:
        group = ""
        parts = parts[2:]

    if len(parts) > 2 and parts[0] == "namespaces":
        parts = parts[2:]

    kind, name = [*parts, "", ""][:2]

    return {
        "kind": f"{kind}.{group}" if group else kind,
        "name": name,
        "provider": PROVIDERS.get(group, group or "it"),
    }
