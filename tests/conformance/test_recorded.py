"""Tests with manifests that a real Argo ran: every node must have the same name, phase and message
when argolocal runs the manifest."""

from collections.abc import Iterator

import pytest
from _pytest.mark.structures import ParameterSet

from argolocal.pods import filesystem, limits
from tests.conformance import recorded
from tests.conformance.alone import FORBIDDEN, RunnerProcess
from tests.conformance.outcome import list_differences

NEEDS = {"out-of-memory": limits.supports_memory_limits}
# this bucket replaces Rekindle's bucket in the manifests
BUCKET = "argolocal"
# recordings whose manifests take 2 seconds and more
SLOW_RECORDINGS = {
    *(
        "deadline-template",
        "deadline-wf",
        "out-of-memory",
        "retry-backoff",
        "retried-error",
        "semaphore",
        "suspend",
    ),
    *("panic-beside-a-pod", "trap-exit-after-deadline", "trap-failfast", "trap-template-failfast"),
    *("random-3-029", "random-13-025", "random-21-122", "random-22-067", "random-27-067"),
}


def make_parameters() -> list[ParameterSet]:
    marks = {name: pytest.mark.slow for name in SLOW_RECORDINGS}
    return [
        pytest.param(recording, id=recording.name, marks=marks.get(recording.name, ()))
        for recording in recorded.read()
    ]


@pytest.fixture(scope="module")
def separate_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerProcess]:
    with RunnerProcess(tmp_path_factory.mktemp("alone")) as runner:
        yield runner


@pytest.mark.skipif(not filesystem.supports_namespaces(), reason="needs mount namespaces")
@pytest.mark.parametrize("recording", make_parameters())
def test_a_recorded_manifest_has_the_outcome_of_argo(
    recording: recorded.Recording, separate_runner: RunnerProcess
) -> None:
    if not NEEDS.get(recording.name, lambda: True)():
        pytest.skip("needs cgroups")
    local_outcome = separate_runner.run(
        recording.manifest.replace("bucket: rekindle", f"bucket: {BUCKET}"), recording.name
    )
    assert not list_differences(local_outcome, recording.outcome)


@pytest.mark.parametrize("module", FORBIDDEN)
def test_argolocal_does_not_import_the_dependencies_of_training(
    module: str, separate_runner: RunnerProcess
) -> None:
    with pytest.raises(AssertionError, match=f"{module} must not be imported by argolocal"):
        separate_runner.run("", module)
