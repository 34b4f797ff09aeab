"""All rendered objects are valid and satisfy checkov, except for rules that are skipped with a
reason."""

import subprocess
from typing import Any

import pytest

from tests.commands import ROOT
from tests.rendered import list_rendered
from tests.schema import find_errors, schema_of


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return list_rendered()


def test_the_api_server_knows_every_field_of_every_rendered_object(
    objects: list[dict[str, Any]],
) -> None:
    for manifest in objects:
        assert list(find_errors(manifest, schema_of(manifest))) == [], manifest["kind"]


@pytest.mark.parametrize(
    "kind, change, error",
    [
        ("Deployment", {"replicsa": 1}, ".spec.replicsa is not known"),
        (
            "Workflow",
            {"templates": [{"name": 1}]},
            ".spec.templates[0].name is 1: it must be of type string",
        ),
        (
            "HTTPRoute",
            {"rules": [{"backendRefs": [{"port": 80}]}]},
            ".spec.rules[0].backendRefs[0].name is missing",
        ),
        ("Service", {"clusterIPs": {}}, ".spec.clusterIPs is {}: it must be of type array"),
    ],
)
def test_an_excerpt_rejects_what_the_api_server_rejects(
    objects: list[dict[str, Any]], kind: str, change: dict[str, Any], error: str
) -> None:
    manifest = next(manifest for manifest in objects if manifest["kind"] == kind)
    manifest = manifest | {"spec": manifest["spec"] | change}
    assert error in find_errors(manifest, schema_of(manifest))


@pytest.mark.slow
def test_all_findings_of_checkov_and_kubeconform_are_explained() -> None:
    completed = subprocess.run(["make", "scan"], cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
