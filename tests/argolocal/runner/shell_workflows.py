"""Workflows whose steps are shell commands. The shell commands share files in a
PersistentVolumeClaim, which tests read and write."""

from pathlib import Path
from typing import Any

import pytest

from argolocal.controllers.controller import Controller
from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from tests import builders

CLAIM = {"kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": {}}


def make_shell_workflow(
    templates: list[dict[str, Any]], name: str = "w", **spec: Any
) -> dict[str, Any]:
    """Return a workflow with the given templates, which may mount the claim `shared`."""
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]
    return builders.make_workflow(*templates, volumes=volumes, name=name, **spec)


def make_shell_template(name: str, command: str, **template: Any) -> dict[str, Any]:
    """Return a template that runs a shell command. If the command contains /shared, the claim is
    mounted at this path (see `shared_folder`)."""
    if "/shared" in command:
        mounts = [{"name": "shared", "mountPath": "/shared"}]
    else:
        mounts = []

    if mounts and not filesystem.supports_namespaces():
        pytest.skip("needs mount namespaces")

    container = {
        "image": "alpine",
        "command": ["sh", "-c"],
        "args": [command],
        "volumeMounts": mounts,
    }
    return {"name": name, "container": container, **template}


def make_dag_template(*tasks: dict[str, Any], **template: Any) -> dict[str, Any]:
    """Return the template `main` with the tasks of a DAG."""
    return {"name": "main", "dag": {"tasks": list(tasks)}, **template}


def cluster_with_claim(home: Path) -> LocalCluster:
    """Return the cluster of a new home with the claim `shared`."""
    cluster = LocalCluster(home)
    Controller(cluster, "PersistentVolumeClaim").apply(CLAIM)
    return cluster


def shared_folder(cluster: LocalCluster, name: str) -> Path:
    """Return the path on this machine of the folder that pods see as /shared."""
    folder = cluster.home / "claims/shared"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def phases_by_name(status: dict[str, Any]) -> dict[str, str]:
    """Return the phases of a run's nodes by the name of the node."""
    return {node["name"]: node["phase"] for node in status["nodes"].values()}
