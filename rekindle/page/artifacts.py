"""The artifacts of runs in the object store of this machine.

The object store starts only when a user opens an artifact, because the status of the run suffices
to list the artifacts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.page.tabs.artifact_source import ObjectReader, StoredArtifacts
from rekindle.local.cluster import LocalCluster


def artifacts_of_home(home: Path) -> StoredArtifacts:
    """Return access to the artifacts of all runs in `home`."""

    def open_store(s3: Mapping[str, Any]) -> ObjectReader:
        return LocalCluster(home).store(s3)

    return StoredArtifacts(open_store)
