"""Each kind's conditions on status objects as their controllers wrote them, in the order in which they did.

statuses/KIND.yaml has one list a story; it is recorded from a cluster (see tests/cluster/test_kinds.py) unless it says
otherwise. A step must wait at every status but the last, and end at that one as the story did.
"""

from typing import Any

import pytest
import yaml

from argolocal.language.selector import evaluate_conditions
from rekindle.blocks.jobs import search
from tests.kinds import kinds
from tests.rekindle.blocks.schema import SCHEMAS

STATUSES = SCHEMAS.parent / "statuses"
GOOD = {"succeeded", "lost", "tolerated", "rollout"}  # every other story ends badly
STORIES = {
    (file.stem, name): statuses
    for file in sorted(STATUSES.glob("*.yaml"))
    for name, statuses in yaml.safe_load(file.read_text()).items()
}


@pytest.mark.parametrize("kind, story", STORIES, ids=lambda value: value)
def test_a_step_ends_when_its_job_does_and_as_the_job_did(kind: str, story: str) -> None:
    one = kinds()[kind.replace("-", "/")]
    seen = [
        evaluate_conditions({"status": status}, one.success, ",".join(one.failure)) for status in STORIES[kind, story]
    ]
    assert [good for good, _ in seen] == [None] * (len(seen) - 1) + [story in GOOD], seen


@pytest.mark.parametrize("kind", [key for key, one in kinds().items() if one.success])
def test_every_kind_has_its_stories(kind: str) -> None:
    told = {story for key, story in STORIES if key == kind.replace("/", "-")}
    assert told >= {"succeeded", "failed"} and told & {"lost", "evicted"}


def test_a_search_that_waited_in_a_queue_ends_too() -> None:
    conditions: list[Any] = [{"type": "Suspended", "status": "False"}, {"type": "SuccessCriteriaMet"}]
    waiting, done = ({"status": {"conditions": [*conditions, *more]}} for more in ([], [{"type": "Complete"}]))
    assert evaluate_conditions(waiting, search.success(queued=True), ",".join(search.FAILURE))[0] is None
    assert evaluate_conditions(done, search.success(queued=True), ",".join(search.FAILURE))[0] is True
