"""Look up cached results for a new run, list them, and prune them."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from argolocal.common.wording import format_duration
from argolocal.manifest.shape import find_shape_errors
from rekindle.errors import RekindleError, write_stderr
from rekindle.keys import CACHED_PARAMETER
from rekindle.kubernetes_names import S3_BUCKET, S3_ENDPOINT_URL
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import DEFAULT_BUCKET
from rekindle.local.services.stored_files import StoredFiles

if TYPE_CHECKING:
    from rekindle.cache.entries import Entry
    from rekindle.cache.key import OpenBucket
    from rekindle.storage import Store


def add_cached_parameter(
    home_folder: Path,
    manifest: Mapping[str, Any],
    workflow_parameters: dict[str, str],
    allow_reuse: bool,
) -> dict[str, str]:
    """Return the workflow parameters of a run on this machine, with the parameter `cached` for the
    cached results of its tasks."""
    if not _uses_cache(manifest, workflow_parameters):
        return workflow_parameters

    set_bucket_variable()
    local_cluster = LocalCluster(home_folder)

    def open_bucket(bucket_name: str) -> "Store":
        return local_cluster.store({"bucket": bucket_name})

    return _look_up_results(
        manifest, workflow_parameters, allow_reuse, local_cluster.store(), open_bucket
    )


def add_cluster_cached_parameter(
    manifest: Mapping[str, Any], workflow_parameters: dict[str, str], allow_reuse: bool
) -> dict[str, str]:
    """Return the parameters of a run on a cluster, extended by the cached results in the bucket
    S3_BUCKET. Without S3_BUCKET, the pods look up the results."""
    if not _uses_cache(manifest, workflow_parameters):
        return workflow_parameters
    if allow_reuse and not os.environ.get(S3_BUCKET):
        return workflow_parameters

    from rekindle.storage import Store

    object_store = Store.from_env().short_retries() if allow_reuse else None
    return _look_up_results(manifest, workflow_parameters, allow_reuse, object_store, None)


def set_bucket_variable() -> None:
    """Set S3_BUCKET as in the pods of this machine, so that s3:// URIs of input data refer to the
    same objects in this process."""
    os.environ.setdefault(S3_BUCKET, DEFAULT_BUCKET)


def open_readable_store(
    home_folder: Path, *, is_on_cluster: bool = False, bucket: str = ""
) -> "Store | None":
    """Return the object store for reading, without starting a service. Raises ConfigError.

    The embedded store is read from its files, unless S3_ENDPOINT_URL names another store. For a
    cluster, return None if S3_BUCKET is not set.
    """
    if is_on_cluster or os.environ.get(S3_ENDPOINT_URL):
        from rekindle.storage import Store

        bucket_name = (
            bucket or os.environ.get(S3_BUCKET) or ("" if is_on_cluster else DEFAULT_BUCKET)
        )
        if bucket_name:
            return Store(bucket_name, os.environ.get(S3_ENDPOINT_URL) or None, short_retries=True)
        return None

    return cast(
        "Store",
        StoredFiles(home_folder / "s3", bucket or os.environ.get(S3_BUCKET) or DEFAULT_BUCKET),
    )


def list_entry_rows(home_folder: Path) -> list[dict[str, Any]]:
    """Return a row for each cached result, newest first."""
    from rekindle.cache import entries

    entries_newest_first = sorted(
        entries.read_entries(LocalCluster(home_folder).store()), key=lambda entry: -entry.made
    )
    return [_make_row(entry) for entry in entries_newest_first]


def prune_cache(
    home_folder: Path, keep_count: int, keep_days: float, should_delete: bool
) -> list[dict[str, Any]]:
    """Return a row for each invalid or surplus cache entry; with `should_delete`, delete these
    entries and unused lists of code files."""
    from rekindle.cache import entries
    from rekindle.cache.difference import remove_unused_code

    object_store = LocalCluster(home_folder).store()
    stale_entries = entries.list_stale_entries(object_store, keep_count, keep_days)

    if should_delete:
        entries.remove_entries(object_store, [cache_entry for cache_entry, _ in stale_entries])
        remove_unused_code(object_store)

    return [
        _make_row(cache_entry) | {"why": stale_reason}
        for cache_entry, stale_reason in stale_entries
    ]


def _uses_cache(manifest: Mapping[str, Any], workflow_parameters: Mapping[str, str]) -> bool:
    if CACHED_PARAMETER in workflow_parameters or any(find_shape_errors(manifest)):
        return False

    from rekindle.cache import lookup

    return lookup.has_reusable_tasks(manifest)


def _look_up_results(
    manifest: Mapping[str, Any],
    workflow_parameters: dict[str, str],
    allow_reuse: bool,
    object_store: "Store | None",
    open_bucket: "OpenBucket | None",
) -> dict[str, str]:
    from rekindle.cache import lookup

    cache_results: list[lookup.CacheResult] = []
    try:
        if allow_reuse and object_store:
            cache_results = lookup.look_up_tasks(
                manifest,
                workflow_parameters,
                object_store,
                is_on_cluster=open_bucket is None,
                open_bucket=open_bucket,
            )
    except RekindleError as error:
        write_stderr(f"the cache is unavailable, so every step runs: {error}")

    cached_task_texts = [
        f"{cache_result.task} ({cache_result.entry.at})"
        for cache_result in cache_results
        if cache_result.entry
    ]
    if cached_task_texts:
        write_stderr(f"cached: {', '.join(cached_task_texts)}; --no-cache runs them again")

    return workflow_parameters | {
        CACHED_PARAMETER: lookup.cached_parameter(manifest, cache_results, allow_reuse)
    }


def _make_row(cache_entry: "Entry") -> dict[str, Any]:
    size_bytes = sum(artifact["bytes"] for artifact in cache_entry.artifacts.values())
    return {
        "key": cache_entry.key[:12],
        "step": cache_entry.facts["step"],
        "made by": cache_entry.at,
        "age": format_duration(time.time() - cache_entry.made),
        "took": format_duration(cache_entry.seconds),
        "bytes": size_bytes,
    }
