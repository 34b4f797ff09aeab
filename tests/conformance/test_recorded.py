"""Manifests that a real Argo ran: every node must be named, end and say what it did there."""

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from rekindle.argo.manifest.read import documents, split
from rekindle.errors import ConfigError
from rekindle.local.emulator import LocalCluster
from rekindle.local.pods import filesystem, limits
from rekindle.local.run import execute
from rekindle.local.services.services import BUCKET
from rekindle.storage import Store
from tests.conformance import recorded
from tests.conformance.outcome import differences, in_store, of_status, refused

NEEDS = {"out-of-memory": limits.available}
SLOW = {  # their manifests wait for 5 seconds and more
    *("panic-beside-a-pod", "trap-exit-after-deadline", "trap-failfast", "trap-template-failfast"),
    *("random-3-029", "random-13-025", "random-21-122", "random-22-067", "random-27-067"),
}


def parameters() -> list[ParameterSet]:
    waits = {name: pytest.mark.slow for name in SLOW}
    return [pytest.param(it, id=it.name, marks=waits.get(it.name, ())) for it in recorded.read()]


@pytest.mark.skipif(not filesystem.available(), reason="needs mount namespaces")
@pytest.mark.parametrize("recording", parameters())
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
