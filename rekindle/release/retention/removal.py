"""Removes the runs, releases and cache entries that decision.py has chosen. Removals can be
repeated after an interruption, and may run concurrently.

An object is deleted only if a record in the store says that it belongs to the run (ownership.py) or
the release (release.json). The record is deleted last.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol
from urllib.parse import quote

from rekindle import tracking
from rekindle.cache import claims, difference, entries
from rekindle.content.verified_release import MLFLOW_FILES, RELEASE_RECORD, UNHASHED_FILES
from rekindle.errors import Conflict, NotFound
from rekindle.mlflow_api import Answer, ArtifactChanged, RequestRefused, RunAnswer, request
from rekindle.names import ObjectId, RunName, split_address
from rekindle.release.release_files import Owner, read_owner
from rekindle.release.retention import listing, ownership
from rekindle.release.retention.decision import Release, Removal, RunRemoval
from rekindle.storage import Store

# maximum number of runs and releases to remove at the end of one run, which must not take long
MAX_AT_END = 50
COMMIT_S = 300  # maximum time between the creation of a version and the last write of its files


class Host(Protocol):
    """Access to the records of runs outside of MLflow and the object store: local run folders or
    Workflows."""

    def hold(self, run: str) -> AbstractContextManager[bool]:
        """Prevent that the run is resumed during the `with` block. Yields False if the run is
        active."""
        ...

    def remove(self, run: str) -> None:
        """Remove the record of the run, if it exists."""
        ...


class NoHost:
    """The Host of a pod, which cannot access Workflows: it does nothing."""

    @contextmanager
    def hold(self, run: str) -> Iterator[bool]:
        yield True

    def remove(self, run: str) -> None:
        pass


def limit_removal(removal: Removal) -> Removal:
    """Limit a removal to MAX_AT_END releases and runs; the ends of later runs remove the remaining
    ones."""
    releases = removal.releases[:MAX_AT_END]
    return Removal(releases, removal.entries, removal.runs[: MAX_AT_END - len(releases)])


def remove(store: Store, removal: Removal, host: Host, context: listing.Context) -> list[str]:
    """Remove releases, cache entries and runs; return the names of the removed runs.

    Runs that became active after the decision are kept, and so are artifacts that another run has
    claimed since. Raises StorageError, TrackingError.
    """
    for release in removal.releases:
        _remove_release(store, release, context.resumable_s)

    removed_names = []
    for item in removal.runs:
        with host.hold(item.run.name) as is_held:
            if is_held:
                entries.remove_entries(
                    store, [entry for entry in removal.entries if entry.workflow == item.run.name]
                )
                # includes tasks that were claimed after the decision
                claimed = claims.claimed_tasks(store, context.claim_s, item.run.name)
                if _remove_run(store, item, item.kept_tasks | claimed, host):
                    removed_names.append(item.run.name)

    if removal.entries:
        difference.remove_unused_code(store)

    return removed_names


def list_own_artifacts(
    store: Store, item: RunRemoval, kept_tasks: frozenset[str]
) -> list[tuple[str, int]]:
    """Return the keys and sizes of the objects that a run owns, except its mark and the artifacts
    of `kept_tasks`."""
    run = RunName(item.run.name)

    mark = ownership.read(store, run)
    if not mark or not mark.belongs_to(item.run.uid):
        return []

    kept_prefixes = tuple(f"{task}/" for task in kept_tasks)
    objects = (obj for obj in store.list(f"{run}/") if obj.key != ownership.mark_key(run))

    return [
        (obj.key, obj.size)
        for obj in objects
        if mark.owns(run, obj.key) and not obj.key.startswith(kept_prefixes)
    ]


def _remove_run(store: Store, item: RunRemoval, kept_tasks: frozenset[str], host: Host) -> bool:
    """Remove a run. If `kept_tasks` is not empty, remove only the artifacts of all other tasks.
    Return False if nothing was removed."""
    run = RunName(item.run.name)
    mark = ownership.read(store, run)
    if mark and not mark.belongs_to(item.run.uid):
        host.remove(run)
        return True

    keys = [key for key, _ in list_own_artifacts(store, item, kept_tasks)]
    store.delete(keys)

    if kept_tasks:
        return bool(keys)

    if mark:
        claims.remove_claims(store, run)
    own_id = listing.store_id(store)

    run_id = listing.find_record_id(item.run.pipeline, run, mark.run_id if mark else "", own_id)
    if run_id and item.keep_mlflow:
        tracking.log(run_id, tags={tracking.EMPTIED: "removed", listing.STORE_TAG: own_id})
    elif run_id:
        trial_ids = listing.find_trial_ids(run_id, run, mark.trial_ids if mark else [])
        for each in (*trial_ids, run_id):
            delete_record(each)

    host.remove(run)
    if not item.keep_mlflow:
        store.delete([ownership.mark_key(run)] if ownership.read(store, run) else [])

    return True


def delete_record(run_id: str) -> None:
    """Delete the artifacts and the record of a run in MLflow. Raises TrackingError.

    MLflow keeps the data of a deleted run until `mlflow gc`; the embedded MLflow deletes the data
    of a run with the tag tracking.REMOVED.
    """
    with suppress_missing():
        answer = request("GET", "mlflow/runs/get", RunAnswer, params={"run_id": run_id})
        root = split_address(answer.run.info.artifact_uri)

        # only artifacts in a folder with the run's id are deleted, since users may choose any
        # folder for an experiment. MLflow can delete artifacts only at addresses with the scheme
        # mlflow-artifacts
        has_own_folder = root.path.strip("/").endswith(f"{ObjectId(run_id)}/artifacts")
        if root.scheme == "mlflow-artifacts" and has_own_folder:
            path = quote(root.path.strip("/"))
            request("DELETE", f"mlflow-artifacts/artifacts/{path}", ArtifactChanged)

        tracking.log(run_id, tags={tracking.REMOVED: "yes"})
        request("POST", "mlflow/runs/delete", Answer, json={"run_id": run_id})


def _remove_release(store: Store, release: Release, resumable_s: float) -> None:
    """Remove a version and then its files, except if a run is just releasing the same files
    again."""
    objects = list(store.list(release.prefix))

    newest = max((obj.modified for obj in objects), default=0.0)
    if (
        newest > release.created + COMMIT_S
        and time.time() - newest < resumable_s
        and not release.marked
    ):
        return

    version = {"name": release.model, "version": str(release.version)}
    mark = {**version, "key": tracking.REMOVED}
    with suppress_missing():
        tag = {**mark, "value": listing.store_id(store)}
        request("POST", "mlflow/model-versions/set-tag", Answer, json=tag)
        # keep it: the alias was set after the decision
        if listing.has_alias(release.model, str(release.version)):
            request("DELETE", "mlflow/model-versions/delete-tag", Answer, json=mark)
            return

    tracking.remove_duplicates(
        release.model, release.prefix, store.uri(release.prefix), version["version"]
    )
    # checked again: another version of the same files may have been registered since the decision
    if not listing.has_other_version(store, release):
        _remove_files(store, release, [obj.key for obj in objects])

    with suppress_missing():
        request("DELETE", "mlflow/model-versions/delete", Answer, json=version)


def _remove_files(store: Store, release: Release, keys: list[str]) -> None:
    """Remove the files of a release; release.json, which names them, is removed last.

    Other objects in its folder are kept.
    """
    mark = _mark_removed(store, release)
    if not mark:
        return

    record_key = f"{release.prefix}{RELEASE_RECORD}"
    names = mark.files.keys() | UNHASHED_FILES | MLFLOW_FILES
    own_keys = {f"{release.prefix}{name}" for name in names} - {record_key}
    store.delete([key for key in keys if key in own_keys])
    if read_owner(store, release.prefix) == mark:
        store.delete([record_key])


def _mark_removed(store: Store, release: Release) -> Owner | None:
    """Write into release.json that its files are being removed, and return its content; None if the
    files belong to another version, such as a version that is being released at this moment."""
    record_key = f"{release.prefix}{RELEASE_RECORD}"

    while True:
        current = store.head(record_key)
        owner = read_owner(store, release.prefix)
        version = (release.model, str(release.version))
        if not current or not owner or (owner.name, owner.version) != version:
            return None

        mark = owner.model_copy(update={"removed": True})
        try:
            store.put(record_key, mark.model_dump_json().encode(), if_match=current.etag)
        except (Conflict, NotFound):
            continue
        return mark


@contextmanager
def suppress_missing() -> Iterator[None]:
    """Ignore MLflow's error about a missing object, because a concurrent removal may have deleted
    it."""
    try:
        yield
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST" and "must be in the 'active' state" not in str(
            error
        ):
            raise
