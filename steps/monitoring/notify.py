"""Send a notification when a workflow has ended: the last task of every pipeline whose config
contains `notify`.

    NOTIFY_URL=https://hooks.example.com/... rekindle step steps.monitoring.notify \\
      --workflow=demo-x7k2p --status=Failed --experiment=demo --format=slack

Notifications report failures, rollbacks, releases, candidates that the gate did not release, and
drift. No notification is sent for a stopped run, or for a run whose candidate has the same weights
as the champion. If a notification cannot be sent, the run gets a warning, but does not fail.
"""

from collections.abc import Mapping

from pydantic import Field

from rekindle.release.watch.notification import (
    Message,
    NotifyConfig,
    convert_phase,
    deliver,
    describe_failures,
    parse_verdicts,
)
from rekindle.step import StepInputs, StepOutputs

MAX_FAILURES = 5  # maximum number of failed steps in a notification


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
    from rekindle.errors import TrackingError, say

    tags = dict[str, str]()
    link = ""
    warnings = list[str]()

    try:
        run_id = tracking.find_run(inputs.experiment, inputs.workflow)
        if run_id:
            tags = tracking.read_tags(run_id)
            link = tracking.find_page_address(inputs.workflow, inputs.mlflow_url)
    except TrackingError as error:
        warnings.append(f"the notification lacks the details that MLflow has: {error}")

    message = compose(inputs, tags, link)
    sent = False
    if message:
        delivery = deliver(message, inputs, inputs.attempts)
        sent = delivery.sent
        warnings += [delivery.problem] if delivery.problem else []

    for warning in warnings:
        say(warning)

    return Outputs(event=message.event if message else "", sent=sent, warnings=warnings)


def compose(inputs: Inputs, tags: Mapping[str, str], link: str) -> Message | None:
    """Return the notification about a run with the MLflow tags `tags`, or None if its result needs
    no notification."""
    from rekindle import tracking

    run = inputs.workflow
    about = {"name": inputs.experiment, "workflow": run, "link": link}
    lines = describe_failures(inputs.failures)
    evaluations = parse_verdicts(tags)

    if inputs.status != "Succeeded":
        if convert_phase(inputs.status, lines) == "KILLED":
            return None

        failures = tags.get(tracking.FAILURES) or "\n".join(
            line[:900] for line in lines[:MAX_FAILURES]
        )
        return Message("failure", text=f"{run} failed.", reason=failures, **about)

    rollbacks = [reason for _, verdict, reason in evaluations if verdict == "taken back"]
    if rollbacks:
        return Message(
            "rollback", text=f"{run} was rolled back.", reason="\n".join(rollbacks), **about
        )

    text = "\n".join(
        f"{prefix}{reason}"
        for prefix, verdict, reason in evaluations
        if verdict in ("release", "keep")
    )

    promoted = tags.get(tracking.PROMOTED)
    if promoted:
        model, _, version = promoted.rpartition(" ")
        return Message(
            "release", text=f"{run} released version {version} of {model}.", reason=text, **about
        )

    if any(verdict == "keep" for _, verdict, _ in evaluations):
        return Message("refusal", text=f"{run} released nothing.", reason=text, **about)

    drift = [reason for _, verdict, reason in evaluations if verdict == "drift"]
    if drift:
        return Message(
            "drift",
            text="the requests of the model have drifted.",
            reason="\n".join(drift),
            **about,
        )

    return None
