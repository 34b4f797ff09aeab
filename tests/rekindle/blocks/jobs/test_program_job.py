"""Tests of a program in a job of another framework: the rendered job, the Secret of the job and the
cost of the job."""

import json
from pathlib import Path
from typing import Any

import pytest

from argolocal.manifest.training_jobs import JOB_KINDS, make_pod_name
from argolocal.validate import lint
from rekindle import ConfigError, blocks
from rekindle.blocks.manifest.config import load_config
from rekindle.kubernetes_names import PROGRAM_IN_JOB_MODULES
from rekindle.program.config import ProgramConfig
from rekindle.training.cost.jobs import list_planned_jobs
from rekindle.training.cost.prices import Prices
from rekindle.training.cost.tariff import build_tariffs
from tests.commands import ROOT
from tests.kinds import PROGRAM_JOBS

CONFIG = {
    "name": "slopes",
    "workload": "tests.rekindle.program.slopes",
    "data": {"source": "simulate://7"},
    "program": {"command": ["tests/programs/sums.py", "{checkpoints}"]},
    "cluster": {"pods": {"train": {"deadline_minutes": 90}}},
}
# kind of job → role → (rank of the role's first pod, True if the program of its pods ends by
# itself)
PLACES = {
    "TFJob": {"Chief": (0, True), "Worker": (1, True), "PS": (4, False)},
    "XGBoostJob": {"Master": (0, True), "Worker": (1, True)},
    "PaddleJob": {"Worker": (0, True), "Master": (2, False)},
    "JAXJob": {"Worker": (0, True)},
    "MPIJob": {"Launcher": (0, True)},
}


def render(tmp_path: Path, kind: str, counts: dict[str, int], **settings: Any) -> dict[str, Any]:
    file = tmp_path / "slopes.yaml"
    file.write_text(json.dumps(CONFIG))
    config = load_config(file, [], {}).config
    program = settings.pop("program", config.program)
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.job(data, kind, program, counts, task="fit", **settings)
        blocks.decide(model)
    return workflow.to_dict()


def find_job(manifest: dict[str, Any], kind: str) -> dict[str, Any]:
    texts = [
        template["resource"]["manifest"]
        for template in manifest["spec"]["templates"]
        if "resource" in template and template["resource"].get("manifest")
    ]
    return next(job for job in map(json.loads, texts) if job["kind"] == kind)


@pytest.mark.parametrize("kind", PLACES)
def test_each_pod_runs_the_program_and_the_first_one_the_coordinator(
    tmp_path: Path, kind: str
) -> None:
    counts, places = PROGRAM_JOBS[kind], PLACES[kind]
    manifest = render(tmp_path, kind, counts)
    assert [str(finding) for finding in lint(manifest) if finding.fatal] == []
    job = find_job(manifest, kind)
    specs = job["spec"][JOB_KINDS[kind].replicas_field]
    leader = next(iter(places))
    for role, (rank, ends) in places.items():
        (container,) = specs[role]["template"]["spec"]["containers"]
        assert container["args"][:2] == ["-m", PROGRAM_IN_JOB_MODULES.launcher]
        assert f"--workers={sum(counts[other] for other in places)}" in container["args"]

        values = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert values["REKINDLE_ROLE_RANK"] == str(rank)
        host = make_pod_name(job["metadata"]["name"], leader)
        assert values["REKINDLE_COORDINATOR"] == host
        assert ("REKINDLE_SERVER" in values) is not ends
        assert (values.get("REKINDLE_DEADLINE") == str(90 * 60)) is (role == leader)
        assert {"POD_IP", "POD_NAME", "REKINDLE_SECRET", "REKINDLE_GRACE"} <= values.keys()

    # with the policy ExitCode, exit codes below 128 fail the job, and other exit codes restart the
    # pod
    policies = {role: spec["restartPolicy"] for role, spec in specs.items()}
    assert policies == dict.fromkeys(counts, "ExitCode") | (
        {"Launcher": "OnFailure"} if kind == "MPIJob" else {}
    )
    unplaced_roles = counts.keys() - places.keys()
    assert all(
        "sleep" in str(specs[role]["template"]["spec"]["containers"]) for role in unplaced_roles
    )


def test_the_job_waits_for_its_secret_and_is_deleted_at_the_end(tmp_path: Path) -> None:
    manifest = render(tmp_path, "JAXJob", {"Worker": 2})
    text = json.dumps(manifest)
    (main_template,) = [t for t in manifest["spec"]["templates"] if t["name"] == "main"]
    (fit,) = [task for task in main_template["dag"]["tasks"] if task["name"] == "fit"]
    assert "fit-secret" in fit["depends"]
    assert '"value": "jaxjob"' in text
    # the step `report` reads the ledger
    assert "fit/checkpoints/ledger" in text


def test_the_cost_of_the_job_is_that_of_its_ledger(tmp_path: Path) -> None:
    manifest = render(tmp_path, "TFJob", {"Chief": 1, "Worker": 2, "PS": 1})
    prices = Prices.load(ROOT / "template")
    tariff = build_tariffs(manifest, prices, ["fit"])["fit"]
    assert set(tariff.workers) == {"Chief", "Worker", "PS"}
    assert tariff.coordinator is None
    # the job is not counted a second time by the duration of its step
    assert list_planned_jobs({}, manifest) == []


def test_a_wrong_program_job_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"program\.processes is 2: the operator of a JAXJob"):
        section = {"command": ["tests/programs/sums.py"], "processes": 2}
        program = ProgramConfig.model_validate(section)
        render(tmp_path, "JAXJob", {"Worker": 2}, program=program)
    with pytest.raises(ConfigError, match="XGBoostJob fit has 0 Master: there must be 1"):
        render(tmp_path, "XGBoostJob", {"Worker": 2})
    with pytest.raises(ConfigError, match="train is"):
        render(tmp_path, "JAXJob", {"Worker": 2}, train="steps.trainer")
