"""What a real Argo makes of a folder of manifests, written beside each as NAME.json; what has one is left alone.

    python -m tests.conformance.record FOLDER --namespace NS [--image python:3.11] [--at-once 4]

It needs kubectl, a KUBECONFIG, and in the namespace what executors need (workflowtaskresults: create, patch); for
manifests with `memoize` the controller also must be allowed to get, create and update ConfigMaps there.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from pipelines.local.manifest import documents, split

OVER = ("Succeeded", "Failed", "Error")
TIMEOUT = 120.0  # what takes longer is called Stuck


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--namespace", required=True)
    options.add_argument("--image", default="python:3.11", help="what stands for python:3.11 on that cluster")
    options.add_argument("--at-once", type=int, default=4)
    given = options.parse_args()
    waiting = [path for path in sorted(given.folder.glob("*.yaml")) if not path.with_suffix(".json").exists()]
    running: dict[Path, float] = {}
    while waiting or running:
        while waiting and len(running) < given.at_once:
            path = waiting.pop(0)
            submit(path.read_text().replace("python:3.11", given.image), given.namespace)
            running[path] = time.monotonic()
        time.sleep(2)
        for path, since in list(running.items()):
            flow = json.loads(kubectl(given.namespace, "get", "workflow", path.stem, "-o", "json"))
            over = (flow.get("status") or {}).get("phase") in OVER
            stuck = not over and time.monotonic() - since > TIMEOUT
            if stuck or over:
                outcome = recorded(flow, path.stem) | ({"phase": "Stuck"} if stuck else {})
                path.with_suffix(".json").write_text(json.dumps(outcome, indent=1) + "\n")
                print(path.stem, outcome["phase"], outcome["message"], flush=True)
                kubectl(given.namespace, "delete", "workflow", path.stem, "--wait=false")
                del running[path]


def submit(text: str, namespace: str) -> None:
    """Workflows are created, and what lies beside them is applied."""
    flow, beside = split(documents(text))
    if beside:
        kubectl(namespace, "apply", "-f", "-", text=yaml.safe_dump_all(beside))
    kubectl(namespace, "create", "-f", "-", text=json.dumps(flow))


def kubectl(namespace: str, *arguments: str, text: str = "") -> str:
    """Raises CalledProcessError."""
    command = ["kubectl", "-n", namespace, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def recorded(flow: dict[str, Any], name: str) -> dict[str, Any]:
    """The outcome as test_recorded compares it."""
    status = flow.get("status") or {}
    outputs = (status.get("outputs") or {}).get("parameters") or []
    return {
        "phase": status.get("phase", ""),
        "message": status.get("message", ""),
        "outputs": {each["name"]: each.get("value") for each in outputs},
        "nodes": [node_of(node, name) for node in (status.get("nodes") or {}).values()],
    }


def node_of(node: dict[str, Any], name: str) -> dict[str, Any]:
    """What is compared of one node."""
    outputs = node.get("outputs") or {}
    return {
        "name": node["name"].replace(name, "WF", 1),
        "displayName": node["displayName"].replace(name, "WF", 1),
        "type": node["type"],
        "phase": node["phase"],
        "message": node.get("message", ""),
        "params": {each["name"]: each.get("value") for each in outputs.get("parameters", [])},
        "result": outputs.get("result"),
        "exitCode": outputs.get("exitCode"),
        "inputs": {each["name"]: each["value"] for each in (node.get("inputs") or {}).get("parameters", [])},
    }


if __name__ == "__main__":
    main()
