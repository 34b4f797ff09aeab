"""Claims on cached results. A claim prevents retention from removing artifacts that a new run
reuses, until the new run itself is recorded.

    cache-claims/RUN         {RUN/TASK: Unix time of its last claim, in seconds}
    cache-claims/releases    {releases/NAME/HASH: the same}, for releases that a run reads

A new run claims an entry, and then checks that the entry still exists; retention deletes the entry,
and then reads the claims. Because of this order, at least one of the two, the run or retention,
sees the change of the other.
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
INTERVAL_S = 3600  # a claim younger than this, in seconds, is not renewed
# a claim older than this, in seconds, is deleted when the next claim is made
EXPIRY_S = 366 * 86400
RELEASES = "releases"  # first part of the key of a release
THREADS = 8


class Claims(RootModel[dict[str, Annotated[float, Field(allow_inf_nan=False)]]]):
    """The Unix time of the last claim of each RUN/TASK or, in the object `cache-claims/releases`,
    of each release."""

    model_config = ConfigDict(strict=True)


def claim_tasks(store: "Store", tasks: Iterable[str]) -> None:
    """Record that a new run uses the artifacts of `tasks` (RUN/TASK). Raises StorageError."""
    tasks_by_run: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        tasks_by_run[task.partition("/")[0]].add(task)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(partial(_record_claims, store), tasks_by_run, tasks_by_run.values()))


def claimed_tasks(store: "Store", claim_s: float, run: str = "") -> set[str]:
    """Return the tasks (RUN/TASK) of `run`, or of all runs, that were claimed in the last `claim_s`
    seconds. Raises StorageError."""
    if run:
        runs = [run]
    else:
        runs = [item.key.removeprefix(CLAIMS_FOLDER) for item in store.list(CLAIMS_FOLDER)]

    with ThreadPoolExecutor(THREADS) as pool:
        times = [times for times, _ in pool.map(partial(_read, store), runs)]

    return {
        task
        for claims in times
        for task, claimed in claims.items()
        if time.time() - claimed < claim_s
    }


def remove_claims(store: "Store", run: str) -> None:
    """Delete the claims on the artifacts of `run`, which were removed. Raises StorageError."""
    store.delete([f"{CLAIMS_FOLDER}{run}"])


def _record_claims(store: "Store", run: str, tasks: Iterable[str]) -> None:
    while True:
        times, etag = _read(store, run)
        now = time.time()
        outdated = [task for task in tasks if now - times.get(task, 0.0) >= INTERVAL_S]
        if not outdated:
            return
        recent = {task: claimed for task, claimed in times.items() if now - claimed < EXPIRY_S}
        data = to_json(recent | dict.fromkeys(outdated, now)).encode()
        # retry, because another run has changed the claims or retention has removed them
        with suppress(Conflict, NotFound):
            store.put(f"{CLAIMS_FOLDER}{run}", data, if_match=etag, if_absent=not etag)
            return


def _read(store: "Store", run: str) -> tuple[dict[str, float], str | None]:
    try:
        data, etag = store.get_with_etag(f"{CLAIMS_FOLDER}{run}")
    except NotFound:
        return {}, None
    return parse(Claims, data, store.uri(f"{CLAIMS_FOLDER}{run}")).root, etag
