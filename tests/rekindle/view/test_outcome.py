"""Tests of the outcome of a run (verdict, metrics and exit code), and of the progress of its
training."""

import io
from pathlib import Path
from typing import Any

import pytest

from argolocal.view import display
from rekindle.operations.results import compute_exit_code
from rekindle.view.outcome import build_outcome, describe_success
from rekindle.view.progress import LogProgress, find_progress
from tests.argolocal.view.nodes import ROOT, WORKFLOW, make_node, make_status, time_at
from tests.waiting import until


def test_json_has_the_steps_and_the_outputs_of_the_workflow():
    outputs = {
        "verdict": "release",
        "metrics": '{"ap": 0.71, "auc": NaN}',
        "reason": "why",
        "model_sha256": "ab",
        "run_id": "r1",
    }

    done = make_status(ROOT, make_node(".prepare", end=2.5), phase="Succeeded", outputs=outputs)
    result = build_outcome(WORKFLOW, done, endpoint="http://x")
    assert result["metrics"] == {"ap": 0.71, "auc": None}
    assert result["reason"] == "why"

    assert result["workflow"] == WORKFLOW
    assert result["phase"] == "Succeeded"
    assert result["verdict"] == "release"

    assert result["model_sha256"] == "ab"
    assert result["run_id"] == "r1"
    assert result["endpoint"] == "http://x"

    (step,) = result["steps"]
    assert set(step) == {"name", "phase", "started", "finished", "seconds", "message"}
    assert step["name"] == "prepare"
    assert step["seconds"] == 2.5


@pytest.mark.parametrize(
    ("verdicts", "more", "code", "words"),
    [
        (("keep", "keep"), {}, 3, "judged    judge-1: keep. chance\n"),
        (("keep", "release"), {}, 3, "judged    judge-0: keep. chance\n"),
        (("release", "release"), {}, 3, "judged    judge-0: release. chance\n"),
        (("keep", "release"), {"content": "ab"}, 0, "verdict   released: power@4 (judge-1)\n"),
        (("keep", "release"), {"content": "ab"}, 0, "metrics   ap 0.1\n"),
        (("keep", "same"), {}, 0, "judged    judge-1: same. chance\n"),
    ],
)
def test_a_step_that_reads_the_champion_is_not_a_release(
    verdicts: tuple[str, ...], more: dict[str, str], code: int, words: str
):
    """The step `ship` counts as a release if it outputs `content`, as steps.release does;
    steps.champion has all outputs of a release except `content`."""

    def with_outputs(**outputs: str) -> Any:
        return {
            "outputs": {
                "parameters": [{"name": name, "value": value} for name, value in outputs.items()]
            }
        }

    judges = [
        make_node(
            f".judge-{n}",
            displayName=f"judge-{n}",
            **with_outputs(verdict=verdict, reason="chance", metrics=f'{{"ap": 0.{n}}}'),
        )
        for n, verdict in enumerate(verdicts)
    ]

    report: Any = {
        "inputs": {"artifacts": [{"name": "report", "s3": {"key": f"{WORKFLOW}/judge-1/report"}}]}
    }

    ship = make_node(
        ".ship",
        displayName="ship",
        **with_outputs(model_uri="releases/power/ab/", version="4", **more),
        **report,
    )

    ended = {
        **make_status(ROOT, *judges, ship, phase="Succeeded"),
        "startedAt": time_at(0),
        "finishedAt": time_at(9),
    }

    assert compute_exit_code(ended, is_rekindle_run=True) == code
    text = describe_success(ended, {}, is_rekindle=True)
    rows = build_outcome(WORKFLOW, ended)["verdicts"]
    assert [(row["task"], row["verdict"]) for row in rows] == [
        ("judge-0", verdicts[0]),
        ("judge-1", verdicts[1]),
    ]
    assert [row["version"] for row in rows] == [None, "4" if more else None]
    assert words in text
    assert ("released: power@4" in text) == bool(more)


def test_the_last_evaluation_of_a_step_counts_and_items_of_a_loop_have_their_own():
    def judge(name: str, end: float, **outputs: str) -> Any:
        values = [{"name": key, "value": value} for key, value in outputs.items()]
        return make_node(
            f".{name}", displayName=name.rpartition(".")[2], end=end, outputs={"parameters": values}
        )

    step_results = {"champion": "1", "reason": "first"}
    repeated = [
        # an evaluation that a user has named like a repetition
        judge("judge-again(0)", 1, verdict="release", **step_results),
        judge("promote.judge-again(0)", 4, verdict="keep", **step_results | {"reason": "last"}),
        judge("judge(0)", 1, verdict="release", **step_results),
    ]

    ended = make_status(ROOT, *repeated[1:], phase="Succeeded")
    result = build_outcome(WORKFLOW, ended)

    assert result["verdict"] == "keep"
    assert result["reason"] == "last"
    assert compute_exit_code(ended, is_rekindle_run=True) == 3

    named = {"inputs": {"parameters": [{"name": "task-name", "value": "judge-again"}]}}
    ended = make_status(ROOT, repeated[0] | named, phase="Succeeded")
    assert [row["task"] for row in build_outcome(WORKFLOW, ended)["verdicts"]] == ["judge-again"]
    loop = [
        judge(f"judge({n}:{n})(1)", 2, verdict=verdict, **step_results)
        for n, verdict in enumerate(("keep", "same"))
    ]
    rows = build_outcome(WORKFLOW, make_status(ROOT, *loop, phase="Succeeded"))["verdicts"]
    assert [(row["task"], row["verdict"]) for row in rows] == [("judge", "keep"), ("judge", "same")]


def test_training_progress_is_shown(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / f"{WORKFLOW}-train-worker-0.log"
    log.write_text(
        "progress step=1/600 loss=0.9 samples_per_s=1 eta_s=1\n"
        "progress step=120/600 loss=0.02130 samples_per_s=10234 eta_s=12\n"
    )

    output = io.StringIO()
    with display.show_run(
        WORKFLOW, LogProgress(WORKFLOW, tmp_path / "logs", tmp_path / "deployments").of, {}, output
    ) as shown:
        shown(make_status(ROOT, make_node(".train", phase="Running", end=None)))
        until("the progress line", lambda: "loss" in output.getvalue())

    assert "train step 120/600  loss 0.02130  10 234 samples/s  12 s left" in output.getvalue()


def test_progress_of_a_worker_cannot_control_the_terminal():
    assert "\x1b" not in find_progress("progress step=1/2 loss=\x1b[2J samples_per_s=1 eta_s=1")
