"""Queued runs start in the order of their priority, and survive the death of their server."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from argolocal.common.json_text import to_json
from argolocal.errors import ArgolocalError, ConfigError
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun
from argolocal.server.queue import Queue
from argolocal.state.journal import (
    MANIFEST_FILE,
    Busy,
    NotQueued,
    RunExists,
    RunFiles,
)
from argolocal.view import runs
from tests import builders


class Process:
    """The process of a run, which a test ends."""

    def __init__(self) -> None:
        self.is_running = True

    def has_ended(self) -> bool:
        return not self.is_running


class QueueOfTest:
    """A queue whose processes do nothing until the test itself executes the workflow."""

    def __init__(self, home: Path, parallelism: int = 1) -> None:
        self.cluster = LocalCluster(home)
        self.processes: dict[str, Process] = {}
        self.queue = Queue(self.cluster, self.launch, parallelism)

    def launch(self, name: str) -> Process:
        self.processes[name] = Process()
        return self.processes[name]

    def finish(self, name: str) -> None:
        LocalRun.load(name, self.cluster, is_queued=True).run()
        self.processes[name].is_running = False


def make_hello_workflow(name: str, **spec: Any) -> dict[str, Any]:
    template = {"name": "main", "container": builders.make_shell_container("echo hello")}
    return builders.make_workflow(template, name=name, **spec)


def test_a_submitted_run_is_pending_and_starts_when_a_place_is_free(tmp_path: Path) -> None:
    test = QueueOfTest(tmp_path)
    assert test.queue.submit(make_hello_workflow("first")) == "first"
    test.queue.submit(make_hello_workflow("second"))
    status = runs.load_status(tmp_path, "second")
    assert status["phase"] == "Pending"
    assert "queue" in status["message"]

    assert test.queue.start_next() == ["first"]
    assert test.queue.start_next() == []
    assert test.queue.active() == ["first"]
    assert test.queue.waiting() == ["second"]

    test.finish("first")
    assert runs.load_status(tmp_path, "first")["phase"] == "Succeeded"
    assert test.queue.start_next() == ["second"]


def test_runs_start_by_priority_and_then_by_time(tmp_path: Path) -> None:
    test = QueueOfTest(tmp_path)
    test.queue.submit(make_hello_workflow("first"))
    test.queue.submit(make_hello_workflow("second"))
    test.queue.submit(make_hello_workflow("urgent", priority=5))
    assert test.queue.waiting() == ["urgent", "first", "second"]


def test_a_new_server_finds_the_runs_of_the_old_one(tmp_path: Path) -> None:
    old = QueueOfTest(tmp_path, parallelism=3)
    for name in ("done", "alive", "killed", "waiting"):
        old.queue.submit(make_hello_workflow(name))
    old.queue.start_next()
    old.finish("done")
    alive = LocalRun.load("alive", old.cluster, is_queued=True)

    new = QueueOfTest(tmp_path, parallelism=1)
    assert new.queue.waiting() == ["killed", "waiting"]
    assert not RunFiles(tmp_path, "done").queue_entry.exists()
    alive.files.close()


def test_a_run_that_has_ended_does_not_run_again(tmp_path: Path) -> None:
    test = QueueOfTest(tmp_path)
    template = {"name": "main", "container": builders.make_shell_container("exit 1")}
    test.queue.submit(builders.make_workflow(template, name="fails"))
    LocalRun.load("fails", test.cluster).run()
    with pytest.raises(NotQueued):
        LocalRun.load("fails", test.cluster, is_queued=True)
    assert test.queue.start_next() == []

    test.queue.retry("fails")
    assert test.queue.start_next() == ["fails"]


def test_a_submission_that_died_halfway_leaves_nothing(tmp_path: Path) -> None:
    test = QueueOfTest(tmp_path)
    test.queue.submit(make_hello_workflow("whole"))
    RunFiles(tmp_path, "half").queue_entry.touch()
    assert test.queue.start_next() == ["whole"]
    assert not RunFiles(tmp_path, "half").queue_entry.exists()
    assert test.queue.submit(make_hello_workflow("half")) == "half"


def test_an_invalid_manifest_and_a_used_name_are_refused(tmp_path: Path) -> None:
    test = QueueOfTest(tmp_path)
    with pytest.raises(ConfigError, match="entrypoint"):
        test.queue.submit(builders.make_workflow(name="empty"))
    test.queue.submit(make_hello_workflow("used"))
    with pytest.raises(RunExists, match='"used" exists already'):
        test.queue.submit(make_hello_workflow("used"))
    assert test.queue.waiting() == ["used"]


def test_a_damaged_run_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = QueueOfTest(tmp_path, parallelism=2)
    test.queue.submit(make_hello_workflow("damaged"))
    test.queue.submit(make_hello_workflow("whole"))
    (tmp_path / "runs/damaged/journal.jsonl").write_text(to_json([]) + "\n")
    assert test.queue.start_next() == ["whole"]
    assert test.queue.start_next() == []
    assert capsys.readouterr().err.count("the queued run damaged is left out") == 1


def test_one_name_that_several_clients_submit_at_once_is_accepted_once(tmp_path: Path) -> None:
    test = QueueOfTest(tmp_path)

    def submit(text: str) -> str:
        template = {"name": "main", "container": builders.make_shell_container(f"echo {text}")}
        try:
            test.queue.submit(builders.make_workflow(template, name="same"))
        except (RunExists, Busy):
            return ""
        return text

    with ThreadPoolExecutor(4) as pool:
        accepted = list(filter(None, pool.map(submit, "abcd")))
    assert len(accepted) == 1
    container = RunFiles(tmp_path, "same").workflow()["spec"]["templates"][0]["container"]
    assert container["args"] == [f"echo {accepted[0]}"]


def test_a_run_with_the_name_of_a_half_removed_one_starts_from_the_beginning(
    tmp_path: Path,
) -> None:
    test = QueueOfTest(tmp_path)
    template = {"name": "main", "container": builders.make_shell_container("exit 5")}
    test.queue.submit(builders.make_workflow(template, name="again"))
    test.queue.start_next()
    test.finish("again")
    # delete only the manifest, as if the removal of the run was killed after its first step
    (RunFiles(tmp_path, "again").root / MANIFEST_FILE).unlink()

    test.queue.submit(make_hello_workflow("again"))
    assert runs.load_status(tmp_path, "again")["phase"] == "Pending"
    assert test.queue.start_next() == ["again"]
    test.finish("again")
    assert runs.load_status(tmp_path, "again")["phase"] == "Succeeded"


@pytest.mark.parametrize(
    ("file", "file_text"),
    [
        ("runs/damaged/asked", ""),
        ("runs/damaged/asked", "{}"),
        ("runs/damaged/asked", '{"changes": 5, "suspend": [], "shutdown": {}}'),
        ("runs/damaged/journal.jsonl", None),
        ("runs/damaged/lock", None),
        ("queue/damaged", None),
    ],
)
def test_a_damaged_file_of_a_run_does_not_stop_the_others(
    tmp_path: Path, file: str, file_text: str | None
) -> None:
    test = QueueOfTest(tmp_path, parallelism=4)
    test.queue.submit(make_hello_workflow("damaged"))
    test.queue.submit(make_hello_workflow("other"))
    path = tmp_path / file
    path.unlink(missing_ok=True)
    if file_text is None:
        path.mkdir()
    else:
        path.write_text(file_text)

    assert "other" in test.queue.start_next()


def test_a_submission_that_cannot_be_written_keeps_no_file_open(tmp_path: Path) -> None:
    test = QueueOfTest(tmp_path)
    (tmp_path / "queue").write_text("")
    count = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        with pytest.raises(ArgolocalError):
            test.queue.submit(make_hello_workflow(f"run-{number}"))
    assert len(os.listdir("/proc/self/fd")) == count
