"""The cause of a failed job of another framework reaches the user: in the status, in `explain` and
in notifications."""

import json
from pathlib import Path
from typing import Any

from argolocal.common import causes
from argolocal.view import summary
from rekindle.local.cluster import LocalCluster
from rekindle.training.cost.jobs import list_job_runs
from tests import builders
from tests.argolocal.running import execute_manifest

FAILED = ",".join(f"status.conditions.{index}.type == Failed" for index in range(1, 5))


def make_job_workflow(program: str) -> dict[str, Any]:
    container = {"name": "xgboost", "image": "any", "command": ["python", "-c", program]}
    master = {
        "replicas": 1,
        "restartPolicy": "Never",
        "template": {"spec": {"containers": [container]}},
    }

    spec = {"xgbReplicaSpecs": {"Master": master}}

    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "XGBoostJob",
        "metadata": {"name": "trees"},
        "spec": spec,
    }

    resource = {
        "action": "apply",
        "successCondition": "status.replicaStatuses.Master.succeeded > 0",
        "failureCondition": FAILED,
        "manifest": json.dumps(job),
    }

    tasks = [{"name": "trees", "template": "trees"}]
    templates = [{"name": "main", "dag": {"tasks": tasks}}, {"name": "trees", "resource": resource}]

    return builders.make_workflow(*templates)


def test_the_cause_is_the_error_of_the_process_and_not_a_condition(tmp_path: Path) -> None:
    manifest = make_job_workflow("import sys; sys.exit('error: the table has no rows')")
    status = execute_manifest(manifest, {}, LocalCluster(tmp_path))
    (job,) = list_job_runs(status, manifest)
    (step,) = summary.make_json_object("w", status)["steps"]
    ((_, reason),) = causes.list_failed_steps(
        [node for node in status["nodes"].values() if node["type"] == "Pod"]
    )
    for text in (job.message, step["message"], reason):
        assert "trees-master-0 ended with code 1" in text
        assert "the table has no rows" in text
        assert "condition" not in text
        assert "status." not in text
    text = summary.failure("w", status, "error: the table has no rows\n", None, "resume")
    assert "cause   the table has no rows\n" in text
