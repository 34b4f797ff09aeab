"""A backfill that is killed continues with the same table, and a scheduled run trains only if its
data or code has changed."""

import json
import random
import subprocess
from contextlib import suppress
from typing import Any

import pytest

from rekindle.cluster import workflows
from rekindle.cluster.kubernetes_api import Cluster
from tests.cluster.run import DEMO, SMALL_SETTINGS, Namespace, Run, rekindle
from tests.commands import BIN, ROOT
from tests.waiting import until

NAME = "weeks"
WEEKS = [*SMALL_SETTINGS, f"name={NAME}", "data.window=50d", "schedule.cron=0 3 * * 1"]
# three Mondays; the source ends on March 10
DAYS = ["--from", "2024-02-26", "--to", "2024-03-17"]
LAST_TIME = "2024-03-11T03:00:00Z"
NEXT_TIME = "2024-03-18T03:00:00Z"
KILLS = 6
# before a kill
MAX_SECONDS = 40
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def schedule(namespace: Namespace) -> list[str]:
    """The flags of the schedule's config; the schedule itself is suspended."""
    flags = [str(DEMO), *namespace.sets(WEEKS)]
    rekindle("schedule", *flags, "--namespace", namespace.kube.namespace, "--suspend")
    return flags


def runs(namespace: Namespace) -> list[str]:
    names = (item["metadata"]["name"] for item in namespace.kube.items("workflows"))
    return sorted(name for name in names if name.startswith(f"{NAME}-"))


@pytest.fixture(scope="module")
def killed(namespace: Namespace, schedule: list[str]) -> Rows:
    """The table of a backfill on the cluster that is killed several times by SIGKILL, each time
    after the start of a run."""
    flags = [
        "backfill",
        *schedule,
        *DAYS,
        "--parallel",
        "2",
        "--cluster",
        "--namespace",
        namespace.kube.namespace,
    ]

    chance = random.Random(5)

    for _ in range(KILLS):
        process = subprocess.Popen(
            [str(BIN / "rekindle"), *flags], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        until("the backfill has started a run", lambda: runs(namespace))
        with suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, MAX_SECONDS))

        process.kill()
        process.wait()

    return json.loads(rekindle(*flags, "-o", "json"))["weeks"]


def test_a_killed_backfill_has_the_table_of_an_undisturbed_backfill_on_this_machine(
    namespace: Namespace,
    schedule: list[str],
    killed: Rows,
    tmp_path_factory: pytest.TempPathFactory,
):
    home_variables = {"REKINDLE_HOME": str(tmp_path_factory.mktemp("home"))}
    try:
        undisturbed = json.loads(
            rekindle("backfill", *schedule, *DAYS, "-o", "json", variables=home_variables)
        )["weeks"]
    finally:
        rekindle("down", variables=home_variables)
    assert killed == undisturbed
    assert len(killed) == 3
    assert runs(namespace) == sorted(row["workflow"] for row in killed)


def scheduled_run(namespace: Namespace, time: str) -> Run:
    """Start the run that the schedule would have started at the time `time`, and wait for its
    end."""
    cluster = Cluster.connect(None, namespace.kube.namespace)
    workflow = workflows.build_scheduled_workflow(cluster, NAME, {"scheduled-time": time})
    workflows.submit(cluster, workflow)
    run = Run(namespace, workflow["metadata"]["name"])
    assert run.wait_for_end() == "Succeeded"
    return run


def test_a_scheduled_run_starts_no_job_if_its_model_is_known_or_its_source_has_nothing_newer(
    namespace: Namespace, killed: Rows
):
    known = scheduled_run(namespace, LAST_TIME)
    assert known.pods("prepare")
    assert not known.pods("train-master")
    assert Run(namespace, killed[-1]["workflow"]).pods("train-master")
    assert known.outputs()["model_sha256"] == killed[-1]["model_sha256"] == known.sha256()
    # a scheduled run releases its model, unlike a run of a backfill
    assert known.outputs()["verdict"] == "release"
    unchanged_run = scheduled_run(namespace, NEXT_TIME)
    assert unchanged_run.pods("prepare")
    assert not unchanged_run.pods("train-master")
    assert not unchanged_run.pods("evaluate")
    flags = ["--cluster", "--namespace", namespace.kube.namespace, "-o", "json"]
    assert json.loads(rekindle("status", unchanged_run.name, *flags))["verdict"] == "same"
