"""Build the Services of a model: one for clients, and one for each of its Deployments."""

from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.serving.model_deployment import labels
from rekindle.release.serve_config import PORT


def service(model: str, port: int, server: str) -> Manifest:
    """Return the Service for clients, which selects the pods of `server`. Source: Kubernetes v1
    ServiceSpec."""
    return _service(model, labels(model), {"port": port}, labels(model, server))


def headless_service(model: str, server: str) -> Manifest:
    """Return the headless Service of the pods of `server`, through which `verify` reaches these
    pods before they get traffic."""
    selector = labels(model, server)
    manifest = _service(server, selector, {"port": PORT}, selector)
    manifest["spec"]["clusterIP"] = "None"
    return manifest


def _service(
    name: str, labels: dict[str, str], port: Manifest, selector: dict[str, str]
) -> Manifest:
    ports = [{"name": "http", **port, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": selector, "ports": ports},
    }
