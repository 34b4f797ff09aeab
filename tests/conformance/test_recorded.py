"""Manifests that a real Argo ran: every node must be named, end and say what it did there."""

import json
from pathlib import Path

import pytest

from pipelines.local import isolation
from pipelines.local.cluster import LocalCluster
from pipelines.local.manifest import documents, split
from pipelines.local.run import execute
from steps.errors import ConfigError
from steps.storage import Store
from tests.conformance.record import node_of

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.yaml"))


@pytest.mark.skipif(not isolation.available(), reason="no private mount namespace here")
@pytest.mark.parametrize("manifest", RECORDED, ids=lambda path: path.stem)
def test_a_manifest_ends_here_as_it_ended_on_argo(manifest: Path, tmp_path: Path, s3: Store) -> None:
    recorded = json.loads(manifest.with_suffix(".json").read_text())
    main, beside = split(documents(manifest.read_text()))
    cluster = LocalCluster(tmp_path / ".rekindle")
    cluster.keep(beside)
    if recorded.get("message", "").startswith("invalid spec"):  # Argo's own check refused it
        with pytest.raises(ConfigError):
            execute(main, {}, cluster)
        return
    status = execute(main, {}, cluster)
    nodes = sorted((node_of(node, manifest.stem) for node in status["nodes"].values()), key=lambda node: node["name"])
    assert nodes == sorted((recorded.get("was") or recorded)["nodes"], key=lambda node: node["name"])
    outputs = (status.get("outputs") or {}).get("parameters") or []
    assert {each["name"]: each["value"] for each in outputs} == recorded.get("outputs", {})
    if recorded["phase"] == "Stuck":  # Argo waits for ever; here that is an end with its reason
        assert (status["phase"], "Argo would wait" in status["message"]) == ("Error", True)
    else:
        assert (status["phase"], status["message"]) == (recorded["phase"], recorded.get("message", ""))
