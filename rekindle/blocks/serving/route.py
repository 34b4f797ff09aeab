"""The route to the Service of a model, for clients outside of the cluster or through a Gateway."""

from typing import Any

from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.resource import integer_input, integer_placeholder
from rekindle.blocks.serving.model_deployment import labels
from rekindle.release.serve_config import PORT, ServeConfig


def route(model: str, serve: ServeConfig) -> Manifest | None:
    """Return the HTTPRoute or Ingress of `serve.host`, or None without a host."""
    if not serve.host:
        return None
    if serve.gateway:
        return http_route(model, serve)
    return _ingress(model, serve)


def http_route(model: str, serve: ServeConfig, server: str = "") -> Manifest:
    """Return an HTTPRoute that sends a model's requests to its Service.

    The Service `server`, if set, gets a share of the requests (the template's input `percent`) or,
    with `serve.canary.shadow`, a copy of each request.

    Source: gateway.networking.k8s.io/v1 HTTPRouteSpec.
    """
    namespace, _, gateway = (
        serve.gateway or (serve.canary and serve.canary.gateway) or ""
    ).rpartition("/")
    parent = {"name": gateway} | ({"namespace": namespace} if namespace else {})
    predict, other = _public_paths(model)
    paths = [{"type": "Exact", "value": predict}, {"type": "PathPrefix", "value": other}]
    champion = {"name": model, "port": serve.port}
    candidate = {"name": server, "port": PORT}
    rule: dict[str, Any] = {
        "matches": [{"path": path} for path in paths],
        "backendRefs": [champion],
    }

    if server and serve.canary and serve.canary.shadow:
        rule["filters"] = [{"type": "RequestMirror", "requestMirror": {"backendRef": candidate}}]
    elif server:
        rule["backendRefs"] = [
            champion | {"weight": integer_placeholder("100 - asInt(inputs.parameters.percent)")},
            candidate | {"weight": integer_input("percent")},
        ]

    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": _metadata(model, serve),
        "spec": {
            "parentRefs": [parent],
            **({"hostnames": [serve.host]} if serve.host else {}),
            "rules": [rule],
        },
    }


def _ingress(model: str, serve: ServeConfig) -> Manifest:
    """Return an Ingress. Source: networking.k8s.io/v1 IngressSpec."""
    backend = {"service": {"name": model, "port": {"number": serve.port}}}
    # ingress-nginx rejects a colon in paths of the types Exact and Prefix
    kinds = ("ImplementationSpecific", "Prefix")
    paths = [
        {"path": path, "pathType": kind, "backend": backend}
        for path, kind in zip(_public_paths(model), kinds, strict=True)
    ]
    spec: dict[str, Any] = {"rules": [{"host": serve.host, "http": {"paths": paths}}]}

    if serve.ingress_class:
        spec["ingressClassName"] = serve.ingress_class
    if serve.tls_secret:
        spec["tls"] = [{"hosts": [serve.host], "secretName": serve.tls_secret}]

    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": _metadata(model, serve),
        "spec": spec,
    }


def _public_paths(model: str) -> tuple[str, str]:
    """Return the public paths of a model: the exact path for predictions, and the path prefix for
    all other requests. The paths of probes and metrics are not public."""
    return f"/v1/models/{model}:predict", f"/v1/models/{model}"


def _metadata(model: str, serve: ServeConfig) -> Manifest:
    if serve.annotations:
        annotations = {"annotations": serve.annotations}
    else:
        annotations = {}
    return {"name": model, "labels": labels(model), **annotations}
