"""Tests of the conditions of each kind of object, evaluated on the statuses that its controller
wrote, in their order.

statuses/KIND.yaml contains lists of statuses, one list for each recorded course of an object
(called a story), recorded from a cluster (see tests/cluster/test_kinds.py) unless a comment says
otherwise. A step must wait at all statuses of a recorded story except the last one. At the last
status of a story, the step must end with the outcome that the file states.
"""

from pathlib import Path

import pytest
import yaml

from argolocal.language.selector import evaluate_conditions
from tests.kinds import kinds

STATUSES = Path(__file__).parent / "statuses"
SUCCESS_STORIES = {
    "succeeded",
    "lost",
    "tolerated",
    "rollout",
}  # the stories of objects that succeed; all other stories end with a failure
STORIES = {
    (file.stem, name): statuses
    for file in sorted(STATUSES.glob("*.yaml"))
    for name, statuses in yaml.load(file.read_text(), yaml.CSafeLoader).items()
}


@pytest.mark.parametrize("kind, story", STORIES, ids=lambda value: value)
def test_a_step_ends_with_its_job_and_with_the_same_outcome(kind: str, story: str) -> None:
    job_kind = kinds()[kind.replace("-", "/")]
    seen = [
        evaluate_conditions({"status": status}, job_kind.success, ",".join(job_kind.failure))
        for status in STORIES[kind, story]
    ]
    assert [good for good, _ in seen] == [None] * (len(seen) - 1) + [story in SUCCESS_STORIES], seen


@pytest.mark.parametrize("kind", [key for key, job_kind in kinds().items() if job_kind.success])
def test_every_kind_has_recorded_statuses_of_success_failure_and_loss(kind: str) -> None:
    stories = {story for key, story in STORIES if key == kind.replace("/", "-")}
    assert stories >= {"succeeded", "failed"}
    assert stories & {"lost", "evicted"}
