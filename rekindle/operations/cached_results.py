"""Look up cached results for a new run, list them, and prune them."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from argolocal.common.wording import format_duration
from argolocal.manifest.shape import shape_errors
from rekindle.errors import RekindleError, say
from rekindle.keys import CACHED
from rekindle.kubernetes_names import S3_BUCKET, S3_ENDPOINT_URL
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import BUCKET
from rekindle.local.services.stored_files import StoredFiles

if TYPE_CHECKING:
    from rekindle.cache.entries import Entry
    from rekindle.cache.key import OpenBucket
    from rekindle.storage import Store


def add_cached(
    home: Path, manifest: Mapping[str, Any], parameters: dict[str, str], reuse: bool
) -> dict[str, str]:
    """Return the workflow parameters of a run on this machine, with the parameter `cached` for the
    cached results of its tasks."""
    if not _uses_cache(manifest, parameters):
        return parameters

    set_bucket()
    cluster = LocalCluster(home)

    def open_bucket(name: str) -> "Store":
        return cluster.store({"bucket": name})

    return _look_up(manifest, parameters, reuse, cluster.store(), open_bucket)


def add_cached_on_cluster(
    manifest: Mapping[str, Any], parameters: dict[str, str], reuse: bool
) -> dict[str, str]:
    """Return the parameters of a run on a cluster, extended by the cached results in the bucket
    S3_BUCKET. Without S3_BUCKET, the pods look up the results."""
    if not _uses_cache(manifest, parameters):
        return parameters
    if reuse and not os.environ.get(S3_BUCKET):
        return parameters

    from rekindle.storage import Store

    store = Store.from_env().short_retries() if reuse else None
    return _look_up(manifest, parameters, reuse, store, None)


def set_bucket() -> None:
    """Set S3_BUCKET as in the pods of this machine, so that s3:// URIs of input data refer to the
    same objects here."""
    os.environ.setdefault(S3_BUCKET, BUCKET)


def readable_store(home: Path, *, on_cluster: bool = False, bucket: str = "") -> "Store | None":
    """Return the object store for reading, without starting a service. Raises ConfigError.

    The embedded store is read from its files, unless S3_ENDPOINT_URL names another store. For a
    cluster, return None if S3_BUCKET is not set.
    """
    if on_cluster or os.environ.get(S3_ENDPOINT_URL):
        from rekindle.storage import Store

        name = bucket or os.environ.get(S3_BUCKET) or ("" if on_cluster else BUCKET)
        if name:
            return Store(name, os.environ.get(S3_ENDPOINT_URL) or None, short_retries=True)
        return None

    return cast("Store", StoredFiles(home / "s3", bucket or os.environ.get(S3_BUCKET) or BUCKET))


def entries(home: Path) -> list[dict[str, Any]]:
    """Return a row for each cached result, newest first."""
    from rekindle.cache import entries

    newest_first = sorted(
        entries.read_entries(LocalCluster(home).store()), key=lambda entry: -entry.made
    )
    return [_row(entry) for entry in newest_first]


def prune(home: Path, keep: int, days: float, delete: bool) -> list[dict[str, Any]]:
    """Return a row for each invalid or surplus cache entry; with `delete`, delete these entries and
    unused lists of code files."""
    from rekindle.cache import entries
    from rekindle.cache.difference import remove_unused_code

    store = LocalCluster(home).store()
    stale = entries.list_stale(store, keep, days)

    if delete:
        entries.remove_entries(store, [entry for entry, _ in stale])
        remove_unused_code(store)

    return [_row(entry) | {"why": reason} for entry, reason in stale]


def _uses_cache(manifest: Mapping[str, Any], parameters: Mapping[str, str]) -> bool:
    if CACHED in parameters or any(shape_errors(manifest)):
        return False

    from rekindle.cache import lookup

    return lookup.has_reuse(manifest)


def _look_up(
    manifest: Mapping[str, Any],
    parameters: dict[str, str],
    reuse: bool,
    store: "Store | None",
    open_bucket: "OpenBucket | None",
) -> dict[str, str]:
    from rekindle.cache import lookup

    results: list[lookup.CacheResult] = []
    try:
        if reuse and store:
            results = lookup.look_up(
                manifest, parameters, store, on_cluster=open_bucket is None, open_bucket=open_bucket
            )
    except RekindleError as error:
        say(f"the cache is unavailable, so every step runs: {error}")

    cached_tasks = [f"{item.task} ({item.entry.at})" for item in results if item.entry]
    if cached_tasks:
        say(f"cached: {', '.join(cached_tasks)}; --no-cache runs them again")

    return parameters | {CACHED: lookup.cached_parameter(manifest, results, reuse)}


def _row(entry: "Entry") -> dict[str, Any]:
    size = sum(artifact["bytes"] for artifact in entry.artifacts.values())
    return {
        "key": entry.key[:12],
        "step": entry.facts["step"],
        "made by": entry.at,
        "age": format_duration(time.time() - entry.made),
        "took": format_duration(entry.seconds),
        "bytes": size,
    }
