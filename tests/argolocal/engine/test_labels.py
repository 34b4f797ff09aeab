"""Tests of the labels of a run whose values are expressions (workflowMetadata.labelsFrom)."""

from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.runner.cluster import LocalCluster
from argolocal.state.journal import RunFiles
from tests.argolocal.running import execute_manifest
from tests.builders import make_shell_container


def run_with_labels(home: Path, labels: dict[str, str], value: str = "bar") -> dict[str, Any]:
    container = make_shell_container("echo '{{workflow.labels.foo}}'")

    spec = {
        "entrypoint": "main",
        "arguments": {"parameters": [{"name": "foo", "value": value}]},
        "workflowMetadata": {
            "labelsFrom": {name: {"expression": text} for name, text in labels.items()}
        },
        "templates": [{"name": "main", "container": container}],
    }

    manifest = {
        "kind": "Workflow",
        "metadata": {"name": "w", "labels": {"old": "kept"}},
        "spec": spec,
    }

    return execute_manifest(manifest, {"foo": value}, LocalCluster(home))


def test_a_label_has_the_value_of_its_expression(tmp_path: Path) -> None:
    status = run_with_labels(
        tmp_path, {"foo": "workflow.parameters.foo + '-' + workflow.labels.old"}
    )
    assert status["phase"] == "Succeeded"
    assert RunFiles(tmp_path, "w").workflow()["metadata"]["labels"] == {
        "old": "kept",
        "foo": "bar-kept",
    }
    assert (tmp_path / "runs/w/logs/w.log").read_text() == "bar-kept\n"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("workflow.parameters.none.x", "cannot be evaluated"),
        ("1 + 1", "evaluates to 2: it must be a string"),
        ("'-' + workflow.parameters.foo", "evaluates to '-bar': it must be a string of at most 63"),
    ],
)
def test_an_invalid_label_is_rejected_with_its_path(
    tmp_path: Path, expression: str, message: str
) -> None:
    with pytest.raises(
        ConfigError, match=r"spec\.workflowMetadata\.labelsFrom\.foo\.expression " + message
    ):
        run_with_labels(tmp_path, {"foo": expression})
    assert not (tmp_path / "runs").exists()
