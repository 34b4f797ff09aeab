"""The route to the Service of a model, for clients outside of the cluster or through a Gateway."""

from typing import Any

from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.resource import integer_input, integer_placeholder
from rekindle.blocks.serving.model_deployment import labels
from rekindle.release.serve_config import DEFAULT_PORT, ServeConfig


def build_route(model_name: str, serve_config: ServeConfig) -> Manifest | None:
    """Return the HTTPRoute or Ingress of `serve.host`, or None without a host."""
    if not serve_config.host:
        return None
    if serve_config.gateway:
        return build_http_route(model_name, serve_config)
    return _build_ingress(model_name, serve_config)


def build_http_route(model_name: str, serve_config: ServeConfig, server_name: str = "") -> Manifest:
    """Return an HTTPRoute that sends a model's requests to its Service.

    The Service `server_name`, if set, gets a share of the requests (the template's input `percent`)
    or, with `serve.canary.shadow`, a copy of each request.

    Source: the fields are defined by the Gateway API (gateway.networking.k8s.io/v1, HTTPRouteSpec).
    """
    namespace, _, gateway = (
        serve_config.gateway or (serve_config.canary and serve_config.canary.gateway) or ""
    ).rpartition("/")
    parent_reference = {"name": gateway} | ({"namespace": namespace} if namespace else {})
    predict_path, path_prefix = _public_paths(model_name)
    path_matches = [
        {"type": "Exact", "value": predict_path},
        {"type": "PathPrefix", "value": path_prefix},
    ]
    champion_backend = {"name": model_name, "port": serve_config.port}
    candidate_backend = {"name": server_name, "port": DEFAULT_PORT}
    route_rule: dict[str, Any] = {
        "matches": [{"path": path} for path in path_matches],
        "backendRefs": [champion_backend],
    }

    if server_name and serve_config.canary and serve_config.canary.shadow:
        route_rule["filters"] = [
            {"type": "RequestMirror", "requestMirror": {"backendRef": candidate_backend}}
        ]
    elif server_name:
        route_rule["backendRefs"] = [
            champion_backend
            | {"weight": integer_placeholder("100 - asInt(inputs.parameters.percent)")},
            candidate_backend | {"weight": integer_input("percent")},
        ]

    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": _route_metadata(model_name, serve_config),
        "spec": {
            "parentRefs": [parent_reference],
            **({"hostnames": [serve_config.host]} if serve_config.host else {}),
            "rules": [route_rule],
        },
    }


def _build_ingress(model_name: str, serve_config: ServeConfig) -> Manifest:
    """Return an Ingress for the Service of a model. Source: the fields are defined by Kubernetes
    (networking.k8s.io/v1, IngressSpec)."""
    service_backend = {"service": {"name": model_name, "port": {"number": serve_config.port}}}
    # ingress-nginx rejects a colon in paths of the types Exact and Prefix
    path_types = ("ImplementationSpecific", "Prefix")
    ingress_paths = [
        {"path": path, "pathType": path_type, "backend": service_backend}
        for path, path_type in zip(_public_paths(model_name), path_types, strict=True)
    ]
    ingress_spec: dict[str, Any] = {
        "rules": [{"host": serve_config.host, "http": {"paths": ingress_paths}}]
    }

    if serve_config.ingress_class:
        ingress_spec["ingressClassName"] = serve_config.ingress_class
    if serve_config.tls_secret:
        ingress_spec["tls"] = [
            {"hosts": [serve_config.host], "secretName": serve_config.tls_secret}
        ]

    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": _route_metadata(model_name, serve_config),
        "spec": ingress_spec,
    }


def _public_paths(model_name: str) -> tuple[str, str]:
    """Return the public paths of a model: the exact path for predictions, and the path prefix for
    all other requests. The paths of probes and metrics are not public."""
    return f"/v1/models/{model_name}:predict", f"/v1/models/{model_name}"


def _route_metadata(model_name: str, serve_config: ServeConfig) -> Manifest:
    if serve_config.annotations:
        annotation_fields = {"annotations": serve_config.annotations}
    else:
        annotation_fields = {}
    return {"name": model_name, "labels": labels(model_name), **annotation_fields}
