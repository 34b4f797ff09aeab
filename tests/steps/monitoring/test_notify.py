"""A notification says how a workflow ended and links to its MLflow run; no notification is sent for
a result that changes nothing."""

import json
import uuid
from typing import Any

import pytest

from argolocal.view import summary
from rekindle import tracking
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.mlflow_api import RETRIES_VARIABLE
from steps.monitoring import notify
from tests.argolocal.view.nodes import ROOT, WORKFLOW, make_node, make_status
from tests.rekindle.hook import Hook

FAILED = json.dumps(
    json.dumps([{"displayName": "train", "message": "Error (exit code 65): no data"}])
)
RETRIED = "retryStrategy.expression evaluated to false"
STOPPED_STATUS = json.dumps(
    [{"displayName": "train", "message": "workflow shutdown with strategy:  Stop"}]
)


def run_with(tags: dict[str, str]) -> tuple[str, str]:
    """Create an MLflow run with the given tags; return the names of its workflow and run."""
    name = f"w-{uuid.uuid4().hex[:8]}"
    run_id = tracking.start_run("notifications", name)
    tracking.log_to_run(run_id, run_tags=tags)
    return name, run_id


def notify_hook(
    monkeypatch: pytest.MonkeyPatch, **inputs: Any
) -> tuple[notify.Outputs, list[dict[str, Any]]]:
    """Run the step `notify`, and return its outputs and the messages that the webhook received."""
    with Hook() as server:
        monkeypatch.setenv("NOTIFY_URL", server.url)
        outputs = notify.run(notify.Inputs(format="json", experiment="notifications", **inputs))
    return outputs, server.received


@pytest.mark.parametrize(
    ("tags", "status", "failures", "event", "text", "reason"),
    [
        ({}, "Failed", FAILED, "failure", " failed.", "train: Error (exit code 65): no data"),
        (
            {"rekindle.failures": "training: the gradient is not finite"},
            *("Error", FAILED, "failure", " failed.", "training: the gradient is not finite"),
        ),
        (
            {"verdict": "keep", "reason": "auc 0.7 < 0.75."},
            *("Succeeded", "null", "refusal", " released nothing.", "auc 0.7 < 0.75."),
        ),
        (
            {"verdict": "release", "reason": "It is better.", "rekindle.promoted": "cards 7"},
            *("Succeeded", "null", "release", " released version 7 of cards.", "It is better."),
        ),
        (
            {"verdict": "taken back", "reason": "version 4 with 5 % of the requests: it errs."},
            *(
                "Succeeded",
                "null",
                "rollback",
                " was rolled back.",
                "version 4 with 5 % of the requests: it errs.",
            ),
        ),
        (
            {
                "small/verdict": "keep",
                "small/reason": "Worse.",
                "wide/verdict": "release",
                "wide/reason": "Better.",
            }
            | {"rekindle.promoted": "cards 8"},
            *(
                "Succeeded",
                "null",
                "release",
                " released version 8 of cards.",
                "small/Worse.\nwide/Better.",
            ),
        ),
    ],
)
def test_a_notification_has_the_reason_and_a_working_link(
    mlflow_server: str,
    monkeypatch: pytest.MonkeyPatch,
    tags: dict[str, str],
    status: str,
    failures: str,
    event: str,
    text: str,
    reason: str,
) -> None:
    name, run_id = run_with(tags)
    outside = "https://mlflow.example.com/"
    outputs, [message] = notify_hook(
        monkeypatch, workflow=name, status=status, failures=failures, mlflow_url=outside
    )
    assert outputs == notify.Outputs(event=event, sent=True)
    assert message["event"] == event
    assert message["text"] == f"{name}{text}"
    assert sorted(message["reason"].split("\n")) == sorted(reason.split("\n"))
    assert message["link"].startswith("https://mlflow.example.com/#/experiments/")
    assert run_id in message["link"]


@pytest.mark.parametrize(
    ("tags", "status", "failures"),
    [
        ({"verdict": "release"}, "Failed", STOPPED_STATUS),
        ({"verdict": "same", "reason": "It is the champion."}, "Succeeded", "null"),
        ({}, "Succeeded", "null"),
    ],
)
def test_a_stopped_or_unchanged_run_sends_no_notification(
    mlflow_server: str,
    monkeypatch: pytest.MonkeyPatch,
    tags: dict[str, str],
    status: str,
    failures: str,
) -> None:
    name, _ = run_with(tags)
    outputs, messages = notify_hook(monkeypatch, workflow=name, status=status, failures=failures)
    assert outputs == notify.Outputs(event="", sent=False)
    assert messages == []


def test_a_failure_is_sent_even_if_mlflow_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv(RETRIES_VARIABLE, "0")
    outputs, [message] = notify_hook(monkeypatch, workflow="w", status="Failed", failures=FAILED)
    assert outputs.sent
    assert message["reason"] == "train: Error (exit code 65): no data"
    assert message["link"] == ""


def test_a_failed_step_has_the_error_of_its_process_not_of_its_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nodes in the test are in the form that Argo lists them: the DAG, the node that counts the
    attempts, the attempts, and a step that succeeded after an attempt had failed."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv(RETRIES_VARIABLE, "0")

    nodes = [
        {"displayName": "w", "message": "", "templateName": "main", "phase": "Failed"},
        {"displayName": "train", "message": RETRIED, "templateName": "train", "phase": "Failed"},
        {
            "displayName": "train(1)",
            "message": "Error (exit code 65): no data",
            "templateName": "train",
        },
        {
            "displayName": "train(0)",
            "message": "pod deleted",
            "templateName": "train",
            "phase": "Error",
        },
        {
            "displayName": "prepare(0)",
            "message": "evicted",
            "templateName": "prepare",
            "phase": "Failed",
        },
        {
            "displayName": "ship",
            "message": "child 'w-123' failed",
            "templateName": "ship",
            "phase": "Failed",
        },
    ]

    _, [message] = notify_hook(
        monkeypatch, workflow="w", status="Failed", failures=json.dumps(json.dumps(nodes))
    )
    assert message["reason"] == "train: Error (exit code 65): no data"


def test_an_unreachable_webhook_is_a_warning_of_the_step(
    mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = run_with({})
    monkeypatch.setenv("NOTIFY_URL", "http://127.0.0.1:9/x")

    inputs = notify.Inputs(
        format="slack",
        experiment="notifications",
        workflow=name,
        status="Failed",
        failures=FAILED,
        attempts=1,
    )

    outputs = notify.run(inputs)
    assert outputs.event == "failure"
    assert outputs.sent is False
    (warning,) = outputs.warnings
    assert warning.startswith("notification not sent: the webhook at 127.0.0.1 cannot be reached")
    monkeypatch.delenv("NOTIFY_URL")
    (warning,) = notify.run(inputs).warnings
    assert "NOTIFY_URL is not set" in warning


def test_the_run_shows_a_notification_that_was_not_sent() -> None:
    """The output `warnings` of the step is declared in the manifest, so that the outcome of a run
    contains these warnings."""
    manifest = render_manifest(
        load_config("configs/demo.yaml", ["notify.format=slack"], environment={}).config
    )
    (template,) = [
        template for template in manifest["spec"]["templates"] if template["name"] == "notify"
    ]
    assert "warnings" in [item["name"] for item in template["outputs"]["parameters"]]
    outputs: dict[str, Any] = {
        "outputs": {"parameters": [{"name": "warnings", "value": '["notification not sent: x"]'}]}
    }
    ended = make_status(
        ROOT, make_node(".train"), make_node(".onExit.notify", **outputs), phase="Succeeded"
    )
    assert summary.make_json_object(WORKFLOW, ended)["warnings"] == ["notification not sent: x"]
    failed_status = make_status(
        ROOT,
        make_node(".train", phase="Failed"),
        make_node(".onExit.notify", **outputs),
        phase="Failed",
    )
    assert "warning notification not sent: x" in summary.failure(
        WORKFLOW, failed_status, "", None, "resume"
    )
