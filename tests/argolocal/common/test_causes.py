"""The message of a failed step states the cause of the failure, not the failureCondition of its
template."""

import json

import pytest

from argolocal.common import causes

CONDITION = (
    "main: Error (exit code 64): failure condition '{status.conditions.2.type == [Failed]}'"
    " evaluated true"
)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            f"{CONDITION}: job-master-0 ended with code 1: error: no rows",
            "job-master-0 ended with code 1: error: no rows",
        ),
        (CONDITION, causes.UNREPORTED_CAUSE),
        ("main: Error (exit code 1)", "main: Error (exit code 1)"),
        ("", ""),
    ],
)
def test_the_cause_of_a_failed_job_replaces_the_condition_of_its_template(
    message: str, cause: str
) -> None:
    assert causes.extract_cause(message) == cause
    nodes = [
        {"displayName": "train", "templateName": "train", "phase": "Failed", "message": message}
    ]
    assert causes.list_failed_steps(json.loads(json.dumps(nodes))) == [("train", cause or "Failed")]
