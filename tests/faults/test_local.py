"""Every fault on every kind of job, as processes on this machine."""

import json
from collections.abc import Iterator

import pytest

from rekindle.blocks.jobs.backends import BACKENDS
from tests.faults.catalog import FAULTS, Fault
from tests.faults.local_stage import LocalStage
from tests.faults.matrix import PACE_SETTING, SETTINGS, FaultMatrix, check_outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def read_sha256(stage: LocalStage) -> str:
    """Return the sha256 of the weights that a run has trained."""
    return json.loads(stage.store.get(f"{stage.name}/train/model/model.json"))["sha256"]


@pytest.fixture(scope="module")
def undisturbed(s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights of the training without faults, with one worker."""
    stage = LocalStage(
        tmp_path_factory.mktemp("undisturbed") / "home",
        [*SETTINGS, "train.workers=1", "name=undisturbed"],
        s3_environment,
    )
    try:
        assert stage.wait_for_end() == 0, stage.log.read_text()
        return read_sha256(stage)
    finally:
        stage.close()


@pytest.fixture(scope="module", params=BACKENDS)
def matrix(
    request: pytest.FixtureRequest,
    s3_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[FaultMatrix]:
    """A training in a job of this kind, after all faults."""
    settings = [
        *SETTINGS,
        PACE_SETTING,
        f"cluster.backend={request.param}",
        f"name={request.param}",
    ]
    stage = LocalStage(tmp_path_factory.mktemp(request.param) / "home", settings, s3_environment)
    matrix = FaultMatrix(stage)
    try:
        for fault in FAULTS:
            matrix.inject(fault)
        print(f"\n{matrix.format_table(request.param)}")
        yield matrix
    finally:
        stage.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_costs_no_finished_step_and_restarts_no_other_pod(
    matrix: FaultMatrix, fault: Fault
):
    check_outcome(matrix.outcomes[fault.name])


def test_the_weights_after_all_faults_are_those_of_an_undisturbed_training(
    matrix: FaultMatrix, undisturbed: str
):
    stage = matrix.stage
    assert isinstance(stage, LocalStage)
    assert stage.wait_for_end() == 0, stage.log.read_text()
    assert read_sha256(stage) == undisturbed
