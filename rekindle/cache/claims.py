"""Claims on cached results. A claim prevents retention from removing artifacts that a new run
reuses, until the new run itself is recorded.

    cache-claims/RUN         {RUN/TASK: Unix time of its last claim, in seconds}
    cache-claims/releases    {releases/NAME/HASH: the same}, for releases that a run reads

A new run claims an entry, and then checks that the entry still exists; retention deletes the entry,
and then reads the claims. Because of this order, at least one side notices a conflict: the run
finds the entry deleted, or retention finds the claim.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, RootModel

from argolocal.common.json_text import to_json
from rekindle.documents import parse
from rekindle.errors import Conflict, NotFound

if TYPE_CHECKING:
    from rekindle.storage import Store

CLAIMS_FOLDER = "cache-claims/"
# a claim younger than this, in seconds, is not renewed
RENEWAL_INTERVAL_S = 3600
# a claim older than this, in seconds, is deleted when the next claim is made
EXPIRY_S = 366 * 86400
# first part of the object key of a release
RELEASES_CLAIM = "releases"
THREADS = 8


class Claims(RootModel[dict[str, Annotated[float, Field(allow_inf_nan=False)]]]):
    """The Unix time of the last claim of each RUN/TASK or, in the object `cache-claims/releases`,
    of each release."""

    model_config = ConfigDict(strict=True)


def claim_tasks(store: "Store", task_references: Iterable[str]) -> None:
    """Record that a new run uses the artifacts of `task_references` (RUN/TASK). Raises
    StorageError."""
    tasks_by_run: dict[str, set[str]] = defaultdict(set)
    for task_reference in task_references:
        tasks_by_run[task_reference.partition("/")[0]].add(task_reference)
    with ThreadPoolExecutor(THREADS) as thread_pool:
        list(thread_pool.map(partial(_record_claims, store), tasks_by_run, tasks_by_run.values()))


def claimed_tasks(store: "Store", claim_age_s: float, run_name: str = "") -> set[str]:
    """Return the tasks (RUN/TASK) of `run_name`, or of all runs, that were claimed in the last
    `claim_age_s` seconds. Raises StorageError."""
    if run_name:
        run_names = [run_name]
    else:
        run_names = [
            claim_object.key.removeprefix(CLAIMS_FOLDER)
            for claim_object in store.list(CLAIMS_FOLDER)
        ]

    with ThreadPoolExecutor(THREADS) as thread_pool:
        claim_times = [
            claim_times
            for claim_times, _ in thread_pool.map(partial(_read_claims, store), run_names)
        ]

    return {
        task_reference
        for claim_times_by_task in claim_times
        for task_reference, claim_time in claim_times_by_task.items()
        if time.time() - claim_time < claim_age_s
    }


def remove_claims(store: "Store", run_name: str) -> None:
    """Delete the claims on the artifacts of `run_name`, which were removed. Raises StorageError."""
    store.delete([f"{CLAIMS_FOLDER}{run_name}"])


def _record_claims(store: "Store", run_name: str, task_references: Iterable[str]) -> None:
    while True:
        claim_times, etag = _read_claims(store, run_name)
        current_time = time.time()
        outdated_tasks = [
            task_reference
            for task_reference in task_references
            if current_time - claim_times.get(task_reference, 0.0) >= RENEWAL_INTERVAL_S
        ]
        if not outdated_tasks:
            return
        recent_claims = {
            task_reference: claim_time
            for task_reference, claim_time in claim_times.items()
            if current_time - claim_time < EXPIRY_S
        }
        claims_json = to_json(recent_claims | dict.fromkeys(outdated_tasks, current_time)).encode()
        # retry, because another run has changed the claims, or retention has removed the claims
        with suppress(Conflict, NotFound):
            store.put(f"{CLAIMS_FOLDER}{run_name}", claims_json, if_match=etag, if_absent=not etag)
            return


def _read_claims(store: "Store", run_name: str) -> tuple[dict[str, float], str | None]:
    try:
        claims_json, etag = store.get_with_etag(f"{CLAIMS_FOLDER}{run_name}")
    except NotFound:
        return {}, None
    return parse(Claims, claims_json, store.uri(f"{CLAIMS_FOLDER}{run_name}")).root, etag
