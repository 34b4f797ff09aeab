"""Errors of the API server, as messages with a remedy."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rekindle.errors import ConfigError, RekindleError

if TYPE_CHECKING:
    from rekindle.documents import KubernetesStatus


class ApiError(RekindleError):
    """The API server rejected a request, or did not answer (`code` 0). `code` is the HTTP status;
    `reason`: the `reason` field of the Kubernetes Status."""

    def __init__(self, message: str, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class BadObject(ApiError, ConfigError):
    """The request itself is wrong, so a retry cannot help."""


class MalformedObject(ApiError):
    """The API server answered with an object that is not of its type."""


PLATFORM_COMMAND = "`rekindle platform render --namespace {namespace} | kubectl apply -f -`"
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
        + PLATFORM_COMMAND
        + " creates the roles that Rekindle needs; an administrator of the cluster must bind one to"
        " you.",
    ),
    (
        404,
        r'namespaces "(?P<what>[^"]+)" not found',
        "namespace {what} does not exist: create it with "
        + PLATFORM_COMMAND
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
# maximum number of characters of a server's message that are searched
MAX_MESSAGE_CHARS = 10_000
PERMANENT_CODES = (400, 404, 409, 413, 422)
# matches the messages of errors that are permanent with any HTTP status
PERMANENT_MESSAGE = re.compile("denied the request|violates PodSecurity|request is too large")


def make_api_error(
    status_code: int,
    response_body: bytes,
    path: str,
    server_address: str,
    context_name: str,
    namespace: str,
) -> ApiError:
    """Return the error for a response with HTTP status `status_code`."""
    response_status = _parse_status(response_body)
    text = (response_status.message or response_body.decode(errors="replace")[:500]).strip()
    message = _remove_regex(text[:MAX_MESSAGE_CHARS])
    message_facts = _describe_target(path) | {
        "server": server_address,
        "context": context_name,
        "namespace": namespace,
    }

    if status_code in PERMANENT_CODES or PERMANENT_MESSAGE.search(message):
        error_type = BadObject
    else:
        error_type = ApiError

    return error_type(
        _describe_rejection(status_code, message, response_status, message_facts),
        status_code,
        response_status.reason or "",
    )


def _describe_rejection(
    status_code: int,
    status_message: str,
    response_status: "KubernetesStatus",
    message_facts: Mapping[str, str],
) -> str:
    denial_match = WEBHOOK_DENIAL.search(status_message)
    if denial_match:
        return (
            f"the webhook {denial_match['hook']} refuses {message_facts['kind']}"
            f" {message_facts['name']!r}: {denial_match['what'].strip()}"
        )

    status_details = response_status.details
    if status_code == 422 and status_details and status_details.causes:
        field_errors = [
            f"{status_cause.field or '?'}:"
            f" {_remove_regex(str(status_cause.message)[:MAX_MESSAGE_CHARS])}"
            for status_cause in status_details.causes
        ]
        return (
            f"{message_facts['server']} refuses {message_facts['kind']} {message_facts['name']!r};"
            f" change {'; '.join(field_errors)}"
        )

    for rule_code, message_pattern, message_template in ERROR_RULES:
        if rule_code != status_code:
            continue
        message_match = re.search(message_pattern, status_message, re.DOTALL)
        if message_match:
            return message_template.format(**message_facts, **message_match.groupdict())

    return (
        f"{message_facts['server']} answered {status_code} for {message_facts['kind']}"
        f" {message_facts['name']!r}: {status_message}"
    )


def _remove_regex(status_message: str) -> str:
    """Return a message of Kubernetes without regular expressions, because the message usually also
    states the rule in words."""
    return VALIDATION_REGEX.sub(
        lambda regex_match: " has the wrong form" if regex_match[1].startswith("in body") else "",
        status_message,
    )


def _parse_status(response_body: bytes) -> "KubernetesStatus":
    """Parse a response as a Kubernetes Status object; return an empty Status if the response is
    another text, such as the error page of a proxy."""
    # imported in this function, because pydantic would slow down `rekindle --help`
    from rekindle.documents import KubernetesStatus, parse_and_validate

    try:
        return parse_and_validate(KubernetesStatus, response_body)
    except ValueError:
        return KubernetesStatus()


def _describe_target(path: str) -> dict[str, str]:
    """Return the kind and name of the object at an API path, and the software that provides this
    kind.

    An example of a path is `/apis/argoproj.io/v1alpha1/namespaces/models/workflows/demo-4k2xp`.
    """
    path_segments = path.strip("/").split("/")

    if path_segments[0] == "apis" and len(path_segments) > 3:
        api_group = path_segments[1]
        path_segments = path_segments[3:]
    else:
        api_group = ""
        path_segments = path_segments[2:]

    if len(path_segments) > 2 and path_segments[0] == "namespaces":
        path_segments = path_segments[2:]

    resource_kind, name = [*path_segments, "", ""][:2]

    return {
        "kind": f"{resource_kind}.{api_group}" if api_group else resource_kind,
        "name": name,
        "provider": PROVIDERS.get(api_group, api_group or "it"),
    }
