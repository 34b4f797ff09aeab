"""A backfill on a cluster ends with the same table, also if it is killed at any time, and two
backfills of the same weeks share their runs."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.commands import ROOT
from tests.rekindle.cluster.server import ApiServer
from tests.rekindle.cluster.workflows import WORKFLOWS_AT

# this test starts two dozen commands
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONFIG = [
    "configs/demo.yaml",
    "--set",
    "data.source=s3://b/payments",
    "--set",
    "data.window=60d",
    "-n",
    "models",
]
BACKFILL = [
    "backfill",
    *CONFIG,
    "--cluster",
    "--from",
    "2026-03-02",
    "--to",
    "2026-05-24",
    "--parallel",
    "3",
]


class Controller(threading.Thread):
    """Ends each run after a moment, as Argo's controller would; the first attempt of every third
    run fails."""

    def __init__(self, server: ApiServer) -> None:
        super().__init__(daemon=True)
        self.server, self.stopped, self.failed = server, threading.Event(), set[str]()

    def run(self) -> None:
        while not self.stopped.wait(0.3):
            with self.server.changed:
                active = [
                    workflow
                    for workflow in self.server.objects.get(WORKFLOWS_AT, {}).values()
                    if (workflow.get("status") or {}).get("phase", "Running") == "Running"
                ]
            for number, workflow in enumerate(active):
                self.end(workflow, number % 3 == 0)

    def end(self, workflow: dict[str, Any], fails: bool) -> None:
        name = workflow["metadata"]["name"]
        fails = fails and name not in self.failed
        self.failed.update({name} if fails else set())
        arguments = {
            item["name"]: item.get("value") for item in workflow["spec"]["arguments"]["parameters"]
        }
        output = {"name": "model_sha256", "value": f"weights of {arguments['scheduled-time']}"}
        phase = "Failed" if fails else "Succeeded"

        node = {
            "id": name,
            "name": name,
            "type": "DAG",
            "phase": phase,
            "startedAt": "2026-11-21T20:00:00Z",
        }

        status = {
            "phase": phase,
            "nodes": {name: node},
            "outputs": {"parameters": [] if fails else [output]},
        }

        self.server.put(WORKFLOWS_AT, workflow | {"status": node | status})


@pytest.fixture
def controller(server: ApiServer) -> Iterator[Controller]:
    controller = Controller(server)
    assert start_rekindle("schedule", *CONFIG).wait() == 0
    controller.start()
    yield controller
    controller.stopped.set()
    controller.join()


def start_rekindle(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rekindle", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, text=True
    )


def test_twelve_weeks_that_are_killed_ten_times_give_the_same_table(
    server: ApiServer, controller: Controller
) -> None:
    chance = random.Random(1)
    for _ in range(10):
        process = start_rekindle(*BACKFILL)
        time.sleep(chance.uniform(0.5, 4))
        process.kill()
        process.communicate()

    start_rekindle(*BACKFILL).communicate()
    # the second command resumes the runs that failed
    out, _ = start_rekindle(*BACKFILL, "-o", "json").communicate()
    weeks = json.loads(out)["weeks"]
    assert [week["phase"] for week in weeks] == ["Succeeded"] * 12
    assert [week["model_sha256"] for week in weeks] == [
        f"weights of {week['scheduled']}" for week in weeks
    ]
    assert len(server.objects[WORKFLOWS_AT]) == 12
    assert controller.failed


def test_two_backfills_at_the_same_time_submit_each_week_once(
    server: ApiServer, controller: Controller
) -> None:
    controller.failed.add("none")
    backfills = [start_rekindle(*BACKFILL, "-o", "json") for _ in range(2)]
    tables = [json.loads(process.communicate()[0])["weeks"] for process in backfills]
    assert [week["workflow"] for week in tables[0]] == [week["workflow"] for week in tables[1]]
    assert len(server.objects[WORKFLOWS_AT]) == 12
