"""Manifests that a real Argo ran: every node must be named, end and say what it did there."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.local import isolation
from pipelines.local.cluster import LocalCluster
from pipelines.local.manifest import documents
from pipelines.local.run import execute
from steps.storage import Store

RECORDED = sorted((Path(__file__).parent / "conformance").glob("*.yaml"))


def node_of(node: dict[str, Any], name: str) -> dict[str, Any]:
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


@pytest.mark.skipif(not isolation.available(), reason="no private mount namespace here")
@pytest.mark.parametrize("manifest", RECORDED, ids=lambda path: path.stem)
def test_a_manifest_ends_here_as_it_ended_on_argo(manifest: Path, tmp_path: Path, s3: Store) -> None:
    recorded = json.loads(manifest.with_suffix(".json").read_text())
    status = execute(documents(manifest.read_text())[0], {}, LocalCluster(tmp_path / ".rekindle"))
    nodes = sorted((node_of(node, manifest.stem) for node in status["nodes"].values()), key=lambda node: node["name"])
    assert nodes == sorted((recorded.get("was") or recorded)["nodes"], key=lambda node: node["name"])
    outputs = (status.get("outputs") or {}).get("parameters") or []
    assert {each["name"]: each["value"] for each in outputs} == recorded.get("outputs", {})
    if recorded["phase"] == "Stuck":  # Argo waits for ever; here that is an end with its reason
        assert (status["phase"], "Argo would wait" in status["message"]) == ("Error", True)
    else:
        assert (status["phase"], status["message"]) == (recorded["phase"], recorded["message"])
