"""Workflows as a cluster returns them."""

from typing import Any


def make_node(run: str, step: str = "", phase: str = "Succeeded", **fields: Any) -> dict[str, Any]:
    suffix = f".{step}" if step else ""
    return {
        "id": f"{run}-{len(step)}" if step else run,
        "name": run + suffix,
        "displayName": step or run,
        "type": "Pod" if step else "DAG",
        "templateName": "say" if step else "main",
        "phase": phase,
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:09Z",
        **fields,
    }


def make_workflow(name: str, phase: str, *nodes: dict[str, Any]) -> dict[str, Any]:
    tasks = [{"name": "first", "template": "say"}, {"name": "second", "template": "say"}]
    say = {"name": "say", "container": {"image": "bash:5", "command": ["true"]}}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name, "generateName": "demo-"},
        "spec": {
            "entrypoint": "main",
            "templates": [{"name": "main", "dag": {"tasks": tasks}}, say],
        },
        "status": {
            "phase": phase,
            "startedAt": "2026-01-01T00:00:00Z",
            "nodes": {node["id"]: node for node in (make_node(name, phase=phase), *nodes)},
        },
    }
