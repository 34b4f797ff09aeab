"""A part of the traffic for a candidate: by the number of its pods, or exactly, by an HTTPRoute."""

from typing import Any

from rekindle.blocks.pod import Manifest
from rekindle.blocks.serving.deployment import labels
from rekindle.release.config import PORT, CanaryConfig, ServeConfig

CANARY, WORKFLOW = "rekindle.dev/canary", "rekindle.dev/workflow"  # labels


def canary(servers: Manifest, model: str, server: str, former: str, replicas: str) -> Manifest:
    """`replicas` more pods of `servers`, the Deployment `server`, that clients reach beside those of `former`.

    The Service finds them by the label of `former`; the Deployment knows its own by another.
    """
    own = {"app.kubernetes.io/name": model, CANARY: server}
    spec = servers["spec"]
    template = spec["template"]
    known = template["metadata"]["labels"] | labels(model, former) | own
    return servers | {
        "metadata": {"name": f"{server}-canary", "labels": own | {WORKFLOW: "{{workflow.name}}"}},
        "spec": spec
        | {
            "replicas": replicas,
            "selector": {"matchLabels": own},
            "template": template | {"metadata": {"labels": known}},
        },
    }


def replicas(percent: int, serve: ServeConfig) -> int:
    """Pods of a candidate that get about this part of what comes, beside `min_replicas` others; at least one."""
    return max(1, round(serve.min_replicas * percent / (100 - percent)))


def route(
    model: str, serve: ServeConfig, canary: CanaryConfig, server: str = "", percent: str = "", rest: str = ""
) -> Manifest:
    """All requests for the model go to its Service, but `percent` of them, or a copy of all, to `server`.

    Source: gateway.networking.k8s.io/v1 HTTPRouteSpec.
    """
    namespace, _, gateway = canary.gateway.rpartition("/")
    parent = {"name": gateway} | ({"namespace": namespace} if namespace else {})
    paths = [
        {"type": "Exact", "value": f"/v1/models/{model}:predict"},
        {"type": "PathPrefix", "value": f"/v1/models/{model}"},
    ]
    backends: list[Manifest] = [{"name": model, "port": serve.port}]
    rule: dict[str, Any] = {"matches": [{"path": path} for path in paths], "backendRefs": backends}
    if server and canary.shadow:
        copy = {"backendRef": {"name": server, "port": PORT}}
        rule["filters"] = [{"type": "RequestMirror", "requestMirror": copy}]
    elif server:
        backends[0]["weight"] = rest
        backends.append({"name": server, "port": PORT, "weight": percent})
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": model, "labels": labels(model)},
        "spec": {"parentRefs": [parent], "rules": [rule]},
    }
