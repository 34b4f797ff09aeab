"""Tests of the reports of a program, sent as Kubeflow's callback in transformers does."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rekindle.program.progress import (
    MAX_BODY_BYTES,
    SERVER_TOKEN_VARIABLE,
    SERVER_URL_VARIABLE,
    ProgressReport,
    ProgressServer,
    SavedProgress,
)
from rekindle.training.membership.messages import parse_message
from rekindle.training.membership.protocol import encode_message
from rekindle.view.progress import choose_progress, find_progress


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ProgressServer]:
    server = ProgressServer(tmp_path / "progress")
    yield server
    server.close()


def send(server: ProgressServer, body: bytes, token: str = "") -> int:
    """Send a report, and return the HTTP status of the answer."""
    variables = server.variables()
    token = token or Path(variables[SERVER_TOKEN_VARIABLE]).read_text()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(variables[SERVER_URL_VARIABLE], body, headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def make_report(**status: Any) -> bytes:
    return json.dumps({"trainerStatus": status}).encode()


def test_a_report_has_percentage_time_left_and_metrics(server: ProgressServer) -> None:
    metrics = [{"name": "loss", "value": "0.25"}, {"name": "note", "value": "warm-up"}]
    body = make_report(
        lastUpdatedTime="2026-11-29T08:00:00Z",
        progressPercentage=45,
        estimatedRemainingSeconds=180,
        metrics=metrics,
    )
    assert send(server, body) == 200
    progress = server.take()
    assert progress
    assert progress.percentage == 45
    assert progress.seconds_left == 180
    assert progress.metrics == {"loss": 0.25}
    assert str(progress) == "45 %  loss 0.25  3 min 00 s left"
    assert server.take() is None


def test_other_users_of_the_machine_cannot_report(server: ProgressServer) -> None:
    assert send(server, make_report(progressPercentage=1), token="wrong") == 401
    assert server.take() is None
    assert Path(server.variables()[SERVER_TOKEN_VARIABLE]).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{" * 5000,
        make_report(progressPercentage=101),
        make_report(estimatedRemainingSeconds="soon"),
        make_report(metrics=[{"name": "a\nb", "value": "1"}]),
        make_report(metrics=[{"name": "a", "value": "1"}] * 101),
    ],
    ids=range(7),
)
def test_a_malformed_report_is_refused(server: ProgressServer, body: bytes) -> None:
    assert send(server, body) == 422
    assert server.take() is None


def test_a_huge_report_is_refused(server: ProgressServer) -> None:
    assert send(server, b" " * (MAX_BODY_BYTES + 1)) == 413


def test_a_report_may_be_empty(server: ProgressServer) -> None:
    assert send(server, make_report()) == 200
    assert server.take() == ProgressReport.model_validate({})


def test_the_step_of_a_report_is_one_of_its_metrics(server: ProgressServer) -> None:
    metrics = [{"name": "loss", "value": "3"}, {"name": "current_step", "value": "130"}]
    assert send(server, make_report(metrics=metrics)) == 200
    progress = server.take()
    assert progress
    assert progress.step == 130


@pytest.mark.parametrize("value", ["1764449734000000000", "1e308", "-1", "nan"])
def test_a_number_that_cannot_be_a_step_does_not_cut_the_pod_off_from_its_coordinator(
    value: str,
) -> None:
    status = {"metrics": [{"name": "step", "value": value}, {"name": "global_step", "value": "7"}]}
    progress = ProgressReport.model_validate(status)
    assert progress.step == 7
    assert parse_message(encode_message({"beat": progress.step, "busy": False}))[0] == "beat"

    metrics = [{"name": "step", "value": value}]
    assert ProgressReport.model_validate({"metrics": metrics}).step == -1


@pytest.mark.parametrize("length", ["\xb2", "9" * 5000, "-1", "1_0", "", " "])
def test_a_request_with_a_strange_length_is_refused(server: ProgressServer, length: str) -> None:
    address = urlsplit(server.variables()[SERVER_URL_VARIABLE])
    assert address.hostname
    with socket.create_connection((address.hostname, address.port), timeout=5) as connection:
        head = f"POST /status HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode("latin-1"))
        assert connection.makefile("rb").read().startswith(b"HTTP/1.0 413")


def test_the_metrics_of_reports_in_quick_succession_are_kept(server: ProgressServer) -> None:
    for name, value in (("eval_loss", "3"), ("step", "1"), ("step", "2")):
        assert send(server, make_report(metrics=[{"name": name, "value": value}])) == 200
    progress = server.take()
    assert progress
    assert progress.metrics == {"step": 2, "eval_loss": 3}

    assert send(server, make_report(metrics=[{"name": "step", "value": "3"}])) == 200
    progress = server.take()
    assert progress
    assert progress.metrics == {"step": 3}


def test_status_shows_the_newest_report_in_the_log() -> None:
    reports = [ProgressReport.model_validate({"progressPercentage": number}) for number in (1, 2)]
    log = "".join(f"{report.log_line}\nan output of the program\n" for report in reports)
    assert find_progress(log) == "2 %"


def test_status_shows_the_worker_that_is_furthest() -> None:
    line = "progress step={}/9 loss=0.5 samples_per_s=10 eta_s=3\n"
    # a worker that does not report anymore has written other lines since
    old_log = line.format(3) + "joined generation 7\n"
    logs = [old_log, line.format(3) + line.format(8), "no progress\n"]
    assert choose_progress(logs).startswith("step 8/9")
    assert choose_progress(["no progress\n"]) == choose_progress([]) == ""


@pytest.mark.parametrize("number", ["n/a", "inf", "nan", "-1", "1e308", "?", "9" * 5000])
def test_a_strange_number_in_a_log_does_not_end_the_display(number: str) -> None:
    line = "progress step=1/2 loss=0.5 samples_per_s={} eta_s={}\n"
    assert find_progress(line.format(number, 3)) == "step 1/2  loss 0.5  3 s left"
    assert find_progress(line.format(10, number)) == "step 1/2  loss 0.5  10 samples/s"


def write_state(folder: Path, **state: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_checkpoints_of_a_trainer_tell_the_progress_of_a_program_without_reports(
    tmp_path: Path,
) -> None:
    history = [{"loss": 2.5, "step": 5}, {"loss": 1.5, "step": 10}, {"eval_loss": 2}]
    saved = SavedProgress()
    assert saved.read(write_state(tmp_path / "5", global_step=5, max_steps=40))

    checkpoint = write_state(tmp_path / "10", global_step=10, max_steps=40, log_history=history)
    progress = saved.read(checkpoint)
    assert progress
    assert progress.step == 10
    assert progress.percentage == 25
    assert progress.seconds_left is not None
    assert progress.metrics == {"step": 10, "loss": 1.5, "eval_loss": 2}


def test_a_checkpoint_of_a_trainer_that_diverged_names_the_metric(tmp_path: Path) -> None:
    history = [{"loss": 1.5, "eval_loss": 2}, {"eval_loss": float("nan")}]
    progress = SavedProgress().read(write_state(tmp_path, global_step=5, log_history=history))
    assert progress
    assert progress.metrics == {"step": 5, "loss": 1.5}
    assert progress.not_finite == ["eval_loss"]


@pytest.mark.parametrize("state", ["", "[]", "[" * 5000, '{"global_step": -1}'], ids=range(4))
def test_a_malformed_state_is_no_progress(state: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(state)
    assert SavedProgress().read(tmp_path) is None
    assert SavedProgress().read(tmp_path / "missing") is None
