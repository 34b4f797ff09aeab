"""Tests with random workflows: the local runner ends each workflow, with the same outcome as
Argo."""

import os
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from argolocal.engine.nodes import FULFILLED_PHASES
from argolocal.manifest.read import split_main_object
from argolocal.pods import filesystem
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.storage import Store
from tests.argolocal.running import execute_manifest
from tests.conformance.argo import DEFAULT_IMAGE, Argo
from tests.conformance.differ import Plain, compare_runs, random_manifests
from tests.conformance.here import LocalRunner
from tests.conformance.workflows import NAME, workflows

COUNT = 20
FINDINGS = re.compile(r"the manifest cannot run:(\nspec\.\S+: .{20,1000} \[\w+\])+")


@pytest.mark.skipif(not filesystem.supports_namespaces(), reason="needs mount namespaces")
@pytest.mark.timeout(300)
@settings(
    max_examples=10,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(workflows())
def test_any_workflow_ends_or_is_rejected_with_a_reason(
    s3: Store, tmp_path_factory: pytest.TempPathFactory, objects: list[dict[str, Any]]
) -> None:
    text = yaml.dump_all(objects, Dumper=Plain).replace(NAME, f"w-{uuid.uuid4().hex[:8]}")
    workflow, other_objects = split_main_object(list(yaml.safe_load_all(text)))
    cluster = LocalCluster(tmp_path_factory.mktemp("home"))
    cluster.store_objects(other_objects)
    try:
        status = execute_manifest(workflow, {}, cluster)
    except ConfigError as error:
        assert FINDINGS.fullmatch(str(error)), error
        return
    assert status["phase"] in ("Succeeded", "Failed", "Error")
    if status["phase"] == "Succeeded":  # siblings of a failed node may stay unfinished, as on Argo
        assert all(node["phase"] in FULFILLED_PHASES for node in status["nodes"].values())


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_random_workflows_have_the_same_outcome_as_on_argo(tmp_path: Path) -> None:
    image = os.environ.get("REKINDLE_TEST_PYTHON", DEFAULT_IMAGE)
    seed = int(os.environ.get("REKINDLE_TEST_SEED", "0"))
    with (
        Argo(f"rekindle-test-{uuid.uuid4().hex[:6]}", image) as argo,
        LocalRunner(tmp_path / "home") as here,
    ):
        manifests = random_manifests(tmp_path, COUNT, seed, bool(argo.store))
        comparisons = compare_runs(manifests, here, argo, 4, lambda comparison: None)

    assert not {
        comparison.name: comparison.differences
        for comparison in comparisons
        if comparison.differences
    }
