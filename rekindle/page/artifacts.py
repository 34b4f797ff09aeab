"""The artifacts of runs in the object store of this machine, and the readers of their tables.

The object store starts when a user opens an artifact: the list of artifacts needs only the status
of the run and the files of the store.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common import object_names
from argolocal.page.tabs.artifact_source import ObjectLister, ObjectReader, StoredArtifacts
from argolocal.page.tabs.artifacts import ReadTable
from rekindle.local.cluster import LocalCluster
from rekindle.operations.cached_results import readable_store
from rekindle.page import parquet

TABLE_READERS: Mapping[str, ReadTable] = {parquet.SUFFIX: parquet.read_parquet}


def artifacts_of_home(home: Path) -> StoredArtifacts:
    """Return access to the artifacts of all runs in `home`."""

    # bucket → its objects, of which only the changes are read again
    listings: dict[str, ObjectLister | None] = {}

    def open_store(s3: Mapping[str, Any]) -> ObjectReader:
        return LocalCluster(home).store(s3)

    def open_listing(s3: Mapping[str, Any]) -> ObjectLister | None:
        if s3.get("endpoint"):
            # another store, which may be far away
            return None
        bucket = str(s3.get("bucket") or "")
        if bucket not in listings:
            if bucket:
                object_names.BUCKET.check(bucket, "the bucket of an artifact")
            listings[bucket] = readable_store(home, bucket=bucket)
        return listings[bucket]

    return StoredArtifacts(open_store, open_listing)
