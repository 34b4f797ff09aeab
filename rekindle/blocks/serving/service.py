"""Build the Services of a model: one for clients, and one for each of its Deployments."""

from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.serving.model_deployment import labels
from rekindle.release.serve_config import DEFAULT_PORT


def build_client_service(model_name: str, port: int, server_name: str) -> Manifest:
    """Return the Service for the clients of a model, which selects the pods of `server_name`.
    Source: the fields are defined by Kubernetes (v1, ServiceSpec)."""
    return _build_service(
        model_name, labels(model_name), {"port": port}, labels(model_name, server_name)
    )


def build_headless_service(model_name: str, server_name: str) -> Manifest:
    """Return the headless Service of the pods of `server_name`, through which `verify` reaches
    these pods before they get traffic."""
    pod_selector = labels(model_name, server_name)
    service_manifest = _build_service(
        server_name, pod_selector, {"port": DEFAULT_PORT}, pod_selector
    )
    service_manifest["spec"]["clusterIP"] = "None"
    return service_manifest


def _build_service(
    service_name: str,
    service_labels: dict[str, str],
    port_fields: Manifest,
    pod_selector: dict[str, str],
) -> Manifest:
    service_ports = [{"name": "http", **port_fields, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service_name, "labels": service_labels},
        "spec": {"selector": pod_selector, "ports": service_ports},
    }
