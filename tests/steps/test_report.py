"""Whatever the end of a workflow, its MLflow run says so."""

import json
import uuid

import pytest
from mlflow import MlflowClient

from steps import report, tracking

FAILURE = [{"displayName": "train", "message": "Error (exit code 65): no data", "phase": "Failed"}]
STOPPED = [{"displayName": "train", "message": "workflow shutdown with strategy:  Stop", "phase": "Failed"}]


@pytest.mark.parametrize(
    ("status", "failures", "expected", "tag"),
    [
        ("Succeeded", "null", "FINISHED", None),
        ("Failed", json.dumps(FAILURE), "FAILED", "train: Error (exit code 65): no data"),
        ("Failed", json.dumps(json.dumps(FAILURE)), "FAILED", "train: Error (exit code 65): no data"),  # as Argo quotes
        ("Error", "{{workflow.failures}}", "FAILED", "workflow: {{workflow.failures}}"),
        ("Failed", json.dumps(STOPPED), "KILLED", "train: workflow shutdown with strategy:  Stop"),
        ("Failed", "", "FAILED", None),
    ],
)
def test_the_run_ends_as_the_workflow_did(
    mlflow_server: str, status: str, failures: str, expected: str, tag: str | None
) -> None:
    name = f"w-{uuid.uuid4().hex[:8]}"
    run_id = tracking.start_run("reports", name)
    for _ in range(2):
        inputs = report.Inputs(workflow=name, status=status, failures=failures, experiment="reports")
        assert report.run(inputs).run_id == run_id
    run = MlflowClient(mlflow_server).get_run(run_id)
    assert (run.info.status, run.data.tags.get("rekindle.failures")) == (expected, tag)


def test_a_workflow_that_failed_before_its_run_was_made_has_nothing_to_close(mlflow_server: str) -> None:
    inputs = report.Inputs(workflow="never-started", status="Failed", experiment="reports")
    assert report.run(inputs).run_id == ""
