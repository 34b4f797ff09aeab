"""If several runs claim artifacts at the same time, no claim is lost; retention never removes a
claimed artifact."""

import uuid
from concurrent.futures import ThreadPoolExecutor

from rekindle.cache import claims
from rekindle.storage import Store


def test_the_claims_of_concurrent_runs_are_all_recorded(s3: Store) -> None:
    run = uuid.uuid4().hex
    other = uuid.uuid4().hex
    tasks = [f"{run}/t{number}" for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda task: claims.claim_tasks(s3, [task, f"{other}/train"]), tasks))
    assert claims.claimed_tasks(s3, 60.0, run) == {*tasks}
    assert {*tasks, f"{other}/train"} <= claims.claimed_tasks(s3, 60.0)
    claims.remove_claims(s3, run)
    assert claims.claimed_tasks(s3, 60.0, run) == set()
    assert claims.claimed_tasks(s3, 60.0, other) == {f"{other}/train"}


def test_a_claim_expires_and_is_renewed_at_most_once_per_hour(s3: Store) -> None:
    run = uuid.uuid4().hex
    claims.claim_tasks(s3, [f"{run}/train"])
    first_claim = s3.get(f"{claims.CLAIMS_FOLDER}{run}")
    claims.claim_tasks(s3, [f"{run}/train"])
    assert s3.get(f"{claims.CLAIMS_FOLDER}{run}") == first_claim
    assert claims.claimed_tasks(s3, 0.0, run) == set()
    s3.put(f"{claims.CLAIMS_FOLDER}{run}", b'{"%s/train": 1e9}' % run.encode())
    assert claims.claimed_tasks(s3, 3600.0, run) == set()
    claims.claim_tasks(s3, [f"{run}/train"])
    assert claims.claimed_tasks(s3, 3600.0, run) == {f"{run}/train"}
