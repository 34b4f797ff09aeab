"""What need not run because an earlier run has left it: looked up for a run, listed and forgotten."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argolocal.common.wording import duration
from argolocal.manifest.shape import shape_errors
from rekindle.errors import RekindleError, say
from rekindle.keys import CACHED
from rekindle.local.cluster import LocalCluster

if TYPE_CHECKING:
    from rekindle.storage import Store


def looked_up(home: Path, manifest: Mapping[str, Any], parameters: dict[str, str], reuse: bool) -> dict[str, str]:
    """`parameters` of a run on this machine, with what is known of its tasks."""
    if not _asks(manifest, parameters):
        return parameters
    cluster = LocalCluster(home)
    return _with_known(manifest, parameters, reuse, cluster.store(), lambda name: cluster.store({"bucket": name}))


def looked_up_for_cluster(manifest: Mapping[str, Any], parameters: dict[str, str], reuse: bool) -> dict[str, str]:
    """The same of a run on a cluster, whose object store is that of S3_BUCKET; without it, its pods look."""
    if not _asks(manifest, parameters):
        return parameters
    if reuse and not os.environ.get("S3_BUCKET"):
        return parameters
    from rekindle.storage import Store

    return _with_known(manifest, parameters, reuse, Store.from_env().short_retries() if reuse else None, None)


def entries(home: Path) -> list[dict[str, Any]]:
    """The table of what is known, the newest first."""
    from rekindle.cache import entries

    known = sorted(entries.entries(LocalCluster(home).store()), key=lambda entry: -entry.made)
    return [_row(entry) for entry in known]


def forget(home: Path, keep: int, days: float, really: bool) -> list[dict[str, Any]]:
    """What does not count any more, or is too much; removed if `really`."""
    from rekindle.cache import entries

    store = LocalCluster(home).store()
    stale = entries.stale(store, keep, days)
    if really and stale:
        entries.remove(store, [entry for entry, _ in stale])
    return [_row(entry) | {"why": why} for entry, why in stale]


def _asks(manifest: Mapping[str, Any], parameters: Mapping[str, str]) -> bool:
    if CACHED in parameters or any(shape_errors(manifest)):
        return False
    from rekindle.cache import plan

    return plan.has_reuse(manifest)


def _with_known(
    manifest: Mapping[str, Any], parameters: dict[str, str], reuse: bool, store: "Store | None", bucket: Any
) -> dict[str, str]:
    from rekindle.cache import plan

    known: list[plan.Found] = []
    try:
        if reuse and store:
            known = plan.look_up(manifest, parameters, store, on_cluster=bucket is None, bucket=bucket)
    except RekindleError as error:
        say(f"what earlier runs left is not known, so everything is computed: {error}")
    if found := [f"{item.task} ({item.entry.at})" for item in known if item.entry]:
        say(f"cached: {', '.join(found)}; --no-cache computes them again")
    return parameters | {CACHED: plan.parameter(manifest, known, reuse)}


def _row(entry: Any) -> dict[str, Any]:
    size = sum(artifact["bytes"] for artifact in entry.artifacts.values())
    return {
        "key": entry.key[:12],
        "step": entry.facts["step"],
        "made by": entry.at,
        "age": duration(time.time() - entry.made),
        "took": duration(entry.seconds),
        "bytes": size,
    }
