"""Removes the runs, releases and cache entries that decision.py has chosen. Removals can be
repeated after an interruption, and may run concurrently.

An object is deleted only if a record in the object store says that the object belongs to the
removed run (ownership.py) or release (release.json). The record of a run or release is deleted
after its objects.
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
from rekindle.mlflow_api import Answer, ArtifactChanged, RequestRefused, RunAnswer, send_request
from rekindle.names import ObjectId, RunName, split_address
from rekindle.release.release_files import ReleaseOwner, read_owner
from rekindle.release.retention import (
    listing,
    mlflow_records,
    ownership,
    registered_versions,
)
from rekindle.release.retention.decision import Release, Removal, RunRemoval
from rekindle.storage import Store

# maximum number of runs and releases to remove at the end of one run, which must not take long
MAX_REMOVALS_AT_END = 50
# maximum time between the creation of a version and the last write of its files
COMMIT_SECONDS = 300


class RunHost(Protocol):
    """Access to the records of runs outside of MLflow and the object store: local run folders or
    Workflows."""

    def hold(self, run_name: str) -> AbstractContextManager[bool]:
        """Prevent a run from being resumed during the `with` block. Yield False if the run is
        active."""
        ...

    def remove(self, run_name: str) -> None:
        """Remove the record of the run (its folder or Workflow), if it exists."""
        ...


class NoHost:
    """The RunHost of a pod, which cannot access Workflows, so that its methods do nothing."""

    @contextmanager
    def hold(self, run_name: str) -> Iterator[bool]:
        yield True

    def remove(self, run_name: str) -> None:
        pass


def limit_removal(removal: Removal) -> Removal:
    """Limit a removal to MAX_REMOVALS_AT_END releases and runs. The remaining releases and runs are
    removed at the end of later runs."""
    limited_releases = removal.releases[:MAX_REMOVALS_AT_END]
    return Removal(
        limited_releases,
        removal.entries,
        removal.runs[: MAX_REMOVALS_AT_END - len(limited_releases)],
    )


def apply_removal(
    object_store: Store,
    removal: Removal,
    run_host: RunHost,
    listing_context: listing.ListingContext,
) -> list[str]:
    """Remove releases, cache entries and runs; return the names of the removed runs.

    Runs that became active after the decision are kept, and so are artifacts that another run has
    claimed since. Raises StorageError, TrackingError.
    """
    for release in removal.releases:
        _remove_release(object_store, release, listing_context.resumable_s)

    removed_names = []
    for run_removal in removal.runs:
        with run_host.hold(run_removal.run.name) as is_held:
            if is_held:
                entries.remove_entries(
                    object_store,
                    [
                        cache_entry
                        for cache_entry in removal.entries
                        if cache_entry.workflow == run_removal.run.name
                    ],
                )
                # read the claims again, because tasks may have been claimed after the decision
                claimed_tasks = claims.claimed_tasks(
                    object_store, listing_context.claim_s, run_removal.run.name
                )
                if _remove_run(
                    object_store, run_removal, run_removal.kept_tasks | claimed_tasks, run_host
                ):
                    removed_names.append(run_removal.run.name)

    if removal.entries:
        difference.remove_unused_code(object_store)

    return removed_names


def list_own_artifacts(
    object_store: Store, run_removal: RunRemoval, kept_tasks: frozenset[str]
) -> list[tuple[str, int]]:
    """Return the keys and sizes of the objects that a run owns, except its mark and the artifacts
    of `kept_tasks`."""
    run_name = RunName(run_removal.run.name)

    run_mark = ownership.read(object_store, run_name)
    if not run_mark or not run_mark.belongs_to(run_removal.run.uid):
        return []

    kept_prefixes = tuple(f"{task_reference}/" for task_reference in kept_tasks)
    run_objects = (
        object_entry
        for object_entry in object_store.list(f"{run_name}/")
        if object_entry.key != ownership.make_mark_key(run_name)
    )

    return [
        (object_entry.key, object_entry.size)
        for object_entry in run_objects
        if run_mark.owns(run_name, object_entry.key)
        and not object_entry.key.startswith(kept_prefixes)
    ]


def _remove_run(
    object_store: Store, run_removal: RunRemoval, kept_tasks: frozenset[str], run_host: RunHost
) -> bool:
    """Remove a run. If `kept_tasks` is not empty, remove only the artifacts of tasks that are not
    in `kept_tasks`. Return False if nothing was removed."""
    run_name = RunName(run_removal.run.name)
    run_mark = ownership.read(object_store, run_name)
    if run_mark and not run_mark.belongs_to(run_removal.run.uid):
        run_host.remove(run_name)
        return True

    artifact_keys = [
        artifact_key
        for artifact_key, _ in list_own_artifacts(object_store, run_removal, kept_tasks)
    ]
    object_store.delete(artifact_keys)

    if kept_tasks:
        return bool(artifact_keys)

    if run_mark:
        claims.remove_claims(object_store, run_name)
    own_store_id = listing.read_or_create_store_id(object_store)

    run_id = mlflow_records.find_record_id(
        run_removal.run.pipeline, run_name, run_mark.run_id if run_mark else "", own_store_id
    )
    if run_id and run_removal.keep_mlflow:
        tracking.log_to_run(
            run_id,
            run_tags={tracking.ARTIFACTS_EMPTIED: "removed", listing.STORE_TAG: own_store_id},
        )
    elif run_id:
        trial_ids = mlflow_records.find_trial_ids(
            run_id, run_name, run_mark.trial_ids if run_mark else []
        )
        for record_id in (*trial_ids, run_id):
            delete_record(record_id)

    run_host.remove(run_name)
    if not run_removal.keep_mlflow:
        object_store.delete(
            [ownership.make_mark_key(run_name)] if ownership.read(object_store, run_name) else []
        )

    return True


def delete_record(run_id: str) -> None:
    """Delete the artifacts and the record of a run in MLflow. Raises TrackingError.

    MLflow keeps the data of a deleted run until `mlflow gc`; the embedded MLflow deletes the data
    of a run with the tag tracking.REMOVED.
    """
    with suppress_missing_errors():
        run_answer = send_request("GET", "mlflow/runs/get", RunAnswer, params={"run_id": run_id})
        artifact_root = split_address(run_answer.run.info.artifact_uri)

        # only artifacts in a folder with the run's id are deleted, since users may choose any
        # folder for an experiment. MLflow can delete artifacts only at addresses with the scheme
        # mlflow-artifacts
        has_own_folder = artifact_root.path.strip("/").endswith(f"{ObjectId(run_id)}/artifacts")
        if artifact_root.scheme == "mlflow-artifacts" and has_own_folder:
            artifact_path = quote(artifact_root.path.strip("/"))
            send_request("DELETE", f"mlflow-artifacts/artifacts/{artifact_path}", ArtifactChanged)

        tracking.log_to_run(run_id, run_tags={tracking.REMOVED: "yes"})
        send_request("POST", "mlflow/runs/delete", Answer, json={"run_id": run_id})


def _remove_release(object_store: Store, release: Release, resumable_seconds: float) -> None:
    """Remove the files of a release and then its version, unless a run is releasing the same files
    again at this moment."""
    release_objects = list(object_store.list(release.prefix))

    newest_change_seconds = max(
        (object_entry.modified for object_entry in release_objects), default=0.0
    )
    if (
        newest_change_seconds > release.created + COMMIT_SECONDS
        and time.time() - newest_change_seconds < resumable_seconds
        and not release.marked
    ):
        return

    version_fields = {"name": release.model, "version": str(release.version)}
    removed_mark = {**version_fields, "key": tracking.REMOVED}
    with suppress_missing_errors():
        removed_tag = {**removed_mark, "value": listing.read_or_create_store_id(object_store)}
        send_request("POST", "mlflow/model-versions/set-tag", Answer, json=removed_tag)
        # keep the version, because an alias was set after the decision to remove it
        if registered_versions.has_alias(release.model, str(release.version)):
            send_request("DELETE", "mlflow/model-versions/delete-tag", Answer, json=removed_mark)
            return

    tracking.remove_duplicates(
        release.model, release.prefix, object_store.uri(release.prefix), version_fields["version"]
    )
    # check again, because another version with the same files may have been registered since the
    # decision
    if not registered_versions.has_other_version(object_store, release):
        _remove_files(object_store, release, [object_entry.key for object_entry in release_objects])

    with suppress_missing_errors():
        send_request("DELETE", "mlflow/model-versions/delete", Answer, json=version_fields)


def _remove_files(object_store: Store, release: Release, object_keys: list[str]) -> None:
    """Remove the files of a release. Other objects in the folder of the release are kept.
    release.json, which names the files, is removed last.
    """
    marked_owner = _mark_removed(object_store, release)
    if not marked_owner:
        return

    record_key = f"{release.prefix}{RELEASE_RECORD}"
    file_names = marked_owner.files.keys() | UNHASHED_FILES | MLFLOW_FILES
    own_keys = {f"{release.prefix}{file_name}" for file_name in file_names} - {record_key}
    object_store.delete([object_key for object_key in object_keys if object_key in own_keys])
    if read_owner(object_store, release.prefix) == marked_owner:
        object_store.delete([record_key])


def _mark_removed(object_store: Store, release: Release) -> ReleaseOwner | None:
    """Write into release.json that its files are being removed, and return its content; None if the
    files belong to another version, such as a version that is being released at this moment."""
    record_key = f"{release.prefix}{RELEASE_RECORD}"

    while True:
        current_record = object_store.head(record_key)
        release_owner = read_owner(object_store, release.prefix)
        version_key = (release.model, str(release.version))
        if (
            not current_record
            or not release_owner
            or (release_owner.name, release_owner.version) != version_key
        ):
            return None

        marked_owner = release_owner.model_copy(update={"removed": True})
        try:
            object_store.put(
                record_key, marked_owner.model_dump_json().encode(), if_match=current_record.etag
            )
        except (Conflict, NotFound):
            continue
        return marked_owner


@contextmanager
def suppress_missing_errors() -> Iterator[None]:
    """Ignore MLflow's error about a missing object, because a concurrent removal may have deleted
    the object."""
    try:
        yield
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST" and "must be in the 'active' state" not in str(
            error
        ):
            raise
