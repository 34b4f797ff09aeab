"""Tests of the display of a running and of a failed run, from Argo's status as plain data."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from argolocal.common.wording import format_duration
from argolocal.view import display
from argolocal.view import runs as overview
from argolocal.view.summary import (
    describe_success,
    failure,
    find_failed_step,
    list_leaf_steps,
    list_steps,
    make_json_object,
)
from tests.argolocal.view.nodes import ROOT, WORKFLOW, make_node, make_status, time_at
from tests.effort import count_calls


def test_steps_are_below_their_parents_in_any_order_of_nodes():
    nodes = [
        make_node(".ship.release"),
        ROOT,
        make_node(".ship", "DAG"),
        make_node(".prepare", "Retry"),
        make_node(".prepare(0)"),
        make_node(".steps", "Steps"),
        make_node(".steps[0]", "StepGroup"),
        make_node(".steps[0].first"),
    ]

    rows = {row.name: (row.label, row.depth) for row in list_steps(WORKFLOW, make_status(*nodes))}

    assert rows == {
        "ship": ("ship", 0),
        "ship.release": ("release", 1),
        "prepare": ("prepare", 0),
        "steps": ("steps", 0),
        "steps.first": ("first", 1),
    }


def test_steps_are_listed_by_start_time():
    rows = list_steps(
        WORKFLOW, make_status(make_node(".late", start=9), make_node(".early", start=2), ROOT)
    )
    assert [row.name for row in rows] == ["early", "late"]


def test_a_step_that_succeeds_after_a_retry_is_not_shown_as_the_failure():
    attempts = [
        make_node(".train", "Retry"),
        make_node(".train(0)", phase="Failed", message="evicted"),
        make_node(".train(1)"),
    ]
    rows = list_steps(WORKFLOW, make_status(ROOT, *attempts))
    assert [row.label for row in rows] == ["train", "(0)", "(1)"]
    assert [row.name for row in list_leaf_steps(rows)] == ["train"]
    assert find_failed_step(rows) is None


def test_an_error_of_the_runner_names_the_running_step():
    running = [
        make_node(".train", "Retry", "Running", end=None),
        make_node(".train(0)", phase="Running", end=None),
    ]
    error_node = {
        **make_status(ROOT, make_node(".prepare"), *running, phase="Error"),
        "message": "No space left on device",
    }
    text = failure(WORKFLOW, error_node, "", None, "rekindle resume x")
    assert "step    train" in text
    assert "cause   No space left on device" in text


def test_an_error_of_the_runner_takes_precedence_over_the_failure_of_a_step():
    failed = make_node(".fill", phase="Failed", message="main: Error (exit code 1)")
    text = failure(
        WORKFLOW,
        make_status(ROOT, failed, phase="Error"),
        "",
        None,
        "rekindle resume x",
        "no space is left",
    )
    assert "step    fill" in text
    assert "cause   no space is left" in text


def test_a_run_of_one_pod_is_not_hidden_by_its_exit_hook():
    rows = list_steps(WORKFLOW, make_status(make_node("", phase="Failed"), make_node(".onExit")))
    assert [row.phase for row in rows] == ["Failed", "Succeeded"]


def test_a_failed_step_shows_its_own_error_not_the_retry_message():
    retry_message = "retryStrategy.expression evaluated to false"
    attempts = [
        make_node(".a", "Retry", "Failed", message=retry_message),
        make_node(".a(0)", phase="Failed", message="exit code 65"),
    ]
    assert list_steps(WORKFLOW, make_status(ROOT, *attempts))[0].message == "exit code 65"


@pytest.mark.parametrize(
    "message", ["No more retries left", "child 'w-1' failed", "Max duration limit exceeded"]
)
def test_the_message_of_a_run_is_the_error_of_its_step(message: str):
    attempts = [make_node("", "Retry", "Failed", message=message)]
    attempts += [make_node(f"({n})", phase="Failed", message=f"error {n}") for n in (10, 9)]
    ended = {**make_status(*attempts, phase="Failed"), "message": message}
    assert make_json_object(WORKFLOW, ended)["message"] == "error 10"
    assert overview.format_steps_table(WORKFLOW, ended).startswith(f"{WORKFLOW}: Failed error 10\n")
    assert "cause   error 10" in failure(WORKFLOW, ended, "", None, "rekindle resume x")


def test_a_stopped_run_does_not_show_a_running_step():
    """On a stopped run of a real Argo, a Retry node still had the phase Running."""
    counter = {**make_node("demo.cleanup", "Retry", "Running"), "finishedAt": None}
    ended = make_status(counter, make_node("demo.cleanup(0)"), phase="Failed")
    (row,) = list_steps("demo", ended)
    assert row.phase == "Succeeded"
    assert row.seconds == 1
    assert [row.phase for row in list_steps("demo", {**ended, "phase": "Running"})] == ["Running"]


def test_future_steps_are_listed_before_they_start():
    rows = list_steps(
        WORKFLOW,
        make_status(ROOT, make_node(".prepare"), make_node(".onExit")),
        ["prepare", "train"],
    )
    assert [(row.name, row.phase) for row in rows] == [
        ("prepare", "Succeeded"),
        ("train", "Waiting"),
        ("onExit", "Succeeded"),
    ]


def test_warnings_appear_during_the_run_at_its_end_and_in_status():
    texts = [
        "this run has 4,700 rows; that for 2024-04-15 had 5,417.",
        "\x1b[2Jamount has one value.",
    ]
    parameters = [{"name": "warnings", "value": json.dumps(texts)}, {"name": "rows", "value": "9"}]
    node_outputs: dict[str, Any] = {"outputs": {"parameters": parameters}}

    run = make_status(
        ROOT,
        make_node(".prepare", "Retry", **node_outputs),
        make_node(".prepare(0)", **node_outputs),
        make_node(".train"),
        phase="Succeeded",
    )

    out = io.StringIO()
    lines = display.LineDisplay(WORKFLOW, lambda row: "", out)
    lines(make_status(ROOT))
    lines(run)
    run["startedAt"] = time_at(0)

    run["finishedAt"] = time_at(9)
    for text in (
        out.getvalue(),
        describe_success(run, {}),
        overview.format_steps_table(WORKFLOW, run),
    ):
        assert text.count(texts[0]) == 1
        assert text.count("amount has one value.") == 1
        assert "warning" in text
        assert "\x1b" not in text

    for text in (describe_success(run, {}), overview.format_steps_table(WORKFLOW, run)):
        assert f"prepare: {texts[0]}" in text, "a warning names its step"

    assert make_json_object(WORKFLOW, run)["warnings"] == texts
    assert make_json_object(WORKFLOW, make_status(ROOT, make_node(".prepare")))["warnings"] == []


@pytest.mark.parametrize("value", ["", "{", "7", "{{outputs}}", '{"a": 1}'])
def test_an_output_called_warnings_that_is_not_a_list_is_ignored(value: str):
    node_outputs: dict[str, Any] = {
        "outputs": {"parameters": [{"name": "warnings", "value": value}]}
    }
    assert (
        make_json_object(WORKFLOW, make_status(ROOT, make_node(".other", **node_outputs)))[
            "warnings"
        ]
        == []
    )


def test_the_text_of_a_failure_has_step_cause_log_and_command_in_15_lines():
    log = "".join(f"noise {i}\n" for i in range(100)) + "error: the disk is full\n"
    failed = [
        make_node(".train", "Retry", "Failed", start=1, end=9, message="No more retries left")
    ]
    failed += [
        make_node(".train(0)", phase="Failed", start=1, end=9, message="main: Error (exit code 1)")
    ]
    failed += [make_node(".onExit", phase="Failed", start=1, end=5)]

    text = failure(
        WORKFLOW,
        make_status(ROOT, *failed, phase="Failed"),
        log,
        "logs/train.log",
        f"rekindle resume {WORKFLOW}",
    )

    lines = text.splitlines()
    assert len(lines) <= 15
    assert lines[-1].endswith(f"rekindle resume {WORKFLOW}")
    assert [
        word in text
        for word in ("step    train", "exit code 1", "logs/train.log", "the disk is full")
    ] == [True] * 4
    assert "noise" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.0612, "0.061 s"),
        (9.96, "10 s"),
        (41, "41 s"),
        (59.6, "1 min 00 s"),
        (12000, "3 h 20 min"),
    ],
)
def test_durations_are_written_with_units(seconds: float | None, text: str):
    assert format_duration(seconds) == text


def test_a_pipe_gets_plain_lines_without_control_codes():
    out = io.StringIO()
    with display.show_run(WORKFLOW, lambda row: "", {}, out) as shown:
        running = make_status(ROOT, make_node(".prepare", phase="Running", end=None))
        shown(running)
        shown(running)
        shown(
            make_status(
                ROOT,
                make_node(".prepare", end=2),
                make_node(".train", phase="Failed", message="boom"),
            )
        )

    lines = [line[9:] for line in out.getvalue().splitlines()]
    assert lines == [
        f"{WORKFLOW} running",
        "prepare running",
        "prepare succeeded in 2 s",
        "train failed in 1 s: boom",
    ]

    assert "\x1b" not in out.getvalue()


def test_a_failed_attempt_is_shown_while_the_next_attempt_waits(tmp_path: Path):
    attempt = make_node(
        ".train(0)",
        phase="Failed",
        message="failure condition '{status.x == Failed}' evaluated true",
    )

    (tmp_path / f"{WORKFLOW}-train-master-0.log").write_text(
        "generation 1: a\nerror: KeyError: 3 (own.py:7, in loss)\n"
    )
    out = io.StringIO()

    progress = display.LogErrors(WORKFLOW, tmp_path, tmp_path / "deployments").of
    with display.show_run(WORKFLOW, progress, {}, out) as shown:
        shown(make_status(ROOT, make_node(".train", "Retry", "Running", end=None)))
        shown(make_status(ROOT, make_node(".train", "Retry", "Running", end=None), attempt))

    lines = [line[9:] for line in out.getvalue().splitlines()]
    assert "train(0) failed in 1 s: KeyError: 3 (own.py:7, in loss)" in lines


def test_a_failed_attempt_of_a_deployment_shows_the_error_of_its_pod(tmp_path: Path):
    message = "failure condition '{status.x == [ProgressDeadlineExceeded]}' evaluated true"
    attempt = make_node(
        ".deployment(0)", phase="Failed", message=message, templateName="deployment"
    )
    log = tmp_path / "deployments/model/logs/model-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("error: the model cannot be loaded: own.py:7: KeyError: 3.\n")
    errors = display.LogErrors(WORKFLOW, tmp_path, tmp_path / "deployments")
    rows = {
        row.name: row
        for row in list_steps(
            WORKFLOW, make_status(ROOT, make_node(".deployment", "Retry", "Running"), attempt)
        )
    }
    assert (
        display.find_cause(rows["deployment(0)"], errors.of)
        == "the model cannot be loaded: own.py:7: KeyError: 3."
    )


def test_a_message_with_brackets_is_shown_in_the_tree():
    from rich.console import Console

    tree = display.TreeDisplay(WORKFLOW, lambda row: "", {}, io.StringIO())
    tree(make_status(ROOT, make_node(".a", phase="Failed", message="no file [/data/x] of [red]")))
    out = io.StringIO()
    Console(file=out, width=100).print(tree.draw())
    assert "no file [/data/x] of [red]" in out.getvalue()


def test_a_pending_step_shows_its_reason_once():
    out = io.StringIO()
    with display.show_run(WORKFLOW, lambda row: "", {}, out) as shown:
        for message in (
            "PodInitializing",
            "ErrImagePull: no such image",
            "ImagePullBackOff",
            "ErrImagePull: no such image",
        ):
            shown(make_status(ROOT, make_node(".a", phase="Pending", message=message)))

    assert [line[9:] for line in out.getvalue().splitlines()[1:]] == [
        "a is waiting: ErrImagePull: no such image",
        "a is waiting: ImagePullBackOff",
    ]


def test_the_tree_draws_every_phase_of_argo():
    from rich.console import Console

    phases = ["Pending", "Running", "Succeeded", "Failed", "Error", "Skipped", "Omitted"]
    tree = display.TreeDisplay(WORKFLOW, lambda row: "", {}, io.StringIO())
    tree(make_status(ROOT, *[make_node(f".{phase.lower()}", phase=phase) for phase in phases]))
    out = io.StringIO()
    Console(file=out, width=100).print(tree.draw())
    assert [phase.lower() in out.getvalue() for phase in phases] == [True] * len(phases)
    assert "\x1b" not in out.getvalue()


def test_the_display_does_not_slow_down_a_thousand_steps() -> None:
    out = io.StringIO()
    shown = display.LineDisplay("w", lambda row: "", out)
    nodes = {f"w-{i}": {"name": f"w.t{i}", "type": "Pod", "phase": "Running"} for i in range(1000)}
    once = count_calls(lambda: shown({"nodes": nodes}))

    def end_one_after_the_other() -> None:
        for each in nodes.values():
            each["phase"] = "Succeeded"
            shown({"nodes": nodes})

    assert count_calls(end_one_after_the_other) < 100 * once
    shown.next_report = 0.0
    shown.tick()
    assert out.getvalue().count("succeeded") == 1000


HOSTILE_TEXT = "\x1b[2J\x1b]0;owned\x07a\x1b[31mred\x1b[0m\rspoofed \x9b2J \u202e\x7f"
ESCAPED_TEXT = "\\u001b[2J\\u001b]0;owned\\u0007ared\\u000dspoofed \\u009b2J \\u202e\\u007f"


@pytest.mark.parametrize("as_json", [False, True])
def test_output_of_a_pod_cannot_control_the_terminal(tmp_path: Path, as_json: bool):
    (tmp_path / "w-a.log").write_text(f"{HOSTILE_TEXT}|\n", newline="\n")
    out = io.StringIO()
    display.follow(tmp_path, "", "", lambda: True, out, as_json)
    assert not set(out.getvalue()[:-1]) & set("\x1b\x07\r\x9b\x7f\u202e")
    if as_json:  # the JSON output contains the complete text
        assert json.loads(out.getvalue())["line"].startswith("\x1b[2J\x1b]0;owned")
    else:
        # on a terminal, the text after a carriage return replaces the text before it
        last_state = ESCAPED_TEXT.rpartition("\\u000d")[2]
        assert out.getvalue() == f"w-a | {last_state}|\n"


def test_a_termination_message_cannot_control_the_terminal():
    failed = make_node(".a", phase="Failed", message=f"Error: {HOSTILE_TEXT}")
    lines = io.StringIO()
    log = f"error: {HOSTILE_TEXT}\n"
    shown = display.LineDisplay(WORKFLOW, lambda row: "step 1/2 loss \x1b[2J", lines)
    running = make_status(ROOT, make_node(".b", phase="Running", end=None), failed)
    shown(running)
    shown.tick()

    texts = [
        lines.getvalue(),
        failure(WORKFLOW, running, log, None, "rekindle resume"),
        overview.format_steps_table(WORKFLOW, running),
    ]
    for text in texts:
        assert "u001b[2J" in text
        assert not set(text) & set("\x1b\x07\r\x9b\x7f\u202e")
