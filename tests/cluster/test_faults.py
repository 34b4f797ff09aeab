"""Every fault on every kind of job, on the cluster.

    REKINDLE_TEST_RESTARTS=yes pytest -m cluster tests/cluster/test_faults.py

REKINDLE_TEST_RESTARTS=yes adds the faults that need root on a node or restart controllers, which
affects other users of the cluster. The run prints a table of the outcomes.
"""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.node_agent import NodeAgent, start_node_agent
from tests.cluster.quota import LIGHT_SETTINGS
from tests.cluster.run import Namespace, Run, is_served, run_locally
from tests.cluster.stage import ClusterStage
from tests.commands import ROOT
from tests.faults.catalog import FAULTS, Fault
from tests.faults.matrix import PACE_SETTING, SETTINGS, FaultMatrix, check_outcome

CONFIG = ROOT / "configs/digits.yaml"
IS_ADMINISTRATOR = os.environ.get("REKINDLE_TEST_RESTARTS") == "yes"
# name of a backend → the kind of its jobs that the cluster must serve, and further settings
BACKENDS = {
    "pytorchjob": ("pytorchjobs.kubeflow.org", ()),
    "jobset": ("jobsets.jobset.x-k8s.io", ()),
    "jobset with RestartJob": ("jobsets.jobset.x-k8s.io", ("cluster.restart_job=true",)),
    "trainjob": ("trainjobs.trainer.kubeflow.org", ()),
}


@pytest.fixture(scope="module")
def undisturbed(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights of the training without faults, with one worker on this machine."""
    return run_locally(
        tmp_path_factory.mktemp("undisturbed"),
        *namespace.sets([*SETTINGS, "train.workers=1"]),
        config=CONFIG,
    )["model_sha256"]


@pytest.fixture(scope="module")
def agent(namespace: Namespace) -> Iterator[NodeAgent | None]:
    if not IS_ADMINISTRATOR:
        yield None
        return
    with start_node_agent(namespace) as agent:
        yield agent


@pytest.fixture(scope="module", params=BACKENDS)
def matrix(
    request: pytest.FixtureRequest, namespace: Namespace, agent: NodeAgent | None
) -> FaultMatrix:
    """A training in a job of this kind, after all faults."""
    kind, settings = BACKENDS[request.param]
    if not is_served(kind):
        pytest.skip(f"the cluster does not serve {kind}")

    backend = request.param.split()[0]
    run = Run.submit(
        namespace,
        *SETTINGS,
        PACE_SETTING,
        f"cluster.backend={backend}",
        f"name={backend}",
        *LIGHT_SETTINGS,
        *settings,
        config=CONFIG,
    )
    stage = ClusterStage(run, backend, agent)
    matrix = FaultMatrix(stage)
    run.wait_for_workers(3, 400)
    job_uid = stage.job_uid()

    for fault in FAULTS:
        if IS_ADMINISTRATOR or not fault.needs_administrator:
            matrix.inject(fault)

    print(f"\n{matrix.format_table(request.param)}")
    assert stage.job_uid() == job_uid
    return matrix


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_costs_no_finished_step_and_restarts_no_other_pod(
    matrix: FaultMatrix, fault: Fault
):
    if fault.needs_administrator and not IS_ADMINISTRATOR:
        pytest.skip("restarts controllers, or needs root on the nodes: REKINDLE_TEST_RESTARTS=yes")
    check_outcome(matrix.outcomes[fault.name])


def test_the_weights_after_all_faults_are_those_of_an_undisturbed_training(
    matrix: FaultMatrix, undisturbed: str
):
    stage = matrix.stage
    assert isinstance(stage, ClusterStage)
    assert stage.run.wait_for_end() == "Succeeded"
    assert stage.run.outputs()["model_sha256"] == stage.run.sha256() == undisturbed
