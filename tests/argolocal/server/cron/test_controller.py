"""CronWorkflows start their runs as in Argo: policies, conditions, limits, status."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun
from argolocal.server.cron.controller import CronController, read_progress
from argolocal.server.objects import Objects
from argolocal.server.queue import Queue
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from tests.argolocal.server.running import make_shell_spec

START = int(datetime(2026, 3, 2, tzinfo=UTC).timestamp())


def make_cron_workflow(script: str = "true", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "CronWorkflow",
        "metadata": {"name": "c"},
        "spec": {"schedules": ["* * * * *"], "workflowSpec": make_shell_spec(script), **spec},
    }


class Home:
    """A home (directory of runs) with a clock that a test sets, in seconds after START."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.cluster = LocalCluster(folder)
        self.now = float(START)
        self.objects = Objects(self.cluster, lambda: self.now)
        self.objects.create(make_cron_workflow(**spec))
        self.restart()

    def restart(self) -> None:
        """Start the server's controller again, with only the state on disk."""
        self.controller = CronController(self.cluster, self.objects, lambda: self.now)
        self.queue = Queue(self.cluster, self._refuse_start, parallelism=1)

    def _refuse_start(self, name: str) -> Any:
        raise AssertionError("a test runs the workflows itself")

    def look(self, seconds: float) -> list[str]:
        """Let the controller check the schedule, and return the runs that wait in the queue."""
        self.now = START + seconds
        self.controller.reconcile()
        return self.queue.waiting()

    def finish(self, *names: str) -> None:
        """Run queued workflows to their end."""
        for name in names:
            LocalRun.load(name, self.cluster, is_queued=True).run()
        self.queue = Queue(self.cluster, self._refuse_start, parallelism=1)
        self.queue.waiting()

    @property
    def status(self) -> dict[str, Any]:
        return self.objects.get("CronWorkflow", "c")["status"]

    @property
    def missed(self) -> list[tuple[int, str]]:
        progress = read_progress(self.cluster.home, "c")["c"]
        return [(missed_run.time - START, missed_run.reason) for missed_run in progress.missed]


def run_at(seconds: int) -> str:
    return f"c-{START + seconds}"


def test_a_run_has_the_name_labels_and_time_of_its_schedule(tmp_path: Path) -> None:
    metadata = {"labels": {"team": "fraud"}, "annotations": {"note": "weekly"}}
    home = Home(tmp_path, workflowMetadata=metadata)
    assert home.look(59.9) == []
    assert home.look(60.2) == [run_at(60)]
    assert home.look(60.4) == [run_at(60)]

    created = RunFiles(tmp_path, run_at(60)).workflow()["metadata"]
    assert created["labels"]["workflows.argoproj.io/cron-workflow"] == "c"
    assert created["labels"]["team"] == "fraud"
    assert created["annotations"]["note"] == "weekly"
    time = created["annotations"]["workflows.argoproj.io/scheduled-time"]
    assert time == "2026-03-02T00:01:00Z"
    [owner] = created["ownerReferences"]
    assert owner["kind"] == "CronWorkflow"

    assert home.status["phase"] == "Active"
    assert home.status["lastScheduledTime"] == "2026-03-02T00:01:00Z"
    assert [active_run["uid"] for active_run in home.status["active"]] == [created["uid"]]
    annotations = home.objects.get("CronWorkflow", "c")["metadata"]["annotations"]
    assert annotations["cronworkflows.argoproj.io/last-used-schedule"] == "* * * * *"

    home.finish(run_at(60))
    home.look(61)
    assert home.status["active"] == []
    assert home.status["succeeded"] == 1


def test_forbid_leaves_a_time_out_while_a_run_is_active_and_says_why(tmp_path: Path) -> None:
    home = Home(tmp_path, concurrencyPolicy="Forbid")
    home.look(59)
    home.look(61)
    assert home.look(120) == [run_at(60)]
    reason = f"the previous run {run_at(60)} was in progress (concurrencyPolicy: Forbid)"
    assert home.missed == [(120, reason)]
    home.finish(run_at(60))
    assert home.look(179) == []
    assert home.look(180) == [run_at(180)]


def test_replace_terminates_the_active_run(tmp_path: Path) -> None:
    home = Home(tmp_path, concurrencyPolicy="Replace")
    home.look(59)
    home.look(61)
    assert home.look(120) == [run_at(60), run_at(120)]
    home.finish(run_at(60), run_at(120))
    status = runs.load_status(tmp_path, run_at(60))
    assert (status["phase"], status["message"]) == ("Failed", "Stopped with strategy 'Terminate'")
    assert runs.load_status(tmp_path, run_at(120))["phase"] == "Succeeded"


def test_a_suspended_schedule_starts_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    home = Home(tmp_path, suspend=True)
    home.look(59)
    assert home.look(61) == []
    cron = home.objects.get("CronWorkflow", "c")
    cron["spec"].pop("suspend")
    home.objects.replace(cron)
    assert home.look(62) == []
    assert home.look(120) == [run_at(120)]


def test_a_stop_strategy_ends_the_schedule(tmp_path: Path) -> None:
    home = Home(tmp_path, stopStrategy={"expression": "cronworkflow.succeeded >= 1"})
    home.look(59)
    home.finish(*home.look(60))
    assert home.look(120) == []
    assert home.status["phase"] == "Stopped"
    labels = home.objects.get("CronWorkflow", "c")["metadata"]["labels"]
    assert labels["workflows.argoproj.io/cron-workflow-completed"] == "true"
    home.restart()
    assert home.look(180) == []


def test_when_may_forbid_a_run(tmp_path: Path) -> None:
    when = (
        "{{= cronworkflow.lastScheduledTime == nil ||"
        " (now() - cronworkflow.lastScheduledTime).Seconds() > 90 }}"
    )
    home = Home(tmp_path, when=when)
    home.look(59)
    home.finish(*home.look(60))
    assert home.look(120) == []
    assert home.missed == [(120, "when was false")]
    assert home.look(180) == [run_at(180)]


def test_an_invalid_when_is_a_condition_of_the_status(tmp_path: Path) -> None:
    home = Home(tmp_path, when="{{= cronworkflow.unknown > 1 }}")
    home.look(59)
    assert home.look(60) == []
    [condition] = home.status["conditions"]
    assert condition["type"] == "SubmissionError"
    assert condition["message"].startswith("run policy error: ")
    assert home.status["failed"] == 1


def test_a_template_that_was_deleted_is_a_condition_until_it_exists_again(tmp_path: Path) -> None:
    template = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "WorkflowTemplate",
        "metadata": {"name": "shared"},
        "spec": make_shell_spec("true"),
    }
    LocalCluster(tmp_path).store_objects([template])
    home = Home(tmp_path, workflowSpec={"workflowTemplateRef": {"name": "shared"}})
    home.objects.delete("WorkflowTemplate", "shared")
    home.look(59)
    assert home.look(60) == []
    [condition] = home.status["conditions"]
    assert "shared" in condition["message"]

    home.cluster.store_objects([template])
    assert home.look(120) == [run_at(120)]
    assert home.status["conditions"] == []


def test_history_limits_remove_the_oldest_runs(tmp_path: Path) -> None:
    home = Home(tmp_path, successfulJobsHistoryLimit=1, failedJobsHistoryLimit=0)
    home.look(59)
    for seconds in (60, 120, 180):
        home.finish(*home.look(seconds))
    home.look(181)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [run_at(180)]
    assert home.status["succeeded"] == 3


def test_a_server_that_dies_between_its_writes_starts_no_time_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path, concurrencyPolicy="Forbid", startingDeadlineSeconds=30)
    home.look(59)

    for seconds, method in ((60, "_add_active"), (180, "_write_progress")):
        with monkeypatch.context() as patch:
            patch.setattr(home.controller, method, _raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                home.look(seconds)

        home.restart()
        assert home.look(seconds + 1) == [run_at(seconds)]
        assert [active_run["name"] for active_run in home.status["active"]] == [run_at(seconds)]
        # the run is active, so the schedule skips the next time
        assert home.look(seconds + 60) == [run_at(seconds)]
        home.finish(run_at(seconds))
        home.look(seconds + 61)

    assert home.status["succeeded"] == 2
    assert [time for time, _ in home.missed] == [120, 240]


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_damaged_schedule_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path)
    (tmp_path / "objects/CronWorkflow/a.json").write_text("{")
    (tmp_path / "cron").mkdir()
    (tmp_path / "cron/b.json").write_text("{")
    home.objects.create({**make_cron_workflow(), "metadata": {"name": "b"}})
    home.look(59)
    assert home.look(60) == [run_at(60)]
    errors = capsys.readouterr().err
    assert errors.count("warning: the CronWorkflow a: ") == 1
    assert errors.count("warning: the CronWorkflow b: ") == 1


def test_a_deleted_schedule_starts_nothing_and_a_new_one_begins_now(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.look(59)
    home.objects.delete("CronWorkflow", "c")
    assert home.look(60) == []
    assert read_progress(tmp_path, "c") == {}
