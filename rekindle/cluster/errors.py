"""What the API server refuses, in words that say what to change."""

import json
import re
from collections.abc import Mapping
from typing import Any

from rekindle.errors import ConfigError, RekindleError


class ApiError(RekindleError):
    """The cluster refused, or did not answer (`code` 0). `code` is HTTP's, `reason` Kubernetes' own word for it."""

    def __init__(self, message: str, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class BadObject(ApiError, ConfigError):
    """What was sent or asked for is wrong: sending it again cannot help."""


PLATFORM = "`rekindle platform render --namespace {namespace} | kubectl apply -f -`"
# HTTP code, a pattern of the server's message, what it means. The first that fits is said; groups fill the words.
RULES: tuple[tuple[int, str, str], ...] = (
    (401, "", "{server} does not know you: the credentials of context {context!r} are wrong or have run out. Log in "
              "again (your provider's `get-credentials`), or choose another --context."),
    (403, r"exceeded quota: (?P<quota>[^,]+), (?P<what>.*)",
          "the quota {quota!r} of namespace {namespace} is used up ({what}): wait for other runs to end, lower what "
          "the config requests (cluster.pods), or have the ResourceQuota raised."),
    (403, r"violates PodSecurity (?P<what>.*)",
          "namespace {namespace} enforces PodSecurity, and this breaks it: {what}."),
    (403, r"because it is being terminated", "namespace {namespace} is being deleted: choose another --namespace."),
    (403, r'User "(?P<user>[^"]*)" cannot (?P<may>\S+) resource "(?P<what>[^"]+)" in API group "(?P<group>[^"]*)"',
          "{user} may not {may} {what} in namespace {namespace}: it needs a Role with that verb. " + PLATFORM +
          " makes the roles that Rekindle needs; binding one to you is for whoever administers the cluster."),
    (404, r'namespaces "(?P<what>[^"]+)" not found',
          "there is no namespace {what}: make it and what it needs with " + PLATFORM + ", or choose another "
          "--namespace."),
    (404, r"page not found|could not find the requested resource",
          "{server} does not know {kind}: {owner} is not installed there, or in another version. `rekindle doctor "
          "--cluster` tells what is missing."),
    (404, "", "there is no {kind} {name!r} in namespace {namespace}. `rekindle status --cluster` lists what there is."),
    (409, "already exists", "{kind} {name!r} exists already in namespace {namespace}: delete it, or give another "
          "name (metadata.generateName makes one for each run)."),
    (409, "", "{kind} {name!r} was changed by somebody else at this moment: try again."),
    (413, "", "the object is larger than Kubernetes takes (about 1.5 MB): split the pipeline or shorten its texts."),
    (500, r'failed calling webhook "(?P<hook>[^"]+)"(?P<what>.*)',
          "the webhook {hook} does not answer{what}. Whoever installed it must get its pods running again "
          "(`kubectl get pods -A`); `rekindle doctor --cluster` checks it."),
    (500, "request is too large", "the object is larger than etcd takes (about 1.5 MB): split the pipeline."),
)  # fmt: skip
WEBHOOK = re.compile(r'admission webhook "(?P<hook>[^"]+)" denied the request:?\s*(?P<what>.*)', re.DOTALL)
OWNERS = {
    "argoproj.io": "Argo Workflows",
    "kubeflow.org": "the Kubeflow training operator",
    "trainer.kubeflow.org": "Kubeflow Trainer",
    "serving.kserve.io": "KServe",
}
CANNOT_HELP = (400, 404, 409, 413, 422)
NOR_CAN = re.compile("denied the request|violates PodSecurity|request is too large")  # whatever code they come with


def explained(code: int, body: bytes, path: str, **about: str) -> ApiError:
    """The error of one answer. `about`: server, context, namespace."""
    status = _status(body)
    message = str(status.get("message") or body.decode(errors="replace")[:500]).strip()
    facts = _named(path) | about
    kind = BadObject if code in CANNOT_HELP or NOR_CAN.search(message) else ApiError
    return kind(_words(code, message, status, facts), code, str(status.get("reason") or ""))


def _words(code: int, message: str, status: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    if found := WEBHOOK.search(message):
        return f"the webhook {found['hook']} refuses {facts['kind']} {facts['name']!r}: {found['what'].strip()}"
    causes = (status.get("details") or {}).get("causes") or []
    if code == 422 and causes:
        lines = [f"  {each.get('field') or '?'}: {each.get('message')}" for each in causes]
        return "\n".join([f"{facts['server']} refuses {facts['kind']} {facts['name']!r}; change", *lines])
    for when, pattern, words in RULES:
        found = re.search(pattern, message, re.DOTALL) if when == code else None
        if found:
            return words.format(**facts, **found.groupdict())
    return f"{facts['server']} answered {code} for {facts['kind']} {facts['name']!r}: {message}"


def _status(body: bytes) -> dict[str, Any]:
    """Kubernetes' Status object; what a proxy or an aggregated server says may be anything."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _named(path: str) -> dict[str, str]:
    """`/apis/argoproj.io/v1alpha1/namespaces/models/workflows/demo-4k2xp` → kind, name and who owns the kind."""
    parts = path.strip("/").split("/")
    group, parts = (parts[1], parts[3:]) if parts[0] == "apis" and len(parts) > 3 else ("", parts[2:])
    if len(parts) > 2 and parts[0] == "namespaces":
        parts = parts[2:]
    kind, name = [*parts, "", ""][:2]
    return {"kind": f"{kind}.{group}" if group else kind, "name": name, "owner": OWNERS.get(group, group or "it")}
