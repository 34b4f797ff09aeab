"""The artifacts of runs in the object store of this machine, and the readers of their tables.

The object store is started only when a user opens an artifact. The list of artifacts is read from
the status of the run and from the files of the object store, without starting it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common import object_names
from argolocal.page.tabs.artifact_source import ObjectLister, ObjectReader, StoredArtifacts
from argolocal.page.tabs.artifacts import ReadTable
from rekindle.local.cluster import LocalCluster
from rekindle.operations.cached_results import open_readable_store
from rekindle.page import parquet

TABLE_READERS: Mapping[str, ReadTable] = {parquet.SUFFIX: parquet.read_parquet}


def open_home_artifacts(home: Path) -> StoredArtifacts:
    """Return access to the artifacts of all runs in REKINDLE_HOME (`home`)."""

    # bucket → its listing, which is kept, so that later calls read only changes
    listings: dict[str, ObjectLister | None] = {}

    def open_store(s3: Mapping[str, Any]) -> ObjectReader:
        return LocalCluster(home).store(s3)

    def open_listing(s3: Mapping[str, Any]) -> ObjectLister | None:
        if s3.get("endpoint"):
            # an external object store is not listed, because listing may be slow
            return None
        bucket = str(s3.get("bucket") or "")
        if bucket not in listings:
            if bucket:
                object_names.BUCKET_NAME_RULE.check(bucket, "the bucket of an artifact")
            listings[bucket] = open_readable_store(home, bucket=bucket)
        return listings[bucket]

    return StoredArtifacts(open_store, open_listing)
