"""Nodes are drained one server at a time."""

from rekindle.blocks.pod import Manifest
from rekindle.blocks.serving.deployment import labels


def disruption_budget(name: str) -> Manifest:
    """At most one pod is away on purpose; never none, which would block a drain. Source: policy/v1."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(name)}},
    }
