"""The artifacts of runs in the object store of this machine.

The object store starts when a user opens an artifact: the list of artifacts needs only the status
of the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.page.tabs.artifact_source import ObjectReader, StoredArtifacts
from rekindle.local.cluster import LocalCluster


def artifacts_of_home(home: Path) -> StoredArtifacts:
    """Return the artifacts of the runs of a home."""

    def open_store(s3: Mapping[str, Any]) -> ObjectReader:
        return LocalCluster(home).store(s3)

    return StoredArtifacts(open_store)
