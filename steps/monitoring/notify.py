"""Send a notification when a workflow has ended. The step is the last task of every pipeline whose
config contains `notify`.

    NOTIFY_URL=https://hooks.example.com/... rekindle step steps.monitoring.notify \\
      --workflow=demo-x7k2p --status=Failed --experiment=demo --format=slack

Notifications report failures, rollbacks, releases, candidates that the gate did not release, and
drift. No notification is sent for a stopped run, or for a run whose candidate has the same weights
as the champion. If a notification cannot be sent, the run gets a warning, but does not fail.
"""

from collections.abc import Mapping

from pydantic import Field

from rekindle.release.watch.notification import (
    NotificationMessage,
    NotifyConfig,
    convert_phase,
    deliver_message,
    describe_failures,
    parse_verdicts,
)
from rekindle.step import StepInputs, StepOutputs

# maximum number of failed steps in a notification
MAX_FAILURES = 5


class Inputs(StepInputs, NotifyConfig):
    workflow: str = Field(description="name of the workflow")
    status: str = Field(description="{{workflow.status}}: Succeeded, Failed or Error")
    failures: str = Field(
        default="", description="{{workflow.failures}}: JSON list of the nodes that failed"
    )
    experiment: str = Field(
        default="rekindle", description="name of the pipeline, and MLflow experiment of its run"
    )
    attempts: int = Field(
        default=6, ge=1, description="maximum number of requests to an unavailable webhook"
    )


class Outputs(StepOutputs):
    event: str = Field(description="event of the notification; empty if no notification was due")
    sent: bool = Field(description="true if the webhook accepted the notification")
    warnings: list[str] = Field(
        default=[], description="why the notification was not sent, or lacks details"
    )


def run(inputs: Inputs) -> Outputs:
    """Read the result of the run, and send the notification. Errors of MLflow or the webhook only
    cause warnings."""
    from rekindle import tracking
    from rekindle.errors import TrackingError, write_stderr

    run_tags = dict[str, str]()
    run_link = ""
    warnings = list[str]()

    try:
        run_id = tracking.find_run(inputs.experiment, inputs.workflow)
        if run_id:
            run_tags = tracking.read_tags(run_id)
            run_link = tracking.find_page_address(inputs.workflow, inputs.mlflow_url)
    except TrackingError as error:
        warnings.append(f"the notification lacks the details that MLflow has: {error}")

    notification = compose(inputs, run_tags, run_link)
    was_sent = False
    if notification:
        delivery_result = deliver_message(notification, inputs, inputs.attempts)
        was_sent = delivery_result.sent
        warnings += [delivery_result.problem] if delivery_result.problem else []

    for warning in warnings:
        write_stderr(warning)

    return Outputs(
        event=notification.event if notification else "", sent=was_sent, warnings=warnings
    )


def compose(
    inputs: Inputs, run_tags: Mapping[str, str], run_link: str
) -> NotificationMessage | None:
    """Return the notification about a run with the MLflow tags `run_tags`, or None if the result of
    the run needs no notification."""
    from rekindle import tracking

    run_name = inputs.workflow
    message_fields = {"name": inputs.experiment, "workflow": run_name, "link": run_link}
    failure_lines = describe_failures(inputs.failures)
    evaluations = parse_verdicts(run_tags)

    if inputs.status != "Succeeded":
        if convert_phase(inputs.status, failure_lines) == "KILLED":
            return None

        failures_text = run_tags.get(tracking.FAILURES) or "\n".join(
            line[:900] for line in failure_lines[:MAX_FAILURES]
        )
        return NotificationMessage(
            "failure", text=f"{run_name} failed.", reason=failures_text, **message_fields
        )

    rollback_reasons = [
        verdict_reason
        for _, evaluation_verdict, verdict_reason in evaluations
        if evaluation_verdict == "taken back"
    ]
    if rollback_reasons:
        return NotificationMessage(
            "rollback",
            text=f"{run_name} was rolled back.",
            reason="\n".join(rollback_reasons),
            **message_fields,
        )

    verdict_texts = "\n".join(
        f"{evaluation_prefix}{verdict_reason}"
        for evaluation_prefix, evaluation_verdict, verdict_reason in evaluations
        if evaluation_verdict in ("release", "keep")
    )

    promoted_tag = run_tags.get(tracking.PROMOTED)
    if promoted_tag:
        model_name, _, model_version = promoted_tag.rpartition(" ")
        return NotificationMessage(
            "release",
            text=f"{run_name} released version {model_version} of {model_name}.",
            reason=verdict_texts,
            **message_fields,
        )

    if any(evaluation_verdict == "keep" for _, evaluation_verdict, _ in evaluations):
        return NotificationMessage(
            "refusal", text=f"{run_name} released nothing.", reason=verdict_texts, **message_fields
        )

    drift_reasons = [
        verdict_reason
        for _, evaluation_verdict, verdict_reason in evaluations
        if evaluation_verdict == "drift"
    ]
    if drift_reasons:
        return NotificationMessage(
            "drift",
            text="the requests of the model have drifted.",
            reason="\n".join(drift_reasons),
            **message_fields,
        )

    return None
