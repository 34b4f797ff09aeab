"""Manifests that a real Argo ran: every node must be named, end and say what it did there."""

from pathlib import Path

import pytest

from argolocal.manifest.read import documents, split
from argolocal.pods import filesystem, limits
from argolocal.runner.run import execute
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import BUCKET
from rekindle.storage import Store
from tests.conformance import recorded
from tests.conformance.outcome import differences, in_store, of_status, refused

NEEDS = {"out-of-memory": limits.available}


@pytest.mark.skipif(not filesystem.available(), reason="needs mount namespaces")
@pytest.mark.parametrize("recording", recorded.read(), ids=lambda recording: recording.name)
def test_a_manifest_ends_here_as_it_ended_on_argo(recording: recorded.Recording, tmp_path: Path, s3: Store) -> None:
    if not NEEDS.get(recording.name, lambda: True)():
        pytest.skip("needs cgroups")
    text = recording.manifest.replace(f"bucket: {BUCKET}", f"bucket: {s3.bucket}")
    main, beside = split(documents(text))
    cluster = LocalCluster(tmp_path / ".rekindle")
    cluster.keep(beside)
    if refused(recording.outcome):  # by Argo's own check
        with pytest.raises(ConfigError):
            execute(main, {}, cluster)
        return
    mine = of_status(recording.name, execute(main, {}, cluster), in_store(s3))
    assert not differences(mine, recording.outcome)
