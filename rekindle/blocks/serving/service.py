"""The address under which a deployment's pods are reached."""

from rekindle.blocks.pod import Manifest
from rekindle.blocks.serving.deployment import labels


def service(name: str, port: int) -> Manifest:
    """Port `port` of NAME goes to the pods that are ready. Source: Kubernetes v1 ServiceSpec."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {"selector": labels(name), "ports": [{"name": "http", "port": port, "targetPort": "http"}]},
    }
