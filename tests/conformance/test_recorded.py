"""Manifests that a real Argo ran: every node must be named, end and say what it did there, by argolocal alone."""

from collections.abc import Iterator

import pytest
from _pytest.mark.structures import ParameterSet

from argolocal.pods import filesystem, limits
from tests.conformance import recorded
from tests.conformance.alone import FORBIDDEN, Alone
from tests.conformance.outcome import differences

NEEDS = {"out-of-memory": limits.available}
HERE = "argolocal"  # the bucket of argolocal; those of the manifests are Rekindle's
SLOW = {  # their manifests wait for 5 seconds and more
    *("panic-beside-a-pod", "trap-exit-after-deadline", "trap-failfast", "trap-template-failfast"),
    *("random-3-029", "random-13-025", "random-21-122", "random-22-067", "random-27-067"),
}


def parameters() -> list[ParameterSet]:
    waits = {name: pytest.mark.slow for name in SLOW}
    return [pytest.param(it, id=it.name, marks=waits.get(it.name, ())) for it in recorded.read()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    with Alone(tmp_path_factory.mktemp("alone")) as alone:
        yield alone


@pytest.mark.skipif(not filesystem.available(), reason="needs mount namespaces")
@pytest.mark.parametrize("recording", parameters())
def test_a_manifest_ends_here_as_it_ended_on_argo(recording: recorded.Recording, alone: Alone) -> None:
    if not NEEDS.get(recording.name, lambda: True)():
        pytest.skip("needs cgroups")
    mine = alone.run(recording.manifest.replace("bucket: rekindle", f"bucket: {HERE}"), recording.name)
    assert not differences(mine, recording.outcome)


@pytest.mark.parametrize("module", FORBIDDEN)
def test_what_only_a_training_needs_cannot_be_imported_there(module: str, alone: Alone) -> None:
    with pytest.raises(AssertionError, match=f"{module} is imported by what needs none of it"):
        alone.run("", module)
