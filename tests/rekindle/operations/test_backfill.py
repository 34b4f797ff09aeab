"""A backfill ends with the same table, also if it is killed at any time. The tests run twelve weeks
of a small workload, and of the fraud demo."""

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import ROOT, Shell, open_shell
from tests.rekindle.cli.user_project import run_make
from tests.waiting import until

TWELVE_WEEKS = "--from 2026-03-02 --to 2026-05-24 --parallel 2"
KILLS = 10
# the data of each week has another size; in the week of April 6, the data are missing while the
# file EMPTY exists
GROWING_DATA_CODE = """

def prepare(data, out):
    from rekindle import DataError

    if data.until.startswith("2026-04-06") and Path("EMPTY").exists():
        raise DataError("no rows until 2026-04-06: wait for the export")
    day = int(data.until[5:7]) * 31 + int(data.until[8:10])
    lines = Path(data.source).read_text().splitlines(keepends=True)
    short = Path(out).with_suffix(".csv")
    short.write_text("".join(lines[: 60 + day]))
    prepared = shop.prepare(data.model_copy(update={"source": str(short)}), out)
    short.unlink()
    return prepared
"""
# a pipeline that does not use the scheduled time, and trains nothing
CARD = """
from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        blocks.step("steps.card", metrics={"rmse": 1.5}, verdict="keep")
    return workflow
"""
Rows = list[dict[str, Any]]


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that pods share with this machine; it is not in /tmp, because each pod has its own
    /tmp. Trainings wait until the folder contains the file `go`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "go").touch()
        yield Path(folder)


@pytest.fixture
def project(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str, shared_folder: Path
) -> Iterator[Shell]:
    """A shell in a user's project, in which the run of a week takes seconds."""
    run_make(tmp_path / "shop", shared_folder / "go")
    with (tmp_path / "shop/steps/paced.py").open("a") as file:
        file.write(GROWING_DATA_CODE.replace("EMPTY", str(shared_folder / "empty")))
    with open_shell(
        tmp_path / "shop", **s3_environment, MLFLOW_TRACKING_URI=mlflow_server
    ) as typed:
        yield typed


def start(typed: Shell, command: str) -> subprocess.Popen[str]:
    """Start a command in its own process group, as a terminal does."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    words = ["bash", "-c", f"exec {command}"]
    return subprocess.Popen(
        words, cwd=typed.folder, env=dict(typed.environ), text=True, process_group=0, **pipes
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to a command and all its descendants."""
    victims = [psutil.Process(process.pid)]
    victims += victims[0].children(recursive=True)
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    process.communicate(timeout=30)


def rows_of(done: subprocess.CompletedProcess[str] | str) -> Rows:
    """Return the rows of a backfill, without the names of its runs, which depend on the config."""
    text = done if isinstance(done, str) else done.stdout
    return [
        {key: value for key, value in row.items() if key != "workflow"}
        for row in json.loads(text)["weeks"]
    ]


def run_with_kills(
    typed: Shell, undisturbed_command: str, killed_command: str, kills: int, seed: int
) -> tuple[Rows, Rows]:
    """Run a backfill without disturbance, and then with SIGKILL at random moments; return both
    tables."""
    began = time.monotonic()
    expected = typed(undisturbed_command)
    assert expected.returncode == 0, expected.stderr
    chance = random.Random(seed)
    duration = time.monotonic() - began
    assert typed("rekindle cache prune --keep 0 --yes").returncode == 0, (
        "otherwise nothing would be computed again"
    )

    for _ in range(kills):
        process = start(typed, killed_command)
        time.sleep(chance.uniform(0, 2 * duration / kills))
        kill(process)

    result = typed(killed_command)
    assert result.returncode == 0, result.stderr
    return rows_of(expected), rows_of(result)


def test_a_backfill_of_runs_on_the_same_data_says_so_once_before_the_first_run(
    project: Shell,
) -> None:
    (project.folder / "pipelines/card.py").write_text(CARD)
    command = (
        "rekindle backfill configs/shop.yaml --set pipeline=pipelines.card --from 2026-03-02 --to"
        " 2026-03-15"
    )
    result = project(command)
    assert result.returncode == 0, result.stderr
    assert [
        line for line in result.stderr.splitlines() if "warning" in line
    ] == result.stderr.splitlines()[:1]
    assert "every run of this backfill trains on the same data" in result.stderr


@pytest.mark.slow
# this test executes two dozen runs
@pytest.mark.timeout(1800)
def test_twelve_weeks_that_are_killed_ten_times_give_the_same_table(project: Shell) -> None:
    command = f"rekindle backfill configs/shop.yaml {TWELVE_WEEKS} -o json"
    expected, table = run_with_kills(
        project, f"{command} --set name=calm", f"{command} --set name=struck", KILLS, 1
    )
    assert table == expected
    assert len(table) == 12
    assert len({row["model_sha256"] for row in table}) == 12
    assert {row["phase"] for row in table} == {"Succeeded"}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # ten runs
def test_killed_weeks_of_the_fraud_demo_give_the_same_table(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    world = "simulate://7?cards=150&terminals=300&days=91"

    small = {
        "REKINDLE_DATA__SOURCE": world,
        "REKINDLE_TRAIN__EPOCHS": "1",
        "REKINDLE_GATE__MINIMUM": "{auc: 0.01}",
    }

    command = (
        "rekindle backfill configs/demo.yaml --set data.window=60d --from 2024-03-04 --to"
        " 2024-03-25 -o json"
    )

    with open_shell(tmp_path, **small) as typed:
        expected, table = run_with_kills(
            typed, f"{command} --set name=calm", f"{command} --set name=struck", 5, 2
        )

    assert table == expected
    assert len(table) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)  # four weeks
def test_two_backfills_at_the_same_time_run_each_week_once(project: Shell) -> None:
    command = "rekindle backfill configs/shop.yaml --from 2026-03-02 --to 2026-03-15 -o json"
    backfills = [start(project, command) for _ in range(2)]
    results = [process.communicate(timeout=300) for process in backfills]
    assert [process.returncode for process in backfills] == [0, 0], results
    first_rows, second_rows = (rows_of(out) for out, _ in results)
    assert first_rows == second_rows
    assert {row["phase"] for row in first_rows} == {"Succeeded"}
    assert len(json.loads(project("rekindle status -o json").stdout)["runs"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)  # four weeks
def test_a_failed_run_does_not_stop_the_other_runs_and_is_repeated(
    project: Shell, shared_folder: Path
) -> None:
    empty = shared_folder / "empty"
    empty.touch()
    command = "rekindle backfill configs/shop.yaml --from 2026-03-30 --to 2026-04-19 -o json"
    result = project(command)
    assert result.returncode == 1, result.stderr
    assert [row["phase"] for row in rows_of(result)] == ["Succeeded", "Failed", "Succeeded"]
    (name,) = [
        row["workflow"] for row in json.loads(result.stdout)["weeks"] if row["phase"] == "Failed"
    ]
    assert "no rows until 2026-04-06" in project(f"rekindle logs {name}").stdout
    empty.unlink()
    second_result = project(command)
    assert second_result.returncode == 0
    assert [row["phase"] for row in rows_of(second_result)] == ["Succeeded"] * 3
    assert rows_of(second_result)[0] == rows_of(result)[0]


@pytest.mark.slow
@pytest.mark.timeout(600)  # two weeks
def test_ctrl_c_stops_a_backfill_and_the_same_command_continues(
    project: Shell, shared_folder: Path
) -> None:
    command = "rekindle backfill configs/shop.yaml --from 2026-03-02 --to 2026-03-15 -o json"
    go = shared_folder / "go"
    go.unlink()
    process = start(project, command)
    logs = project.folder / ".rekindle/runs"
    until("the training of the first week", lambda: any(logs.glob("*/logs/*train*")), 120)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err, err
    assert "2026-03-09" not in err, err
    go.touch()
    result = project(command)
    assert result.returncode == 0
    assert [row["phase"] for row in rows_of(result)] == ["Succeeded"] * 2
