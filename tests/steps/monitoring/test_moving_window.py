"""A scheduled run whose source has no new rows trains nothing, unless the code or the config has
changed."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rekindle import DataError, Store, tracking
from rekindle.cache import code, loaded
from rekindle.step import encode_parameter, load_step_module
from tests.steps.bills import make_workload

# the function `prepare`, which counts the rows of the days before the end of the window
PREPARE = """
rows = [row.split() for row in open(data.source) if row.split()[0] < data.until]
(out / "rows").write_text(str(rows))
return Prepared(rows=sum(int(count) for _, count in rows), newest=f"{rows[-1][0]}T00:00:00+00:00")
"""
prepare: Any = load_step_module("steps.prepare")


class Weeks:
    """The scheduled runs of one pipeline, each with its own MLflow run."""

    def __init__(self, folder: Path) -> None:
        # each test imports its own module
        self.name = f"bills_{uuid4().hex[:6]}"
        self.module = folder / f"{self.name}.py"
        self.source = folder / "bills.txt"
        self.module.write_text(make_workload("", PREPARE))
        self.templates: list[dict[str, Any]] = []

    def run(self, day: str, status: str = "FINISHED", more: Any = None, **config: Any) -> Any:
        data = {"source": str(self.source), "window": "4w"} | config.pop("data", {})
        config = {"data": data, "train": {"seed": 1}} | config
        values = {"config_hash": json.dumps(config), "manifest_hash": "1", "git_sha": "abc"}
        parameters = [{"name": name, "value": value} for name, value in values.items()]
        workflow = f"{self.name}-{day}-{uuid4().hex[:4]}"

        inputs = {
            "workload": self.name,
            "data": data,
            "workflow": workflow,
            "experiment": self.name,
            "config": config,
            "manifest": encode_parameter(
                json.dumps(
                    {"spec": {"arguments": {"parameters": parameters}, "templates": self.templates}}
                )
            ),
        }

        outputs = prepare.run(
            prepare.Inputs(**inputs | {"scheduled": day, "skip": True} | (more or {}))
        )
        tracking.finish(outputs.run_id, status)

        return outputs


@pytest.fixture
def weeks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_server: str) -> Weeks:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = Weeks(tmp_path)
    result.source.write_text("2024-04-01 600\n2024-04-09 400\n")
    return result


def test_weeks_without_newer_rows_train_nothing_until_rows_arrive(weeks: Weeks) -> None:
    first_run = weeks.run("2024-04-15")
    assert first_run.unchanged == ""

    for day in ("2024-04-22", "2024-04-29"):
        week = weeks.run(day)
        assert "does not contain rows after 2024-04-09T00:00:00+00:00" in week.unchanged
        assert week.unchanged.endswith(": this run trains nothing.")
        tags = tracking.read_tags(week.run_id)
        assert tags["verdict"] == "same"
        assert tags["reason"] == week.unchanged
        assert "the run for 2024-04-15 had 1,000." in week.warnings[0], (
            "compared with the last training"
        )

    with weeks.source.open("a") as rows:
        rows.write("2024-05-02 300\n")

    newer_run = weeks.run("2024-05-06")
    assert newer_run.unchanged == ""
    assert "verdict" not in tracking.read_tags(newer_run.run_id)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "time", ["x", "", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59-01:00", "2024-04-15", "1"]
)
@pytest.mark.parametrize("tag", ["data.newest", "data.window_until", "rekindle.scheduled"])
def test_a_run_with_a_malformed_time_is_not_compared(weeks: Weeks, tag: str, time: str) -> None:
    first_run = weeks.run("2024-04-15")
    tracking.log_to_run(first_run.run_id, run_tags={tag: time}, run_metrics={"rows": float("inf")})
    weeks.run("2024-04-22")


@pytest.mark.slow
def test_a_change_of_config_or_code_trains_and_says_what_changed(weeks: Weeks) -> None:
    weeks.run("2024-04-15")
    changed = weeks.run("2024-04-22", train={"seed": 2})
    assert changed.unchanged == ""
    assert "train.seed changed: this run trains." in changed.warnings[-1]
    assert weeks.run("2024-04-29", train={"seed": 2}).unchanged, (
        "the changed config was that of the last run"
    )
    weeks.module.write_text(make_workload("", PREPARE) + "# a comment\n")
    forget_code()
    assert "the code changed" in weeks.run("2024-05-06", train={"seed": 2}).warnings[-1]


def add_module(weeks: Weeks, suffix: str, text: str) -> str:
    """Write a module of the project, and return the name of the module."""
    file = weeks.module.with_name(f"{weeks.name}_{suffix}.py")
    file.write_text(text)
    return file.stem


def forget_code() -> None:
    """Clear the cached digests of files, because each real run is a process of its own."""
    for function in (code._compute_digest, code._hash_file, code._list_imports):
        function.cache_clear()


def make_train_template(*command: str) -> dict[str, Any]:
    section = json.dumps({"command": command})
    args = ["-m", "rekindle.program.agent", f"--program={section}"]
    return {"name": "train", "container": {"args": args}}


def test_changed_code_of_a_program_trains(weeks: Weeks) -> None:
    helper = add_module(weeks, "helper", "K = 2")
    weeks.templates = [make_train_template(f"{add_module(weeks, 'train', f'import {helper}')}.py")]
    weeks.run("2024-04-15")
    assert weeks.run("2024-04-22").unchanged

    add_module(weeks, "helper", "K = 7")
    forget_code()
    week = weeks.run("2024-04-29")
    assert week.unchanged == ""
    assert re.search(r"the code .*changed: this run trains\.$", week.warnings[-1])


def test_changed_code_of_a_step_with_a_short_name_trains(weeks: Weeks) -> None:
    name = add_module(weeks, "trainer", "VERSION = 1")
    weeks.templates = [{"name": "t", "container": {"args": ["-m", "rekindle", "step", name]}}]
    weeks.run("2024-04-15")
    assert weeks.run("2024-04-22").unchanged

    add_module(weeks, "trainer", "VERSION = 2")
    forget_code()
    assert weeks.run("2024-04-29").unchanged == ""


def test_a_program_whose_files_are_unknown_always_trains(weeks: Weeks) -> None:
    weeks.templates = [make_train_template("sh", "train.sh")]
    weeks.run("2024-04-15")
    week = weeks.run("2024-04-22")
    assert week.unchanged == ""
    assert "unknown which files the program sh train.sh loads" in week.warnings[-1]


def test_a_run_that_has_loaded_an_uncovered_file_is_never_taken_for_unchanged(
    weeks: Weeks, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncovered = "network.py was loaded, but the cache key does not cover it"
    with monkeypatch.context() as patched:
        patched.setattr(loaded, "reason_uncovered", lambda modules: uncovered)
        weeks.run("2024-04-15")
        assert uncovered in weeks.run("2024-04-22").warnings[-1]

    assert uncovered in weeks.run("2024-04-29").warnings[-1], "the earlier run has loaded it"
    weeks.templates = [{"name": "main", "dag": {"tasks": [{"name": "evaluate"}]}}]
    assert weeks.run("2024-05-06").unchanged

    # a later step of the earlier run has loaded a file that the key does not cover
    trained = weeks.run("2024-05-13", train={"seed": 2})
    run = tracking.read_tags(trained.run_id)[tracking.WORKFLOW]
    s3.put(f"{run}/evaluate/uncovered", uncovered.encode())
    assert f"{run}/evaluate, {uncovered}" in weeks.run("2024-05-20", train={"seed": 2}).warnings[-1]


@pytest.mark.slow
def test_only_successful_scheduled_runs_for_earlier_times_count(weeks: Weeks) -> None:
    assert weeks.run("2024-04-15", more={"scheduled": ""}).unchanged == "", "started by hand"
    assert weeks.run("2024-04-15", status="FAILED").unchanged == ""
    assert weeks.run("2024-04-22", more={"backfill": "true"}).unchanged == ""
    assert weeks.run("2024-04-29", status="RUNNING").unchanged == "", "no run was successful"
    assert weeks.run("2024-05-06").unchanged == "", "the run for 04-29 was killed"
    assert weeks.run("2024-05-06").unchanged == "", "another run for this time"
    assert weeks.run("2024-05-13").unchanged
    assert weeks.run("2024-05-20", more={"backfill": "true"}).unchanged == "", (
        "a past week is always trained"
    )
    assert (
        weeks.run("2024-05-20", more={"scheduled": "", "created": "2024-05-20"}).unchanged == ""
    ), "by hand"
    assert weeks.run("2024-05-20", more={"skip": False}).unchanged == "", (
        "this pipeline always trains"
    )


@pytest.mark.slow
def test_a_window_below_the_minimum_share_is_an_error_but_not_in_a_past_week(weeks: Weeks) -> None:
    data = {"minimum_share": 0.7}
    weeks.run("2024-04-15", data=data)
    weeks.source.write_text("2024-04-09 750\n")
    assert weeks.run("2024-04-22", data=data).unchanged
    weeks.source.write_text("2024-04-09 650\n")
    message = (
        r"data.minimum_share \(0.7\) .* this run has 650 rows; the run for 2024-04-15 had 1,000"
    )
    with pytest.raises(DataError, match=message):
        weeks.run("2024-04-29", data=data)
    assert weeks.run("2024-04-29", data=data, more={"backfill": "true"}).rows == 650
    assert weeks.run("2024-05-06").rows == 650, "without minimum_share"


def test_a_scheduled_run_takes_no_dataset_from_the_cache() -> None:
    inputs = prepare.Inputs(
        workload="x", data={"source": "y"}, workflow="z", scheduled="2024-04-15", skip=True
    )
    assert "compares its data" in prepare.REUSE.not_reused_if(inputs)
    for other in ({"scheduled": ""}, {"skip": False}, {"backfill": "true"}):
        assert prepare.REUSE.not_reused_if(inputs.model_copy(update=other)) == ""


@pytest.mark.slow
def test_a_last_run_is_found_by_its_time_and_not_by_its_start(weeks: Weeks) -> None:
    from steps.monitoring import moving_window

    for day in ("2024-05-06", "2024-04-15", "2024-04-29"):
        weeks.run(day)
    for day, expected in (
        ("2024-05-06", "2024-04-29"),
        ("2024-04-20", "2024-04-15"),
        ("2024-04-15", None),
    ):
        time = datetime.fromisoformat(day).replace(tzinfo=UTC)
        last_run = moving_window.last_scheduled(weeks.name, weeks.name, "", time)
        assert (last_run.tags[tracking.SCHEDULED_TIME_TAG][:10] if last_run else None) == expected
