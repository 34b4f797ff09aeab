"""The addresses of a model: the one that clients use, and for each Deployment one of its own."""

from rekindle.blocks.pod import Manifest
from rekindle.blocks.serving.deployment import labels
from rekindle.release.config import PORT


def service(model: str, port: int, server: str) -> Manifest:
    """Port `port` of MODEL goes to the pods of `server` that are ready. Source: Kubernetes v1 ServiceSpec."""
    return _service(model, labels(model), {"port": port}, labels(model, server))


def address(model: str, server: str) -> Manifest:
    """The headless Service by which the pods of `server` are reached before clients reach them."""
    own = labels(model, server)
    manifest = _service(server, own, {"port": PORT}, own)
    manifest["spec"] |= {"clusterIP": "None"}
    return manifest


def _service(name: str, own: dict[str, str], port: Manifest, selector: dict[str, str]) -> Manifest:
    ports = [{"name": "http", **port, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": own},
        "spec": {"selector": selector, "ports": ports},
    }
