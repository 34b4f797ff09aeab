"""Manifests that tests run, lint or store."""

from typing import Any


def make_workflow(*templates: dict[str, Any], name: str = "w", **spec: Any) -> dict[str, Any]:
    """Return a workflow that starts with its template `main`."""
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {"entrypoint": "main", "templates": [*templates], **spec},
    }


def make_shell_container(source: str, **more: Any) -> dict[str, Any]:
    """Return a container that runs a shell script."""
    return {"image": "busybox", "command": ["sh", "-c"], "args": [source], **more}
